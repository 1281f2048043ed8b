"""What a rank is told to do, and the Trainer's options made from it."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments
from transformers.utils.logging import disable_progress_bar

from workbench.base.errors import ConfigError, RunError
from workbench.jobs.choices import Optimizer, Precision, Technique
from workbench.jobs.finetune import FineTune, job_from_dict

__all__ = ["Assignment", "prepare_process", "training_arguments"]

# Share of the steps over which the learning rate rises to its peak; without it AdamW's first updates of a model
# that starts from random weights are all sign and no size.
_WARMUP = 0.1

# transformers 5.2x calls it by another name, and warns of the old one.
_CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in Seq2SeqTrainingArguments.__dataclass_fields__
)

# The Trainer's names of the update rules.
_OPTIM = {
    Optimizer.ADAMW: "adamw_torch",
    Optimizer.SGD: "sgd",
    Optimizer.ADAMW_8BIT: "adamw_bnb_8bit",
    Optimizer.PAGED_ADAMW: "paged_adamw_32bit",
    Optimizer.PAGED_ADAMW_8BIT: "paged_adamw_8bit",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The job as this rank reads it."""

    job: FineTune
    """What is asked; a model folder is named as it lies on this pod."""
    base: str
    """The model as the user named it."""
    train: str | None
    """The training file; None for a hub dataset."""
    evaluation: str | None
    """The evaluation file; None for no evaluation."""
    hub: Mapping[str, object] | None
    """The options of a hub dataset."""
    deepspeed: Mapping[str, Any] | None
    """The resolved DeepSpeed configuration; None without DeepSpeed."""
    gpus: int
    """GPUs of a pod; 0 trains on the CPU."""
    folder: Path
    """This run's folder on this pod."""
    rank_folder: Path
    """This rank's folder in it."""
    rank: int
    """This rank."""
    world_size: int
    """The number of ranks."""
    resumed_step: int = 0
    """The step of the checkpoint that it goes on from; 0 from the beginning."""

    @classmethod
    def read(cls) -> Assignment:
        """Read `job.json` of the run's folder, and the rank's environment."""
        try:
            folder = Path(os.environ["WORKBENCH_RUN_DIR"])
            raw = json.loads((folder / "job.json").read_text(encoding="utf-8"))
            job = job_from_dict(raw["job"])
        except (KeyError, OSError, ValueError) as error:
            raise RunError(f"this rank has no job it can read ({error!r}); it is started by an agent") from error
        if not isinstance(job, FineTune):
            raise RunError(f"the trainer runs finetune jobs, and was given a {job.kind} job")
        rank = int(os.environ.get("RANK", "0"))
        return cls(
            job=job,
            base=str(raw.get("base") or job.model),
            train=raw.get("train"),
            evaluation=raw.get("eval"),
            hub=raw.get("hub"),
            deepspeed=raw.get("deepspeed"),
            gpus=int(raw.get("gpus", 0)),
            folder=folder,
            rank_folder=Path(os.environ.get("WORKBENCH_RANK_DIR", str(folder / f"rank-{rank}"))),
            rank=rank,
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            resumed_step=int((raw.get("resume") or {}).get("step", 0)),
        )

    @property
    def out(self) -> Path:
        """What rank 0 leaves to be fetched."""
        return self.folder / "out"

    @property
    def stop(self) -> Path:
        """An empty file whose presence asks to stop after the step in progress."""
        return self.folder / "stop"

    @property
    def technique(self) -> Technique:
        """The technique of the job."""
        return Technique(self.job.technique)

    @property
    def global_batch(self) -> int:
        """Rows of one optimizer step."""
        return self.job.per_device_train_batch_size * self.job.gradient_accumulation_steps * self.world_size


def prepare_process(work: Assignment) -> None:
    """Set this process up before torch and DeepSpeed look around."""
    _check_trackers(work)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    disable_progress_bar()
    # DeepSpeed calls torch's collectives by names that torch 2.13 has given others; each call would say so.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # T5's blocks give their position bias on as a view, and change it nowhere in place.
    warnings.filterwarnings(
        "ignore", message=r"FSDP2-wrapped module \(FSDPT5Block\) returned a view", category=UserWarning
    )
    if work.gpus and not torch.cuda.is_available():
        raise ConfigError(f"the job counts on {work.gpus} GPU(s), but torch finds none on this pod")
    if work.job.precision == Precision.TF32 and not work.gpus:
        raise ConfigError("precision 'tf32' needs NVIDIA GPUs of the Ampere generation or later; use 'fp32' on CPUs")
    if work.technique is Technique.SINGLE:
        if work.world_size != 1:
            raise RunError(f"technique 'single' is one rank, and {work.world_size} were started")
        # With these in sight accelerate would open a process group of one.
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    elif not work.gpus:
        _open_on_cpu(with_deepspeed=work.technique.uses_deepspeed)


