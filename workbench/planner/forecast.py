"""How long an optimizer step will take, from one pod's timed steps and the exchange between the pods. Pure.

A step of k micro-batches takes T = (k * Tc + U) * slowdown + Tn: forward and backward passes, the update, of which
sharding spreads what `single` takes, and what is sent. With a = (ranks - 1) / ranks, DDP sends 2a of the trained
weights a step, ZeRO-1 3a, ZeRO-2 2a a micro-batch and a a step, ZeRO-3 and FSDP 3a a micro-batch; an all-reduce is 2a.
Sending and computing are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.jobs.choices import Technique
from workbench.planner.setting import Setting
from workbench.planner.table import Fit, Pace, PlanRow
from workbench.planner.tracing import Trace
from workbench.pods.doctor.exchange import Exchange

TIMED_AS = {
    Technique.DDP: Technique.SINGLE,
    Technique.LOCAL_SGD: Technique.SINGLE,
    Technique.ZERO2: Technique.ZERO1,
    Technique.ZERO3_OFFLOAD: Technique.ZERO3,
}
"""Techniques whose step on one pod is as good as another's; the others have work of their own beside the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """What a technique on several pods makes of one pod's step."""

    sending_s: float = 0.0
    """Seconds of a step for what goes over the network."""
    slowdown: float = 1.0
    """How many times longer a pod computes while the others do: 1 but where pods share a processor."""
    shards: int = 1
    """Ranks over which the update is spread."""

    def step_s(self, pace: Pace, *, rows: int, accumulation: int, spread_s: float = 0.0) -> float:
        """Return the seconds of an optimizer step with micro-batches of so many rows.

        Args:
            pace: The technique's own on one pod.
            rows: Of a micro-batch.
            accumulation: Micro-batches of a step.
            spread_s: What of the update is spread over the ranks: all that `single` has.

        Example:
            >>> pace = Pace(rows=8, micro_batch_s=1.0, update_s=0.75)
            >>> Scaling(sending_s=0.25, slowdown=1.5, shards=2).step_s(pace, rows=8, accumulation=4, spread_s=0.5)
            7.0
        """
        update_s = pace.update_s - min(spread_s, pace.update_s) * (1 - 1 / self.shards)
        computing_s = accumulation * pace.micro_batch_s * rows / pace.rows + update_s
        return computing_s * self.slowdown + self.sending_s


def scaling_of(
    setting: Setting, trace: Trace, *, accumulation: int, exchange: Exchange | None
) -> Scaling | None:
    """Work it out for a technique; None where ranks exchange data and how fast they do was not measured."""
    if setting.ranks == 1:
        return Scaling()
    pods = setting.ranks // setting.on_pod
    if exchange is None or exchange.latency_s is None or not exchange.sizes or pods == 1:
        return None
    return Scaling(
        sending_s=_sending_s(setting, trace, accumulation, exchange),
        slowdown=exchange.slowdown(pods),
        shards=setting.shards,
    )


def _sending_s(setting: Setting, trace: Trace, accumulation: int, exchange: Exchange) -> float:
    technique, ranks = setting.technique, setting.ranks
    latency_s, wait_s = (
        exchange.meet_s(ranks // setting.on_pod),
        exchange.wait_s(ranks // setting.on_pod),
    )
    reduced_s = exchange.all_reduce_s(setting.reduce_bytes * trace.trained, ranks)
    gathered_s = exchange.all_reduce_s(setting.compute_bytes * trace.trained, ranks) / 2
    match technique:
        case Technique.DDP:
            return wait_s + reduced_s
        case Technique.LOCAL_SGD:
            return (wait_s + reduced_s) / setting.sync_steps
        case Technique.ZERO1:
            return wait_s + reduced_s + gathered_s
        case Technique.ZERO2:
            return accumulation * (wait_s + reduced_s) + gathered_s
    if setting.shards < ranks:  # within a pod, and a replica on each
        return accumulation * exchange.all_reduce_s(
            setting.reduce_bytes * trace.trained, ranks // setting.on_pod
        )
    # Each layer by itself: gathered before its forward pass and, unless it was kept, its backward pass; then scattered,
    # which gloo does by an all-reduce. ZeRO-3 scatters by buckets; small parameters it gathers once a step, each.
    zero3 = technique.zero_stage == 3
    persist = setting.persist if zero3 else 0
    kept, small = trace.no_larger_than(persist)
    layers = [layer for layer in trace.layers if layer.largest > persist]
    twice = 0 if setting.gathers_all else sum(layer.all for layer in layers)
    gathered = max(0, trace.parameters - kept) + max(0, twice - kept)
    whole_s, kept_s = (
        exchange.all_reduce_s(setting.compute_bytes * size, ranks) / 2 for size in (gathered, kept)
    )
    scattered_s = reduced_s if exchange.backend == "gloo" else reduced_s / 2
    scatters = -(-trace.trained // setting.bucket) if zero3 else len(layers) + 1
    messages = (
        (1 if setting.gathers_all else 2) * len(layers) + (trace.rest.largest > persist) + scatters
    )
    at_the_end_s = kept_s + (small - 1) * (exchange.latency_s or 0.0) if small else 0.0
    return accumulation * (whole_s + scattered_s + messages * latency_s) + at_the_end_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    settings: Mapping[str, Setting]
    """By technique; those that are refused are missing."""
    trace: Trace
    micro: int
    """Rows of a micro-batch."""
    paces: Mapping[str, Pace]
    """One pod's, by technique; `single`'s is there."""
    exchange: Exchange | None

    def added(self, row: PlanRow, accumulation: int, *, price: float | None = None) -> PlanRow:
        """Put the predicted speed into a row; it stays as it is where none can be predicted."""
        setting = self.settings.get(row.technique)
        scaling = setting and scaling_of(
            setting, self.trace, accumulation=accumulation, exchange=self.exchange
        )
        if not setting or not scaling:
            return row
        single = self.paces[Technique.SINGLE]
        pace = self.paces.get(TIMED_AS.get(setting.technique, setting.technique), single)
        step_s = scaling.step_s(
            pace, rows=self.micro, accumulation=accumulation, spread_s=single.update_s
        )
        alone_s = Scaling().step_s(single, rows=self.micro, accumulation=accumulation)
        samples_per_s = self.micro * accumulation * setting.ranks / step_s
        pod_hours = setting.ranks // setting.on_pod * 1e6 / samples_per_s / 3600
        return replace(
            row,
            step_s=step_s,
            samples_per_s=samples_per_s,
            speed_up=setting.ranks * alone_s / step_s,
            pod_hours=pod_hours,
            cost=None if price is None else pod_hours * price,
        )

    def speed_ups(self, rows: Sequence[PlanRow], accumulation: int) -> dict[int, float]:
        """Return the most that several pods make of one by accumulation, doubled from the job's up to 64 times it."""
        able = [row for row in rows if row.ranks > 1 and row.fit is not Fit.NOT and row.speed_up]
        several = [row for row in able if row.technique != Technique.LOCAL_SGD]
        times = [accumulation << bits for bits in range(7)] if several else []
        return {k: max(self.added(row, k).speed_up or 0.0 for row in several) for k in times}
