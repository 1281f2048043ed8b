"""Predict the time of an optimizer step from timed steps and the network between pods. Pure.

A step of k micro-batches takes T = (k * Tc + U) * slowdown + Tn. Tc is a forward and backward pass,
U the update, and Tn the network time. Sharding spreads the part of U that `single` has.

Network traffic in trained weights, with a = (ranks - 1) / ranks: DDP 2a per step, ZeRO-1 3a per
step, ZeRO-2 2a per micro-batch and a per step, ZeRO-3 and FSDP 3a per micro-batch. An all-reduce
is 2a. Network time and computing time are added.
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
    """Effect of a technique on several pods on the step of a single pod."""

    sending_s: float = 0.0
    """Seconds of network time per step."""
    slowdown: float = 1.0
    """Factor of computing time while all pods compute: 1 unless pods share a processor."""
    shards: int = 1
    """Number of ranks that share the update."""

    def step_s(self, pace: Pace, *, rows: int, accumulation: int, spread_s: float = 0.0) -> float:
        """Return the seconds of an optimizer step with micro-batches of `rows` rows.

        Args:
            pace: Pace of the technique on a single pod.
            rows: Rows of a micro-batch.
            accumulation: Micro-batches of a step.
            spread_s: Seconds of the update that are spread over the ranks: the update of `single`.

        Example:
            >>> pace = Pace(rows=8, micro_batch_s=1.0, update_s=0.75)
            >>> scaling = Scaling(sending_s=0.25, slowdown=1.5, shards=2)
            >>> scaling.step_s(pace, rows=8, accumulation=4, spread_s=0.5)
            7.0
        """
        saved_s = min(spread_s, pace.update_s) * (1 - 1 / self.shards)
        update_s = pace.update_s - saved_s
        computing_s = accumulation * pace.micro_batch_s * rows / pace.rows + update_s
        return computing_s * self.slowdown + self.sending_s


def scaling_of(
    setting: Setting,
    trace: Trace,
    *,
    accumulation: int,
    exchange: Exchange | None,
) -> Scaling | None:
    """Return the scaling of a setting. None: ranks exchange data at an unmeasured speed."""
    if setting.ranks == 1:
        return Scaling()
    pods = setting.ranks // setting.on_pod
    if pods == 1:
        return None
    if exchange is None or exchange.latency_s is None or not exchange.sizes:
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
    """Settings by technique, without refused techniques."""
    trace: Trace
    micro: int
    """Rows of a micro-batch."""
    paces: Mapping[str, Pace]
    """Paces on a single pod, by technique, with `single` among them."""
    exchange: Exchange | None

    def added(self, row: PlanRow, accumulation: int, *, price: float | None = None) -> PlanRow:
        """Return the row with its predicted speed, or the same row if no speed can be predicted."""
        setting = self.settings.get(row.technique)
        scaling = setting and scaling_of(
            setting,
            self.trace,
            accumulation=accumulation,
            exchange=self.exchange,
        )
        if not setting or not scaling:
            return row
        single = self.paces[YARDSTICK]
        technique = technique_of(setting.technique)
        pace = self.paces.get(technique.timed_as or technique.name, single)
        step_s = scaling.step_s(
            pace,
            rows=self.micro,
            accumulation=accumulation,
            spread_s=single.update_s,
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
        """Return the best speed-up by accumulation, doubled from the job's up to 64 times."""
        able = [row for row in rows if row.ranks > 1 and row.fit is not Fit.NOT and row.speed_up]
        several = [row for row in able if technique_of(row.technique).same_losses]
        if not several:
            return {}
        best: dict[int, float] = {}
        for bits in range(7):
            longer = accumulation << bits
            best[longer] = max(self.added(row, longer).speed_up or 0.0 for row in several)
        return best