def training_arguments(work: Assignment) -> Any:
    """Translate the job into the Trainer's options; opens the process group of the ranks."""
    job = work.job
    on_cpu = not work.gpus
    return Seq2SeqTrainingArguments(
        output_dir=str(work.folder / "trainer"),
        per_device_train_batch_size=job.per_device_train_batch_size,
        per_device_eval_batch_size=job.per_device_eval_batch_size,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        num_train_epochs=job.epochs,
        max_steps=job.max_steps or -1,
        learning_rate=job.learning_rate,
        lr_scheduler_type="linear",
        optim=_OPTIM[Optimizer(job.optimizer)],
        **_from_deepspeed(work.deepspeed or {}),
        seed=job.seed,
        # Under FSDP the layers themselves are gathered in bf16; autocast would convert a second time.
        bf16=job.precision == Precision.BF16 and work.technique is not Technique.FSDP,
        fp16=job.precision == Precision.FP16,
        tf32=(job.precision == Precision.TF32) if not on_cpu else None,
        **({_CHECKPOINTING: True} if job.gradient_checkpointing else {}),
        logging_strategy="steps",
        logging_steps=job.logging_steps,
        # It would put the last average in place of a NaN; FineTuner stops there instead.
        logging_nan_inf_filter=False,
        eval_strategy="steps" if job.eval_steps else "no",
        eval_steps=job.eval_steps,
        save_strategy="no",
        # One rank speaks for all, as with the project's own metrics.
        report_to=list(job.report_to) if work.rank == 0 and job.report_to else "none",
        run_name=work.folder.name,
        disable_tqdm=True,
        use_cpu=on_cpu,
        remove_unused_columns=False,
        deepspeed=dict(work.deepspeed) if work.deepspeed is not None else None,
        accelerator_config={"use_configured_state": on_cpu and work.technique is not Technique.SINGLE},
        # The Trainer would have DDP look for unused parameters in every step, and T5 and Llama have none.
        ddp_find_unused_parameters=False,
    )


def _from_deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    # The Trainer insists that its options and DeepSpeed's configuration agree; what a job has no key for is taken
    # from the configuration.
    optimizer = config.get("optimizer", {}).get("params", {})
    scheduler = config.get("scheduler", {}).get("params", {})
    betas = optimizer.get("betas", "auto")
    told = {
        "max_grad_norm": config.get("gradient_clipping", "auto"),
        "weight_decay": optimizer.get("weight_decay", "auto"),
        "adam_epsilon": optimizer.get("eps", "auto"),
        "adam_beta1": betas[0] if betas != "auto" else "auto",
        "adam_beta2": betas[1] if betas != "auto" else "auto",
        "warmup_steps": scheduler.get("warmup_num_steps", "auto"),
    }
    ours = {"max_grad_norm": 1.0, "weight_decay": 0.0, "warmup_steps": _WARMUP}
    return {**ours, **{name: value for name, value in told.items() if value != "auto"}}


def _check_trackers(work: Assignment) -> None:
    # Only rank 0 hands metrics on, so only its pod needs the package.
    for name in work.job.report_to if work.rank == 0 else ():
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"report_to names '{name}', and the pod of rank 0 has no package of that name; install it there "
                f"(pip install 'deepspeed-workbench[{name}]'), or drop it: TensorBoard has the metrics anyway"
            )


def _open_on_cpu(*, with_deepspeed: bool) -> None:
    from accelerate import PartialState

    if not with_deepspeed:
        PartialState(cpu=True, backend="gloo")
        return
    _skip_shm_op()
    # Left alone, accelerate counts one process on CPUs under DeepSpeed; told `use_cpu`, it opens the process group
    # without DeepSpeed. So its state is made beforehand, as it makes it itself where there are GPUs.
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
    try:
        PartialState(backend="gloo")
    finally:
        del os.environ["ACCELERATE_USE_DEEPSPEED"], os.environ["ACCELERATE_TORCH_DEVICE"]


def _skip_shm_op() -> None:
    # DeepSpeed would compile it for a minute, and training uses gloo anyway; it also names its shared memory alike
    # for all runs of a machine. https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/comm/torch.py
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
