"""An error of ours that ended a cell: one block with the user's own lines, without the frames of the library."""

from __future__ import annotations

import difflib
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Any

from workbench.base.errors import RunFailed, WorkbenchError
from workbench.base.words import plain, printable
from workbench.client.result import RunResult
from workbench.display.failure.fault import card_of, fault_text

_RED, _BOLD, _PLAIN = "\x1b[31;1m", "\x1b[1m", "\x1b[0m"
_NOT_THEIRS = ("IPython", "ipykernel", "workbench")
_UNKNOWN = re.compile(r"'(\w+)'( is not known.* Allowed: )(\w+(?:, \w+){12,})")
_NEAREST = 6
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def error_lines(error: WorkbenchError) -> list[str]:
    """Draw an error below its cell: what it says and where; all of the traceback once `%tb` asks for it."""
    if sys.exc_info()[1] is None:  # it has been handled: this is %tb
        return _whole(error)
    lines = [f"{_RED}{type(error).__name__}{_PLAIN}: {printable(_words(error))}"]
    lines += [f"  {_BOLD}{where}{_PLAIN}  {plain(line)}" for where, line in _places(error)]
    return [*lines, "(%tb shows the whole traceback)"]


def _words(error: WorkbenchError) -> str:
    match error:
        case RunFailed(result=RunResult(error=fault) as result) if fault is not None:
            return f"the run failed. {fault_text(card_of(result), brief=True)}\nIts logs are in {result.path / 'logs'}"
    return _UNKNOWN.sub(_with_nearest, str(error))


def _with_nearest(match: re.Match[str]) -> str:
    """Name the nearest of many allowed names alone."""
    got, words, names = match[1], match[2], match[3].split(", ")
    nearest = difflib.get_close_matches(got, names, _NEAREST, cutoff=0)
    return f"'{got}'{words}{', '.join(nearest)} and {len(names) - len(nearest)} more"


def _places(error: WorkbenchError) -> Iterator[tuple[str, str]]:
    """Return the user's own lines that led to the error, the cell's first, and what stands there."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THEIRS and not file.startswith((*_LIBRARIES, "<frozen")):
            summary = traceback.FrameSummary(file, number, frame.f_code.co_name)
            yield f"{_cell(file) or file}, line {number}:", summary.line or ""


def _cell(file: str) -> str:
    shell = _shell()
    named = None if shell is None else shell.compile.format_code_name(file)
    return "" if named is None else " ".join(named)


def _whole(error: WorkbenchError) -> list[str]:
    if (shell := _shell()) is None:
        return traceback.format_exception(error)
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__, tb_offset=1)
    return lines


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()
