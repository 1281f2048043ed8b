"""Call the user's reward functions, and name the row of a function that fails."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from workbench.base.errors import RunError
from workbench.base.words import plain
from workbench.finetune.data.messages import Message
from workbench.finetune.data.rows import Example
from workbench.finetune.methods.rows import columns_of
from workbench.finetune.options.prompts import source_text

Reward = Callable[..., Any]
_LETTERS = 300  # of a row in messages


class Raised(RunError):
    """A reward function raised an error, or returned no number."""


def text_row(example: Example) -> dict[str, Any]:
    """Return a row as reward functions see it: the prompt, and the other columns by name."""
    prompt: str | list[Message] = source_text(example.source, example.input)
    if example.messages:
        prompt = list(example.messages)
    return {"prompt": prompt, **columns_of(example)}


def call_reward(
    function: Reward,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    completions: Sequence[str],
    **further: Any,
) -> list[float]:
    """Return a number per completion.

    The function gets the arguments of its signature: `prompts`, `completions`, and columns of the
    rows. A chat's completions are lists of messages, as in TRL.

    Raises:
        Raised: The function raised an error, or returned no number for a completion.
    """
    answers: list[Any] = list(completions)
    if isinstance(rows[0]["prompt"], list):
        answers = [[{"role": "assistant", "content": text}] for text in completions]
    arguments: dict[str, Any] = {
        "prompts": [row["prompt"] for row in rows],
        "completions": answers,
        **further,
    }
    for column in rows[0]:
        if column != "prompt":
            arguments[column] = [row.get(column) for row in rows]
    try:
        returned = function(**_taken(function, arguments))
    # Any failure of the user's code ends the run with its name.
    except (Exception, SystemExit) as error:
        first = f"the reward function {name} raised {type(error).__name__}: {error}"
        raise Raised(f"{first}; the first of its {len(rows)} rows is {_shown(rows[0])}") from error
    return _numbers(returned, name, rows, completions)


def _numbers(
    returned: Any,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    completions: Sequence[str],
) -> list[float]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple) or len(values) != len(rows):
        what = type(returned).__name__
        if isinstance(values, list | tuple):
            what = f"{len(values)} values"
        raise Raised(
            f"the reward function {name} returned {what} for {len(rows)} completions; return a "
            "list with a number for every completion"
        )
    numbers = []
    for value, row, completion in zip(values, rows, completions, strict=True):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise Raised(
                f"the reward function {name} returned {value!r}, no finite number, for "
                f"the completion {plain(completion[:_LETTERS])!r} of the row {_shown(row)}"
            )
        numbers.append(float(value))
    return numbers


def _taken(function: Reward, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments that a function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return arguments
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return arguments
    names = {each.name for each in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _shown(row: Mapping[str, Any]) -> str:
    return plain(str(dict(row))[:_LETTERS])
