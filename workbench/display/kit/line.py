"""A progress line: rewritten in place in a terminal or notebook, ten lines in a file."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from workbench.base.clock import Clock
from workbench.base.display_protocol import Draw
from workbench.base.table import coloured
from workbench.base.words import count, duration, number, strip_controls
from workbench.rundir.totals import Progress

if TYPE_CHECKING:
    from workbench.client.run import Run

_INTERVAL_S = 0.25
_NOTEBOOK_COLUMNS = 120
_BAR = 20
_MIN_BAR_COLUMNS = 60
_SHARE = 0.05  # share of the waiting time for the progress, which reads all events


def progress_text(progress: Progress, columns: int = _NOTEBOOK_COLUMNS) -> str:
    """Return how far a run is, in at most so many columns.

    Example:
        >>> from workbench.rundir.state import RunState
        >>> progress_text(Progress(state=RunState.RUNNING, step=3, max_steps=12, loss=2.5, eta_s=9))
        'running [#####---------------] 3/12, loss 2.5, 9.0 s left'
    """
    parts = [_steps(progress, bar=columns >= _MIN_BAR_COLUMNS)]
    if progress.loss is not None:
        parts.append(f"loss {number(progress.loss)}")
    if progress.eval_loss is not None:
        parts.append(f"eval loss {number(progress.eval_loss)}")
    if progress.samples_per_s is not None:
        parts.append(f"{number(progress.samples_per_s)} samples/s")
    if progress.eta_s is not None:
        parts.append(f"{duration(progress.eta_s)} left")
    text = ", ".join(parts)
    # A failure matters more than the speed.
    if progress.message and progress.state == "failed":
        text = f"{parts[0]}: {strip_controls(progress.message)}"
    elif progress.message:
        text = f"{text}: {progress.message}"
    return cut(strip_controls(text), columns)


class Screen:
    """Where the user looks: a notebook's cell, a terminal or a file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self.is_notebook = is_notebook(self._stream)
        self.is_live = self.is_notebook or self._stream.isatty()
        self._display: Any = None

    def show(self, bundle: Mapping[str, object]) -> None:
        """Draw into a notebook, in place of what was drawn before."""
        # Not as text with \r: every drawing would be an output of the cell. nbclient's
        # `coalesce_streams` joins the outputs at the end of the cell but keeps the old indices of
        # later displays. Their next update raises IndexError or changes another output.
        from IPython.display import display

        if self._display is None:
            self._display = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._display.update(bundle, raw=True)

    def write(self, text: str) -> None:
        """Write to a terminal or a file; one without UTF-8 must not end the waiting."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = coloured(text, self._stream)
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


class ProgressLine:
    """The progress line of a run; `close` draws the last state and ends the line."""

    def __init__(self, stream: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        self._screen = Screen(stream)
        self._clock = clock
        self._pending: Progress | None = None
        self._drawn: Progress | None = None
        self._drawn_at = float("-inf")
        self._closed = False

    def update(self, progress: Progress) -> None:
        """Draw a state now, or leave it for later where the last drawing is too fresh.

        The end is drawn at once.
        """
        if self._closed:
            return
        self._pending = progress
        if progress.state.is_terminal:
            self.close()
        elif self._clock() - self._drawn_at >= _INTERVAL_S and self._is_worth_it(progress):
            self._draw()

    def close(self) -> None:
        """Draw the last state if it was not, and end the line. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._pending != self._drawn:
            self._draw()
        if self._screen.is_live and not self._screen.is_notebook and self._drawn is not None:
            self._screen.write("\n")

    def _is_worth_it(self, progress: Progress) -> bool:
        if self._screen.is_live or self._drawn is None or progress.state != self._drawn.state:
            return progress != self._drawn
        # A file gets ten lines of steps. Before the first step, a new message is a line.
        if progress.step is None and progress.message != self._drawn.message:
            return True
        return _tenth(progress) != _tenth(self._drawn)

    def _draw(self) -> None:
        assert self._pending is not None
        self._drawn = self._pending
        self._drawn_at = self._clock()
        if self._screen.is_notebook:
            self._screen.show({"text/plain": progress_text(self._pending)})
        elif not self._screen.is_live:
            self._screen.write(progress_text(self._pending, columns=10_000) + "\n")
        else:
            # One column stays free: otherwise a terminal wraps, and \r misses the line's start.
            columns = shutil.get_terminal_size().columns - 1
            self._screen.write("\r\x1b[K" + progress_text(self._pending, columns))


@contextmanager
def follow_run(run: Run) -> Iterator[Draw]:
    """Draw the progress of a run while someone waits for it.

    Its last state when the waiting ends well.
    """
    due = 0.0

    def draw() -> None:
        nonlocal due
        began = time.monotonic()
        if began >= due:
            line.update(run.progress)
            took_s = time.monotonic() - began
            due = began + max(_INTERVAL_S, took_s / _SHARE)

    with closing(ProgressLine()) as line:
        yield draw
        line.update(run.progress)


def _steps(progress: Progress, *, bar: bool) -> str:
    if progress.step is None:
        return str(progress.state)
    if not progress.max_steps:
        return f"{progress.state} step {count(progress.step)}"
    drawn = ""
    if bar:
        drawn = f" [{text_bar(min(1.0, progress.step / progress.max_steps), _BAR)}]"
    return f"{progress.state}{drawn} {count(progress.step)}/{count(progress.max_steps)}"


def _tenth(progress: Progress) -> int | None:
    if progress.step is None or not progress.max_steps:
        return None
    return 10 * progress.step // progress.max_steps


def text_bar(share: float, width: int) -> str:
    """Draw a share of the way in so many letters."""
    done = int(width * share)
    return "#" * done + "-" * (width - done)


def cut(text: str, columns: int) -> str:
    """Return as much of a text as fits into so many columns."""
    if len(text) <= columns:
        return text
    kept = max(0, columns - 1)
    return text[:kept] + "…"


def is_notebook(stream: TextIO) -> bool:
    return type(stream).__module__.split(".")[0] == "ipykernel"


def show_bundle(bundle: Mapping[str, object]) -> None:
    """Display a bundle; a program without IPython gets its text."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        Screen().write(f"{bundle['text/plain']}\n")
    else:
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
