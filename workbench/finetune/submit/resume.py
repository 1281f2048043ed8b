"""Check and resume checkpoints: same training, same global batch, same rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError, DiskFull, RunError
from workbench.base.files import is_folder, not_ours, read_json, records, write_json
from workbench.base.json_values import Json, as_int, as_list, as_str, get_object
from workbench.finetune.data.sources.hub import Hub
from workbench.finetune.deepspeed.keys import AUTO_BATCHES
from workbench.finetune.job.deepspeed_config import completed
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import Facts, check, deepspeed_json
from workbench.finetune.options.metrics import metric_function, metric_text
from workbench.finetune.options.model.models import has_chat_template
from workbench.finetune.techniques.registry import technique_of
from workbench.rundir.checkpoints import (
    CHECKPOINT,
    INPUTS,
    Checkpoint,
    newest_good,
    remove_after,
    shared_run,
)
from workbench.rundir.paths import RunPaths
from workbench.rundir.stores.address import is_address
from workbench.rundir.stores.checkpoints import fetch_newest, fetch_run
from workbench.rundir.stores.store import Store

CHANGES_NOTHING = frozenset(
    {
        # Start of ranks, and timeouts.
        "launcher",
        "env",
        "stall_timeout_s",
        "ddp_timeout",
        "restarts",
        # Placement of layers, and recomputation to save memory. The arithmetic stays the same.
        "device_map",
        "max_memory",
        "gradient_checkpointing",
        "checkpoint_layers",
        "checkpoint_policy",
        "sequence_parallel",
        # Measurements and reports besides the training.
        "logging_steps",
        "report_to",
        "profile_step",
        "trace_steps",
        "predict_rows",
        "per_device_eval_batch_size",
        "eval_strategy",
        "eval_steps",
        "metrics",
        "metric_rows",
        # Choice of the best model, and end of training.
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "early_stopping_patience",
        "early_stopping_threshold",
        # Times and places of checkpoints.
        "save_steps",
        "save_total_limit",
        "async_save",
        "checkpoints",
        "resume",
    }
)
"""Options that a resumed job may change: the later steps stay the same."""

LENGTH = frozenset({"max_steps", "epochs"})
"""Options that a resumed job may change with a note. Length and schedule of training change."""

COMPARED_APART = frozenset(
    {
        "dataset",
        "deepspeed",
        "communication",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "rewards",
    }
)
"""Options that are compared by their effect.

Compared are training rows, the resolved DeepSpeed configuration, the number format of sent
gradients, the global batch, and the names of the reward functions. Each run writes the functions
of a notebook to files of its own.
"""

COMPARED = tuple(
    name for name in FineTune.model_fields if name not in CHANGES_NOTHING | LENGTH | COMPARED_APART
)
"""All other options. A resumed job must have the same values."""

_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """Run to resume from."""

    root: Path
    """Its run directory, or the folder in the new run's directory with its files from a store."""
    name: str
    """Directory or address, for messages."""
    store: str = ""
    """Address in an object store. Empty: the run directory is on this machine."""


def before_of(job: FineTune, paths: RunPaths) -> Before | None:
    """Return the run to resume from. None: the job begins anew.

    Of a run in an object store, the job and the digests of the rows are fetched.
    """
    if job.resume is None:
        return None
    if not is_address(job.resume):
        return Before(root=Path(job.resume), name=job.resume)
    try:
        with Store(job.resume) as store:
            fetch_run(store, paths.resumed)
    except RunError as error:
        raise ConfigError(f"resume: {error}") from error
    return Before(root=paths.resumed, name=job.resume, store=job.resume)


def resume_checkpoint(
    job: FineTune,
    paths: RunPaths,
    before: Before,
    *,
    world_size: int,
    resolved: Mapping[str, Any],
    cluster: Path | None,
) -> Checkpoint:
    """Return the checkpoint that a job continues, after reading every byte of the checkpoint.

    Raises:
        ConfigError: The checkpoint is of another training, or no checkpoint is good.
    """
    root = before.root
    made = read_json(RunPaths(root).job)
    if not get_object(made, "job"):
        unseen = "" if is_folder(root) else ", and this machine sees no such folder"
        raise ConfigError(
            f"resume is {before.name!r}, not the directory of a FineTune run{unseen}; give the "
            "directory of the run to continue"
        )
    shared = shared_run(RunPaths(root))
    # Pods may have other users than this machine, so they check no owner.
    foreign = not_ours(root) if shared is not None and shared.root == root else ""
    if foreign:
        raise ConfigError(f"resume: {foreign}; only checkpoints of your own are used")
    if before.store:
        # A checkpoint may be large: the settings are compared first.
        ranks = as_int(made.get("ranks")) or world_size
        _check_same(job, made, paths, before, (world_size, ranks), resolved)
        checkpoint = _from_store(before, job.max_steps)
    else:
        held = None
        if cluster is not None:
            # Ranks without a keeper have neither cluster nor client.
            from workbench.client.takeover import checkpoint_on_pods

            held = checkpoint_on_pods(cluster, RunPaths(root), job.max_steps, world_size)
        checkpoint = held or newest_good(root, last_step=job.max_steps)
        _check_same(job, made, paths, before, (world_size, checkpoint.world_size), resolved)
    _check_ranks(job, checkpoint, world_size, before.name, get_object(resolved, "deepspeed"))
    return replace(checkpoint, notes=[*checkpoint.notes, *_other_length(job, made)])


