"""Read a benchmark row from a specification or a run directory; unknown facts are None."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json, user_path
from workbench.base.json_values import Json, as_float, as_int, as_str, get_object
from workbench.benchmark.row import BenchmarkRow, Outcome, Provenance
from workbench.client.result import RunResult
from workbench.finetune.advice.rules import advise, gib_of
from workbench.finetune.techniques.registry import runs_alone
from workbench.jobs.registry import job_from_dict, table_columns
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.catalog.label import read_label
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import Measurements, RunFault
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import state_of
from workbench.rundir.totals import TotalsTail

_PATHS = {"model", "dataset", "deepspeed", "resume", "path"}
_MEASURED = tuple(field.name for field in fields(Measurements))
_OF_ANSWERS = ("perplexity", "exact_match", "useful_tokens_per_s", "padded_tokens_per_s")
_DERIVED = ("tflops_per_device", "mfu")
_OUTCOMES = {
    RunState.QUEUED: Outcome.WAITING,
    RunState.SUCCEEDED: Outcome.SUCCEEDED,
    RunState.FAILED: Outcome.FAILED,
    RunState.STOPPED: Outcome.STOPPED,
    RunState.CANCELLED: Outcome.CANCELLED,
}


def row_of(run_dir: Path) -> BenchmarkRow:
    paths = RunPaths(run_dir)
    spec = read_json(paths.spec)
    info = read_json(paths.info)
    facts = read_json(paths.result) or _facts_so_far(paths, spec)
    try:
        result = RunResult.at(run_dir, {**facts, "state": state_of(paths)})
    except (OSError, ValueError, WorkbenchError):
        unsaid = {"state": RunState.LOST, "message": "the run's files do not say how the run ended"}
        result = RunResult.at(run_dir, {**facts, **unsaid})
    outcome, reason = _end_of(paths, result)
    asked = _Asked.of(spec)
    # A row of a benchmark has a key in its note. The key of an ordinary run is computed.
    note = get_object(info, "benchmark")
    key = as_str(note.get("key"))
    if not key and get_object(spec, "job"):
        key = key_of(spec)
    columns = {
        **_spec_columns(spec, asked),
        **_result_columns(result),
        **_shortage_columns(result.error, spec),
    }
    provenance = _provenance(asked, result, read_json(paths.origin))
    return BenchmarkRow(
        name=as_str(info.get("id")) or run_dir.name,
        outcome=outcome,
        path=run_dir,
        title=read_label(paths).name,
        spec=spec,
        key=key,
        repeat=as_int(note.get("repeat")) or 0,
        reason=reason,
        predicted_memory_gib=as_float(info.get("predicted_memory_gib")),
        provenance=provenance,
        **columns,  # type: ignore[arg-type]
    )


def skipped_row(
    spec: RunSpec | Json, reason: str, predicted_memory_gib: float | None = None
) -> BenchmarkRow:
    raw = _raw(spec)
    asked = _Asked.of(raw)
    seed = as_int(asked.job.get("seed"))
    key = key_of(raw)
    return BenchmarkRow(
        name=key,
        outcome=Outcome.SKIPPED,
        spec=raw,
        key=key,
        reason=reason,
        predicted_memory_gib=predicted_memory_gib,
        provenance=Provenance(seed=seed),
        **_spec_columns(raw, asked),  # type: ignore[arg-type]
    )


def key_of(spec: RunSpec | Json) -> str:
    """Return the fingerprint of the work that a spec asks for, its number of pods included.

    Example:
        >>> short = {"cluster": {"count": 3}, "job": {"technique": "zero1"}}
        >>> job = {"technique": "zero1", "seed": 0}
        >>> key_of(short) == key_of({"cluster": {"count": 5}, "job": job, "pods": 3})
        True
        >>> key_of(short) == key_of({"cluster": {"count": 3}, "job": {**job, "seed": 1}})
        False
    """
    raw = _raw(spec)
    cluster = get_object(raw, "cluster")
    pod = dict(get_object(cluster, "pods"))
    with suppress(WorkbenchError, TypeError):
        pod = PodSpec.from_dict(pod).to_dict()
    asked = _Asked.of(raw)
    job = dict(asked.job)
    for name in job.keys() & _PATHS:
        job[name] = _absolute(job[name])
    backend = get_object(cluster, "backend")
    work = {
        "job": job,
        "pods": asked.pods,
        "pod": pod,
        "backend": as_str(backend.get("kind")) or "local",
    }
    written = json.dumps(work, sort_keys=True, default=str)
    digest = hashlib.sha256(written.encode())
    return digest.hexdigest()[:16]


def _raw(spec: RunSpec | Json) -> Json:
    if isinstance(spec, RunSpec):
        return spec.chosen().to_dict()
    return spec


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """Job and numbers of a spec, with defaults filled in if this version can read the job."""

    job: Json
    """JSON form of the job."""
    pods: int
    ranks: int
    """Number of ranks on all pods."""

    @classmethod
    def of(cls, spec: Json) -> _Asked:
        options = get_object(spec, "job")
        cluster = get_object(spec, "cluster")
        pod = get_object(cluster, "pods")
        pods = as_int(spec.get("pods")) or as_int(cluster.get("count")) or 1
        gpus = as_int(pod.get("gpus")) or 0
        slots = max(1, gpus)
        with suppress(WorkbenchError, TypeError):
            job = job_from_dict(options)
            job = job.chosen(gpus=gpus, ranks=None, apart=False, looks=False)
            return cls(
                job=job.to_dict(),
                pods=job.rules.capped(pods),
                ranks=job.rules.capped(pods * slots),
            )
        if runs_alone(options.get("technique")):
            return cls(job=options, pods=1, ranks=1)
        return cls(job=options, pods=pods, ranks=pods * slots)


def _absolute(value: object) -> object:
    # A folder is kept as an absolute path once it is submitted.
    named = as_str(value)
    if not named:
        return value
    with suppress(OSError, ValueError):
        path = user_path(named)
        if path.exists():
            return str(path.absolute())
    return value


def _spec_columns(spec: Json, asked: _Asked) -> dict[str, object]:
    if not get_object(spec, "job"):
        return {}
    columns = dict(table_columns(asked.job))
    peft = columns.pop("peft", "")
    if peft not in ("", "none"):
        technique = columns["technique"]
        columns["technique"] = f"{technique} {peft}".strip()
    micro_batch = as_int(columns.get("per_device_batch"))
    accumulation = as_int(columns.get("accumulation"))
    if micro_batch and accumulation:
        columns["global_batch_size"] = micro_batch * accumulation * asked.ranks
    return {
        **columns,
        "launcher": as_str(asked.job.get("launcher")) or "ssh",
        "pods": asked.pods,
        "world_size": asked.ranks,
    }


def _result_columns(result: RunResult) -> dict[str, object]:
    columns: dict[str, object] = {}
    # What the run reports takes the place of what the spec asks for.
    reported = {
        "pods": len(result.hosts),
        "world_size": result.world_size,
        "global_batch_size": result.global_batch_size,
        "precision": result.precision,
    }
    for name, value in reported.items():
        if value:
            columns[name] = value
    for name in _MEASURED:
        columns[name] = _finite(getattr(result, name))
    for name in _OF_ANSWERS:
        columns[name] = _finite(as_float(result.of_kind.get(name)))
    derived = result.derived
    for name in _DERIVED:
        columns[name] = _finite(derived.get(name))
    columns["train_samples_per_s"] = _finite(result.train_samples_per_s)
    # On CPUs, the measured peak is the resident memory.
    kind = ""
    if result.peak_memory_gib:
        kind = result.memory_kind
    peak = _highest(result.peak_memory_gib)
    host = _highest(result.host_memory_gib)
    if host is None and kind == "resident":
        host = peak
    columns["peak_memory_gib"] = peak
    columns["memory_kind"] = kind
    columns["host_memory_gib"] = host
    duration_s = result.duration_s or 0.0
    pod_seconds = len(result.hosts) * duration_s
    columns["pod_hours"] = None
    if pod_seconds:
        columns["pod_hours"] = pod_seconds / 3600
    return columns


def _facts_so_far(paths: RunPaths, spec: Json) -> Json:
    """Return the facts reported by an unfinished run; the start time is unknown."""
    totals = TotalsTail(paths.events).read()
    asked = _Asked.of(spec)
    facts = totals.facts(None)
    return {**facts, "peft": asked.job.get("peft")}


def _end_of(paths: RunPaths, result: RunResult) -> tuple[Outcome, str]:
    """Return the outcome of a run and the reason, on a single line."""
    state = result.state
    message = result.message
    if not message:
        stored = read_json(paths.state)
        message = as_str(stored.get("message"))
    if state is RunState.SUCCEEDED or not state.is_terminal:
        return _OUTCOMES.get(state, Outcome.RUNNING), ""
    if state is RunState.LOST:
        return Outcome.FAILED, result.message or "the keeper died before the run ended"
    if state is RunState.FAILED and result.error is not None:
        reason = _one_line(result.error.message or message)
        advice = advise(result.error)
        if advice.lacked_memory:
            return Outcome.OUT_OF_MEMORY, reason
        return Outcome.FAILED, reason
    return _OUTCOMES[state], _one_line(message)


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _shortage_columns(fault: RunFault | None, spec: Json) -> dict[str, object]:
    if not fault:
        return {}
    advice = advise(fault)
    if not advice.lacked_memory:
        return {}
    cluster = get_object(spec, "cluster")
    pod = get_object(cluster, "pods")
    # The free memory, else the limit in the error, else the limit of the pod.
    free_gib = gib_of(advice.free)
    if free_gib is None:
        free_gib = gib_of(advice.limit)
    if free_gib is None:
        free_gib = as_float(pod.get("memory_gib"))
    return {
        "wanted_gib": gib_of(advice.asked),
        "free_gib": free_gib,
    }


def _provenance(asked: _Asked, result: RunResult, origin: Json) -> Provenance:
    stem = result.package.removesuffix(".zip")
    package = stem.removeprefix("workbench-")
    script = as_str(origin.get("script"))
    return Provenance(
        versions=result.versions,
        device=result.device,
        devices=result.devices,
        commit=as_str(origin.get("commit")),
        seed=as_int(asked.job.get("seed")),
        command=result.command,
        data=as_str(origin.get("data")),
        code=f"{package} {script}".strip(),
    )


def _finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value


def _highest(by_host: Mapping[str, float]) -> float | None:
    # A rank that was gone before the first sample has 0.
    sizes = [size for size in by_host.values() if size]
    return max(sizes, default=None)
