"""Suggest options that make a job need less memory. Pure."""

from __future__ import annotations

from workbench.finetune.job.finetune import FineTune

MORE_MEMORY = "PodSpec(memory_gib=…) with more than the pods have now"
PLAN = "cluster.plan(job) shows which technique and micro-batch fit these pods"
OF_SCRIPTS = (
    "smaller batches, with more gradient accumulation where the rows of a step are to stay",
    "fewer ranks on a pod, or more pods: each rank has a copy of what the script loads",
)


def fit_gpu(job: FineTune | None) -> list[str]:
    """Return fixes for too little GPU memory, the cheapest first, at the same global batch.

    Example:
        >>> job = FineTune(technique="ddp", per_device_train_batch_size=8)
        >>> smaller, plan = fit_gpu(job)[:2]
        >>> smaller.partition(": ")[0]
        'per_device_train_batch_size=4, gradient_accumulation_steps=2'
        >>> plan.partition(" ")[0]
        'cluster.plan(job)'
    """
    if job is None:
        return list(OF_SCRIPTS)
    fixes = [*_smaller_batch(job), PLAN]
    if not job.gradient_checkpointing:
        fixes.append(
            "gradient_checkpointing=True: about a third more time for far fewer activations"
        )
    return [*fixes, *_shorter(job)]


def fit_host(job: FineTune | None) -> list[str]:
    """Return fixes for too little pod memory: a smaller job, or more memory per pod."""
    if job is None:
        return [MORE_MEMORY, *OF_SCRIPTS]
    return [MORE_MEMORY, *_smaller_batch(job), PLAN, *_shorter(job)]


def _smaller_batch(job: FineTune) -> list[str]:
    micro = job.per_device_train_batch_size
    if micro < 2:
        return []
    return [f"{_batch(job, micro // 2)}: the same global batch with fewer activations"]


def _batch(job: FineTune, most: int) -> str:
    """Return the options of the largest micro-batch up to `most` with the same global batch."""
    rows = job.per_device_train_batch_size * job.gradient_accumulation_steps
    micro = next(size for size in range(min(most, rows), 0, -1) if rows % size == 0)
    return f"per_device_train_batch_size={micro}, gradient_accumulation_steps={rows // micro}"


def _shorter(job: FineTune) -> list[str]:
    if job.max_source_length is None:
        return ["max_source_length, which cuts long inputs"]
    return [f"a smaller max_source_length than {job.max_source_length}, where inputs are long"]
