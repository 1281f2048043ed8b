"""What a run is predicted to need, written beside its other files; and the same as a check of the doctor's.

Submitting must not wait for a trace. What was traced before answers at once; for the rest an inquiry is left in the run
directory, and the keeper has it answered beside the run: by the first pod, whose warm server has torch imported
(`workbench.worker.trace.inquiry`), or by `python -m workbench.planner.prediction`, at the lowest priority here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from workbench.base.errors import WorkbenchError
from workbench.jobs.finetune import FineTune, Script
from workbench.planner.plan import GIB, TIGHT, PlanRow, machine_memory_gib, predict, row_of
from workbench.planner.setting import Setting, request_of, setting_from, setting_of
from workbench.planner.shapes import model_config
from workbench.planner.tracing import Trace, joined, one_at_a_time, places, recall, trace_step
from workbench.pods.doctor.examination import Diagnosis, HostReport
from workbench.pods.doctor.verdicts import MEMORY_OF_JOB, Finding, Verdict
from workbench.pods.pod import PodSpec

__all__ = ["Foresight", "answer", "foretell", "inquiry", "main"]

Limits = tuple[float | None, float | None]
"""GiB of one GPU and of a pod's own memory; None where it is not known."""


class Foresight:
    """What one cluster knows of the memory of its runs before they need it."""

    def __init__(self, spec: PodSpec, *, local: bool) -> None:
        """Remember what the pods are."""
        self._spec = spec
        self._local = local

    def begin(self, job: FineTune | Script, pods: int, prediction: Path, left: Path) -> None:
        """Write what a job is predicted to need where that is known, and leave an inquiry for its first pod."""
        if not isinstance(job, FineTune):
            return
        with contextlib.suppress(WorkbenchError, OSError):
            asked = inquiry(job, pods=pods, spec=self._spec, local=self._local)
            if (trace := recall(asked["request"])) is not None:
                asked["trace"] = dict(trace)
                _write(prediction, answer(asked, trace))
            _write(left, asked)

    def judge(self, diagnosis: Diagnosis, job: FineTune, pods: int) -> Diagnosis:
        """Add to a diagnosis whether a job will fit, as `foretell` does."""
        return foretell(diagnosis, job, pods=pods, spec=self._spec, local=self._local)


def inquiry(job: FineTune, *, pods: int, spec: PodSpec, local: bool) -> dict[str, Any]:
    """Put together all that an answer is made of; JSON, free of secrets and of paths on the pods."""
    setting = setting_of(job, pods=pods, gpus=spec.gpus)
    request = request_of(job, model_config(job.model), [setting.arithmetic], gpu=setting.gpu, lengths=None)
    return {
        "setting": asdict(setting),
        "rows": job.per_device_train_batch_size,
        "request": request,
        "limits": [None, _memory_gib(spec, pods, local)],
        "saves": job.save_steps is not None,
        "keep": {name: str(place) for name, place in places(request).items()},
    }


def answer(
    asked: Mapping[str, Any],
    trace: Trace | Mapping[str, Any],
    limits: Limits = (None, None),
    free_gib: float | None = None,
) -> dict[str, Any]:
    """Answer an inquiry."""
    setting = setting_from(asked["setting"])
    traced = trace if isinstance(trace, Trace) else joined([trace])
    row = row_of(setting, traced, asked["rows"], (None, None))
    disk_gib = _disk_gib(setting, traced, saves=asked["saves"])
    known = [ours if ours is not None else theirs for ours, theirs in zip(asked["limits"], limits, strict=True)]
    finding = _judged(row, (known[0], known[1]))
    held = row.gpu or row.host
    assert held is not None
    return {
        "gpu_gib": row.gpu_gib,
        "pod_gpu_gib": row.pod_gpu_gib,
        "host_gib": row.host_gib,
        "parts_gib": {name: size / GIB for name, size in asdict(held).items()},
        "disk_gib": disk_gib,
        "warning": "; ".join(
            filter(None, (finding.found if finding.fix else "", finding.fix, _room(disk_gib, free_gib)))
        ),
    }


