"""How a job can be made to need less memory, named with its own figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.base.json_values import number, part
from workbench.jobs.finetune import FineTune

__all__ = ["evidence", "fit_gpu", "fit_host"]

_LADDER = ("zero1", "zero2", "zero3", "zero3-offload")  # each needs less memory than the one before
_SHARDS = {
    "zero1": "shards the optimizer's state over the ranks",
    "zero2": "shards the gradients too",
    "zero3": "shards gradients and parameters too",
    "zero3-offload": "keeps optimizer and parameters in the pods' own memory",
}


def evidence(prediction: Mapping[str, object]) -> str:
    """Return what the run was predicted to need, its largest parts first.

    Example:
        >>> evidence({"gpu_gib": 41.25, "parts_gib": {"activations": 30.0, "optimizer": 11.25, "logits": 0.0}})
        '41.25 GiB on each GPU (30.00 activations, 11.25 optimizer)'
    """
    total = number(prediction.get("gpu_gib") or prediction.get("host_gib"))
    if total is None or "parts_gib" not in prediction:
        return ""
    sizes = [(number(size) or 0.0, name) for name, size in part(prediction, "parts_gib").items()]
    largest = sorted((each for each in sizes if each[0] >= 0.005), reverse=True)[:3]
    where = "on each GPU" if prediction.get("gpu_gib") else "on each pod"
    return f"{total:.2f} GiB {where} ({', '.join(f'{size:.2f} {name}' for size, name in largest)})"


def fit_gpu(job: FineTune | None) -> list[str]:
    """Name what lowers the memory a GPU needs, the cheapest first; the global batch stays what it is.

    Example:
        >>> fit_gpu(FineTune(technique="zero1", per_device_train_batch_size=8))[0][:64]
        'per_device_train_batch_size=4 with gradient_accumulation_steps=2'
    """
    job = job or FineTune()
    fixes = _smaller_batch(job)
    if better := _leaner(job.technique):
        fixes.append(f'technique="{better}" {_SHARDS[better]}')
    if not job.gradient_checkpointing:
        fixes.append("gradient_checkpointing=True: about a third more time for far fewer activations")
    return [*fixes, *_shorter(job)]


def fit_host(job: FineTune | None) -> list[str]:
    """Name what lowers the memory a pod needs, or gives it more."""
    more = "PodSpec(memory_gib=…) with more than the pods have now"
    if job is None:
        return [more, "fewer ranks a pod: each has a copy of what the script loads"]
    fixes = [more]
    if job.technique == "zero3-offload":
        fixes.append('technique="zero3" keeps the optimizer out of the pods\' memory, where GPUs have room')
    elif (better := _leaner(job.technique)) not in ("", "zero3-offload"):
        fixes.append(f'technique="{better}" {_SHARDS[better]}')
    return [*fixes, *_smaller_batch(job), *_shorter(job)]


def _leaner(technique: str) -> str:
    if technique == "fsdp":
        return "zero3-offload"
    after = _LADDER.index(technique) + 1 if technique in _LADDER else 0
    return next(iter(_LADDER[after:]), "")


def _smaller_batch(job: FineTune) -> list[str]:
    micro, steps = job.per_device_train_batch_size, job.gradient_accumulation_steps
    if micro < 2:
        return []
    if micro % 2:
        return [
            f"a smaller micro-batch than per_device_train_batch_size={micro}, with more gradient_accumulation_steps"
        ]
    return [
        f"per_device_train_batch_size={micro // 2} with gradient_accumulation_steps={steps * 2}: "
        "the same global batch in half the activations"
    ]


def _shorter(job: FineTune) -> list[str]:
    return [f"a smaller max_source_length than {job.max_source_length}, where inputs are long"]
