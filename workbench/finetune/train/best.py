"""Best evaluation and early stopping. All ranks use the same figures."""

from __future__ import annotations

import math
from collections.abc import Mapping

from workbench.base.words import number
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.evaluation import best_metric, greater_is_better, measured_names
from workbench.finetune.train.guests.figures import named_figure


class BestModel:
    """Best evaluation of a run so far; the evaluation of the untrained model does not count."""

    def __init__(self, job: FineTune) -> None:
        self.wanted = job.load_best_model_at_end
        """Whether to save the model of the best evaluation."""
        self.metric = best_metric(job)
        """Name of the figure that compares models."""
        self._is_own = self.metric not in measured_names(job)
        self.step: int | None = None
        """Step of the best evaluation; None before the first evaluation."""
        self.value = math.nan
        self.kept: int | None = None
        """Step of the best checkpoint on disk; None without a checkpoint."""
        self._sign = 1.0 if greater_is_better(job) else -1.0
        self._patience = job.early_stopping_patience
        self._threshold = job.early_stopping_threshold
        self._stale = 0

    def see(self, step: int, figures: Mapping[str, float]) -> bool:
        """Record an evaluation and return whether it is the best.

        A missing figure counts as no better.
        """
        if self._is_own:
            self.metric = named_figure(self.metric, figures) or self.metric
        value = figures.get(self.metric, math.nan)
        if step == 0:
            return False
        gain = math.inf if self.step is None else self._sign * (value - self.value)
        better = gain > 0 and math.isfinite(value)
        self._stale = 0 if better and gain > self._threshold else self._stale + 1
        if better:
            self.step = step
            self.value = value
        return better

    @property
    def exhausted(self) -> str:
        """Reason to stop training now; empty to continue."""
        if self._patience is None or self._stale < self._patience:
            return ""
        if self.step is None:
            return f"no evaluation had the figure {self.metric}, {self._stale} in a row"
        by = f" by more than {number(self._threshold)}" if self._threshold else ""
        times = "evaluation" if self._stale == 1 else f"{self._stale} evaluations in a row"
        return f"{self} was not bettered{by} in {times}"

    def __str__(self) -> str:
        return f"{self.metric} {number(self.value)} of step {self.step}"

    def state(self) -> dict[str, object]:
        return {
            "metric": self.metric,
            "step": self.step,
            "value": self.value,
            "stale": self._stale,
        }

    def restore(self, state: Mapping[str, object], *, at_step: int) -> bool:
        """Restore the state of a checkpoint; return whether the model of its step is the best.

        Without a usable state the search for the best evaluation begins anew.
        """
        step = state.get("step")
        value = state.get("value")
        stale = state.get("stale")
        before = str(state.get("metric"))
        is_same = before == self.metric
        if self._is_own:
            is_same = named_figure(self.metric, [before]) is not None
        if not is_same or not isinstance(step, int) or (self.wanted and step != at_step):
            return False
        self.metric = before
        self.value = float(str(value))
        self._stale = int(str(stale))
        self.step = step
        return step == at_step
