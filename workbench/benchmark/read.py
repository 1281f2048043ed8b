"""Read a benchmark row from a specification or a run directory; unknown facts are None."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json
from workbench.base.json_values import Json, number, part, text, whole
from workbench.benchmark.row import BenchmarkRow, Outcome, Provenance
from workbench.client.result import RunResult
from workbench.finetune.advice.rules import advise, gib_of
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.choices import LossOn, Peft, Sampling
from workbench.finetune.techniques.registry import runs_alone
from workbench.jobs.registry import job_from_dict
from workbench.jobs.script import Script
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.catalog.store import read_label
from workbench.rundir.events import read_events
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import Measurements, RunFault
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import state_of
from workbench.rundir.totals import RunTotals

_PATHS = ("model", "dataset", "deepspeed", "resume", "path")
_MEASURED = tuple(field.name for field in fields(Measurements))
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
        unsaid = {"state": RunState.LOST, "message": "its files do not say how it ended"}
        result = RunResult.at(run_dir, {**facts, **unsaid})
    outcome, reason = _end_of(paths, result)
    note = part(info, "benchmark")
    columns = {
        **_spec_columns(spec),
        **_result_columns(result),
        **_shortage_columns(result.error, spec),
    }
    return BenchmarkRow(
        name=text(info.get("id")) or run_dir.name,
        outcome=outcome,
        path=run_dir,
        title=read_label(paths).name,
        spec=spec,
        key=text(note.get("key")) or (key_of(spec) if part(spec, "job") else ""),
        repeat=whole(note.get("repeat")) or 0,
        reason=reason,
        predicted_memory_gib=result.predicted_memory_gib,
        scaling=part(info, "scaling"),
        provenance=_provenance(spec, result, read_json(paths.origin)),
        **columns,  # type: ignore[arg-type]
    )


def skipped_row(
    spec: RunSpec | Json, reason: str, predicted_memory_gib: float | None = None
) -> BenchmarkRow:
    raw = _raw(spec)
    key = key_of(raw)
    return BenchmarkRow(
        name=key,
        outcome=Outcome.SKIPPED,
        spec=raw,
        key=key,
        reason=reason,
        predicted_memory_gib=predicted_memory_gib,
        provenance=Provenance(seed=whole(_job_of(raw).get("seed"))),
        **_spec_columns(raw),  # type: ignore[arg-type]
    )


def key_of(spec: RunSpec | Json) -> str:
    """Return the fingerprint of the work that a spec asks for, its number of pods included.

    Example:
        >>> short = {"cluster": {"count": 3}, "job": {"technique": "zero1"}}
        >>> key_of(short) == key_of({"cluster": {"count": 5}, "job": {"technique": "zero1", "seed": 0}, "pods": 3})
        True
        >>> key_of(short) == key_of({"cluster": {"count": 3}, "job": {"technique": "zero1", "seed": 1}})
        False
    """
    raw = _raw(spec)
    cluster = part(raw, "cluster")
    pod = dict(part(cluster, "pods"))
    with suppress(WorkbenchError, TypeError):
        pod = PodSpec.from_dict(pod).to_dict()
    job = {
        name: _absolute(value) if name in _PATHS else value for name, value in _job_of(raw).items()
    }
    backend = text(part(cluster, "backend").get("kind")) or "local"
    work = {"job": job, "pods": _pods_and_ranks(raw)[0], "pod": pod, "backend": backend}
    return hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _raw(spec: RunSpec | Json) -> Json:
    return spec.chosen().to_dict() if isinstance(spec, RunSpec) else spec


def _job_of(spec: Json) -> Json:
    """Return the job of a spec, with defaults filled in if this version can read the job."""
    with suppress(WorkbenchError, TypeError):
        match job_from_dict(part(spec, "job")):
            case FineTune() as job:
                gpus = whole(part(part(spec, "cluster"), "pods").get("gpus")) or 0
                return choose(job, gpus=gpus, looks=False).to_dict()
            case script:
                return script.to_dict()
    return part(spec, "job")


def _absolute(value: object) -> object:
    # A folder is kept as an absolute path once it is submitted.
    with suppress(OSError, ValueError):
        if (named := text(value)) and (path := Path(named).expanduser()).exists():
            return str(path.absolute())
    return value


def _pods_and_ranks(spec: Json) -> tuple[int, int]:
    job = part(spec, "job")
    cluster = part(spec, "cluster")
    if runs_alone(job.get("technique")):
        return 1, 1
    pods = whole(spec.get("pods")) or whole(cluster.get("count")) or 1
    return pods, pods * max(1, whole(part(cluster, "pods").get("gpus")) or 0)


def _spec_columns(spec: Json) -> dict[str, object]:
    if not part(spec, "job"):
        return {}
    job = _job_of(spec)
    pods, ranks = _pods_and_ranks(spec)
    common = {"launcher": text(job.get("launcher")) or "ssh", "pods": pods, "slots": ranks}
    if job.get("kind") == Script.kind:
        return {"model": Path(text(job.get("path"))).name, "technique": "script", **common}
    micro = whole(job.get("per_device_train_batch_size"))
    accumulation = whole(job.get("gradient_accumulation_steps"))
    peft = text(job.get("peft"))
    return {
        **common,
        "model": text(job.get("model")),
        "technique": f"{text(job.get('technique'))} {'' if peft == Peft.NONE else peft}".strip(),
        "precision": text(job.get("precision")),
        "per_device_batch": micro,
        "accumulation": accumulation,
        "global_batch": micro * accumulation * ranks if micro and accumulation else None,
        "sequence": _sequence(job),
        "dataset": _dataset(job.get("dataset")),
    }


def _sequence(job: Json) -> str:
    source = whole(job.get("max_source_length"))
    target = whole(job.get("max_target_length"))
    if source is None or target is None:
        return ""
    words = f"source {source}, target {target}, padded to the longest"
    words += (
        ", grouped by length"
        if job.get("train_sampling_strategy") == Sampling.GROUP_BY_LENGTH
        else ""
    )
    prompt = text(job.get("prompt"))
    loss_on = text(job.get("loss_on"))
    words += f", prompt {prompt}" if prompt not in ("", "plain") else ""
    return words + (f", loss on {loss_on}" if loss_on not in ("", LossOn.ANSWER) else "")


def _dataset(value: object) -> str:
    match value:
        case {"kind": str(kind), **options}:
            return " ".join([kind, *(f"{name}={each}" for name, each in options.items())])
    return text(value)


def _result_columns(result: RunResult) -> dict[str, object]:
    given = {
        "pods": len(result.hosts),
        "slots": result.world_size,
        "global_batch": result.global_batch_size,
        "precision": result.precision,
    }
    kind = result.memory_kind if result.peak_memory_gib else ""
    peak = _highest(result.peak_memory_gib)
    host = _highest(result.host_memory_gib)
    pod_seconds = len(result.hosts) * (result.duration_s or 0.0)
    derived = result.derived
    return {
        **{name: value for name, value in given.items() if value},
        **{name: _finite(getattr(result, name)) for name in _MEASURED},
        **{name: _finite(derived.get(name)) for name in _DERIVED},
        "samples_per_s": _finite(result.train_samples_per_s),
        "peak_memory_gib": peak,
        "memory_kind": kind,
        "host_memory_gib": peak if host is None and kind == "resident" else host,
        "pod_hours": pod_seconds / 3600 if pod_seconds else None,
    }


def _facts_so_far(paths: RunPaths, spec: Json) -> Json:
    """Return the facts reported by an unfinished run; the start time is unknown."""
    try:
        facts = RunTotals.of(read_events(paths.events)).facts(None)
    except OSError:
        return {}
    return {**facts, "peft": _job_of(spec).get("peft")}


def _end_of(paths: RunPaths, result: RunResult) -> tuple[Outcome, str]:
    state, message = result.state, result.message or text(read_json(paths.state).get("message"))
    if state is RunState.SUCCEEDED or not state.is_terminal:
        return _OUTCOMES.get(state, Outcome.RUNNING), ""
    if state is RunState.LOST:
        return Outcome.FAILED, result.message or "its keeper died before it ended"
    if state is RunState.FAILED and result.error is not None:
        outcome = Outcome.OUT_OF_MEMORY if advise(result.error).lacked_memory else Outcome.FAILED
        return outcome, " ".join((result.error.message or message).split())
    return _OUTCOMES[state], " ".join(message.split())


def _shortage_columns(fault: RunFault | None, spec: Json) -> dict[str, object]:
    advice = advise(fault) if fault else None
    if advice is None or not advice.lacked_memory:
        return {}
    pod_gib = number(part(part(spec, "cluster"), "pods").get("memory_gib"))
    free = (gib_of(advice.free), gib_of(advice.limit), pod_gib)
    return {
        "wanted_gib": gib_of(advice.asked),
        "free_gib": next((gib for gib in free if gib is not None), None),
    }


def _provenance(spec: Json, result: RunResult, origin: Json) -> Provenance:
    package = result.package.removeprefix("workbench-").removesuffix(".zip")
    return Provenance(
        versions=result.versions,
        device=result.device,
        devices=result.devices,
        commit=text(origin.get("commit")),
        seed=whole(_job_of(spec).get("seed")),
        command=result.command,
        data=text(origin.get("data")),
        code=" ".join(filter(None, (package, text(origin.get("script"))))),
    )


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _highest(by_host: Mapping[str, float]) -> float | None:
    return max(
        (size for size in by_host.values() if size), default=None
    )  # 0: a rank that was gone before a look
