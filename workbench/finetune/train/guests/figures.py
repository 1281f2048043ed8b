"""Numbers that a user's metric functions return, under names that no other figure has."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from numbers import Real

from workbench.agent.rank.notes import note
from workbench.base.errors import ConfigError, RunError
from workbench.base.words import strip_controls
from workbench.finetune.options.evaluation import LOSS, ROUGE
from workbench.finetune.options.metrics import METRICS
from workbench.rundir.figures import metrics as known

_MOST_NAMES = 50
_LONGEST = 64  # letters of a name
PRODUCT_NAMES = frozenset((LOSS, *METRICS, *ROUGE, *(metric.name for metric in known.rows())))
"""Names of the product's own figures, whether or not a job measures them."""


class OwnFigures:
    """Figures of the user's metric functions. A figure keeps its name for the whole training."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], str] = {}
        self._told: set[tuple[int, str]] = set()

    def take(
        self,
        function: tuple[int, str],
        returned: object,
        *,
        step: int,
        others: Collection[str],
    ) -> dict[str, float]:
        """Return the figures of a function's result. A figure that is not finite is NaN.

        `function` is the number and the name of the function; `others` are names of the product's
        figures in this evaluation.

        Raises:
            RunError: The function returned neither a number nor a mapping of few values.
        """
        number, name = function
        figures: dict[str, float] = {}
        remarks: list[str] = []
        for key, value in _pairs(returned, name).items():
            shown = strip_controls(key)[:_LONGEST]
            figure = _number_of(value)
            if figure is None:
                kind = type(value).__name__
                if self._is_new(number, key):
                    remarks.append(f"{shown} at step {step} is no number, but {kind}")
                continue
            if not math.isfinite(figure):
                if self._is_new(number, key):
                    remarks.append(f"{shown} at step {step} is {value}")
                figure = math.nan
            figures[self._name(function, key, others, remarks)] = figure
        if remarks:
            note(f"metric {name}: {'; '.join(remarks)}")
        return figures

    def _is_new(self, number: int, key: str) -> bool:
        """Return whether a missing number is the first of its name."""
        known_before = len(self._told)
        self._told.add((number, key))
        return len(self._told) > known_before

    def _name(
        self, function: tuple[int, str], key: str, others: Collection[str], remarks: list[str]
    ) -> str:
        """Return the name of a function's figure; the first figure of a name keeps the name."""
        known_name = self._names.get((function[0], key))
        if known_name is not None and known_name not in others:
            return known_name
        asked = plain_name(key) or function[1]
        taken = {*others, *self._names.values()}
        name = asked[:_LONGEST]
        if name in PRODUCT_NAMES or f"eval_{name}" in PRODUCT_NAMES or name in taken:
            name = _free(plain_name(f"{function[1]}.{key}"), taken)
        if name != asked:
            why = f"another figure has the name {asked[:_LONGEST]}"
            if len(asked) > _LONGEST:
                why = f"a name has at most {_LONGEST} letters"
            remarks.append(f"{strip_controls(key)[: 2 * _LONGEST]} is named {name}, because {why}")
        self._names[function[0], key] = name
        return name


def plain_name(key: str) -> str:
    """Return the name of a figure without the prefix that every evaluation's figure has.

    Example:
        >>> plain_name("eval_f1"), plain_name("f1"), plain_name("eval_")
        ('f1', 'f1', 'eval_')
    """
    return re.sub("^(eval_)+", "", key) or key


def named_figure(wanted: str, names: Collection[str]) -> str | None:
    """Return the figure that a user means: of this name, or of a function's own by that name.

    None: no figure, or several figures of functions.

    Example:
        >>> named_figure("accuracy", ["f1", "mine.accuracy"]), named_figure("f2", ["f1"])
        ('mine.accuracy', None)
    """
    if wanted in names:
        return wanted
    of_functions = [name for name in names if name.endswith(f".{wanted}")]
    return of_functions[0] if len(of_functions) == 1 else None


def unknown_figure(wanted: str, names: Collection[str]) -> ConfigError:
    """Make the error for a best metric that no evaluation has, the nearest names first."""
    from difflib import SequenceMatcher

    def likeness(name: str) -> float:
        return SequenceMatcher(None, wanted.casefold(), name.casefold()).ratio()

    nearest = sorted(names, key=likeness, reverse=True)
    return ConfigError(
        f"metric_for_best_model {wanted!r} is no figure of the first evaluation. Choose one of "
        f"{', '.join(strip_controls(name) for name in nearest)}"
    )


def _pairs(returned: object, name: str) -> dict[str, object]:
    if isinstance(returned, Mapping) and len(returned) <= _MOST_NAMES:
        return {str(key): value for key, value in returned.items()}
    number = None if isinstance(returned, str) else _number_of(returned)
    if returned is None or isinstance(returned, Mapping) or number is None:
        raise RunError(
            f"it returned {type(returned).__name__}; it must return "
            f"a number, or at most {_MOST_NAMES} numbers by name"
        )
    return {name: returned}


def _number_of(value: object) -> float | None:
    """Return a number, also of an array or a tensor of one element; NaN for None.

    None: the value is no number.
    """
    if value is None:
        return math.nan
    try:
        if not isinstance(value, Real) and hasattr(value, "item"):
            value = value.item()
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _free(name: str, taken: Collection[str]) -> str:
    """Return the name, cut and with a number if another figure has the name already."""
    free = name[:_LONGEST]
    number = 2
    while free in taken or free in PRODUCT_NAMES:
        ending = f"-{number}"
        free = name[: _LONGEST - len(ending)] + ending
        number += 1
    return free
