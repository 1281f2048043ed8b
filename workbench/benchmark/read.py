"""Read the row of a benchmark off a run directory, whatever is there of it.

A directory may be of a run that goes on, was killed, or was written by an older version: what it does not hold is
None in the row, and nothing is guessed in its place. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json
from workbench.base.loose import Json, number, part, text, whole
from workbench.benchmark.asked import columns_asked, key_of, raw_spec, whole_job
from workbench.benchmark.row import Outcome, Provenance, Row
from workbench.client.run import Run
from workbench.jobs.choices import Peft
from workbench.results.advice.shortage import shortage_of
from workbench.results.speed import forward_flops, mfu, tflops_per_device
from workbench.rundir.events import read_events
from workbench.rundir.outcome import measured
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import RunFault
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState

__all__ = ["key_of", "row_of", "skipped_row"]


def row_of(run_dir: Path) -> Row:
    """Read the row of a run."""
    paths = RunPaths(run_dir)
    spec, info, result = read_json(paths.spec), read_json(paths.info), read_json(paths.result)
    facts = result or _so_far(paths)
    outcome, reason, fault = _ended(paths, result)
    benchmark = part(info, "benchmark")
    columns = {**columns_asked(spec), **_told(facts), **_measured(facts), **_memory(fault, spec)}
    columns |= _speed(paths, facts, whole_job(spec))
    return Row(
        name=text(info.get("id")) or run_dir.name,
        outcome=outcome,
        path=run_dir,
        spec=spec,
        key=text(benchmark.get("key")) or (key_of(spec) if part(spec, "job") else ""),
        repeat=whole(benchmark.get("repeat")) or 0,
        reason=reason,
        **columns,  # type: ignore[arg-type]
        predicted_memory_gib=_predicted(paths, facts),
        provenance=_provenance(spec, facts, read_json(paths.origin)),
    )


def skipped_row(spec: RunSpec | Json, reason: str, predicted_memory_gib: float | None = None) -> Row:
    """Make the row of a run that is never started."""
    raw = raw_spec(spec)
    key = key_of(raw)
    return Row(
        name=key,
        outcome=Outcome.SKIPPED,
        spec=raw,
        key=key,
        reason=reason,
        predicted_memory_gib=predicted_memory_gib,
        provenance=_provenance(raw, {}, {}),
        **columns_asked(raw),  # type: ignore[arg-type]
    )


def _told(facts: Json) -> dict[str, object]:
    """Return those columns that the run itself told better: the pods it was really given."""
    hosts = facts.get("hosts")
    told = {
        "pods": len(hosts) if isinstance(hosts, list) else None,
        "slots": whole(facts.get("world_size")),
        "global_batch": whole(facts.get("global_batch_size")),
        "precision": text(facts.get("precision")),
    }
    return {name: value for name, value in told.items() if value}


def _measured(facts: Json) -> dict[str, object]:
    found = {column: number(facts.get(name)) for column, name in _COLUMNS.items()}
    duration_s, hosts = found["duration_s"], facts.get("hosts")
    pod_hours = None
    if duration_s is not None and isinstance(hosts, list) and hosts:
        pod_hours = len(hosts) * duration_s / 3600
    kind = (text(facts.get("memory_kind")) or "resident") if facts.get("peak_memory_gib") else ""
    peak, host = _highest(facts.get("peak_memory_gib")), _highest(facts.get("host_memory_gib"))
    return {
        **found,
        "steps": whole(facts.get("steps")),
        "peak_memory_gib": peak,
        "memory_kind": kind,
        "host_memory_gib": peak if host is None and kind == "resident" else host,
        "pod_hours": pod_hours,
    }


_COLUMNS = {
    "epochs": "epochs",
    "duration_s": "duration_s",
    "train_runtime_s": "train_runtime_s",
    "time_to_first_step_s": "time_to_first_step_s",
    "samples_per_s": "train_samples_per_s",
    "useful_tokens_per_s": "useful_tokens_per_s",
    "padded_tokens_per_s": "padded_tokens_per_s",
    "sent_bytes_per_step": "sent_bytes_per_step",
    "train_loss": "train_loss",
    "eval_loss": "eval_loss",
    "perplexity": "perplexity",
    "exact_match": "exact_match",
}
"""Columns of a row by the field of `RunResult` that they are."""


def _so_far(paths: RunPaths) -> Json:
    """Return what a run without a result has told; of what is measured from its start, nothing is known."""
    try:
        facts = measured(read_events(paths.events), 0.0)
    except (OSError, ValueError, TypeError):
        return {}
    facts.pop("time_to_first_step_s", None)
    return facts


def _ended(paths: RunPaths, result: Json) -> tuple[Outcome, str, RunFault | None]:
    try:
        state = RunState(text(result.get("state"))) if result else Run(paths.root).state
    except (OSError, ValueError, KeyError, WorkbenchError):
        return Outcome.FAILED, "its files do not say how it ended", None
    if state is RunState.SUCCEEDED:
        return Outcome.SUCCEEDED, "", None
    if state is RunState.LOST:
        return Outcome.FAILED, "its keeper died before it ended", None
    if state is not RunState.FAILED:
        said = text(result.get("message")) or text(read_json(paths.state).get("message"))
        return _OUTCOMES.get(state, Outcome.RUNNING), _line(said) if state.is_terminal else "", None
    fault = _fault(part(result, "error"))
    short = shortage_of(fault) is not None
    reason = fault.message or text(result.get("message"))
    return Outcome.OUT_OF_MEMORY if short else Outcome.FAILED, _line(reason), fault


_OUTCOMES = {RunState.QUEUED: Outcome.WAITING, RunState.CANCELLED: Outcome.CANCELLED}


def _fault(raw: Json) -> RunFault:
    texts = {name: text(raw.get(name)) for name in ("host", "pod", "kind", "message", "traceback", "others")}
    return RunFault(**texts, rank=whole(raw.get("rank")))


def _line(text: str) -> str:
    return " ".join(text.split())


def _memory(fault: RunFault | None, spec: Json) -> dict[str, float | None]:
    short = shortage_of(fault) if fault else None
    if short is None:
        return {}
    pod = number(part(part(spec, "cluster"), "pods").get("memory_gib"))
    free = (short.free_gib, short.limit_gib, pod)
    return {"wanted_gib": short.wanted_gib, "free_gib": next((gib for gib in free if gib is not None), None)}


def _predicted(paths: RunPaths, facts: Json) -> float | None:
    raw = read_json(paths.prediction)
    on_gpu = facts.get("memory_kind") == "cuda" or (not facts.get("memory_kind") and "pod_gpu_gib" in raw)
    return number(raw.get("pod_gpu_gib" if on_gpu and raw.get("pod_gpu_gib") is not None else "host_gib"))


def _speed(paths: RunPaths, facts: Json, job: Json) -> dict[str, float | None]:
    rate, tokens = number(facts.get("padded_tokens_per_s")), whole(facts.get("profiled_tokens"))
    tflops = tflops_per_device(
        forward_flops=forward_flops(paths.profile) if rate and tokens else None,
        profiled_tokens=tokens,
        padded_tokens_per_s=rate,
        devices=whole(facts.get("devices")) or 0,
        adapters=text(job.get("peft")) not in ("", Peft.NONE),
    )
    return {"tflops_per_device": tflops, "mfu": mfu(tflops, text(facts.get("device")), text(facts.get("precision")))}


def _provenance(spec: Json, facts: Json, origin: Json) -> Provenance:
    package = text(facts.get("package")).removeprefix("workbench-").removesuffix(".zip")
    return Provenance(
        versions={str(name): text(version) for name, version in part(facts, "versions").items()},
        device=text(facts.get("device")),
        devices=whole(facts.get("devices")),
        commit=text(origin.get("commit")),
        seed=whole(whole_job(spec).get("seed")),
        command=text(facts.get("command")),
        data=text(origin.get("data")),
        code=" ".join(filter(None, (package, text(origin.get("script"))))),
    )


def _highest(by_host: object) -> float | None:
    sizes = [number(size) for size in by_host.values()] if isinstance(by_host, Mapping) else []
    return max((size for size in sizes if size), default=None)  # 0: a rank that was gone before it was looked at
