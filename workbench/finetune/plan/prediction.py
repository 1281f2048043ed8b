"""Predict the memory and disk of a run, and write the prediction beside the run's other files.

Submitting a run must not wait for a trace. If no trace is cached, an inquiry file is left for
the first pod or for the local keeper. The warm server of the pod has imported torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.files import write_json
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.shapes import model_config
from workbench.finetune.plan.plan import (
    MARGIN,
    Limits,
    as_planned,
    decided,
    fit_of,
    most_rows,
    row_of,
)
from workbench.finetune.plan.setting import setting_from, setting_of
from workbench.finetune.plan.table import GIB, Fit, PlanRow
from workbench.finetune.plan.tracing import cached_answer, trace_of
from workbench.finetune.techniques.registry import TECHNIQUES, technique_of
from workbench.finetune.techniques.sizes import FP32, Setting, Trace, states_of
from workbench.jobs.job import Job

LARGEST = "largest_micro_batch"
"""Key of the largest micro-batch with room to spare: rows by technique, 0 if no row fits."""
WHY = "why"
"""Key of the reason why nothing is predicted."""
FIX = "plan(job, pods=…) shows which technique and micro-batch fit"


def begin_prediction(
    job: Job,
    pods: int,
    prediction: Path,
    inquiry: Path,
    *,
    gpus: int,
    memory_gib: float | None,
) -> None:
    """Write the prediction if the trace is cached, and an inquiry for the job's first pod."""
    if not isinstance(job, FineTune):
        return
    with contextlib.suppress(OSError):
        try:
            request = inquiry_of(
                job,
                pods=pods,
                gpus=gpus,
                memory_gib=memory_gib,
            )
        except WorkbenchError as error:
            write_json(prediction, {WHY: str(error)})
            return
        answer = cached_answer(request["request"])
        if answer is not None:
            request["trace"] = dict(answer)
            write_json(prediction, prediction_of(request, trace_of([answer])))
        write_json(inquiry, request)


def inquiry_of(job: FineTune, *, pods: int, gpus: int, memory_gib: float | None) -> dict[str, Any]:
    """Return all inputs of a prediction as JSON, without secrets or paths on the pods."""
    job, setting, request = decided(job, pods=pods, gpus=gpus)
    return {
        "setting": asdict(setting),
        "others": _others(job, setting, pods=pods, gpus=gpus),
        "rows": job.per_device_train_batch_size,
        "request": request,
        "memory_gib": memory_gib,
        "saves": job.save_steps is not None,
    }


def prediction_of(
    inquiry: Mapping[str, Any],
    trace: Trace,
    limits: Limits = (None, None),
    free_gib: float | None = None,
) -> dict[str, Any]:
    """Answer an inquiry with the pod's own `limits` and the `free_gib` on its disk."""
    setting = setting_from(inquiry["setting"])
    row = row_of(setting, trace, inquiry["rows"], (None, None))
    gpu_gib = limits[0]
    pod_gib = inquiry["memory_gib"] or limits[1]
    fit, text = judge(row, (gpu_gib, pod_gib))
    disk_gib = _disk_gib(setting, trace, saves=inquiry["saves"])
    memory = row.gpu or row.host
    assert memory is not None
    warnings = [f"{text}; {FIX}"] if fit in (Fit.NOT, Fit.TIGHT) else []
    if free_gib is not None and disk_gib > free_gib:
        warnings.append(
            "the disk of the first pod will be full: its model, checkpoints "
            f"and offloads take {disk_gib:.2f} GiB and {free_gib:.2f} are "
            "free; make room there before the first of them is written"
        )
    return {
        "gpu_gib": row.gpu_gib,
        "pod_gpu_gib": row.pod_gpu_gib,
        "host_gib": row.host_gib,
        "parts_gib": {name: size / GIB for name, size in asdict(memory).items()},
        "disk_gib": disk_gib,
        LARGEST: _largest(inquiry, trace, (gpu_gib, pod_gib)),
        "warning": "; ".join(warnings),
    }


def _others(job: FineTune, setting: Setting, *, pods: int, gpus: int) -> dict[str, Any]:
    """Return the settings of other techniques with the same ranks and the same traced step."""
    others = dict[str, Any]()
    config = model_config(job.model, job.model_revision)
    for technique in (each.name for each in TECHNIQUES):
        with contextlib.suppress(ConfigError):
            other = setting_of(
                as_planned(job, technique),
                pods=pods,
                gpus=gpus,
                model=config,
            )
            if technique != job.technique and (other.arithmetic, other.ranks) == (
                setting.arithmetic,
                setting.ranks,
            ):
                others[technique] = asdict(other)
    return others


def _largest(inquiry: Mapping[str, Any], trace: Trace, limits: Limits) -> dict[str, int]:
    own = setting_from(inquiry["setting"])
    others = [setting_from(raw) for raw in inquiry.get("others", {}).values()]
    gpu_gib, pod_gib = limits
    deciding_gib = gpu_gib if own.gpu else pod_gib
    if deciding_gib is None:
        return {}
    # Leave a margin for the error of a prediction.
    usable = (
        None if gpu_gib is None else gpu_gib * MARGIN,
        None if pod_gib is None else pod_gib * MARGIN,
    )
    largest = {}
    for setting in (own, *others):
        largest[setting.technique] = most_rows(setting, trace, usable)
    return largest


def judge(row: PlanRow, limits: Limits) -> tuple[Fit, str]:
    """Compare the need with the limits, in words. The place with the least room decides."""
    needs = {
        "of each GPU's": (row.gpu_gib, limits[0]),
        "of each pod's memory": (row.host_gib, limits[1]),
    }
    parts = []
    for where, (need, limit) in needs.items():
        if need is None:
            continue
        there = "" if limit is None else f" (there are {limit:.2f})"
        parts.append(f"{need:.2f} GiB {where}{there}")
    fit = fit_of(*needs.values())
    heading = {Fit.NOT: "will not fit: ", Fit.TIGHT: "will be tight: "}.get(fit, "")
    return fit, f"{heading}predicted {', '.join(parts)}"


def _disk_gib(setting: Setting, trace: Trace, *, saves: bool) -> float:
    """Return the GiB stored on the first pod: the model, two checkpoints and offloaded states."""
    model = 4 * trace.parameters
    if trace.trained < trace.parameters:
        # Only the adapters are saved.
        model = setting.weight_bytes * trace.trained
    trace_of_rank = trace.cut(setting.sharers)
    weights = (FP32 + setting.outer_bytes) * trace_of_rank.trained
    state = weights + states_of(setting, trace_of_rank)
    technique = technique_of(setting.technique)
    # Rank 0 alone writes a state that is the same on every rank.
    writers = 1 if technique.same_on_ranks and setting.sharers == 1 else setting.on_pod
    checkpoint = state / setting.shards * writers
    offloaded = technique.bytes_on_disk(setting, trace)
    return (model + 2 * checkpoint * saves + offloaded) / GIB
