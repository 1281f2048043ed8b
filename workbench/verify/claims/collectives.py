"""Claims about collectives: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.base.errors import RunError
from workbench.verify.claims.jobs import tiny
from workbench.verify.outcome import Broken, Cannot
from workbench.verify.ranks.collectives import all_reduced
from workbench.verify.row import Row
from workbench.verify.turn import Turn, at_most, curve, difference

SUBJECT = "collectives"


def _all_reduce(turn: Turn) -> str:
    figures = turn.call(all_reduced)
    words = _judged(turn, figures)
    if len(figures) < 2:
        raise Cannot(f"one rank only; {figures[0]['backend']} starts and sums one rank's numbers")
    return words


def _judged(turn: Turn, figures: Sequence[Mapping[str, Any]]) -> str:
    wanted = "nccl" if turn.has_gpus else "gloo"
    for rank, found in enumerate(figures):
        if found["backend"] != wanted:
            raise Broken(f"rank {rank} used {found['backend']}, not {wanted}")
        if found["wrong"]:
            raise Broken(f"rank {rank} has {found['wrong']} wrong sums")
    slowest = max(float(found["seconds"]) for found in figures)
    ranks = len(figures)
    rate = 2 * (ranks - 1) / ranks * float(figures[0]["bytes"]) / slowest / 1e9
    return f"{wanted}, 64 MiB in {1000 * slowest:.1f} ms, {rate:.3g} GB/s per link"


def _between_pods(turn: Turn) -> str:
    if len(turn.bench.main.pods) < 2:
        raise Cannot("one pod only")
    exchange = turn.once_free(lambda: _measured(turn))
    if exchange.problem:
        raise Broken(exchange.problem)
    turn.note(exchange.pods, turn.bench.main)
    wanted = "nccl" if turn.has_gpus else "gloo"
    if exchange.backend != wanted:
        raise Broken(f"the doctor measured {exchange.backend}, not {wanted}")
    latency = 1e6 * (exchange.latency_s or 0)
    if not exchange.transports:
        raise Broken("the doctor names no transport")
    ways = ", ".join(exchange.transports)
    rate = f"{exchange.bandwidth_gb_per_s:.3g} GB/s"
    return f"{exchange.ranks} ranks by {exchange.backend}: {ways}, {rate}, latency {latency:.0f} µs"


def _measured(turn: Turn) -> Any:
    diagnosis = turn.bench.main.doctor()
    if diagnosis.exchange is None:
        raise RunError(f"the bandwidth between the pods was not measured: {diagnosis.note}")
    return diagnosis.exchange


def _two_ranks_on_a_pod(turn: Turn) -> str:
    crowded = turn.bench.crowded
    figures = turn.call(all_reduced, pods=1, cluster=crowded)
    local = [int(found["local_rank"]) for found in figures]
    if len(figures) < 2 or local != list(range(len(figures))):
        raise Broken(f"the ranks of the pod have the local numbers {local}")
    words = _judged(turn, figures)
    # The global batch of the reference, on the ranks of a single pod.
    reference = turn.train(tiny(turn, "single"))
    rows = reference.spec.job.to_dict()["per_device_train_batch_size"]
    ranks = len(figures)
    if int(str(rows)) % ranks:
        return f"{words}; losses were not compared: {rows} rows on {ranks} ranks"
    job = tiny(turn, "ddp", per_device_train_batch_size=int(str(rows)) // ranks)
    run = turn.train(job, pods=1, cluster=crowded)
    off = difference(curve(run, "loss"), curve(reference, "loss"))
    return f"{words}; {at_most('loss of ddp off by', off, 0.01)}"


ROWS = (
    Row(
        name="all-reduce",
        subject=SUBJECT,
        claim="all ranks sum 64 MiB, by NCCL on GPUs",
        check=_all_reduce,
    ),
    Row(
        name="between-pods",
        subject=SUBJECT,
        claim="the doctor measures all ranks and names the transport",
        check=_between_pods,
    ),
    Row(
        name="two-ranks-on-a-pod",
        subject=SUBJECT,
        claim="two ranks on one pod sum and train together",
        check=_two_ranks_on_a_pod,
        limit_s=180.0,
    ),
)
