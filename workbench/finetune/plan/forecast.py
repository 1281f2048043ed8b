"""How long an optimizer step will take, from one pod's timed steps and the exchange between the pods. Pure.

A step of k micro-batches takes T = (k * Tc + U) * slowdown + Tn: forward and backward passes, the update, of which
sharding spreads what `single` takes, and what is sent. With a = (ranks - 1) / ranks, DDP sends 2a of the trained
weights a step, ZeRO-1 3a, ZeRO-2 2a a micro-batch and a a step, ZeRO-3 and FSDP 3a a micro-batch; an all-reduce is 2a.
Sending and computing are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.finetune.plan.table import Fit, Pace, PlanRow
from workbench.finetune.techniques.registry import YARDSTICK, technique_of
from workbench.finetune.techniques.sizes import Exchanges, Setting, Trace
from workbench.pods.doctor.exchange import Exchange


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
    exchanges = Exchanges(setting=setting, trace=trace, network=exchange)
    return Scaling(
        sending_s=technique_of(setting.technique).sending_s(exchanges, accumulation),
        slowdown=exchange.slowdown(pods),
        shards=setting.shards,
    )


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
        single = self.paces[YARDSTICK]
        technique = technique_of(setting.technique)
        pace = self.paces.get(technique.timed_as or technique.name, single)
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
        several = [row for row in able if technique_of(row.technique).same_losses]
        times = [accumulation << bits for bits in range(7)] if several else []
        return {k: max(self.added(row, k).speed_up or 0.0 for row in several) for k in times}