def _from_store(before: Before, last_step: int | None) -> Checkpoint:
    """Fetch the newest good checkpoint of a run in an object store."""
    try:
        with Store(before.store) as store:
            notes = fetch_newest(store, before.root, last_step=last_step)
    except DiskFull:
        raise
    except RunError as error:
        raise ConfigError(f"resume: {error}") from error
    checkpoint = newest_good(before.root, last_step=last_step)
    return replace(checkpoint, notes=[*notes, *checkpoint.notes])


def _check_same(
    job: FineTune,
    made: Mapping[str, Any],
    paths: RunPaths,
    before: Before,
    ranks: tuple[int, int],
    resolved: Mapping[str, Any],
) -> None:
    """Raise ConfigError if settings or rows differ. `ranks`: of the new run, and of the earlier."""
    left_open = "communication" in [*resolved["chosen"], *as_list(made.get("chosen"))]
    _check_settings(job, made, before.name, ranks, left_open=left_open)
    _check_rows(paths, made, before, resolved)
    # The number of pods decides whether gradients are sent in bf16.
    free = {}
    if ranks[0] != ranks[1]:
        free = {**AUTO_BATCHES, "communication_data_type": None}
    now, then = ({**get_object(of, "deepspeed"), **free} for of in (resolved, made))
    if now != then:
        raise ConfigError(
            f"the DeepSpeed configuration differs from the configuration of {before.name}; resume "
            "with the same configuration"
        )


def write_resumption(
    root: Path,
    *,
    gpus: int,
    before: int,
    ranks: int,
    last_step: int | None,
    newest: Checkpoint | None = None,
) -> tuple[int, int | None]:
    """Rewrite the inputs of a run of `before` ranks to continue on `ranks` ranks.

    The run continues from its newest good checkpoint: `newest` for checkpoints in a shared folder,
    which pods have read. Return the step of the checkpoint, 0 for the
    beginning, and the global batch if the batch had to change.

    Raises:
        ConfigError: The run cannot continue on `ranks` ranks.
    """
    paths = RunPaths(root)
    made = read_json(paths.job)
    job = FineTune.from_dict(made["job"])
    rows = job.global_batch(before)
    config = get_object(made, "deepspeed")
    # The own checkpoints come first, then the checkpoint that the run itself resumed from.
    own = newest
    if shared_run(paths) is None:
        # Without a checkpoint, the run begins anew.
        with suppress(ConfigError):
            own = newest_good(paths.root, last_step=last_step)
    checkpoint = own or (CHECKPOINT.validate_python(made["resume"]) if "resume" in made else None)
    # Fewer ranks take more rows each, so that the global batch stays.
    if ranks != before:
        job = (job.replace(deepspeed=config) if config else job).on_ranks(ranks, before)
    if checkpoint is not None:
        _check_ranks(job, checkpoint, ranks, paths.root, config)
        # Later steps belong to the lost attempt, and would be taken for newer ones.
        remove_after(paths.checkpoints, checkpoint.step)
        resume = CHECKPOINT.dump_python(checkpoint, mode="json")
        made = {**made, "resume": {**resume, "notes": [] if own else resume["notes"]}}
        job = job.replace(resume=str(paths.root)) if own else job
    # The model's files passed at submit.
    given = deepspeed_json(job)
    check(job, Facts(gpus=gpus, on_pod=max(1, gpus), ranks=ranks, deepspeed=given))
    deepspeed = completed(job, gpus=gpus)
    write_json(
        paths.job,
        {**made, "job": {**job.to_dict(), "env": {}}, "deepspeed": deepspeed, "ranks": ranks},
    )
    if deepspeed is not None:
        write_json(paths.deepspeed, deepspeed)
    batch = job.global_batch(ranks)
    return 0 if checkpoint is None else checkpoint.step, batch if batch != rows else None


def restarted_from(job: FineTune, root: Path, ranks: int) -> Mapping[int, Path]:
    """Choose a checkpoint of an earlier attempt, and write it to the inputs as `resume`."""
    paths = RunPaths(root)
    try:
        newest = newest_good(root, last_step=job.max_steps)
    except ConfigError:
        return {}  # start from the beginning
    made = read_json(paths.job)
    if newest.world_size != ranks and bound_to_ranks(job, get_object(made, "deepspeed")):
        return {}
    # Old parts of another number of ranks must not mix with new parts.
    remove_after(paths.checkpoints, newest.step)
    write_json(paths.job, {**made, "job": {**get_object(made, "job"), "resume": str(root)}})
    return newest.parts


def bound_to_ranks(job: FineTune, config: Json) -> str:
    """Return the reason why checkpoints fit only the same number of ranks; empty for any number."""
    if job.tensor_parallel > 1:
        return "the weights are cut by tensor_parallel"
    why = technique_of(job.technique).bound_to_ranks(job)
    if why:
        return why
    if get_object(config, "zero_optimization").get("round_robin_gradients") is True:
        return "round_robin_gradients puts weights in an order of their number"
    return ""


