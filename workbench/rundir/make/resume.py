"""Whether a run can go on from another one's checkpoint: the same training, on as many ranks, over the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError
from workbench.base.files import read_json, write_json
from workbench.base.json_values import part
from workbench.base.package import file_digest
from workbench.jobs.choices import Sampling
from workbench.jobs.data.sources.hub import Hub
from workbench.jobs.deepspeed.config import resolve
from workbench.jobs.finetune import FineTune
from workbench.jobs.model import has_chat_template
from workbench.rundir.checkpoints.choose import CHECKPOINT, Checkpoint, newest_good, remove_after
from workbench.rundir.paths import RunPaths

AskPods = Callable[[RunPaths, int | None], Checkpoint | None]
"""By a run and the last step: the checkpoint that its pods hold; None where all there are is in its directory."""

_SAME = (
    *("model", "technique", "peft", "lora", "fsdp", "local_sgd", "precision", "optimizer", "learning_rate", "seed"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "train_sampling_strategy"),
    *("max_source_length", "max_target_length"),
    *("prompt", "chat_template", "system", "loss_on", "packing", "training", "lr_scheduler_type", "warmup_steps"),
    *(
        "warmup_ratio",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "label_smoothing_factor",
    ),
)


def resume_checkpoint(
    job: FineTune, paths: RunPaths, *, world_size: int, resolved: Mapping[str, Any], ask_pods: AskPods | None
) -> Checkpoint:
    """Choose the checkpoint that a job goes on from; every byte of it is read."""
    assert job.resume is not None
    root = Path(job.resume)
    made = read_json(RunPaths(root).job, within=root)
    if not part(made, "job"):
        raise ConfigError(
            f"resume is {str(root)!r}, which is not the directory of a FineTune run; give the one to go on from"
        )
    held = ask_pods(RunPaths(root), job.max_steps) if ask_pods else None
    checkpoint = held or newest_good(root, last_step=job.max_steps)
    _check_settings(job, made, root)
    _check_rows(paths, made, root, resolved)
    if resolved["deepspeed"] != made.get("deepspeed"):
        raise ConfigError(f"the DeepSpeed configuration differs from that of {root}; resume with the same")
    _check_ranks(checkpoint, world_size, root)
    return checkpoint


def write_resumption(paths: RunPaths, *, gpus: int, before: int, ranks: int, last_step: int | None) -> int:
    """Let the inputs of a run, of `before` ranks, be those of going on with its newest good checkpoint on `ranks`.

    Return the step of that, 0 for the beginning. A ConfigError says why it cannot go on so.
    """
    made = read_json(paths.job)
    job = FineTune.from_dict(made["job"])
    try:
        own: Checkpoint | None = newest_good(paths.root, last_step=last_step)
    except ConfigError:
        own = None
    checkpoint = own or (CHECKPOINT.validate_python(made["resume"]) if "resume" in made else None)
    job = job if ranks == before else job.on_ranks(ranks, before)
    if checkpoint is not None:
        _check_ranks(checkpoint, ranks, paths.root)
        remove_after(paths.checkpoints, checkpoint.step)
        resume = CHECKPOINT.dump_python(checkpoint, mode="json")
        made = {**made, "resume": {**resume, "notes": [] if own else resume["notes"]}}
        job = job.replace(resume=str(paths.root)) if own else job
    deepspeed = resolve(job, gpus=gpus, world_size=ranks)
    write_json(paths.job, {**made, "job": {**job.to_dict(), "env": {}}, "deepspeed": deepspeed})
    if deepspeed is not None:
        write_json(paths.deepspeed, deepspeed)
    return 0 if checkpoint is None else checkpoint.step


def _check_ranks(checkpoint: Checkpoint, ranks: int, root: Path) -> None:
    if checkpoint.world_size != ranks:
        raise ConfigError(
            f"the checkpoint of step {checkpoint.step} in {root} is of {checkpoint.world_size} ranks, and this run has "
            f"{ranks}; resume with as many pods and slots"
        )


def _check_settings(job: FineTune, made: Mapping[str, Any], root: Path) -> None:
    # Older runs had no other order.
    before = FineTune.from_dict({"train_sampling_strategy": Sampling.RANDOM.value, **made["job"], "resume": None})
    # Older runs wrote 'plain' where nothing was asked for.
    chats = True if job.chat_template is not None else has_chat_template(job.model)
    default = {True: "chat", False: "plain", None: None}[chats]
    now, then = ({**each.to_dict(), "prompt": each.prompt or default} for each in (job, before))
    different = [f"{name} is {now[name]!r} and was {then[name]!r}" for name in _SAME if now[name] != then[name]]
    if different:
        raise ConfigError(f"this job is not that of {root}: {'; '.join(different)}; resume with the same settings")


def _check_rows(paths: RunPaths, made: Mapping[str, Any], root: Path, resolved: Mapping[str, Any]) -> None:
    train, before = resolved["train"], made.get("train")
    hubs = [Hub.from_dict(hub) if hub else None for hub in (resolved["hub"], made.get("hub"))]
    same = hubs[0] == hubs[1] and bool(train) == bool(before)
    if same and train:
        old, new = RunPaths(root).inputs / str(before), paths.inputs / str(train)
        same = old.is_file() and file_digest(old) == file_digest(new)
    if not same:
        raise ConfigError(f"the training rows differ from those of {root}; resume with the same dataset")