def _disk_gib(setting: Setting, trace: Trace, *, saves: bool) -> float:
    """Return the GiB that the first pod must store: the model, and the last checkpoint beside the one being made."""
    model = setting.weight_bytes * trace.trained if trace.trained < trace.parameters else 4 * trace.parameters
    checkpoint = (4 + setting.state_bytes) * trace.trained / setting.shards * setting.on_pod
    return (model + 2 * checkpoint * saves) / GIB


def _room(disk_gib: float, free_gib: float | None) -> str:
    if free_gib is None or disk_gib <= free_gib:
        return ""
    return (
        f"the disk of the first pod will be full: its model and checkpoints take {disk_gib:.2f} GiB and "
        f"{free_gib:.2f} are free; make room there before the first of them is written"
    )


def foretell(diagnosis: Diagnosis, job: FineTune, *, pods: int, spec: PodSpec, local: bool) -> Diagnosis:
    """Add to a diagnosis whether a job will fit each pod, by the memory that was found there; may take seconds."""
    try:
        row = predict(job, pods=pods, gpus=spec.gpus)
        assert row is not None
    except WorkbenchError as error:
        unknown = Finding(check=MEMORY_OF_JOB, verdict=Verdict.UNKNOWN, found=str(error))
        return _added(diagnosis, [unknown] * min(pods, len(diagnosis.hosts)))
    asked = _memory_gib(spec, pods, local)
    return _added(diagnosis, [_judged(row, _limits(host, asked)) for host in diagnosis.hosts[:pods]])


def main() -> None:
    """Answer the inquiry in the first line of standard input, on standard output; end when the input does."""
    os.nice(19)
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    with contextlib.suppress(WorkbenchError, OSError), one_at_a_time():
        sys.stdout.write(json.dumps({"prediction": answer(asked, trace_step(asked["request"]))}) + "\n")
        sys.stdout.flush()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def _added(diagnosis: Diagnosis, findings: list[Finding]) -> Diagnosis:
    hosts = [
        replace(host, findings=(*host.findings, findings[number])) if number < len(findings) else host
        for number, host in enumerate(diagnosis.hosts)
    ]
    return replace(diagnosis, hosts=tuple(hosts))


def _limits(host: HostReport, asked_gib: float | None) -> Limits:
    found = host.memory_limit_gib
    known = [size for size in (asked_gib, found) if size is not None]
    return host.gpu_gib, min(known, default=None)


def _write(file: Path, said: Mapping[str, Any]) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(said), encoding="utf-8")
    part.replace(file)


def _judged(row: PlanRow, limits: Limits) -> Finding:
    """Judge what is needed against what there is; the place with the least room decides."""
    fix = "plan(job, pods=…) shows which technique and micro-batch fit"
    needs = {"of each GPU's": (row.gpu_gib, limits[0]), "of each pod's memory": (row.host_gib, limits[1])}
    found, share = [], 0.0
    for where, (need, limit) in needs.items():
        if need is not None:
            there = f" (there are {limit:.2f})" if limit is not None else ""
            found.append(f"{need:.2f} GiB {where}{there}")
            share = max(share, need / limit if limit is not None else 0.0)
    said = f"predicted {', '.join(found)}"
    if share > 1:
        return Finding(check=MEMORY_OF_JOB, verdict=Verdict.BAD, found=f"will not fit: {said}", fix=fix)
    if share > TIGHT:
        return Finding(check=MEMORY_OF_JOB, verdict=Verdict.WARNING, found=f"will be tight: {said}", fix=fix)
    return Finding(check=MEMORY_OF_JOB, verdict=Verdict.GOOD, found=said)


def _memory_gib(spec: PodSpec, pods: int, local: bool) -> float | None:
    if spec.memory_gib is not None:
        return float(spec.memory_gib)
    return machine_memory_gib() / pods if local else None


if __name__ == "__main__":
    main()
