"""Views of runs: runs below a folder as a table, with equal options above, and comparisons."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from markupsafe import Markup

from workbench.base.table import Cell, Grid, Spark, Tone, Toned
from workbench.base.words import (
    UNKNOWN,
    count,
    moment,
    number,
    percent,
    pluralize,
    short_list,
    size,
)
from workbench.client.deletion import bytes_of_run
from workbench.client.tables.comparison import ComparisonPlot, RunComparison
from workbench.client.tables.history import History
from workbench.client.tables.run_table import FIGURES, Format, figure, grid_of
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
from workbench.display.kit.plots.static import plot_svg
from workbench.display.kit.widgets import Button, ButtonBar
from workbench.rundir.catalog.store import RunRecord
from workbench.rundir.figures.glimpse import some_losses
from workbench.rundir.paths import RunPaths
from workbench.rundir.state import RunState

_RUNS = 50
_FILTERED_FROM = 10
_FILTER = "Filter: words of any column"
_TONES: Mapping[str, Tone] = {
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
_OUTPUTS = 3  # outputs of a comparison: differences and plot, its PNG, tables


def history_doc(history: History) -> Doc:
    """State the newest runs. HTML has a field for filtering the rows."""
    blocks: list[Block] = [Table(history_grid(history, _RUNS), width=80)]
    if len(history) > _FILTERED_FROM:
        place = Markup('<div class="wb-filter" title="{}"></div>').format(_FILTER)
        blocks.insert(0, Raw(str(place)))
    if len(history) > _RUNS:
        blocks.append(Note(f"history()[{_RUNS}:] shows the older runs"))
    return Doc(blocks=blocks, full=True)


def show_history(history: History) -> None:
    """Display the newest runs; with buttons, ticked rows are compared below the table."""
    bundle = to_bundle(history_doc(history))
    name = uuid.uuid4().hex
    # Without a live kernel's widgets the table stands alone.
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
    # Places for the comparison, filled by the button.
    for place in range(_OUTPUTS):
        put(NOTHING, f"{name}-{place}", update=False)


def comparison_doc(comparison: RunComparison) -> Doc:
    """State a comparison for a notebook, where no list beside it shows the colours of runs."""
    return runs_doc(comparison, distinct=True)


def runs_doc(comparison: RunComparison, *, distinct: bool = False) -> Doc:
    """State loss curves, figures, different options, and differences that prevent a comparison."""
    plot = losses_plot([(run.name, run.view) for run in comparison.runs], distinct=distinct)
    drawn = plot_svg(plot, size_in=_COMPARED_IN)
    # Words for readers who see no picture: the curves, and runs without losses.
    lines = []
    drawn_words = plot_words(plot)
    if drawn_words:
        lines.append(drawn_words)
    for run in comparison.runs:
        if not any(len(curve) for curve in run.view.curves.values()):
            lines.append(f"{run.name}: no losses")
    words = "\n".join(lines)
    # What cannot be compared stands above the curves.
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
        number_of_options = pluralize(len(equal.rows), "equal option")
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
    figure = Figure(plot_svg(plot, size_in=_COMPARED_IN), title, words, plot)
    return Doc(blocks=[figure, *(Note(line) for line in [*plot.notes, *_legend(plot)])])


def _legend(plot: Plot) -> list[str]:
    """Explain open markers, where a plot has some."""
    if any(not one.joined for one in plot.series):
        return ["Open markers are evaluations."]
    return []


def history_grid(history: History, limit: int | None = None) -> Grid:
    """Return the runs as a table: options that differ, results, notes and folders."""
    shown = history[:limit]
    rows = []
    for place, (row, record) in enumerate(zip(shown.rows(), shown.records, strict=True)):
        disk = None if record.is_live else bytes_of_run(record.path)
        losses = tuple(some_losses(RunPaths(record.path)))
        names = {"#": place, "run": record.name or record.id, "disk": disk, "losses": losses}
        rows.append({**row, **names, "folder": _near(record, history.folder)})
    metrics = [figure(each.key, each.title, each.write) for each in shown.metrics()]
    options = [_option(name, values) for name, values in shown.options().items()]
    note = Format(name="note", title="note", cut=True)
    folder = Format(name="folder", title="folder", cut=True, above=True)
    # Columns of equal cells stand above the table.
    formats = []
    same = []
    first, rest = options[:_FIRST_OPTIONS], options[_FIRST_OPTIONS:]
    for each in (*_NAMES, *first, *_RESULTS, note, *_MORE, *metrics, *rest, folder):
        values = {row.get(each.name) for row in rows} if each.above else set()
        if len(values) != 1 or len(rows) == 1:
            formats.append(each)
            continue
        cell = each.write(*values)
        if cell not in ("", UNKNOWN):
            same.append(f"{each.title} {cell}")
    live = sum(record.is_live for record in history)
    live_runs = f", {count(live)} live" if live else ""
    facts = [f"{pluralize(len(history), 'run')} below {history.folder}" + live_runs]
    # A live run has no message, unless its keeper is silent or its files are unreadable.
    silent = [f"{r.name or r.id}: {r.message}" for r in history if r.is_live and r.message]
    facts += silent[:_SILENT_SHOWN]
    facts += _hours(history)
    if limit is not None and limit < len(history):
        facts.append(f"the newest {count(limit)} shown")
    if same:
        facts.append(f"the same in all runs: {', '.join(same)}")
    return grid_of(rows, formats, caption="; ".join(facts), stay=("#", "run", "state"), sorts=True)


def _hours(history: History) -> list[str]:
    """Return the hours of all runs by person, the most first: of GPUs, and of pods without GPUs."""
    hours: dict[str, dict[str, float]] = {"GPU-hours": {}, "pod-hours": {}}
    for record in history:
        used = record.gpu_hours if record.gpus_per_pod else record.pod_hours
        by_person = hours["GPU-hours" if record.gpus_per_pod else "pod-hours"]
        name = record.user or "unknown"
        by_person[name] = by_person.get(name, 0.0) + (used or 0.0)
    facts = []
    for unit, by_person in hours.items():
        ordered = sorted(by_person.items(), key=lambda item: -item[1])
        shares = [f"{name} {number(used)}" for name, used in ordered if used]
        if shares:
            facts.append(f"{unit}: {short_list(shares)}")
    return facts


def _state(state: str) -> Toned:
    if RunState(state).is_terminal:
        return Toned(state, _TONES.get(state, "busy"))
    return Toned(f"● {state}", _TONES.get(state, "busy"))


def _spark(losses: tuple[float, ...]) -> Cell:
    return Spark(losses) if len(losses) > 1 else UNKNOWN


def _size(bytes_: int | None) -> str:
    return UNKNOWN if bytes_ is None else size(bytes_)


def _when(at_s: float | None) -> str:
    return moment(at_s, "%Y-%m-%d %H:%M")


_NAMES = (
    figure("#", "#", str),
    Format(name="run", title="run"),
    Format(name="state", title="state", write=_state),
    Format(name="technique", title="technique", above=True),
)
"""Columns before the options that differ."""
_RESULTS = (
    Format(name="losses", title="loss curve", write=_spark),
    FIGURES["eval_loss"],
    Format(name="submitted_s", title="when", write=_when),
    figure("exact_match", "exact match", percent),
    FIGURES["train_samples_per_s"],
)
"""Columns behind the first options that differ."""
_MORE = (
    FIGURES["pods"],
    FIGURES["train_loss"],
    FIGURES["duration_s"],
    FIGURES["gpu_hours"],
    FIGURES["pod_hours"],
    Format(name="user", title="user", above=True),
    FIGURES["steps"],
    figure("disk", "on disk", _size),
    Format(name="model", title="model", cut=True, above=True),
)
"""Columns that are folded first."""
_FIRST_OPTIONS = 3


def _option(name: str, values: Sequence[object]) -> Format:
    has_text = any(not isinstance(value, int | float | None) for value in values)
    return Format(
        name=f"option.{name}",
        title=name.removeprefix("per_device_").replace("_", " "),  # titles wrap at blanks
        write=lambda value: UNKNOWN if value is None else str(value),
        right=not has_text,
        cut=True,
    )


def _near(record: RunRecord, folder: Path) -> str:
    # A run's folder has the run's id as name, unless the user chose another.
    place = record.path.parent if record.path.name == record.id else record.path
    if place == folder:
        return ""
    if place.is_relative_to(folder):
        return str(place.relative_to(folder))
    return str(place)
