"""Suggest options that make a job need less memory, with numbers from the planner. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from workbench.base.json_values import number, part, whole
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.plan.plan import MARGIN
from workbench.finetune.plan.prediction import LARGEST
from workbench.finetune.techniques.registry import TECHNIQUES

MORE_MEMORY = "PodSpec(memory_gib=…) with more than the pods have now"
OF_SCRIPTS = (
    "smaller batches, with more gradient accumulation where the rows of a step are to stay",
    "fewer ranks on a pod, or more pods: each rank has a copy of what the script loads",
)
_LADDER = {technique.name: technique.leaner for technique in TECHNIQUES if technique.leaner}
"""Techniques from most to least memory, if there are ranks to shard over."""


def evidence(prediction: Mapping[str, object]) -> str:
    """Return the predicted need of a run, with its largest parts first.

    Example:
        >>> parts = {"activations": 30.0, "optimizer": 11.25, "logits": 0.0}
        >>> evidence({"gpu_gib": 41.25, "parts_gib": parts})
        '41.25 GiB on each GPU (30.00 activations, 11.25 optimizer)'
    """
    total = number(prediction.get("gpu_gib") or prediction.get("host_gib"))
    if total is None or "parts_gib" not in prediction:
        return ""
    sizes = []
    for name, value in part(prediction, "parts_gib").items():
        size = number(value) or 0.0
        if size >= 0.005:
            sizes.append((size, name))
    sizes.sort(reverse=True)
    largest = ", ".join(f"{size:.2f} {name}" for size, name in sizes[:3])
    where = "on each GPU" if prediction.get("gpu_gib") else "on each pod"
    return f"{total:.2f} GiB {where} ({largest})"


def fit_gpu(job: FineTune | None, prediction: Mapping[str, object]) -> list[str]:
    """Return fixes for too little GPU memory, the cheapest first, at the same global batch.

    Example:
        >>> fits = {"largest_micro_batch": {"ddp": 3, "zero3": 8}}
        >>> job = FineTune(technique="ddp", per_device_train_batch_size=8)
        >>> smaller, sharded = fit_gpu(job, fits)[:2]
        >>> smaller.partition(": ")[0]
        'per_device_train_batch_size=2, gradient_accumulation_steps=4'
        >>> print(sharded)
        technique="zero3" shards gradients and parameters too: by the planner the job fits as it is
    """
    if job is None:
        return list(OF_SCRIPTS)
    fixes = [*_smaller_batch(job, prediction), *_leaner(job, prediction)]
    if not job.gradient_checkpointing:
        fixes.append(
            "gradient_checkpointing=True: about a third more time for far fewer activations"
        )
    return [*fixes, *_shorter(job)]


def fit_host(job: FineTune | None, prediction: Mapping[str, object]) -> list[str]:
    """Return fixes for too little pod memory: a smaller job, or more memory per pod."""
    if job is None:
        return [MORE_MEMORY, *OF_SCRIPTS]
    fixes = [*_smaller_batch(job, prediction), *_leaner(job, prediction)]
    largest = _largest(prediction).get(job.technique)
    needed = number(prediction.get("host_gib"))
    if largest is None or largest >= job.per_device_train_batch_size:
        return [MORE_MEMORY, *fixes, *_shorter(job)]
    if needed is not None:
        enough = math.ceil(2 * needed / MARGIN) / 2
        fixes.append(f"PodSpec(memory_gib={enough:g}): by the planner enough for the job as it is")
    return [*fixes, *_shorter(job)]


def _largest(prediction: Mapping[str, object]) -> dict[str, int]:
    """Return by technique the largest micro-batch with room to spare according to the planner."""
    sizes = {name: whole(size) for name, size in part(prediction, LARGEST).items()}
    return {name: size for name, size in sizes.items() if size is not None}


def _leaner(job: FineTune, prediction: Mapping[str, object]) -> list[str]:
    """Suggest the first technique with enough room according to the planner, if any is known."""
    largest = _largest(prediction)
    micro = job.per_device_train_batch_size
    # The job fits by the planner, so the planner erred: ignore its other numbers.
    if largest.get(job.technique, micro) >= micro:
        return []
    others = [(name, largest.get(name, 0)) for name in _LADDER if name != job.technique]
    for name, size in others:
        if size >= micro:
            return [f'technique="{name}" {_LADDER[name]}: by the planner the job fits as it is']
    if largest.get(job.technique) != 0:
        return []
    for name, size in others:
        if size:
            fix = f'technique="{name}", {_batch(job, size)}'
            return [f"{fix}: the same global batch, and by the planner it fits"]
    return []


def _smaller_batch(job: FineTune, prediction: Mapping[str, object]) -> list[str]:
    micro = job.per_device_train_batch_size
    fits = _largest(prediction).get(job.technique, micro)
    if fits == 0 or micro < 2:
        return []
    if fits < micro:
        return [f"{_batch(job, fits)}: the same global batch, and by the planner it fits"]
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
