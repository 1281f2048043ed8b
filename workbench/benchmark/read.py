"""Read the row of a benchmark off a specification or a run directory, whatever is there of it.

A directory may be of a run that goes on, was killed, or was written by an older version: what it does not hold is
None in the row, and nothing is guessed in its place. Nothing is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json
from workbench.base.loose import Json, number, part, text, whole
from workbench.benchmark.row import BenchmarkRow, Outcome, Provenance
from workbench.client.run import Run
from workbench.jobs.choices import LossOn, Peft, Technique
from workbench.jobs.finetune import job_from_dict
from workbench.jobs.model import Family, model_family
from workbench.jobs.script import Script
from workbench.pods.pod import PodSpec
from workbench.results.advice.shortage import shortage_of
from workbench.results.speed import forward_flops, mfu, tflops_per_device
from workbench.rundir.events import read_events
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import RunFault
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.totals import RunTotals

__all__ = ["key_of", "row_of", "skipped_row"]

_PATHS = ("model", "dataset", "deepspeed", "resume", "path")
_SAME_NAME = (
    *("epochs", "duration_s", "train_runtime_s", "time_to_first_step_s", "useful_tokens_per_s", "padded_tokens_per_s"),
    *("sent_bytes_per_step", "train_loss", "eval_loss", "perplexity", "exact_match"),
)
_OUTCOMES = {RunState.QUEUED: Outcome.WAITING, RunState.CANCELLED: Outcome.CANCELLED}


def row_of(run_dir: Path) -> BenchmarkRow:
    """Read the row of a run."""
    paths = RunPaths(run_dir)
    spec, info, result = read_json(paths.spec), read_json(paths.info), read_json(paths.result)
    facts = result or _facts_so_far(paths)
    outcome, reason, fault = _end_of(paths, result)
    note = part(info, "benchmark")
    columns = {**_spec_columns(spec), **_run_columns(facts), **_measured_columns(facts)}
    columns |= _shortage_columns(fault, spec) | _speed_columns(paths, facts, _job_of(spec))
    return BenchmarkRow(
        name=text(info.get("id")) or run_dir.name,
        outcome=outcome,
        path=run_dir,
        spec=spec,
        key=text(note.get("key")) or (key_of(spec) if part(spec, "job") else ""),
        repeat=whole(note.get("repeat")) or 0,
        reason=reason,
        predicted_memory_gib=_predicted_gib(paths, facts),
        provenance=_provenance(spec, facts, read_json(paths.origin)),
        **columns,  # type: ignore[arg-type]
    )


def skipped_row(spec: RunSpec | Json, reason: str, predicted_memory_gib: float | None = None) -> BenchmarkRow:
    """Make the row of a run that is never started."""
    raw = _raw(spec)
    key = key_of(raw)
    return BenchmarkRow(
        name=key,
        outcome=Outcome.SKIPPED,
        spec=raw,
        key=key,
        reason=reason,
        predicted_memory_gib=predicted_memory_gib,
        provenance=_provenance(raw, {}, {}),
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
    job = {name: _absolute(value) if name in _PATHS else value for name, value in _job_of(raw).items()}
    backend = text(part(cluster, "backend").get("kind")) or "local"
    work = {"job": job, "pods": _pods_and_ranks(raw)[0], "pod": pod, "backend": backend}
    return hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _raw(spec: RunSpec | Json) -> Json:
    return spec.to_dict() if isinstance(spec, RunSpec) else spec


def _job_of(spec: Json) -> Json:
    """Return the job of a spec, every default spelled out where this version can read it."""
    job = part(spec, "job")
    with suppress(WorkbenchError, TypeError):
        return job_from_dict(job).to_dict()
    return job


def _absolute(value: object) -> object:
    # A folder is kept as an absolute path once it is submitted.
    with suppress(OSError, ValueError):
        if isinstance(value, str) and value and (path := Path(value).expanduser()).exists():
            return str(path.absolute())
    return value


def _pods_and_ranks(spec: Json) -> tuple[int, int]:
    job, cluster = part(spec, "job"), part(spec, "cluster")
    if job.get("technique") == Technique.SINGLE:
        return 1, 1
    pods = whole(spec.get("pods")) or whole(cluster.get("count")) or 1
    return pods, pods * max(1, whole(part(cluster, "pods").get("gpus")) or 0)


def _spec_columns(spec: Json) -> dict[str, object]:
    """Return the columns that are known before anything runs."""
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
    source, target = whole(job.get("max_source_length")), whole(job.get("max_target_length"))
    if source is None or target is None:
        return ""
    words = f"source {source}, target {target}, padded to the longest"
    with suppress(OSError, ValueError):
        if model_family(text(job.get("model"))) is Family.ENCODER_DECODER:
            return words
    prompt, loss_on = text(job.get("prompt")), text(job.get("loss_on"))
    words += f", prompt {prompt}" if prompt not in ("", "plain") else ""
    return words + (f", loss on {loss_on}" if loss_on not in ("", LossOn.ANSWER) else "")


def _dataset(value: object) -> str:
    if not isinstance(value, Mapping):
        return text(value)
    options = [f"{name}={each}" for name, each in value.items() if name != "kind"]
    return " ".join([text(value.get("kind")), *options])


def _run_columns(facts: Json) -> dict[str, object]:
    """Return the columns that a run reports of itself: the pods that it was really given."""
    hosts = facts.get("hosts")
    columns = {
        "pods": len(hosts) if isinstance(hosts, list) else None,
        "slots": whole(facts.get("world_size")),
        "global_batch": whole(facts.get("global_batch_size")),
        "precision": text(facts.get("precision")),
    }
    return {name: value for name, value in columns.items() if value}


def _measured_columns(facts: Json) -> dict[str, object]:
    columns = {name: number(facts.get(name)) for name in _SAME_NAME}
    duration_s, hosts = columns["duration_s"], facts.get("hosts")
    pods = len(hosts) if isinstance(hosts, list) else 0
    kind = (text(facts.get("memory_kind")) or "resident") if facts.get("peak_memory_gib") else ""
    peak, host = _highest(facts.get("peak_memory_gib")), _highest(facts.get("host_memory_gib"))
    return {
        **columns,
        "samples_per_s": number(facts.get("train_samples_per_s")),
        "steps": whole(facts.get("steps")),
        "peak_memory_gib": peak,
        "memory_kind": kind,
        "host_memory_gib": peak if host is None and kind == "resident" else host,
        "pod_hours": pods * duration_s / 3600 if duration_s is not None and pods else None,
    }


def _facts_so_far(paths: RunPaths) -> Json:
    """Return what a run without a result has reported; nothing says when it was started."""
    try:
        return RunTotals.of(read_events(paths.events)).facts(None)
    except OSError:
        return {}


def _end_of(paths: RunPaths, result: Json) -> tuple[Outcome, str, RunFault | None]:
    try:
        state = RunState(text(result.get("state"))) if result else Run(paths.root).state
    except (OSError, ValueError, KeyError, WorkbenchError):
        return Outcome.FAILED, "its files do not say how it ended", None
    if state is RunState.SUCCEEDED:
        return Outcome.SUCCEEDED, "", None
    if state is RunState.LOST:
        return Outcome.FAILED, "its keeper died before it ended", None
    message = text(result.get("message"))
    if state is not RunState.FAILED:
        message = message or text(read_json(paths.state).get("message"))
        return _OUTCOMES.get(state, Outcome.RUNNING), _line(message) if state.is_terminal else "", None
    error = part(result, "error")
    texts = {name: text(error.get(name)) for name in ("host", "pod", "kind", "message", "traceback", "others")}
    fault = RunFault(**texts, rank=whole(error.get("rank")))
    outcome = Outcome.FAILED if shortage_of(fault) is None else Outcome.OUT_OF_MEMORY
    return outcome, _line(fault.message or message), fault


def _line(text: str) -> str:
    return " ".join(text.split())


def _shortage_columns(fault: RunFault | None, spec: Json) -> dict[str, object]:
    shortage = shortage_of(fault) if fault else None
    if shortage is None:
        return {}
    pod_gib = number(part(part(spec, "cluster"), "pods").get("memory_gib"))
    free = (shortage.free_gib, shortage.limit_gib, pod_gib)
    return {"wanted_gib": shortage.wanted_gib, "free_gib": next((gib for gib in free if gib is not None), None)}


def _predicted_gib(paths: RunPaths, facts: Json) -> float | None:
    prediction = read_json(paths.prediction)
    on_gpu = facts.get("memory_kind") == "cuda" or (not facts.get("memory_kind") and "pod_gpu_gib" in prediction)
    name = "pod_gpu_gib" if on_gpu and prediction.get("pod_gpu_gib") is not None else "host_gib"
    return number(prediction.get(name))


def _speed_columns(paths: RunPaths, facts: Json, job: Json) -> dict[str, object]:
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
        seed=whole(_job_of(spec).get("seed")),
        command=text(facts.get("command")),
        data=text(origin.get("data")),
        code=" ".join(filter(None, (package, text(origin.get("script"))))),
    )


def _highest(by_host: object) -> float | None:
    sizes = [number(size) for size in by_host.values()] if isinstance(by_host, Mapping) else []
    return max((size for size in sizes if size), default=None)  # 0: a rank that was gone before it was looked at
