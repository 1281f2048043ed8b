"""Claims about processes: warm starts, and reports of stalls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.verify.claims.jobs import tiny
from workbench.verify.claims.techniques import on_device
from workbench.verify.outcome import Broken
from workbench.verify.ranks.facts import cores_of_rank, how_started
from workbench.verify.ranks.models import hang_at_second_call
from workbench.verify.row import Row
from workbench.verify.turn import Turn

if TYPE_CHECKING:
    from workbench.results import FineTuneRun

SUBJECT = "processes"
_PATIENCE_S = 10.0
_LEAST_CORES = 2


def _warm_start(turn: Turn) -> str:
    job = tiny(turn, "ddp", max_steps=2, metrics=[how_started], metric_rows=2)
    run = turn.train(job)
    on_device(turn, run)
    result = run.result
    if result.metrics.get("forked") != 1:
        raise Broken("the rank was not forked from a process that had imported torch")
    if result.metrics.get("cuda_before_fork") != 0:
        raise Broken("CUDA was initialized before the fork")
    return f"forked, first step after {result.time_to_first_step_s:.1f} s"


def _stalled(turn: Turn) -> tuple[FineTuneRun, Any]:
    """Let rank 0 sleep in its second evaluation, while the other ranks wait in a collective."""
    job = tiny(
        turn,
        "ddp",
        max_steps=40,
        eval_steps=3,
        metrics=[hang_at_second_call],
        metric_rows=2,
        stall_timeout_s=_PATIENCE_S,
    )
    run = turn.submit(job)
    result = turn.wait(run, must_succeed=False)
    turn.note(result.world_size, turn.bench.main)
    if result.error is None or result.error.kind != "stall":
        raise Broken(f"the run ended without a stall: {result.error or result.state}")
    return run, result.error


def _stall(turn: Turn) -> str:
    run, error = _stalled(turn)
    if "hang_at_second_call" not in error.traceback + error.message:
        raise Broken(f"the report does not name the sleeping function: {error.message}")
    if not run.paths.stacks.is_file():
        raise Broken("the stacks of the ranks were not saved")
    return str(error.message)


def _flight_recorder(turn: Turn) -> str:
    turn.need_ranks(2)
    _, error = _stalled(turn)
    backend = "nccl" if turn.has_gpus else "gloo"
    waits = [part for part in error.message.split("; ") if part.startswith("collective ")]
    if not any(f"({backend}:" in part for part in waits):
        raise Broken(f"the report names no collective of {backend}: {error.message}")
    return "; ".join(waits)


def _cores(turn: Turn) -> str:
    turn.need_gpus()
    found = turn.call(cores_of_rank)
    for rank, own in enumerate(found):
        if own["threads"] > own["cores"]:
            raise Broken(f"rank {rank} has {own['threads']} threads on {own['cores']} cores")
    least = min(own["threads"] for own in found)
    if least < _LEAST_CORES:
        raise Broken(f"a rank has {least} core; {_LEAST_CORES} or more are needed")
    cores = sorted({own["cores"] for own in found})
    return f"{least} threads or more a rank, on {' or '.join(map(str, cores))} cores"


ROWS = (
    Row(
        name="warm-start",
        subject=SUBJECT,
        claim="ranks are forks, and CUDA starts after the fork",
        check=_warm_start,
    ),
    Row(
        name="cores-of-gpus",
        subject=SUBJECT,
        claim="a rank with a GPU has two cores, and one for each thread",
        check=_cores,
    ),
    Row(
        name="stall",
        subject=SUBJECT,
        claim="a stalled run ends, and its report names the place",
        check=_stall,
        limit_s=180.0,
    ),
    Row(
        name="flight-recorder",
        subject=SUBJECT,
        claim="the report of a stall names the waiting collective",
        check=_flight_recorder,
        limit_s=180.0,
    ),
)
