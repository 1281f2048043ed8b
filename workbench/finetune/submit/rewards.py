"""Try the reward functions of a notebook on a row, before a pod works for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError
from workbench.base.words import pluralize
from workbench.finetune.data.lines import read_lines
from workbench.finetune.data.rows import prepared_row
from workbench.finetune.methods.judging import Raised, call_rewards, text_row
from workbench.finetune.options.metrics import Metric, function_name

_ANSWER = "An answer to try the function with."


def try_rewards(rewards: Sequence[Metric], train: Path | None) -> None:
    """Call each function of the notebook with the first row and a made-up answer.

    The first row that lacks a column is tried too. Functions in files, and functions for a dataset
    of the hub, are not called here. A function that cannot import a package here may find the
    package on the pods.

    Raises:
        ConfigError: A function raises an error, or returns neither a number nor None.
    """
    functions = [reward for reward in rewards if not isinstance(reward, str)]
    if not functions or train is None:
        return
    rows = _rows_to_try(train)
    for function in functions:
        name = function_name(function)
        try:
            call_rewards([(name, function)], rows, [_ANSWER] * len(rows))
        except Raised as error:
            if isinstance(error.__cause__, ImportError):
                continue
            raise ConfigError(
                f"rewards: {error}. The function was tried with an answer made up for "
                f"{pluralize(len(rows), 'row')}, before any pod started; mend the function"
            ) from error


def _rows_to_try(train: Path) -> list[dict[str, Any]]:
    """Return the first row, and the first row with a column that is None."""
    tried: list[dict[str, Any]] = []
    for _, data in read_lines(train, train.parent.parent):
        assert isinstance(data, dict)
        row = text_row(prepared_row(data))
        if not tried:
            tried.append(row)
        if None in row.values():
            return [tried[0]] if row is tried[0] else [tried[0], row]
    return tried
