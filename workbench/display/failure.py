"""Display of failures: the card of a failed run, and errors in a cell.

`finetune/advice` determines the first failed rank, the cause, and likely fixes.
"""

from __future__ import annotations

import difflib
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workbench.base.display_protocol import Displayable
from workbench.base.errors import RunFailed, WorkbenchError
from workbench.base.words import printable, strip_controls
from workbench.client.result import RunResult
from workbench.display.kit.doc import Doc, Raw
from workbench.display.kit.live import is_on_show
from workbench.display.kit.logs import clean
from workbench.display.kit.templates import macro
from workbench.finetune.advice.rules import Advice, advise
from workbench.jobs.job import Job
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord, RunFault
from workbench.rundir.spec import RunSpec

_SHOWN_LINES = 30
_FOLDED_LINES = 12
_RED = "\x1b[31;1m"
_BOLD = "\x1b[1m"
_PLAIN = "\x1b[0m"
_NOT_THEIRS = ("IPython", "ipykernel", "workbench")
_UNKNOWN = re.compile(r"'(\w{1,80})'( is not known.{0,200}? Allowed: )(\w+(?:, \w+){12,})")
_NEAREST = 6
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultCard(Displayable):
    fault: RunFault
    advice: Advice

    @property
    def where(self) -> str:
        fault = self.fault
        host = f" ({fault.host})" if fault.host else ""
        if fault.rank is not None:
            return strip_controls(
                f"rank {fault.rank} on {fault.pod or 'its pod'}{host} failed first"
            )
        if fault.pod:
            return strip_controls(f"on {fault.pod}{host}")
        return "no rank is to blame"

    @property
    def error(self) -> str:
        """The exception or signal, in its own words."""
        kind = f"{self.fault.kind}: " if self.fault.kind else ""
        return strip_controls(kind + self.fault.message)

    @property
    def memory(self) -> list[tuple[str, str]]:
        """Requested, free and total memory, if memory ran out and the error names the figures."""
        advice = self.advice
        pairs = (
            ("asked for", advice.asked),
            ("free", advice.free),
            ("in all", advice.limit),
        )
        return [(name, strip_controls(size)) for name, size in pairs if size]

    @property
    def traceback(self) -> str:
        """The end of the failing rank's own traceback."""
        lines = clean(self.fault.traceback).rstrip().split("\n")
        left_out = len(lines) - _SHOWN_LINES
        if left_out > 0:
            lines = [f"… {left_out} lines before", *lines[-_SHOWN_LINES:]]
        # The card has the exception above.
        if lines[-1].strip() == self.error:
            lines.pop()
        return "\n".join(lines).strip("\n")

    @property
    def is_long(self) -> bool:
        return self.traceback.count("\n") >= _FOLDED_LINES


def fault_card(fault: RunFault, job: Job | None = None) -> FaultCard:
    return FaultCard(fault=fault, advice=advise(fault, job))


def card_of(result: ResultRecord) -> FaultCard:
    """Make the card of a failed run; the job is read from the run directory if available."""
    assert result.error is not None
    paths = RunPaths(result.path)
    try:
        job = RunSpec.load(paths.spec, of_run=True).job
    except WorkbenchError:
        job = None
    return fault_card(result.error, job)


def fault_doc(card: FaultCard) -> Doc:
    return Doc(blocks=[Raw(html=macro("run.html", "fault")(card), text=fault_text(card))])


def fault_text(card: FaultCard, *, brief: bool = False) -> str:
    """Draw the card as text; where it is to be brief, without a long traceback."""
    lines = [f"{card.advice.title}: {card.where}", card.error]
    if card.memory:
        sizes = [f"{size} {name}" for name, size in card.memory]
        lines.append("memory: " + ", ".join(sizes))
    if card.fault.others:
        lines.append(f"the others: {strip_controls(card.fault.others)}")
    if card.advice.fixes:
        lines.append("Likely fixes:")
        for place, fix in enumerate(card.advice.fixes, 1):
            lines.append(f"  {place}. {strip_controls(fix)}")
    is_too_long = brief and card.is_long
    if card.traceback and not is_too_long:
        lines += ["", card.traceback]
    return "\n".join(lines)


def error_lines(error: WorkbenchError) -> list[str]:
    """Draw an error below its cell: message and place. `%tb` shows the full traceback."""
    if sys.exc_info()[1] is None:  # the exception was handled: the user called %tb
        return _whole(error)
    lines = [f"{_RED}{type(error).__name__}{_PLAIN}: {printable(_words(error))}"]
    lines += [f"  {_BOLD}{where}{_PLAIN}  {strip_controls(line)}" for where, line in _places(error)]
    return [*lines, "(%tb shows the whole traceback)"]


def _words(error: WorkbenchError) -> str:
    if isinstance(error, RunFailed):
        result = error.result
        if isinstance(result, RunResult) and result.error is not None:
            if is_on_show(result.path):
                where = card_of(result).where
                logs = result.path / "logs"
                return f"the run failed: {where}. The panel has the error.\nIts logs are in {logs}"
            fault = fault_text(card_of(result), brief=True)
            return f"the run failed. {fault}\nIts logs are in {result.path / 'logs'}"
    return _UNKNOWN.sub(_with_nearest, str(error))


def _with_nearest(match: re.Match[str]) -> str:
    """Name the nearest of many allowed names alone."""
    got = match[1]
    words = match[2]
    names = match[3].split(", ")
    nearest = difflib.get_close_matches(got, names, _NEAREST, cutoff=0)
    left_out = len(names) - len(nearest)
    return f"'{got}'{words}{', '.join(nearest)} and {left_out} more"


def _places(error: WorkbenchError) -> Iterator[tuple[str, str]]:
    """Return the user's own lines of the traceback, the cell's first, with their code."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        is_library = file.startswith((*_LIBRARIES, "<frozen"))
        if package not in _NOT_THEIRS and not is_library:
            summary = traceback.FrameSummary(file, number, frame.f_code.co_name)
            place = _cell(file) or file
            yield f"{place}, line {number}:", summary.line or ""


def _cell(file: str) -> str:
    shell = _shell()
    if shell is None:
        return ""
    named = shell.compile.format_code_name(file)
    if named is None:
        return ""
    return " ".join(named)


def _whole(error: WorkbenchError) -> list[str]:
    shell = _shell()
    if shell is None:
        return traceback.format_exception(error)
    lines: list[str] = shell.InteractiveTB.structured_traceback(
        type(error),
        error,
        error.__traceback__,
        tb_offset=1,
    )
    return lines


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()
