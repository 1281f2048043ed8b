"""Names of metrics, and metrics that are functions of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import Json, as_str

METRICS = ("exact_match", "execution_match", "rouge", "accuracy", "perplexity")

Function = Callable[..., Any]
"""A function of the user: a metric of two lists, or a reward of completions."""
Metric = str | Function
"""One of `METRICS`, `path.py:function`, or a function."""


def metric_function(metric: str) -> tuple[str, str]:
    path, _, function = metric.rpartition(":")
    return path, function


def own_metrics(metrics: Sequence[Metric]) -> list[Metric]:
    return [metric for metric in metrics if metric not in METRICS]


def metric_file(metric: Metric) -> tuple[str, str] | None:
    """Return the path and the function of a metric in a file; None for other metrics."""
    is_file = isinstance(metric, str) and metric not in METRICS
    return metric_function(str(metric)) if is_file else None


def function_name(function: Function) -> str:
    """Return the function's name if a file can define a function of that name, else `metric`.

    Example:
        >>> function_name(len), function_name(lambda predictions, references: 0)
        ('len', 'metric')
    """
    name = str(getattr(function, "__name__", ""))
    return name if name.isidentifier() and not iskeyword(name) else "metric"


def metric_text(metric: Metric) -> str:
    """Return a metric as JSON text; a function becomes the name of the file that a run writes."""
    return metric if isinstance(metric, str) else "{0}-metric.py:{0}".format(function_name(metric))


def check_metrics(metrics: Sequence[Metric]) -> tuple[Metric, ...]:
    """Raise ConfigError for an invalid metric.

    A metric is one of `METRICS`, `path.py:function`, or a function that accepts two lists.
    """
    for metric in metrics:
        if not isinstance(metric, str):
            _check_takes_two(metric)
        elif metric not in METRICS:
            path, function = metric_function(metric)
            if not (path.endswith(".py") and function.isidentifier()):
                raise one_of("job metrics", metric, [*METRICS, "path.py:function", "a function"])
    return tuple(metrics)


def check_rewards(rewards: Sequence[Metric]) -> tuple[Metric, ...]:
    """Raise ConfigError for an invalid reward: neither `path.py:function` nor a function."""
    for reward in rewards:
        if not isinstance(reward, str):
            _check_takes_completions(reward)
            continue
        path, function = metric_function(reward)
        if not (path.endswith(".py") and function.isidentifier()):
            raise one_of("job rewards", reward, ["path.py:function", "a function"])
    return tuple(rewards)


def _check_takes_completions(reward: Function) -> None:
    try:
        parameters = inspect.signature(reward).parameters.values()
    except ValueError:  # a builtin without a signature
        return
    takes = any(
        each.name == "completions" or each.kind is inspect.Parameter.VAR_KEYWORD
        for each in parameters
    )
    if not takes:
        raise ConfigError(
            f"job rewards: {function_name(reward)} must take the argument `completions`; the "
            "other columns of the rows are passed by name"
        )


def _check_takes_two(metric: Function) -> None:
    if inspect.iscoroutinefunction(metric):
        raise ConfigError(
            f"job metrics: {function_name(metric)} is an async function, and metrics are called "
            "without an event loop; write 'def' instead of 'async def'"
        )
    try:
        inspect.signature(metric).bind([], [])
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        raise ConfigError(
            f"job metrics: {function_name(metric)} must take "
            f"two lists, predictions and references: {error}"
        ) from error


def carried_metrics(
    metrics: Sequence[str], sent: Sequence[Json], folder: str = "", stem: str = "metric"
) -> tuple[list[str], dict[str, bytes]]:
    """Return a job's metrics with custom metrics renamed to files of `folder`, and the files.

    Example:
        >>> carried_metrics(["rouge", "/home/me/m.py:f"], [{"function": "f", "source": "f = max"}])
        (['rouge', 'metric-1.py:f'], {'metric-1.py': b'f = max'})
    """
    own = {}
    for number, metric in enumerate(m for m in metrics if m not in METRICS):
        own[metric] = number
    if len(own) != len(sent):
        return list(metrics), {}
    files = {}
    for number, each in enumerate(sent, 1):
        files[f"{stem}-{number}.py"] = as_str(each.get("source")).encode()
    named = {}
    for metric, number in own.items():
        function = as_str(sent[number].get("function"))
        named[metric] = f"{folder}{stem}-{number + 1}.py:{function}"
    return [named.get(metric, metric) for metric in metrics], files
