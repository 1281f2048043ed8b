"""A benchmark while it runs: a line a row with its state, its progress and its figures as they come.

`lines_of` says what to state; text, HTML and the widget are drawn from the same lines. `BenchmarkLive` puts them before
the user's eyes, at most four times a second, and leaves plain HTML in the notebook when it is closed.
"""

from __future__ import annotations

import html
import shutil
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from workbench.base.words import count, duration, gib, number, percent, plain
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.display.benchmark.outcome_cell import MARKS, colour_of, label_of, why_of
from workbench.display.kit.live import WIDGET, has_widgets
from workbench.display.kit.style import styled
from workbench.rundir.figures.progress import Progress

__all__ = ["BenchmarkLive", "LiveLine", "lines_of", "live_html", "live_text", "said_of"]

_INTERVAL_S = 0.25
_BAR = 20
_CSS = """
.wb-rows { margin: 6px 0; }
.wb-rows > div { display: grid; grid-template-columns: 2em minmax(150px, 260px) 9.5em minmax(0, 1fr); gap: 0 10px;
  padding: 3px 0; border-bottom: 1px solid var(--wb-line); }
.wb-rows .wb-bar { margin: 0 0 2px; max-width: 420px; color: var(--jp-ui-font-color1, CanvasText); }
.wb-rows .wb-nth { text-align: right; color: var(--wb-quiet); font-variant-numeric: tabular-nums; }
.wb-rows .wb-how { color: var(--wb-state); font-weight: 600; white-space: nowrap; }
.wb-rows .wb-told { font-variant-numeric: tabular-nums; color: var(--wb-quiet); }
.wb-rows .wb-told b { font-weight: 400; color: var(--wb-state); }
@media (max-width: 760px) { .wb-rows > div { grid-template-columns: 2em minmax(0, 1fr) auto; }
  .wb-rows .wb-told { grid-column: 2 / -1; } .wb-rows .wb-bar { max-width: none; } }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveLine:
    """What is stated of one row, ready to read; foreign text is on one line but not escaped."""

    number: int
    """Its place, from 1."""
    label: str
    """What it is: `tiny-t5 zero1, 3 pods`."""
    outcome: Outcome
    """Where it is in its life."""
    from_disk: bool
    """Whether it was found finished."""
    share: float
    """How much of the way is done, 0 to 1."""
    bar: str
    """The words in the bar; empty where there is none."""
    figures: tuple[tuple[str, str], ...]
    """Name and value of each figure."""
    reason: str
    """Why it failed or was skipped."""

    @property
    def how(self) -> str:
        """The outcome as a mark and a word."""
        return f"{MARKS[self.outcome]} {self.outcome}"


def lines_of(rows: Sequence[BenchmarkRow], progress: Mapping[str, Progress] | None = None) -> tuple[LiveLine, ...]:
    """Work out what to state of each row by now."""
    known = progress or {}
    return tuple(_line(place, row, known.get(row.name)) for place, row in enumerate(rows, 1))


def said_of(lines: Sequence[LiveLine]) -> str:
    """Say in a line how far the whole benchmark is.

    Example:
        >>> rows = [BenchmarkRow(name="a", outcome=Outcome.SUCCEEDED), BenchmarkRow(name="b", outcome=Outcome.WAITING)]
        >>> said_of(lines_of(rows))
        '1 of 2 rows done: 1 succeeded; 1 waiting'
    """
    done = Counter(line.outcome for line in lines if line.outcome.is_terminal)
    rest = Counter(line.outcome for line in lines if not line.outcome.is_terminal)
    found = sum(line.from_disk for line in lines)
    ended = ", ".join(f"{count(n)} {outcome}" for outcome, n in done.items())
    parts = [f"{count(done.total())} of {count(len(lines))} rows done" + (f": {ended}" if ended else "")]
    parts += [f"{count(found)} of them taken from disk"] if found else []
    return "; ".join([*parts, *(f"{count(n)} {outcome}" for outcome, n in rest.items())])


def live_text(lines: Sequence[LiveLine]) -> str:
    """Draw the lines as text."""
    places, labels = len(str(len(lines))), max((len(line.label) for line in lines), default=0)
    hows = max((len(line.how) for line in lines), default=0)
    drawn = [f"{line.number:>{places}}  {line.label:<{labels}}  {line.how:<{hows}}  {_told(line)}" for line in lines]
    return "\n".join([said_of(lines), *(line.rstrip() for line in drawn)])


def live_html(lines: Sequence[LiveLine]) -> str:
    """Draw the lines as HTML that needs no script, everything escaped."""
    head = f"<div class='wb-head'><b>{html.escape(said_of(lines))}</b></div>"
    body = "".join(_line_html(line) for line in lines)
    return styled(f"<style>{_CSS}</style>{head}<div class='wb-rows'>{body}</div>")


def _line(place: int, row: BenchmarkRow, progress: Progress | None) -> LiveLine:
    running = row.outcome is Outcome.RUNNING
    share, bar = (0.0, "") if not running else _way(progress)
    return LiveLine(
        number=place,
        label=label_of(row),
        outcome=row.outcome,
        from_disk=row.from_disk,
        share=1.0 if row.outcome is Outcome.SUCCEEDED else share,
        bar=bar,
        figures=_passing(progress) if running else _lasting(row),
        reason=why_of(row),
    )


def _way(progress: Progress | None) -> tuple[float, str]:
    if progress is None or progress.step is None:
        return 0.0, plain(progress.message if progress and progress.message else "starting")
    left = f", {duration(progress.eta_s)} left" if progress.eta_s is not None else ""
    if not progress.max_steps:
        return 0.0, f"{count(progress.step)} steps{left}"
    return (
        min(1.0, progress.step / progress.max_steps),
        f"{count(progress.step)} of {count(progress.max_steps)} steps{left}",
    )


def _passing(progress: Progress | None) -> tuple[tuple[str, str], ...]:
    if progress is None:
        return ()
    pairs = (
        ("loss", number(progress.loss), progress.loss),
        ("eval loss", number(progress.eval_loss), progress.eval_loss),
        ("samples/s", number(progress.samples_per_s), progress.samples_per_s),
    )
    return tuple((name, text) for name, text, value in pairs if value is not None)


def _lasting(row: BenchmarkRow) -> tuple[tuple[str, str], ...]:
    pairs = (
        ("time", duration(row.duration_s), row.duration_s),
        ("steps", count(row.steps), row.steps),
        ("samples/s", number(row.samples_per_s), row.samples_per_s),
        ("eval loss", number(row.eval_loss), row.eval_loss),
        ("exact match", percent(row.exact_match), row.exact_match),
        ("peak memory", gib(row.peak_memory_gib), row.peak_memory_gib),
        ("predicted", gib(row.predicted_memory_gib), row.predicted_memory_gib),
    )
    return tuple((name, text) for name, text, value in pairs if value is not None)


def _told(line: LiveLine) -> str:
    done = int(_BAR * line.share)
    bar = f"[{'#' * done}{'-' * (_BAR - done)}] {line.bar}" if line.bar else ""
    figures = ", ".join(f"{name} {text}" for name, text in line.figures)
    found = "taken from disk" if line.from_disk else ""
    return "; ".join(part for part in (bar, line.reason, figures, found) if part)


def _line_html(line: LiveLine) -> str:
    width = f"{100 * line.share:.1f}"
    bar = (
        f"<div class='wb-bar' role='progressbar' aria-valuemin='0' aria-valuemax='100' aria-valuenow='{width}'>"
        f"<div style='width: {width}%'></div><span>{html.escape(line.bar)}</span></div>"
    )
    told = [f"<b>{html.escape(line.reason)}</b>"] if line.reason else []
    told += [html.escape(f"{name} {text}") for name, text in line.figures]
    told += ["taken from disk"] if line.from_disk else []
    return (
        f"<div style='--wb-state: {colour_of(line.outcome)}'><span class='wb-nth'>{line.number}</span>"
        f"<span>{html.escape(line.label)}</span><span class='wb-how'>{line.how}</span>"
        f"<span class='wb-told'>{bar if line.bar else ''}{' · '.join(told)}</span></div>"
    )


class BenchmarkLive:
    """The lines of a benchmark before the user's eyes. Use it in a `with`: leaving it draws the last state."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep where to draw; nothing is shown before the first update."""
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._in_notebook = stream is None and _in_notebook()
        self._lines: tuple[LiveLine, ...] = ()
        self._drawn: tuple[LiveLine, ...] | None = None
        self._drawn_at = float("-inf")
        self._name = uuid.uuid4().hex
        self._told: set[int] = set()
        self._passing = False
        self.widget: Any = None
        """The widget, where there are any and something was shown."""

    def update(self, rows: Sequence[BenchmarkRow], progress: Mapping[str, Progress] | None = None) -> None:
        """Take the state of all rows, and draw it unless the last drawing is too fresh; what ended is drawn at once."""
        before, self._lines = [line.outcome for line in self._lines], lines_of(rows, progress)
        moved = before != [line.outcome for line in self._lines]
        if moved or self._clock() - self._drawn_at >= _INTERVAL_S:
            self._draw()

    def close(self) -> None:
        """Draw the last state; what was a widget stays as HTML. Idempotent."""
        if self._drawn is None and not self._lines:
            return
        self._draw()
        if self.widget is not None:
            from IPython.display import display

            self.widget = None
            display(self._plain(), raw=True, display_id=self._name, update=True)  # type: ignore[no-untyped-call]
        if self._passing:
            self._stream.write("\n")
            self._passing = False

    def _draw(self) -> None:
        if self._lines == self._drawn:
            return
        first, self._drawn, self._drawn_at = self._drawn is None, self._lines, self._clock()
        if self._in_notebook:
            self._show(first=first)
        else:
            self._write()

    def _show(self, *, first: bool) -> None:
        from IPython.display import display

        if first and has_widgets():
            import ipywidgets as w

            self.widget = w.HTML()
        if self.widget is not None:
            self.widget.value = live_html(self._lines)
        if first or self.widget is None:
            display(self._repr_mimebundle_(), raw=True, display_id=self._name, update=not first)  # type: ignore[no-untyped-call]

    def _write(self) -> None:
        live = self._stream.isatty()
        clear = "\r\x1b[K" if self._passing else ""
        total = len(self._lines)
        for line in self._lines:
            if line.outcome.is_terminal and line.number not in self._told:
                self._told.add(line.number)
                self._put(f"{clear}{line.number}/{total}  {line.label}  {line.how}  {_told(line)}".rstrip() + "\n")
                clear, self._passing = "", False
        running = next((line for line in self._lines if line.outcome is Outcome.RUNNING), None)
        if live and running is not None:
            text = f"{running.number}/{total}  {running.label}  {_told(running)}"
            columns = shutil.get_terminal_size().columns - 1
            self._put("\r\x1b[K" + (text if len(text) <= columns else text[: columns - 1] + "…"))
            self._passing = True
        self._stream.flush()

    def _put(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))

    def _plain(self) -> dict[str, object]:
        return {"text/plain": live_text(self._lines), "text/html": live_html(self._lines)}

    def _repr_mimebundle_(self, **_asked: object) -> dict[str, object]:
        """Give text and HTML always, and the widget where there is one."""
        bundle = self._plain()
        if self.widget is not None:
            bundle[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return bundle

    def __str__(self) -> str:
        """Return the last state as text."""
        return live_text(self._lines)

    def __enter__(self) -> BenchmarkLive:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw the last state."""
        self.close()


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None
