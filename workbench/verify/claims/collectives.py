"""Claims about collectives: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.verify.claims.jobs import tiny
from workbench.verify.figures import Broken, Cannot, at_most, curve, difference
from workbench.verify.pods import Pods
from workbench.verify.ranks.collectives import all_reduced
from workbench.verify.row import Row

_FREE_S = 20.0
_LOOK_S = 0.5


def _all_reduce(pods: Pods) -> str:
    figures = pods.call(all_reduced)
    words = _judged(pods, figures)
    if len(figures) < 2:
        raise Cannot(f"one rank only; {figures[0]['backend']} starts and sums one rank's numbers")
    return words


def _judged(pods: Pods, figures: Sequence[Mapping[str, Any]]) -> str:
    wanted = "nccl" if pods.has_gpus else "gloo"
    for rank, found in enumerate(figures):
        if found["backend"] != wanted:
            raise Broken(f"rank {rank} used {found['backend']}, not {wanted}")
        if found["wrong"]:
            raise Broken(f"rank {rank} has {found['wrong']} wrong sums")
    slowest = max(float(found["seconds"]) for found in figures)
    ranks = len(figures)
    rate = 2 * (ranks - 1) / ranks * float(figures[0]["bytes"]) / slowest / 1e9
    return f"{wanted}, 64 MiB in {1000 * slowest:.1f} ms, {rate:.3g} GB/s per link"


def _between_pods(pods: Pods) -> str:
    if len(pods.main.pods) < 2:
        raise Cannot("one pod only")
    # The pods may still be cleared of the last run.
    deadline_s = time.monotonic() + _FREE_S
    diagnosis = pods.main.doctor()
    while diagnosis.exchange is None and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        diagnosis = pods.main.doctor()
    exchange = diagnosis.exchange
    if exchange is None:
        raise Broken(f"the bandwidth between the pods was not measured: {diagnosis.note}")
    if exchange.problem:
        raise Broken(exchange.problem)
    pods.note(exchange.pods)
    wanted = "nccl" if pods.has_gpus else "gloo"
    if exchange.backend != wanted:
        raise Broken(f"the doctor measured {exchange.backend}, not {wanted}")
    latency = 1e6 * (exchange.latency_s or 0)
    if not exchange.transports:
        raise Broken("the doctor names no transport")
    ways = ", ".join(exchange.transports)
    rate = f"{exchange.bandwidth_gb_per_s:.3g} GB/s"
    return f"{exchange.ranks} ranks by {exchange.backend}: {ways}, {rate}, latency {latency:.0f} µs"


def _two_ranks_on_a_pod(pods: Pods) -> str:
    crowded = pods.crowded
    figures = pods.call(all_reduced, pods=1, cluster=crowded)
    local = [int(found["local_rank"]) for found in figures]
    if len(figures) < 2 or local != list(range(len(figures))):
        raise Broken(f"the ranks of the pod have the local numbers {local}")
    words = _judged(pods, figures)
    # The global batch of the reference, on the ranks of a single pod.
    reference = pods.train(tiny(pods, "single"))
    rows = reference.spec.job.to_dict()["per_device_train_batch_size"]
    ranks = len(figures)
    if int(str(rows)) % ranks:
        return f"{words}; losses were not compared: {rows} rows on {ranks} ranks"
    job = tiny(pods, "ddp", per_device_train_batch_size=int(str(rows)) // ranks)
    run = pods.train(job, pods=1, cluster=crowded)
    off = difference(curve(run, "loss"), curve(reference, "loss"))
    return f"{words}; {at_most('loss of ddp off by', off, 0.01)}"


ROWS = (
    Row("collectives", "all-reduce", "all ranks sum 64 MiB, by NCCL on GPUs", _all_reduce),
    Row(
        "collectives",
        "between-pods",
        "the doctor measures all ranks and names the transport",
        _between_pods,
    ),
    Row(
        "collectives",
        "two-ranks-on-a-pod",
        "two ranks on one pod sum and train together",
        _two_ranks_on_a_pod,
        180.0,
    ),
)
