"""The speeds of a plan's rows, and from which accumulation on several pods pay. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.jobs.choices import Technique
from workbench.planner.forecast import TIMED_AS, Pace, Scaling, scaling_of
from workbench.planner.setting import Setting
from workbench.planner.table import Fit, PlanRow
from workbench.planner.tracing import Trace
from workbench.pods.doctor.exchange import Exchange


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
        scaling = setting and scaling_of(setting, self.trace, accumulation=accumulation, exchange=self.exchange)
        if not setting or not scaling:
            return row
        single = self.paces[Technique.SINGLE]
        pace = self.paces.get(TIMED_AS.get(setting.technique, setting.technique), single)
        step_s = scaling.step_s(pace, rows=self.micro, accumulation=accumulation, spread_s=single.update_s)
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
