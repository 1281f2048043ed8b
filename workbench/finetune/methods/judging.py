"""Call the user's reward functions, and name the row of a function that fails."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Mapping, Sequence
from functools import cache
from typing import Any

from workbench.base.errors import RunError
from workbench.base.words import strip_controls
from workbench.finetune.data.rows import Example
from workbench.finetune.methods.rows import columns_of
from workbench.finetune.options.metrics import Function
from workbench.finetune.options.text.prompts import source_text

Row = Mapping[str, Any]
_LETTERS = 300  # of a row in messages


class Raised(RunError):
    """A reward function raised an error, or returned no number."""


def text_row(example: Example) -> dict[str, Any]:
    """Return a row as reward functions see it: the prompt, and the other columns by name."""
    prompt: str | list[dict[str, object]] = source_text(example.source, example.input)
    if example.messages:
        # The weights of a prompt's turns are marks of the package.
        prompt = []
        for turn in example.messages:
            prompt.append({key: value for key, value in turn.items() if key != "weight"})
    return {"prompt": prompt, **columns_of(example)}


def call_rewards(
    rewards: Sequence[tuple[str, Function]],
    rows: Sequence[Row],
    completions: Sequence[Any],
    **further: Any,
) -> list[list[float]]:
    """Return a list for each function, with a number for each completion.

    A function gets the arguments of its signature: `prompts`, `completions`, and the columns of the
    rows. All rows have the same columns. The completion of a chat is a list of messages, as in TRL.
    The coroutines of async functions run together, after the other functions. NaN stands for None:
    the function does not apply to the row.

    Raises:
        Raised: A function raised an error, or returned neither a number nor None.
    """
    arguments: dict[str, Any] = {
        "prompts": [row["prompt"] for row in rows],
        "completions": [_of_kind(row, said) for row, said in zip(rows, completions, strict=True)],
        **further,
    }
    for column in rows[0]:
        if column != "prompt":
            arguments[column] = [row[column] for row in rows]
    # An async function only returns its coroutine here.
    outcomes = []
    for _, function in rewards:
        outcomes.append(_called(function, _taken(function, arguments)))
    outcomes = _awaited(outcomes)
    judged = []
    for (name, function), outcome in zip(rewards, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise Raised(_failure(name, function, outcome, rows)) from outcome
        judged.append(_numbers(outcome, name, rows, completions))
    return judged


def _of_kind(row: Row, completion: Any) -> Any:
    """Return a completion in the form of the row's prompt: text, or a list of messages."""
    chat = isinstance(row["prompt"], list)
    if chat and isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    if not chat and not isinstance(completion, str):
        return completion[-1]["content"]
    return completion


def _called(function: Function, arguments: Mapping[str, Any]) -> Any:
    """Return the value of a function, or its error."""
    try:
        return function(**arguments)
    # Any failure of the user's code ends the run with its name.
    except (Exception, SystemExit) as error:
        return error


def _awaited(outcomes: Sequence[Any]) -> list[Any]:
    """Return the outcomes with the values of coroutines, which run together."""

    async def settled(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        # As in `_called`. A cancelled task is a failure of the function.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return error

    async def together(numbers: Sequence[int]) -> list[Any]:
        return await asyncio.gather(*[settled(outcomes[number]) for number in numbers])

    values = list(outcomes)
    waiting = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
    if waiting:
        done = asyncio.run_coroutine_threadsafe(together(waiting), _loop()).result()
        for number, value in zip(waiting, done, strict=True):
            values[number] = value
    return values


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of async functions."""
    # All calls share a loop, as in TRL: a client that a function keeps belongs to its loop. The
    # loop has a thread, because a notebook's own loop is running.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward functions", daemon=True).start()
    return loop


def _failure(name: str, function: Function, error: BaseException, rows: Sequence[Row]) -> str:
    """Return the message for a function that raised an error."""
    message = (
        f"the reward function {name} raised {type(error).__name__}: {error}; the first of its "
        f"{len(rows)} rows is {shown_row(rows[0])}"
    )
    # The usual reason: a column that only some rows have.
    for column in _taken(function, dict.fromkeys(rows[0])):
        empty = [row for row in rows if row[column] is None]
        if empty:
            message += (
                f"; the column {column!r} is None in {len(empty)} of them, first in "
                f"{shown_row(empty[0])}"
            )
    return message


def _float(value: Any) -> float:
    """Return a number of any type as TRL takes it; NaN for another value."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _numbers(
    returned: Any,
    name: str,
    rows: Sequence[Row],
    completions: Sequence[Any],
) -> list[float]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    shape = getattr(returned, "shape", None)
    one_each = isinstance(values, list | tuple) and len(values) == len(rows)
    if not one_each or (shape is not None and len(shape) != 1):
        what = type(returned).__name__
        if shape is not None:
            what = f"{what} of shape {tuple(shape)}"
        elif isinstance(values, list | tuple):
            what = f"{len(values)} values"
        raise Raised(
            f"the reward function {name} returned {what} for {len(rows)} completions; return a "
            "list with a number for every completion"
        )
    numbers = []
    for value, row, completion in zip(values, rows, completions, strict=True):
        if value is None:
            numbers.append(math.nan)
            continue
        number = _float(value)
        if not math.isfinite(number):
            said = strip_controls(str(completion)[:_LETTERS])
            raise Raised(
                f"the reward function {name} returned {value!r}, no finite number, for the "
                f"completion {said!r} of the row {shown_row(row)}. Return None for a row to which "
                "the function does not apply"
            )
        numbers.append(number)
    return numbers


def unjudged(judged: Sequence[Sequence[float]]) -> list[int]:
    """Return the numbers of the completions to which no function applies.

    Example:
        >>> unjudged([[1.0, math.nan], [math.nan, math.nan]])
        [1]
    """
    return [n for n, values in enumerate(zip(*judged, strict=True)) if all(map(math.isnan, values))]


def shown_row(row: Row) -> str:
    """Return the beginning of a row for messages, as printable text."""
    return strip_controls(str(dict(row))[:_LETTERS])


def _taken(function: Function, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments that a function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return arguments
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return arguments
    names = {each.name for each in parameters}
    return {name: value for name, value in arguments.items() if name in names}
