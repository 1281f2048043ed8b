"""A benchmark before and during its run: a line per row, drawn at most four times a second."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from workbench.base.clock import Clock
from workbench.base.table import DONE, Bar, Cell, Grid, Toned
from workbench.base.words import count, duration, gib, number, percent, pluralize, strip_controls
from workbench.benchmark.comparable_groups import names_of
from workbench.benchmark.forecast import BenchmarkForecast, ForecastRow
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.client.tables.run_table import FIGURES, Format, figure, grid_of
from workbench.display.benchmark.columns import MARKS, TONES, label_of, why_of
from workbench.display.kit.doc import Doc, Fold, Note, Table, to_bundle, to_text
from workbench.display.kit.line import Screen, cut, text_bar
from workbench.rundir.totals import Progress

_INTERVAL_S = 0.25
_BAR = 20
_FIGURES = (
    FIGURES["train_samples_per_s"],
    figure("loss", "loss", number),
    FIGURES["eval_loss"],
    FIGURES["duration_s"],
    FIGURES["peak_memory_gib"],
    figure("predicted_memory_gib", "predicted memory", gib),
    figure("exact_match", "exact match", percent),
    FIGURES["steps"],
)
_FORECAST = (
    Format(name="name", title="row"),
    figure("runs", "runs", count),
    figure("gib", "predicted memory", gib),
    Format(name="note", title="note"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveLine:
    """State of a row for display. Foreign text is on a single line but not escaped."""

    number: int
    label: str
    """Label of the row: `tiny-t5 zero1, 3 pods`."""
    outcome: Outcome
    from_disk: bool
    share: float
    """How much of the way is done, 0 to 1."""
    bar: str
    """The words in the bar; empty where there is none."""
    figures: Mapping[str, str]
    """By the title of its column."""
    reason: str

    @property
    def outcome_text(self) -> str:
        """The outcome as a mark and a word, and whether the row was read from disk."""
        source = ", from disk" if self.from_disk else ""
        return f"{MARKS[self.outcome]} {self.outcome}{source}"

    def __str__(self) -> str:
        bar = f"[{text_bar(self.share, _BAR)}] {self.bar}" if self.bar else ""
        figures = ", ".join(f"{name} {text}" for name, text in self.figures.items())
        parts = (bar, self.reason, figures)
        return "; ".join(part for part in parts if part)


def lines_of(
    rows: Sequence[BenchmarkRow], progress: Mapping[str, Progress] | None = None
) -> tuple[LiveLine, ...]:
    """Compute the current state of every row."""
    names = names_of(rows)
    progress_of = {} if progress is None else progress
    lines = []
    for place, row in enumerate(rows, 1):
        label = label_of(row, names[row.key or row.name])
        lines.append(_line(place, row, label, progress_of.get(row.name)))
    return tuple(lines)


def summary_of(lines: Sequence[LiveLine], left_s: float | None = None) -> str:
    """Return in a line how far the whole benchmark is, and how long it may still take.

    Example:
        >>> first = BenchmarkRow(name="a", outcome=Outcome.SUCCEEDED)
        >>> second = BenchmarkRow(name="b", outcome=Outcome.WAITING)
        >>> summary_of(lines_of([first, second]))
        '1 of 2 rows done: 1 succeeded; 1 waiting'
    """
    done = Counter(line.outcome for line in lines if line.outcome.is_terminal)
    rest = Counter(line.outcome for line in lines if not line.outcome.is_terminal)
    from_disk = sum(line.from_disk for line in lines)
    ended = ", ".join(f"{count(n)} {outcome}" for outcome, n in done.items())
    outcomes = f": {ended}" if ended else ""
    parts = [f"{count(done.total())} of {count(len(lines))} rows done" + outcomes]
    if from_disk:
        parts.append(f"{count(from_disk)} of them taken from disk")
    for outcome, n in rest.items():
        parts.append(f"{count(n)} {outcome}")
    if left_s and rest:
        parts.append(f"about {duration(left_s)} left for all")
    return "; ".join(parts)


def live_doc(lines: Sequence[LiveLine], left_s: float | None = None) -> Doc:
    """State the whole benchmark, and a row per line. Without a script."""
    titles = [each.title for each in _FIGURES if any(each.title in line.figures for line in lines)]
    bars = ["progress"] if any(line.bar for line in lines) else []
    rows: list[list[Cell]] = []
    whys: list[Cell] = []
    for line in lines:
        tone = TONES[line.outcome]
        figures = [line.figures.get(title, "") for title in titles]
        bar: Cell = Bar(((DONE, line.share),), words=line.bar) if line.bar else ""
        state = Toned(line.outcome_text, tone)
        rows.append([str(line.number), line.label, state, *(bar for _ in bars), *figures])
        words = line.bar or line.reason
        whys.append(Toned(words, tone) if words else "")
    who = ("#", "row", "state")
    columns = (*who, *bars, *titles)
    grid = Grid(
        columns=columns, rows=rows, right={"#", *titles}, whole=columns, stay=who, under=whys
    )
    # The table of the results follows a benchmark that has ended.
    ended = all(line.outcome.is_terminal for line in lines)
    table = Fold("how every row ran", [Table(grid)]) if ended else Table(grid)
    return Doc(blocks=[Note(summary_of(lines, left_s), "plain"), table], full=True)


def _line(
    place: int,
    row: BenchmarkRow,
    label: str,
    progress: Progress | None,
) -> LiveLine:
    share = 0.0
    bar = ""
    values = {each.name: getattr(row, each.name, None) for each in _FIGURES}
    if row.outcome is Outcome.RUNNING:
        share, bar = _bar(progress)
        values = _figures_so_far(progress)
    elif row.outcome is Outcome.SUCCEEDED:
        share = 1.0
    return LiveLine(
        number=place,
        label=label,
        outcome=row.outcome,
        from_disk=row.from_disk,
        share=share,
        bar=bar,
        figures=_figures(values),
        reason=why_of(row),
    )


def _bar(progress: Progress | None) -> tuple[float, str]:
    if progress is None:
        return 0.0, "starting"
    if progress.step is None:
        return 0.0, strip_controls(progress.message or "starting")
    left = f", {duration(progress.eta_s)} left" if progress.eta_s is not None else ""
    if not progress.max_steps:
        return 0.0, f"{count(progress.step)} steps{left}"
    words = f"{count(progress.step)} of {count(progress.max_steps)} steps{left}"
    return min(1.0, progress.step / progress.max_steps), words


def _figures_so_far(progress: Progress | None) -> dict[str, object]:
    if progress is None:
        return {}
    return {
        "train_samples_per_s": progress.samples_per_s,
        "loss": progress.loss,
        "eval_loss": progress.eval_loss,
    }


def _figures(values: Mapping[str, object]) -> dict[str, str]:
    written = {}
    for each in _FIGURES:
        value = values.get(each.name)
        if value is not None:
            written[each.title] = str(each.write(value))
    return written


class BenchmarkLive:
    """The live lines of a benchmark. `close` draws the last state."""

    def __init__(self, stream: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        self._screen = Screen(stream)
        self._clock = clock
        self._lines: tuple[LiveLine, ...] = ()
        self._drawn: tuple[LiveLine, ...] = ()
        self._drawn_at = float("-inf")
        self._began_at = clock()
        self._written: set[int] = set()
        self._passing = False  # whether the next drawing overwrites the terminal's last line

    def update(
        self, rows: Sequence[BenchmarkRow], progress: Mapping[str, Progress] | None = None
    ) -> None:
        """Draw the state of all rows at most four times a second, and an end at once."""
        before = [line.outcome for line in self._lines]
        self._lines = lines_of(rows, progress)
        after = [line.outcome for line in self._lines]
        if before != after or self._clock() - self._drawn_at >= _INTERVAL_S:
            self._draw()

    def close(self) -> None:
        self._draw()
        if self._passing:
            self._screen.write("\n")
            self._passing = False

    def _draw(self) -> None:
        if self._lines == self._drawn:
            return
        self._drawn = self._lines
        self._drawn_at = self._clock()
        if not self._screen.is_notebook:
            self._write()
            return
        self._screen.show(to_bundle(live_doc(self._lines, self._left_s())))

    def _left_s(self) -> float | None:
        """Return the remaining seconds, from the mean time of finished rows.

        None before the first end.
        """
        ours = [
            line
            for line in self._lines
            if not line.from_disk and line.outcome is not Outcome.SKIPPED
        ]
        if not any(line.outcome.is_terminal for line in ours):
            return None
        done = sum(1.0 if line.outcome.is_terminal else line.share for line in ours)
        seconds = self._clock() - self._began_at
        return seconds * (len(ours) - done) / done

    def _write(self) -> None:
        clear = "\r\x1b[K" if self._passing else ""
        total = len(self._lines)
        for line in self._lines:
            if line.outcome.is_terminal and line.number not in self._written:
                self._written.add(line.number)
                text = f"{line.number}/{total}  {line.label}  {line.outcome_text}  {line}"
                self._screen.write(f"{clear}{text.rstrip()}\n")
                clear = ""
                self._passing = False
        running = [line for line in self._lines if line.outcome is Outcome.RUNNING]
        if self._screen.is_live and running:
            first = running[0]
            columns = shutil.get_terminal_size().columns - 1
            text = f"{first.number}/{total}  {first.label}  {first}"
            self._screen.write("\r\x1b[K" + cut(text, columns))
            self._passing = True

    def __str__(self) -> str:
        return to_text(live_doc(self._lines, self._left_s()))


def forecast_doc(forecast: BenchmarkForecast) -> Doc:
    """State a row of the benchmark per line, repeats together, and the sum."""
    total = pluralize(len(forecast.rows), "row")
    runs = pluralize(forecast.runs, "run")
    grid = grid_of(
        [_row(row) for row in forecast.rows],
        _FORECAST,
        caption=f"{forecast.name}: {total}, {runs}, {count(forecast.to_go)} to go",
        stay=("row",),
    )
    notes = [Note(text) for text in _notes(forecast)]
    return Doc(blocks=[Table(grid), *notes])


def _row(row: ForecastRow) -> dict[str, object]:
    return {
        "name": row.name,
        "runs": row.runs,
        "gib": row.memory.gib,
        "note": _before_start(row),
    }


def _before_start(row: ForecastRow) -> str:
    if row.finished == row.runs:
        return "finished on disk"
    if row.memory.refusal:
        return f"will be skipped: {row.memory.refusal}"
    parts = []
    if row.finished:
        parts.append(f"{count(row.finished)} of {count(row.runs)} finished on disk")
    if row.memory.unknown:
        parts.append(row.memory.unknown)
    return "; ".join(parts)


def _notes(forecast: BenchmarkForecast) -> list[str]:
    notes = []
    memory = [row.memory.gib for row in forecast.rows if row.memory.gib is not None]
    if memory:
        notes.append(
            f"Predicted memory: at most {gib(max(memory))} a "
            "pod, by the longest rows that the jobs allow."
        )
    why: dict[str, list[str]] = {}
    for left in forecast.left_out:
        why.setdefault(left.why, []).append(left.name)
    for reason, names in why.items():
        notes.append(f"Left out: {'; '.join(dict.fromkeys(names))}: {reason}.")
    return notes
