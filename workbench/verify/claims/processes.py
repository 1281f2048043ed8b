"""Claims about processes: warm starts, and reports of stalls."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.verify.claims.jobs import llama, tiny
from workbench.verify.claims.techniques import on_device
from workbench.verify.figures import Broken, at_most
from workbench.verify.pods import Pods
from workbench.verify.ranks.facts import cores_of_rank, how_started
from workbench.verify.ranks.models import hang_at_second_call
from workbench.verify.row import Row

if TYPE_CHECKING:
    from workbench.results import FineTuneRun

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
    "Memcpy HtoD (Pageable -> Device)",
    "Memcpy DtoH (Device -> Pageable)",
)
"""Names in a trace. A copy of pageable memory waits too."""
_TRACE = "trace.json.gz"
_PATIENCE_S = 10.0
_LEAST_CORES = 2


def _warm_start(pods: Pods) -> str:
    job = tiny(pods, "ddp", max_steps=2, metrics=[how_started], metric_rows=2)
    run = pods.train(job)
    on_device(pods, run)
    result = run.result
    if result.metrics.get("forked") != 1:
        raise Broken("the rank was not forked from a process that had imported torch")
    if result.metrics.get("cuda_before_fork") != 0:
        raise Broken("CUDA was initialized before the fork")
    return f"forked, first step after {result.time_to_first_step_s:.1f} s"


def waits_in(trace: Path) -> Mapping[str, int]:
    """Count the calls of a chrome trace that wait for the device or read from it."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
    return {name: names[name] for name in WAITS}


def _waits(pods: Pods) -> str:
    pods.need_gpus("the host of a CPU waits for no device")
    run = pods.train(llama(pods, "ddp", trace_steps=1, logging_steps=100))
    traces = list(run.path.rglob(_TRACE))
    if not traces:
        raise Broken(f"{run.id} wrote no trace")
    counts = waits_in(traces[0])
    return at_most("calls that wait for the stream in a step", counts[WAITS[0]], 0)


def _stalled(pods: Pods) -> tuple[FineTuneRun, Any]:
    """Let rank 0 sleep in its second evaluation, while the other ranks wait in a collective."""
    job = tiny(
        pods,
        "ddp",
        max_steps=40,
        eval_steps=3,
        metrics=[hang_at_second_call],
        metric_rows=2,
        stall_timeout_s=_PATIENCE_S,
    )
    run = pods.submit(job)
    result = pods.wait(run, must_succeed=False)
    pods.note(result.world_size)
    if result.error is None or result.error.kind != "stall":
        raise Broken(f"the run ended without a stall: {result.error or result.state}")
    return run, result.error


def _stall(pods: Pods) -> str:
    run, error = _stalled(pods)
    if "hang_at_second_call" not in error.traceback + error.message:
        raise Broken(f"the report does not name the sleeping function: {error.message}")
    if not run.paths.stacks.is_file():
        raise Broken("the stacks of the ranks were not saved")
    return str(error.message)


def _flight_recorder(pods: Pods) -> str:
    pods.need_ranks(2)
    _, error = _stalled(pods)
    backend = "nccl" if pods.has_gpus else "gloo"
    waits = [part for part in error.message.split("; ") if part.startswith("collective ")]
    if not any(f"({backend}:" in part for part in waits):
        raise Broken(f"the report names no collective of {backend}: {error.message}")
    return "; ".join(waits)


def _cores(pods: Pods) -> str:
    pods.need_gpus()
    found = pods.call(cores_of_rank)
    for rank, own in enumerate(found):
        if own["threads"] > own["cores"]:
            raise Broken(f"rank {rank} has {own['threads']} threads on {own['cores']} cores")
    least = min(own["threads"] for own in found)
    if least < _LEAST_CORES:
        raise Broken(f"a rank has {least} core; {_LEAST_CORES} or more are needed")
    cores = sorted({own["cores"] for own in found})
    return f"{least} threads or more a rank, on {' or '.join(map(str, cores))} cores"


ROWS = (
    Row("processes", "warm-start", "ranks are forks, and CUDA starts after the fork", _warm_start),
    Row(
        "processes",
        "cores-of-gpus",
        "a rank with a GPU has two cores, and one for each thread",
        _cores,
    ),
    Row("processes", "step-without-waits", "a step that is not logged waits for no copy", _waits),
    Row("processes", "stall", "a stalled run ends, and its report names the place", _stall, 180.0),
    Row(
        "processes",
        "flight-recorder",
        "the report of a stall names the waiting collective",
        _flight_recorder,
        180.0,
    ),
)
