"""Check and complete a job's DeepSpeed configuration before a run, without importing DeepSpeed."""

from __future__ import annotations

from typing import Any

from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.deepspeed.files import load
from workbench.finetune.deepspeed.keys import AUTO_BATCHES
from workbench.finetune.job.refusals import check, known
from workbench.finetune.options.choices import OWN_OPTIMIZERS
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.techniques.zero.zero import is_offloaded


def resolve(
    job: FineTuneOptions, *, gpus: int, world_size: int | None = None
) -> dict[str, object] | None:
    """Return the DeepSpeed configuration for the ranks of a job.

    Args:
        job: Job with a `deepspeed` option. By default, the technique's file in `dsconfig/` is used.
        gpus: Number of GPUs of a pod; 0 for CPUs.
        world_size: Number of ranks, if known. `train_batch_size` is then checked too.

    Returns:
        The complete configuration, or None for a technique without DeepSpeed.

    Raises:
        ConfigError: The file is missing or not JSON, or a key is unknown, removed, or contradicts
            the job.

    Example:
        >>> resolve(FineTuneOptions(technique="zero1"), gpus=0)["zero_optimization"]["stage"]
        1
    """
    job = choose(job, gpus=gpus, world_size=world_size)
    check(job, known(job, gpus=gpus, ranks=world_size))
    return completed(job, gpus=gpus)


def completed(job: FineTuneOptions, *, gpus: int) -> dict[str, object] | None:
    """Return the DeepSpeed configuration of a checked job; None for a job without DeepSpeed."""
    if not technique_of(job.technique).uses_deepspeed:
        return None
    config, _ = load(job)
    config.update({**AUTO_BATCHES, **config})
    config.setdefault("gradient_clipping", "auto")
    # DeepSpeed prints a line every 10 steps by default. The trainer reports every step.
    config.setdefault("steps_per_print", 1_000_000_000)
    if "bf16" not in config and "bfloat16" not in config:
        config["bf16"] = {"enabled": "auto"}
    if job.tensor_parallel > 1:
        # DeepSpeed then exchanges gradients and their norm in the right groups.
        config["tensor_parallel"] = {"autotp_size": job.tensor_parallel}
    if job.precision == "fp16":
        config.setdefault("fp16", {"enabled": "auto"})
    if job.communication is not None:
        config.setdefault("communication_data_type", str(job.communication))
    zero = config["zero_optimization"]
    technique_of(job.technique).fill_config(config)
    # The trainer starts the profiler: DeepSpeed's switch would slow every step of the run.
    config["flops_profiler"] = {**config.get("flops_profiler", {}), "enabled": False}
    _fill_optimizer(config, job, gpus=gpus)
    if not gpus:
        for offload in ("offload_optimizer", "offload_param"):
            if zero.get(offload):
                zero[offload]["pin_memory"] = False  # pinned memory only speeds up copies to a GPU
    return config


def _fill_optimizer(config: dict[str, Any], job: FineTuneOptions, *, gpus: int) -> None:
    if job.optimizer != "adamw":
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False
        if job.optimizer in OWN_OPTIMIZERS:
            # DeepSpeed would make its own optimizer, with another arithmetic.
            config.pop("optimizer", None)
        return
    offloaded = is_offloaded(config["zero_optimization"], "offload_optimizer")
    if offloaded and "optimizer" not in config:
        auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": auto}
    if not gpus and "optimizer" in config:
        # Compiling DeepSpeed's Adam takes minutes. torch's Adam is equivalent on a CPU.
        config["optimizer"].setdefault("params", {})["torch_adam"] = True
