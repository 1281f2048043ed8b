"""Predict the time of an optimizer step from timed steps and the network between pods. Pure.

A step of k micro-batches takes F = (k * Tc + U) * slowdown + Tn. Tc is a forward and backward pass,
U the update, and Tn the network time. Sharding spreads the part of U that `single` has. A technique
that was timed on several pods shows what the formula leaves out there, once a step and once a
micro-batch, such as the overhead of gathering weights. Forecasts for other micro-batches add the
same seconds. For other numbers of pods, the sum changes in proportion to the formula.

Steps are timed in turns, and every turn makes a forecast of its own, because ratios of times within
a turn do not depend on the machine's load. A figure is the median of the turns. Its interval runs
from the lowest turn to the highest, and both ends are moved outwards by a factor: `widening`.

Network traffic in trained weights, with a = (ranks - 1) / ranks: DDP 2a per step, ZeRO-1 3a per
step, ZeRO-2 2a per micro-batch and a per step, ZeRO-3 and FSDP 3a per micro-batch. An all-reduce
is 2a. Network time and computing time are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

from workbench.base.errors import ConfigError
from workbench.finetune.plan.calibration import Calibration
from workbench.finetune.plan.table import Fit, Interval, Pace, PlanRow, TimedStep, Turn
from workbench.finetune.techniques.registry import YARDSTICK, technique_of
from workbench.finetune.techniques.sizes import Exchanges, Setting, Trace
from workbench.pods.doctor.exchange import Exchange

_WIDENING = {1: 1.3, 2: 1.2}
_LEAST_WIDENING = 1.15
# The least that a timed step may have.
_ACCUMULATION = 2


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
class Residual:
    """Seconds of a measured step that the formula leaves out. Less than 0: the formula has more."""

    micro_batch_s: float = 0.0
    step_s: float = 0.0
    """Seconds of a step without its micro-batches."""

    @classmethod
    def of(cls, timed: TimedStep, formula: Callable[[int], float]) -> Residual:
        """Compare timed steps with the formula's seconds of a step by its micro-batches.

        Example:
            >>> timed = TimedStep(
            ...     technique="zero3", pods=2, rows=8, accumulation=2, step_s=3.5, micro_batch_s=1.5
            ... )
            >>> Residual.of(timed, lambda micro_batches: 1.25 * micro_batches + 0.25)
            Residual(micro_batch_s=0.25, step_s=0.25)
        """
        micro_batch_s = formula(2) - formula(1)
        step_s = formula(1) - micro_batch_s
        rest_s = timed.step_s - timed.accumulation * timed.micro_batch_s
        return cls(micro_batch_s=timed.micro_batch_s - micro_batch_s, step_s=rest_s - step_s)


def widening(turns: int) -> float:
    """Return the factor by which the ends of an interval are moved outwards.

    Recorded forecasts set the factors (docs/techniques.md, accuracy of the forecast). Few turns
    show less of the spread than there is.
    """
    return _WIDENING.get(turns, _LEAST_WIDENING)


def interval(values: Sequence[float]) -> Interval:
    """Return the interval of a figure from its value in every turn.

    Example:
        >>> found = interval([1.5, 1.2, 1.8])
        >>> round(found.low, 2), round(found.high, 2)
        (1.04, 2.07)
    """
    factor = widening(len(values))
    return Interval(min(values) / factor, max(values) * factor)


def slowdowns_of(turn: Turn, exchange: Exchange) -> tuple[tuple[int, float], ...]:
    """Return the slowdowns of a turn: the doctor's, or those of ranks that trained apart.

    A slowdown is at least 1, and more pods are at least as slow.

    Example:
        >>> alone = TimedStep(
        ...     technique="single", pods=1, rows=8, accumulation=2, step_s=2.0, micro_batch_s=1.0
        ... )
        >>> apart = [
        ...     replace(alone, technique="local-sgd", pods=2, step_s=1.8),
        ...     replace(alone, technique="local-sgd", pods=3, step_s=3.0),
        ... ]
        >>> slowdowns_of((alone, *apart), Exchange(pods=3, slowdowns=((2, 1.25), (3, 2.0))))
        ((2, 1.0), (3, 1.5))
    """
    alone = alone_in(turn)
    found = dict(exchange.slowdowns)
    for timed in turn:
        if technique_of(timed.technique).apart and timed.pods > 1:
            found[timed.pods] = timed.step_s / alone.step_s
    least = 1.0
    slowdowns = []
    for pods, slowdown in sorted(found.items()):
        least = max(least, slowdown)
        slowdowns.append((pods, least))
    return tuple(slowdowns)


def alone_in(turn: Turn) -> TimedStep:
    """Return the mean of the timed steps of `single`, before and after the other techniques.

    Raises:
        ConfigError: The turn has none.
    """
    alone = [timed for timed in turn if timed.technique == YARDSTICK]
    if not alone:
        raise ConfigError(
            f"a turn has no timed step of {YARDSTICK!r}. Pass turns=table.turns of "
            "table = cluster.plan(job)"
        )
    return replace(
        alone[0],
        step_s=fmean(timed.step_s for timed in alone),
        micro_batch_s=fmean(timed.micro_batch_s for timed in alone),
    )


def timed_by(
    turns: Sequence[Turn], calibration: Calibration | None, lengths: tuple[int, int]
) -> Sequence[Turn]:
    """Return the turns, or without turns the times of copies with rows of equal lengths.

    Every round of the copies is a turn with a step of `single` alone.
    """
    if turns or calibration is None or tuple(calibration.lengths) != tuple(lengths):
        return turns
    rounds = []
    for whole in calibration.whole:
        timed = TimedStep(
            technique=YARDSTICK,
            pods=1,
            rows=calibration.rows,
            accumulation=_ACCUMULATION,
            step_s=_ACCUMULATION * whole.micro_batch_s + whole.update_s,
            micro_batch_s=whole.micro_batch_s,
        )
        rounds.append((timed,))
    return rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    settings: Mapping[str, Setting]
    """Settings by technique, without refused techniques."""
    timed_settings: Mapping[tuple[str, int], Setting]
    """Settings of the timed steps, by technique and pods."""
    trace: Trace
    micro: int
    """Rows of a micro-batch."""
    turns: Sequence[Turn]
    exchange: Exchange | None

    def added(self, row: PlanRow, accumulation: int, *, price: float | None = None) -> PlanRow:
        """Return the row with its predicted speed, or the same row if no speed can be predicted."""
        setting = self.settings.get(row.technique)
        if not setting:
            return row
        steps_s = []
        speed_ups = []
        for turn in self.turns:
            step_s = self._step_s(turn, setting, accumulation)
            if step_s is None:
                return row
            single = alone_in(turn).pace
            alone_s = Scaling().step_s(single, rows=self.micro, accumulation=accumulation)
            steps_s.append(step_s)
            speed_ups.append(setting.ranks * alone_s / step_s)
        if setting.technique == YARDSTICK:
            within = {"speed_up": Interval(1.0, 1.0)}
        else:
            within = {"speed_up": interval(speed_ups)}
        within["step_s"] = interval(steps_s)
        rows = self.micro * accumulation * setting.ranks
        pods = setting.ranks // setting.on_pod
        hours_of = partial(_pod_hours, rows, pods)
        step_s = median(steps_s)
        within["samples_per_s"] = within["step_s"].of(lambda seconds: rows / seconds)
        within["pod_hours"] = within["step_s"].of(hours_of)
        pod_hours = hours_of(step_s)
        if price is not None:
            within["cost"] = within["pod_hours"].of(lambda hours: hours * price)
        return replace(
            row,
            step_s=step_s,
            samples_per_s=rows / step_s,
            speed_up=median(speed_ups),
            pod_hours=pod_hours,
            cost=None if price is None else pod_hours * price,
            within=within,
        )

    def _step_s(self, turn: Turn, setting: Setting, accumulation: int) -> float | None:
        """Return the seconds of a step by a turn, or None if the network's speed is unknown."""
        exchange = self.exchange
        if exchange is not None:
            exchange = replace(exchange, slowdowns=slowdowns_of(turn, exchange))
        single = alone_in(turn).pace

        def formula(of: Setting, rows: int, micro_batches: int) -> float | None:
            scaling = scaling_of(of, self.trace, accumulation=micro_batches, exchange=exchange)
            if scaling is None:
                return None
            return scaling.step_s(
                single, rows=rows, accumulation=micro_batches, spread_s=single.update_s
            )

        step_s = formula(setting, self.micro, accumulation)
        timed = self._timed(turn, setting)
        if step_s is None or timed is None:
            return step_s
        its_setting = self.timed_settings[timed.technique, timed.pods]
        if formula(its_setting, timed.rows, 1) is None:
            return None
        residual = Residual.of(timed, lambda many: formula(its_setting, timed.rows, many) or 0.0)
        # A step cannot be faster than its computation on pods of their own.
        least_s = Scaling(shards=setting.shards).step_s(
            single, rows=self.micro, accumulation=accumulation, spread_s=single.update_s
        )
        there_s = formula(its_setting, self.micro, accumulation) or step_s
        measured_s = there_s + accumulation * residual.micro_batch_s + residual.step_s
        # Other numbers of pods have as many times the formula's seconds.
        measured_s *= step_s / there_s
        return max(least_s, measured_s)

    def _timed(self, turn: Turn, setting: Setting) -> TimedStep | None:
        """Return the timed steps nearest to a setting. None: only the formula is known."""
        technique = technique_of(setting.technique)
        pods = setting.ranks // setting.on_pod
        for name in (technique.name, technique.timed_as):
            if not name or name == YARDSTICK or technique_of(name).apart:
                continue
            same = [timed for timed in turn if timed.technique == name]
            same = [timed for timed in same if (name, timed.pods) in self.timed_settings]
            if same:
                return min(same, key=lambda timed: abs(timed.pods - pods))
        return None

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


def _pod_hours(rows: int, pods: int, step_s: float) -> float:
    """Return the pod-hours of a million rows."""
    return pods * 1e6 * step_s / rows / 3600
