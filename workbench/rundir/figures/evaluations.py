"""Last figures of the evaluations, from events that may each report a part of an evaluation."""

from __future__ import annotations

import math
from typing import NamedTuple

from workbench.base.json_values import as_float, get_object, numbers_of
from workbench.rundir.events import Event
from workbench.rundir.figures.reported import facts_of_kinds

_LOSS = "eval_loss"
_MOST = 50  # names, so that memory stays bounded


class Reported(NamedTuple):
    """Value of a figure, and the step of its evaluation."""

    step: int | None
    value: float


class Evaluations:
    """Last value of every figure by name. Reports of one step are one evaluation."""

    def __init__(self) -> None:
        self._last: dict[str, Reported] = {}
        self._facts: dict[str, float] = {}
        """Facts of the job's kind in the last report of a trained model."""
        self.first_loss: float | None = None
        """Loss of the evaluation before the first step."""

    def take(self, event: Event) -> None:
        """Keep the figures of an event; the figures of other names stay."""
        step = event.whole("step")
        loss = event.number(_LOSS)
        if step == 0 and loss is not None:
            self.first_loss = loss
        self._keep(_LOSS, step, loss)
        if step:
            self._facts = facts_in(event)
        metrics = get_object(event.data, "metrics")
        for name in numbers_of(metrics):
            self._keep(name, step, as_float(metrics[name]))
        # A value that is not finite leaves no older value in its place.
        for name, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                self._last.pop(str(name), None)

    def _keep(self, name: str, step: int | None, value: float | None) -> None:
        if value is None:
            return
        # The name moves to the end: the names that were reported last are kept.
        self._last.pop(name, None)
        self._last[name] = Reported(step, value)
        if len(self._last) > _MOST:
            del self._last[next(iter(self._last))]

    @property
    def loss(self) -> float | None:
        """Loss of the last evaluation that reported a loss."""
        return self._last[_LOSS].value if _LOSS in self._last else None

    @property
    def step(self) -> int | None:
        """Step of the last loss; without a loss the step of the last figure."""
        if _LOSS in self._last:
            return self._last[_LOSS].step
        return next((each.step for each in reversed(self._last.values())), None)

    @property
    def metrics(self) -> dict[str, float]:
        """Last values of the other figures."""
        return {name: each.value for name, each in self._last.items() if name != _LOSS}

    def of_trained_model(self) -> dict[str, object]:
        """Return the fields of the result, without figures of the untrained model."""
        trained = {name: each for name, each in self._last.items() if each.step}
        if not trained:
            return {}
        loss = trained.pop(_LOSS, None)
        last = loss or next(reversed(trained.values()))
        return {
            **self._facts,
            _LOSS: None if loss is None else loss.value,
            "eval_step": last.step,
            "metrics": {name: each.value for name, each in trained.items()},
        }


def facts_in(event: Event) -> dict[str, float]:
    """Return the numbers of an event that are facts of a kind of job."""
    facts = {}
    for name in facts_of_kinds():
        value = event.number(name)
        if value is not None:
            facts[name] = value
    return facts
