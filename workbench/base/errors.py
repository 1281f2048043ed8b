"""The errors of the package. A message says what happened, where, and what to do next.

A failed training run is a value (`RunResult`), and an error only after
`RunResult.raise_for_status`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ParamSpec, TypeVar

from workbench.base.display_protocol import as_error

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SHOWN = 200  # letters of a value in a message
_WORD = re.compile(r"\w+")
_NEAR = 0.7  # least similarity of a suggestion, for difflib


class WorkbenchError(Exception):
    """Base class of every error of the package."""

    def _render_traceback_(self) -> list[str]:  # IPython calls this for an error that ends a cell
        return as_error(self)


class ConfigError(WorkbenchError, ValueError):
    """Refuse an unusable input, before any process starts."""

    option: str = ""
    """Name of the refused option, as a program may ask; empty for an error about no option."""
    value: object = None
    """Value of that option; None where the option was not given, or may hold a secret."""

    def name_option(self, options: Mapping[str, object], *, secret: Iterable[str] = ()) -> None:
        """Set `option`, unless set, to the option that the message names first, and its value.

        Args:
            options: Options that the user gave.
            secret: Options whose values are not kept.
        """
        if not self.option:
            named = {name: _place_in(str(self), name) for name in options}
            places = {name: place for name, place in named.items() if place >= 0}
            self.option = min(places, key=lambda name: places[name], default="")
        if self.option not in secret:
            self.value = options.get(self.option)


class BackendError(WorkbenchError):
    """Report that a place for pods refused or failed. The message quotes the platform."""


class PodError(WorkbenchError):
    """Report a pod that did not start, died or cannot be reached; the message names the pod."""


class PodTimeout(PodError, TimeoutError):
    """Report pods that were not ready at the deadline; the message names the missing pods."""


class RemoteError(WorkbenchError):
    """Report a failed command on another host."""

    def __init__(
        self,
        message: str,
        *,
        host: str,
        command: str = "",
        exit_code: int | None = None,
        stderr: str = "",
    ):
        """Store the place of the failure.

        Args:
            message: Cause and remedy.
            host: Address of the host.
            command: The command as a shell line, without secrets.
            exit_code: Exit code of the command; None if the command never ended.
            stderr: Tail of the command's stderr.
        """
        super().__init__(message)
        self.host = host
        self.command = command
        self.exit_code = exit_code
        self.stderr = stderr


class RunError(WorkbenchError):
    """Report a run that cannot be started, found or read."""


class Unreadable(RunError):
    """Report a file that cannot be read now. Existence and content are unknown."""


class DiskFull(RunError, OSError):
    """Report a disk without room.

    The message names machine or pod, folder, and the bytes needed and free.
    """

    def __str__(self) -> str:
        return str(self.args[-1])


class RunFailed(RunError):
    """Report a failed run; `result` is the `RunResult`."""

    def __init__(self, message: str, *, result: object = None):
        super().__init__(message)
        self.result = result


@contextlib.contextmanager
def option_named(options: Mapping[str, object], *, secret: Iterable[str] = ()) -> Iterator[None]:
    """Let refusals of the block carry the refused option."""
    try:
        yield
    except ConfigError as error:
        error.name_option(options, secret=secret)
        raise


def _place_in(text: str, name: str) -> int:
    """Return where a text has the name as a word of its own, or -1."""
    for word in _WORD.finditer(text):
        is_part = text[word.start() - 1 : word.start()] == "."
        if word[0] == name and not is_part:
            return word.start()
    return -1


def one_of(what: str, got: object, allowed: Iterable[str], *, listed: bool = True) -> ConfigError:
    """Make the error for a value outside a closed set, with the nearest allowed value.

    Args:
        what: Name of the option or field.
        got: The refused value.
        allowed: All allowed values.
        listed: Whether the message lists the allowed values.

    Example:
        >>> print(one_of("technique", "Zero-1", ["single", "zero1"]))
        technique 'Zero-1' is not known: did you mean 'zero1'? Allowed: single, zero1
        >>> print(one_of("sql.agg", "MEDIAN", ["", "MAX", "MIN"]))
        sql.agg 'MEDIAN' is not known. Allowed: MAX, MIN
    """
    names = {str(name).casefold(): str(name) for name in allowed if str(name)}
    given = shortened(got).casefold().strip("[('\")]")
    near = difflib.get_close_matches(given, names, n=1, cutoff=_NEAR)
    hint = f": did you mean '{names[near[0]]}'?" if near else "."
    all_names = f" Allowed: {', '.join(names.values())}" if listed and names else ""
    return ConfigError(f"{what} {shortened(got)} is not known{hint}{all_names}")


def require_package(package: str, what: str, *, extra: str) -> None:
    """Refuse local work without a needed package of an extra. The package is not imported.

    Raises:
        ConfigError: The package is not installed.
    """
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ConfigError(
            f"{what} needs {package}, which is not installed here. Install this project with its "
            f"extra {extra!r}"
        )


def suggests(what: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a function refuse unknown options with the nearest option's name, as records do."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        import inspect  # the agent, which must start fast, imports this module

        names = inspect.signature(function).parameters

        @functools.wraps(function)
        def checked(*args: _P.args, **options: _P.kwargs) -> _T:
            for name in options:
                if name not in names:
                    raise one_of(f"{what} option", name, [each for each in names if each != "self"])
            return function(*args, **options)

        return checked

    return decorate


def check_type(call: str, value: object, types: type | tuple[type, ...], wanted: str) -> None:
    """Raise ConfigError for an argument of another type, as a user may give to any call.

    Args:
        call: The call in a user's words, such as `Run.load`.
        value: The argument.
        types: The allowed types.
        wanted: What to give instead, in words.
    """
    if not isinstance(value, types):
        raise ConfigError(f"{call} takes {wanted}, and was given {shortened(value)}")


def shortened(value: object) -> str:
    """Return a value as written, shortened if long."""
    try:
        text = repr(value)
    except Exception:  # an object of the user's, or a number of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
