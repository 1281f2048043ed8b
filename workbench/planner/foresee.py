"""What a run is predicted to need, written beside its other files; and the same as a check of the doctor's.

Submitting must not wait for a trace: what was not traced before is traced by a process of the lowest priority, which
writes its file whenever it is done. `python -m workbench.planner.foresee` is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.planner.plan import GIB, TIGHT, PlanRow, machine_memory_gib, predict
from workbench.planner.shapes import model_config
from workbench.planner.tracing import one_at_a_time
from workbench.pods.doctor import Diagnosis
from workbench.pods.pod import PodSpec
from workbench.pods.verdicts import MEMORY_OF_JOB, Finding, Verdict
from workbench.spec.job import FineTune, Script, job_from_dict

__all__ = ["Foresight", "foresee", "foretell", "main"]


class Foresight:
    """What one cluster knows of the memory of its runs before they need it; owns the processes that trace for it."""

    def __init__(self, spec: PodSpec, *, local: bool) -> None:
        """Start with no process.

        Args:
            spec: What each pod is.
            local: Whether the pods share this machine.
        """
        self._spec = spec
        self._local = local
        self._children: list[subprocess.Popen[bytes]] = []

    def begin(self, job: FineTune | Script, pods: int, file: Path) -> None:
        """Write what a job is predicted to need, as `foresee` does."""
        child = foresee(job, pods=pods, spec=self._spec, local=self._local, file=file)
        self._children = [c for c in (*self._children, child) if c is not None and c.poll() is None]

    def judge(self, diagnosis: Diagnosis, job: FineTune, pods: int) -> Diagnosis:
        """Add to a diagnosis whether a job will fit, as `foretell` does."""
        return foretell(diagnosis, job, pods=pods, spec=self._spec, local=self._local)

    def close(self) -> None:
        """End the processes that are still tracing; what they would have found is left out. Idempotent."""
        while self._children:
            child = self._children.pop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def foresee(
    job: FineTune | Script, *, pods: int, spec: PodSpec, local: bool, file: Path
) -> subprocess.Popen[bytes] | None:
    """Write what a job is predicted to need, at once or some seconds later. Never raises for what it cannot predict.

    Args:
        job: The job; of a script nothing can be said.
        pods: The pods that it runs on.
        spec: What each of them is.
        local: Whether they share this machine.
        file: The JSON file to write; one whose folder has gone is not written.

    Returns:
        The process that will write it, in a process group of its own; None where it is written, or never will be.
    """
    if not isinstance(job, FineTune):
        return None
    asked = {"job": job.to_dict(), "pods": pods, "gpus": spec.gpus, "limit": _limit_gib(spec, pods, local)}
    with contextlib.suppress(WorkbenchError, OSError):
        model_config(job.model)
        if _write(asked, file, trace=False):
            return None
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "workbench.planner.foresee"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (_package(), os.environ.get("PYTHONPATH"))))},
        )
        assert child.stdin is not None
        with child.stdin as pipe:
            pipe.write(json.dumps({**asked, "file": str(file)}).encode())
        return child
    return None


def foretell(diagnosis: Diagnosis, job: FineTune, *, pods: int, spec: PodSpec, local: bool) -> Diagnosis:
    """Add to a diagnosis whether a job will fit; may take seconds.

    Args:
        diagnosis: What the doctor found.
        job: The job.
        pods: The pods that it would run on, the first ones.
        spec: What each of them is.
        local: Whether they share this machine.
    """
    try:
        row = predict(job, pods=pods, gpus=spec.gpus)
        assert row is not None
        finding = _judged(row, _limit_gib(spec, pods, local))
    except WorkbenchError as error:
        finding = Finding(check=MEMORY_OF_JOB, verdict=Verdict.UNKNOWN, found=str(error))
    hosts = [
        replace(host, findings=(*host.findings, finding)) if number < pods else host
        for number, host in enumerate(diagnosis.hosts)
    ]
    return replace(diagnosis, hosts=tuple(hosts))


def main() -> None:
    """Predict what standard input asks for."""
    os.nice(19)
    asked = json.load(sys.stdin)
    with contextlib.suppress(WorkbenchError, OSError), one_at_a_time():
        _write(asked, Path(asked["file"]), trace=True)


def _write(asked: Mapping[str, object], file: Path, *, trace: bool) -> bool:
    raw, pods, gpus, limit = asked["job"], asked["pods"], asked["gpus"], asked["limit"]
    assert isinstance(raw, dict) and isinstance(pods, int) and isinstance(gpus, int)
    job = job_from_dict(raw)
    assert isinstance(job, FineTune)
    row = predict(job, pods=pods, gpus=gpus, trace=trace)
    if row is None:
        return False
    finding = _judged(row, limit if isinstance(limit, float) else None)
    held = row.gpu or row.host
    assert held is not None
    said = {
        "gpu_gib": row.gpu_gib,
        "pod_gpu_gib": row.pod_gpu_gib,
        "host_gib": row.host_gib,
        "parts_gib": {name: size / GIB for name, size in asdict(held).items()},
        "warning": f"{finding.found}; {finding.fix}" if finding.fix else "",
    }
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(said), encoding="utf-8")
    part.replace(file)
    return True


def _judged(row: PlanRow, limit_gib: float | None) -> Finding:
    need = row.host_gib or 0.0
    found = f"predicted {need:.2f} GiB of each pod's memory"
    if row.gpu_gib is not None:
        found += f", {row.gpu_gib:.2f} GiB of each GPU's"
    if limit_gib is None:
        return Finding(check=MEMORY_OF_JOB, verdict=Verdict.GOOD, found=found)
    found += f"; a pod has {limit_gib:.2f} GiB"
    fix = "plan(job, pods=…) shows which technique and micro-batch fit"
    if need > limit_gib:
        return Finding(check=MEMORY_OF_JOB, verdict=Verdict.BAD, found=f"will not fit: {found}", fix=fix)
    if need > TIGHT * limit_gib:
        return Finding(check=MEMORY_OF_JOB, verdict=Verdict.WARNING, found=f"will be tight: {found}", fix=fix)
    return Finding(check=MEMORY_OF_JOB, verdict=Verdict.GOOD, found=found)


def _limit_gib(spec: PodSpec, pods: int, local: bool) -> float | None:
    if spec.memory_gib is not None:
        return float(spec.memory_gib)
    return machine_memory_gib() / pods if local else None


def _package() -> str:
    return str(Path(__file__).resolve().parents[2])


if __name__ == "__main__":
    main()
