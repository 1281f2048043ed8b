"""Try the reward functions of a notebook on a row, before a pod works for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.finetune.data.lines import read_lines
from workbench.finetune.data.rows import prepared_row
from workbench.finetune.methods.judging import Raised, call_reward, text_row
from workbench.finetune.options.metrics import Metric, function_name


def try_rewards(rewards: Sequence[Metric], train: Path | None) -> None:
    """Call each function of the notebook with the first row and a made-up answer.

    Functions in files, and functions for a dataset of the hub, are not called here.
    A function that cannot import a package here may find the package on the pods.

    Raises:
        ConfigError: A function raises, or returns something else than a number for each answer.
    """
    functions = [reward for reward in rewards if not isinstance(reward, str)]
    if not functions or train is None:
        return
    _, data = next(iter(read_lines(train, train.parent.parent)))
    assert isinstance(data, dict)
    row = text_row(prepared_row(data))
    for function in functions:
        name = function_name(function)
        try:
            call_reward(function, name, [row], ["An answer to try the function with."])
        except Raised as error:
            if isinstance(error.__cause__, ImportError):
                continue
            raise ConfigError(
                f"rewards: {error}. The function was tried with an answer made up for the first "
                "row, before any pod started; mend the function"
            ) from error
