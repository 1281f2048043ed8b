"""Views of runs: runs below a folder as a table, with equal options above, and comparisons."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from workbench.base.json_values import number as json_number
from workbench.base.table import Cell, Grid, Key, Toned, cell_text, text_table
from workbench.base.words import (
    UNKNOWN,
    count,
    counted,
    duration,
    moment,
    number,
    percent,
    short_list,
)
from workbench.client.comparison import ComparisonPlot, RunComparison
from workbench.client.history import History
from workbench.display.kit.doc import (
    Block,
    Doc,
    Figure,
    Fold,
    Note,
    Raw,
    Table,
    blocks_html,
    to_bundle,
    to_bundles,
)
from workbench.display.kit.line import show_bundle
from workbench.display.kit.live import NOTHING, has_widgets, put
from workbench.display.kit.plots.figure import Plot, plot_words
from workbench.display.kit.plots.runs import losses_plot
from workbench.display.kit.plots.static import labelled_svg
from workbench.display.kit.templates import html_table
from workbench.display.kit.widgets import Button, ButtonBar
from workbench.rundir.catalog.store import RunRecord

_RUNS = 50
_MOST_RUNS = 200  # in HTML: the first 50, and folds of 50
_FILTERED_FROM = 10
_FILTER = "Filter: words of any column"
_TONES: Mapping[str, Literal["good", "bad", "warn", "busy", "quiet"]] = {
    "succeeded": "good",
    "failed": "bad",
    "lost": "bad",
    "cancelled": "warn",
    "stopped": "quiet",
    "queued": "quiet",
}
"""Colour of a state; the states of a live run are `busy`."""
_COMPARED_IN = (8.4, 3.2)
_SILENT_SHOWN = 3
_CELL_PX = 1140  # width of a notebook's cell in a window of 1400 px, without the tick boxes
_LETTER_PX = 7.6
_BETWEEN_PX = 16.0
_ORDER = (
    "#",
    "run",
    "state",
    "eval loss",
    "exact match",
    "samples/s",
    "technique",
    "pods",
    "train loss",
    "duration",
    "steps",
    "model",
    "when",
)
"""Columns by priority for a narrow window: results first, then options that often differ."""
_OUTPUTS = 3  # outputs of a comparison: differences and plot, its PNG, tables


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    title: str
    keys: Sequence[Key]
    cells: Sequence[Cell]
    right: bool = False
    cut: bool = False
    above: bool = False
    """Whether a column of equal cells may stand above the table."""

    @property
    def tells(self) -> bool:
        return any(cell not in ("", UNKNOWN) for cell in self.cells)

    @property
    def width_px(self) -> float:
        """Approximate width in pixels. Titles wrap at blanks."""
        texts = self.title.split()
        texts += [cell_text(cell, self.cut) for cell in self.cells]
        longest = max(len(text) for text in texts)
        return _LETTER_PX * longest + _BETWEEN_PX


def history_doc(history: History) -> Doc:
    """State the newest runs, and the next in folds. HTML has a field that filters all of them."""
    first = Table(history_grid(history, _RUNS), width=80)
    if len(history) <= _FILTERED_FROM:
        return Doc(blocks=[first], full=True)
    place = Markup('<div class="wb-filter" title="{}"></div>').format(_FILTER)
    blocks: list[Block] = [Raw(str(place))]
    if len(history) <= _RUNS:
        return Doc(blocks=[*blocks, first], full=True)
    # All pages have the columns of the longest table.
    grid = history_grid(history, _MOST_RUNS)
    whole = replace(grid, rows=grid.rows[:_RUNS], keys=grid.keys[:_RUNS])
    pages = [Markup('<div class="wb-wide" tabindex="0">{}</div>').format(Markup(html_table(whole)))]
    for begin in range(_RUNS, len(grid.rows), _RUNS):
        end = min(begin + _RUNS, len(grid.rows))
        page = replace(grid, rows=grid.rows[begin:end], keys=grid.keys[begin:end], caption="")
        fold = Markup(
            '<details><summary>runs {} to {}</summary><div class="wb-wide">{}</div></details>'
        )
        pages.append(fold.format(begin, end - 1, Markup(html_table(page, bare=True))))
    rest = f"history()[{_RUNS}:] shows the older runs"
    text = f"{text_table(first.grid, first.width)}\n{rest}"
    blocks.append(Raw(str(Markup("").join(pages)), text))
    if len(history) > _MOST_RUNS:
        older = counted(len(history) - _MOST_RUNS, "older run")
        note = Note(f"{older}: history()[{_MOST_RUNS}:] shows them")
        blocks.append(Raw(str(blocks_html([note]))))
    return Doc(blocks=blocks, full=True)


def show_history(history: History) -> None:
    """Display the newest runs; with buttons, ticked rows are compared below the table."""
    bundle = to_bundle(history_doc(history))
    name = uuid.uuid4().hex
    if len(history) < 2 or not has_widgets():
        show_bundle(bundle)
        return

    def compare() -> None:
        if len(bar.ticked) < 2:
            bar.say("Tick two runs or more.", bad=True)
            return
        bar.say("")
        drawn = to_bundles(comparison_doc(history.compare(*bar.ticked)))
        for place, output in zip_longest(range(_OUTPUTS), drawn, fillvalue=NOTHING):
            put(output, f"{name}-{place}")

    button = Button(
        name="compare",
        text="Compare the ticked runs",
        tip="Draws their losses and figures below",
    )
    bar = ButtonBar("button of the table of runs", {"compare": compare}, [button], "compare run")
    put(bar.bundle(name), f"{name}-buttons", update=False)
    frame = Markup('<div class="wb-picture" data-wb="{}">{}</div>')
    page = frame.format(name, Markup(bundle["text/html"]))
    put({**bundle, "text/html": str(page)}, name, update=False)
    for place in range(_OUTPUTS):
        put(NOTHING, f"{name}-{place}", update=False)


def comparison_doc(comparison: RunComparison) -> Doc:
    """State a comparison for a notebook, where no list beside it shows the colours of runs."""
    return runs_doc(comparison, distinct=True)


def runs_doc(comparison: RunComparison, *, distinct: bool = False) -> Doc:
    """State loss curves, figures, different options, and differences that prevent a comparison."""
    plot = losses_plot([(run.name, run.view) for run in comparison.runs], distinct=distinct)
    drawn = labelled_svg(plot, size_in=_COMPARED_IN)
    lines = []
    drawn_words = plot_words(plot)
    if drawn_words:
        lines.append(drawn_words)
    for run in comparison.runs:
        if not any(len(curve) for curve in run.view.curves.values()):
            lines.append(f"{run.name}: no losses")
    words = "\n".join(lines)
    blocks: list[Block] = [Note(note, "caution") for note in comparison.notes]
    blocks.append(Figure(drawn, "Loss over optimizer steps", words, plot))
    blocks += [Note(line) for line in _legend(plot)]
    blocks.append(Table(comparison.figures()))
    options = comparison.options()
    if options.rows:
        blocks.append(Table(options))
    else:
        blocks.append(Note(str(options.caption)))
    equal = comparison.equal_options()
    if equal.rows:
        # The text is short: it names the call that returns the rest.
        number_of_options = counted(len(equal.rows), "equal option")
        fold = Fold(number_of_options, [Table(replace(equal, caption=""))])
        blocks.append(
            Raw(
                html=str(blocks_html([fold])),
                text=f"{number_of_options}: equal_options() returns them",
            )
        )
    return Doc(blocks=blocks)


def comparison_plot_doc(it: ComparisonPlot) -> Doc:
    """State the losses alone, drawn as the user chose."""
    runs = [(run.name, run.view) for run in it.comparison.runs]
    plot = losses_plot(runs, it.options, distinct=True)
    if not plot:
        where = f" within{it.options.words[1:]}" if it.options.words else ""
        return Doc(blocks=[Note(f"No run has logged two losses{where}.")])
    title = f"{plot.label.capitalize()}{it.options.words}"
    words = plot_words(replace(plot, notes=()))
    figure = Figure(labelled_svg(plot, size_in=_COMPARED_IN), title, words, plot)
    return Doc(blocks=[figure, *(Note(line) for line in [*plot.notes, *_legend(plot)])])


def _legend(plot: Plot) -> list[str]:
    """Explain open markers, where a plot has some."""
    if any(not one.joined for one in plot.series):
        return ["Open markers are evaluations."]
    return []


def history_grid(history: History, limit: int | None = None) -> Grid:
    """Return the runs as a table, with as many different options, notes and folders as fit."""
    shown = history[:limit]
    columns = _columns(shown)
    more = [_numbers(each.title, each.values, each.write) for each in shown.metrics()]
    options = [_option(name, values) for name, values in shown.options().items()]
    note = _texts("note", [record.note for record in shown], cut=True)
    more += [*options[:1], note, *options[1:]]
    folders = [_near(record, history.folder) for record in shown]
    more.append(_texts("folder", folders, cut=True, above=True))
    # Columns of equal cells stand above the table.
    equal = []
    for column in (*columns, *more):
        if column.above and len(shown) > 1 and len(set(column.keys)) == 1:
            equal.append(column)
    drawn = [column for column in columns if column not in equal and column.tells]
    drawn.sort(key=lambda column: _ORDER.index(column.title))
    left_out = []
    for column in more:
        if column in equal or not column.tells:
            continue
        if sum(each.width_px for each in (*drawn, column)) < _CELL_PX:
            drawn.append(column)
        else:
            left_out.append(column.title)
    live = sum(record.is_live for record in history)
    live_runs = f", {count(live)} live" if live else ""
    facts = [f"{counted(len(history), 'run')} below {history.folder}" + live_runs]
    # A live run has no message, unless its keeper is silent or its files are unreadable.
    silent = [f"{r.name or r.id}: {r.message}" for r in history if r.is_live and r.message]
    facts += silent[:_SILENT_SHOWN]
    if limit is not None and limit < len(history):
        facts.append(f"the newest {count(limit)} shown")
    same = [f"{column.title} {column.cells[0]}" for column in equal if column.tells]
    if same:
        facts.append(f"the same in all runs: {', '.join(same)}")
    if left_out:
        facts.append(f"hidden columns: {short_list(left_out)}")
    titles = [column.title for column in drawn]
    # From columns to rows.
    cells = [column.cells for column in drawn]
    keys = [column.keys for column in drawn]
    return Grid(
        columns=titles,
        rows=list(zip(*cells, strict=True)),
        keys=list(zip(*keys, strict=True)),
        right={column.title for column in drawn if column.right},
        whole=titles,
        cut={column.title for column in drawn if column.cut},
        caption="; ".join(facts),
    )


def _columns(history: History) -> list[_Column]:
    records = history.records
    states = []
    for record in records:
        text = f"● {record.state}" if record.is_live else str(record.state)
        states.append(Toned(text, _TONES.get(record.state, "busy")))
    times = [record.submitted_s for record in records]
    figures: Sequence[tuple[str, str, Callable[..., str]]] = (
        ("steps", "steps", count),
        ("train loss", "train_loss", number),
        ("eval loss", "eval_loss", number),
        ("samples/s", "train_samples_per_s", number),
        ("duration", "duration_s", duration),
    )
    columns = [
        _numbers("#", range(len(records)), str),
        _texts("run", [record.name or record.id for record in records]),
        _Column(title="when", keys=times, cells=[moment(at, "%Y-%m-%d %H:%M") for at in times]),
        _Column(title="state", keys=[str(record.state) for record in records], cells=states),
        _texts(
            "model",
            [record.model for record in records],
            cut=True,
            above=True,
        ),
        _texts("technique", [record.technique for record in records], above=True),
        _numbers(
            "pods",
            [record.pods for record in records],
            count,
            above=True,
        ),
    ]
    for title, field, write in figures:
        values = [getattr(record, field) for record in records]
        columns.append(_numbers(title, values, write))
        if field == "eval_loss":
            matches = [json_number(record.of_kind.get("exact_match")) for record in records]
            columns.append(_numbers("exact match", matches, percent))
    return columns


def _numbers(
    title: str,
    keys: Sequence[Key],
    write: Callable[..., str],
    *,
    above: bool = False,
) -> _Column:
    return _Column(
        title=title,
        keys=list(keys),
        cells=[write(key) for key in keys],
        right=True,
        above=above,
    )


def _option(name: str, values: Sequence[object]) -> _Column:
    keys: list[Key] = [
        value if isinstance(value, int | float | None) else str(value) for value in values
    ]
    has_text = any(isinstance(key, str) for key in keys)
    return _Column(
        title=name.removeprefix("per_device_").replace("_", " "),  # titles wrap at blanks
        keys=keys,
        cells=[UNKNOWN if value is None else str(value) for value in values],
        right=not has_text,
        cut=True,
    )


def _texts(
    title: str,
    texts: Sequence[str],
    *,
    cut: bool = False,
    above: bool = False,
) -> _Column:
    return _Column(
        title=title,
        keys=[text or None for text in texts],
        cells=texts,
        cut=cut,
        above=above,
    )


def _near(record: RunRecord, folder: Path) -> str:
    # A run's folder has the run's id as name, unless the user chose another.
    place = record.path.parent if record.path.name == record.id else record.path
    if place == folder:
        return ""
    if place.is_relative_to(folder):
        return str(place.relative_to(folder))
    return str(place)