def _check_ranks(
    job: FineTune,
    checkpoint: Checkpoint,
    ranks: int,
    root: Path | str,
    config: Json,
) -> None:
    if checkpoint.world_size == ranks:
        return
    apart = ""
    if checkpoint.pods:
        pods = ", ".join(sorted({*checkpoint.pods.values()}))
        apart = f"its parts stay on {pods}"
    reason = bound_to_ranks(job, config) or apart
    if reason:
        raise ConfigError(
            f"the checkpoint of step {checkpoint.step} in {root} is of {checkpoint.world_size} "
            f"ranks, and the new run has {ranks}; {reason}: resume with as many pods and slots"
        )


def _check_settings(
    job: FineTune,
    made: Mapping[str, Any],
    earlier: str,
    ranks: tuple[int, int],
    *,
    left_open: bool,
) -> None:
    """Raise ConfigError if a job differs from the job of the checkpoint.

    `left_open`: the pods decided the format of communication.
    """
    before = _job_before(made)
    # `prompt=None` is equal to the prompt that the model's own template decides.
    chats = True if job.chat_template is not None else has_chat_template(job.model)
    default = {True: "chat", False: "plain", None: None}[chats]
    now = {**job.to_dict(), "prompt": job.prompt or default}
    then = {**before.to_dict(), "prompt": before.prompt or default}
    same = (*COMPARED, *_BATCH) if ranks[0] == ranks[1] else COMPARED
    # All differences are named at once.
    different = []
    for name in same:
        if now[name] != then[name]:
            different.append(f"{name} is {now[name]!r} and was {then[name]!r}")
    names = _reward_names(job), _reward_names(before)
    if names[0] != names[1]:
        different.append(f"rewards is {names[0]!r} and was {names[1]!r}")
    sent = _sent(job), _sent(before)
    if sent[0] != sent[1] and not (left_open and ranks[0] != ranks[1]):
        different.append(f"communication is {sent[0]!r} and was {sent[1]!r}")
    rows = job.global_batch(ranks[0]), before.global_batch(ranks[1])
    if ranks[0] != ranks[1] and rows[0] != rows[1]:
        fits = before.on_ranks(*ranks)
        options = ", ".join(f"{name}={getattr(fits, name)}" for name in _BATCH)
        how = ", which this number cannot share evenly"
        if fits.global_batch(ranks[0]) == rows[1]:
            how = f" ({options})"
        different.append(
            f"the global batch is {rows[0]} rows on {ranks[0]} "
            f"ranks and was {rows[1]} on {ranks[1]}{how}"
        )
    if different:
        raise ConfigError(
            f"the job differs from the job of {earlier}: {'; '.join(different)}; resume with the "
            "same settings"
        )


def _reward_names(job: FineTune) -> list[str]:
    return [metric_function(metric_text(reward))[1] for reward in job.rewards]


def _sent(job: FineTune) -> str:
    """Return the number format of sent gradients. The technique's format follows the precision."""
    if job.communication is not None:
        return job.communication
    return "fp32" if job.number_format in ("fp32", "tf32") else "the technique's own"


def _job_before(made: Mapping[str, Any]) -> FineTune:
    """Return the job that wrote a checkpoint. The oldest runs only had the random row order."""
    return FineTune.from_dict({"train_sampling_strategy": "random", **made["job"], "resume": None})


def _other_length(job: FineTune, made: Mapping[str, Any]) -> list[str]:
    """Return a note if a resumed job trains longer or shorter than the job of the checkpoint."""
    before = _job_before(made)
    changed = []
    for name in sorted(LENGTH):
        now = getattr(job, name)
        then = getattr(before, name)
        if now != then:
            changed.append(f"{name} is {now!r} and was {then!r}")
    if not changed:
        return []
    # A constant rate does not depend on the last step.
    if job.lr_scheduler_type == "constant":
        return [", ".join(changed)]
    return [f"{', '.join(changed)}: the learning rate follows the schedule of the new length"]


def _check_rows(
    paths: RunPaths,
    made: Mapping[str, Any],
    before: Before,
    resolved: Mapping[str, Any],
) -> None:
    train, earlier = resolved["train"], made.get("train")
    hubs = [Hub.from_dict(hub) if hub else None for hub in (resolved["hub"], made.get("hub"))]
    same = hubs[0] == hubs[1] and bool(train) == bool(earlier)
    if same and train:
        digest = _digest_of_rows(before, str(earlier))
        same = digest == records.sha256_of(paths.inputs / str(train))
    if not same:
        raise ConfigError(
            f"the training rows differ from the rows of {before.name}; resume with the same dataset"
        )


def _digest_of_rows(before: Before, name: str) -> str:
    """Return the SHA-256 of a file of rows of an earlier run. Empty: unknown."""
    listed = get_object(read_json(before.root / INPUTS), name)
    if listed:
        return as_str(listed.get("sha256"))
    file = RunPaths(before.root).inputs / name
    return records.sha256_of(file) if file.is_file() else ""
