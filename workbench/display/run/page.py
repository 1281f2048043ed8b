"""A run as text and HTML, for a live and a final picture, and the run card.

A card has all facts of a run on a single page, without script and network.
"""

from __future__ import annotations

import base64
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, singledispatch

from markupsafe import Markup

from workbench.base.errors import RunError
from workbench.base.table import Grid, text_table
from workbench.base.table import facts as fact_table
from workbench.base.words import (
    UNKNOWN,
    count,
    duration,
    gib,
    moment,
    number,
    percent,
    pluralize,
    short_list,
    strip_controls,
)
from workbench.client.result import Card, Recipe
from workbench.client.run import Run
from workbench.display.failure import fault_text
from workbench.display.kit.doc import (
    Block,
    Code,
    Doc,
    Fold,
    Heading,
    Items,
    Note,
    Raw,
    Table,
    blocks_html,
    stripped_words,
    to_page,
)
from workbench.display.kit.line import text_bar
from workbench.display.kit.logs import fold, folded_text, ranks_word
from workbench.display.kit.outliers import with_outliers
from workbench.display.kit.plots.figure import Plot, plot_words
from workbench.display.kit.plots.runs import curve_plot, memory_plot, plot_title
from workbench.display.kit.plots.static import plot_svg
from workbench.display.kit.templates import macro, render, styled
from workbench.display.records.answers import predictions_grid
from workbench.display.records.result import facts_of_result, profile_doc, result_doc
from workbench.display.records.scores import scores_doc
from workbench.display.run.facts import TIPS, RunFacts
from workbench.finetune.notebook.result import FineTuneCard
from workbench.rundir.figures.metrics import curves_of, plot_names
from workbench.rundir.figures.workers import EpochTime, GpuUse, WorkerBook, WorkerUse
from workbench.rundir.totals import MOST_FIGURES
from workbench.rundir.view import RunView

_BAR = 30
_TEXT_LINES = 10
_PAGE_LINES = 60
_FOLDED_LINES = 120  # of a rank's log
_RANKS = 8
_MOST_EPOCHS = 64
_ANSWERS = 12
_MOST_ANSWERS = 500
_MOST_PLOTS = 24  # run.plot(NAME) draws any other
_MOST_NAMED = 12
_TEXT_FILES = 200_000  # bytes; the text of a larger file is only in the archive
Drawing = Callable[[], str]


def run_doc(run: Run) -> Doc:
    """State a run as it is now; for an unreadable run, the reason."""
    try:
        return run_view_doc(RunView(run.path))
    except RunError as error:
        return Doc(blocks=[Note(strip_controls(str(error)))])


def run_view_doc(view: RunView, *, alone: bool = False) -> Doc:
    """State a run as of its last look; `alone` is for a page without notebook and cluster."""
    return RunPage(view, alone=alone).doc()


def run_text(view: RunView, *, alone: bool = False) -> str:
    return RunPage(view, alone=alone).text


def _draw_anew(_name: str, _state: object, draw: Drawing) -> str:
    return draw()


class RunPage:
    def __init__(
        self,
        view: RunView,
        plot: Callable[[str, object, Drawing], str] = _draw_anew,
        folds: Mapping[str, bool] | None = None,
        *,
        alone: bool = False,
    ):
        """Compute the facts. `folds`: open folds by title. `alone`: without notebook or cluster."""
        self.facts = RunFacts(view, alone=alone)
        self._view = view
        self._plot = plot
        self._grids = worker_grids(view.totals.book, view.gpus)
        self._folds = {} if folds is None else folds
        self._is_whole = folds is None or view.state.is_terminal
        last_lines = {}
        for rank in view.ranks:
            last_lines[rank] = view.log(rank)[-_FOLDED_LINES:]
        self._folded = fold(last_lines)

    def doc(self) -> Doc:
        html = styled(self._html(), self._view.state, sheet=False)
        return Doc(blocks=[Raw(html=html, text=self.text)], state=self._view.state)

    @property
    def text(self) -> str:
        facts = self.facts
        rows = []
        if facts.note:
            rows.append(("note", facts.note))
        rows += facts.head
        rows += facts.figures
        for pod, size in facts.memory:
            rows.append((f"memory of {pod}", size))
        table = fact_table(_title(facts), rows)
        parts = [text_table(table, width=100)]
        parts.append(f"[{text_bar(facts.share, _BAR)}] {facts.bar}")
        if facts.card:
            parts.append(fault_text(facts.card))
        parts += facts.receipt
        parts += [f"{name}: {line}" for name, (line, _) in facts.offers.items()]
        parts += [text_table(grid) for grid in self._grids]
        lines = self._folded[-_TEXT_LINES:]
        if lines:
            parts.append("Last lines of the logs, by rank:")
            parts.append(folded_text(lines, self._view.world_size))
        return "\n".join(parts)

    def _html(self) -> Markup:
        view = self._view
        facts = self.facts
        folded_lines = [
            (ranks_word(line.ranks, view.world_size), line.text)
            for line in self._folded[-_PAGE_LINES:]
        ]
        tables = [Table(grid) for grid in self._grids]
        draw_page = macro("run.html", "page")
        html = draw_page(
            facts,
            "GPU memory" if view.memory_kind == "cuda" else "memory",
            self._curves(),
            self._undrawn(),
            self._memory() if facts.memory else "",
            folded_lines,
            self._logs() if view.world_size > 1 else [],
            self._folds,
            blocks_html(tables),
            TIPS,
        )
        return Markup(html)

    def _curves(self) -> list[tuple[str, str]]:
        """Draw the curves, the loss first. During a run, folded curves have only a title."""
        curves = self._view.curves
        drawn: list[tuple[str, str]] = []
        for name in self._plot_names()[:_MOST_PLOTS]:
            title = strip_controls(plot_title(name))
            several = [curves[each] for each in curves_of(name) if each in curves]
            points = [(curve.begun, len(curve)) for curve in several]
            svg = ""
            is_open = not drawn or self._folds.get(title, title in self.facts.open_plots)
            if self._is_whole or is_open:
                draw = partial(self._draw_curve, name)
                svg = self._plot(name, points, draw)
            drawn.append((title, svg))
        return drawn

    def _plot_names(self) -> list[str]:
        """Return the names of the plots with points: known metrics, then the run's own figures."""
        curves = self._view.curves
        names = plot_names()
        # The job's own metrics follow the loss.
        names[1:1] = [name for name in self.facts.panel_metrics if name not in names]
        in_plots = {curve for name in names for curve in curves_of(name)}
        # A plot of a step's figure has the same figure of the evaluations.
        own = sorted(set(curves) - in_plots)
        for name in own:
            with_evaluation = any(name in curves_of(other) for other in own if other != name)
            if not with_evaluation:
                names.append(name)
        with_points = []
        for name in names:
            if any(len(curves[each]) for each in curves_of(name) if each in curves):
                with_points.append(name)
        return with_points

    def _undrawn(self) -> str:
        """Name the figures without a plot here, and the call to draw a plot."""
        parts = []
        names = self._plot_names()[_MOST_PLOTS:]
        if names:
            named = short_list([strip_controls(name) for name in names], _MOST_NAMED)
            parts.append(
                f"{pluralize(len(names), 'more figure')}, drawn by run.plot(NAME): {named}"
            )
        if self._view.totals.has_more_figures:
            parts.append(f"figures after the first {MOST_FIGURES} are in run.events() only")
        return "; ".join(parts)

    def _draw_curve(self, name: str) -> str:
        return _with_words(curve_plot(self._view, name))

    def _memory(self) -> str:
        samples = [len(host.gib) for host in self._view.memory.values()]
        return self._plot("memory", samples, lambda: _with_words(memory_plot(self._view)))

    def _logs(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return the last lines of logs. During a run, a closed fold has only a title."""
        logs = []
        ranks = self._view.ranks
        for rank in ranks[:_RANKS]:
            title = f"log of rank {rank}"
            lines = []
            if self._is_whole or self._folds.get(title):
                for line in self._view.log(rank)[-_PAGE_LINES:]:
                    lines.append(("", line))
            logs.append((title, lines))
        if len(ranks) > _RANKS:
            more = pluralize(len(ranks) - _RANKS, "more rank")
            logs.append((f"logs of {more}", [("", "run.logs(RANK) returns the log of any rank")]))
        return logs


def _with_words(plot: Plot) -> str:
    """Draw a plot, with words for places without SVG."""
    drawn = plot_svg(plot)
    return Markup(drawn) + stripped_words(plot_words(plot)) if drawn else ""


def _title(facts: RunFacts) -> str:
    name = f"{facts.name} ({facts.run_id})" if facts.name else facts.run_id
    message = f": {facts.how}" if facts.how and facts.card is None else ""
    hint = f" ({facts.hint})" if facts.hint else ""
    return f"Run {name} {facts.state}{message}{hint}"


def worker_grids(book: WorkerBook, gpus: Sequence[GpuUse]) -> list[Grid]:
    """Lay out the known facts. Empty tables are left out, and long tables are shortened."""
    grids = [_epochs(book.epochs), _workers(book.workers), _gpus(gpus)]
    return [grid for grid in grids if grid.rows]


def _epochs(epochs: Sequence[EpochTime]) -> Grid:
    rows = [
        (
            number(epoch.epoch),
            count(epoch.steps),
            duration(epoch.seconds),
            number(epoch.steps_per_s),
        )
        for epoch in epochs[-_MOST_EPOCHS:]
    ]
    columns = ("until epoch", "steps", "time", "steps/s")
    caption = "Epochs, without evaluations and checkpoints"
    if len(epochs) > len(rows):
        caption += f"; the last {len(rows)} of {count(len(epochs))}"
    return Grid(columns=columns, rows=rows, right=columns, caption=caption)


def _workers(workers: Sequence[WorkerUse]) -> Grid:
    through = ""
    if workers and workers[0].backend:
        through = "; collectives through " + workers[0].backend
    # A column without a value in any row would only take room.
    numbers: dict[str, list[float | None]] = {
        "own work in a step": [worker.own_s for worker in workers],
        "time in steps": [worker.seconds for worker in workers],
        "memory, peak": [worker.peak_rss_gib for worker in workers],
        "GPU memory, peak": [worker.peak_cuda_gib for worker in workers],
    }
    for title in ("own work in a step", "GPU memory, peak"):
        if all(value is None for value in numbers[title]):
            del numbers[title]
    columns = ["rank", "pod", *numbers, "threads", "cores"]
    rows = []
    for place, worker in enumerate(workers):
        row = [str(worker.rank), worker.pod]
        for title, values in numbers.items():
            write = gib if "memory" in title else duration
            row.append(write(values[place]))
        rows.append([*row, count(worker.threads), worker.cores or UNKNOWN])
    grid = Grid(
        columns=columns,
        rows=rows,
        right=set(columns) - {"pod", "cores"},
        caption=f"Workers{through}",
    )
    return with_outliers(grid, numbers)


def _gpus(gpus: Sequence[GpuUse]) -> Grid:
    rows: list[tuple[str, ...]] = [
        (
            gpu.pod,
            str(gpu.index),
            gib(gpu.peak_gib),
            gib(gpu.total_gib),
            UNKNOWN if gpu.percent is None else percent(gpu.percent / 100),
        )
        for gpu in gpus
    ]
    columns = ["pod", "GPU", "memory, peak", "of", "busy, mean"]
    right = tuple(columns[1:])
    if any(gpu.trouble for gpu in gpus):
        columns.append("trouble")
        rows = [(*row, gpu.trouble) for row, gpu in zip(rows, gpus, strict=True)]
    grid = Grid(columns=columns, rows=rows, right=right, caption="GPUs, by their driver")
    numbers: dict[str, Sequence[float | None]] = {
        "memory, peak": [gpu.peak_gib for gpu in gpus],
        "busy, mean": [gpu.percent for gpu in gpus],
        "trouble": [float(bool(gpu.trouble)) for gpu in gpus],
    }
    return with_outliers(grid, numbers)


def card_html(card: Card) -> str:
    result = card.result
    title = f"Run {result.path.name}: {result.trained}, {result.state}"
    return to_page(Doc(blocks=_blocks(card)), title)


def card_body(card: Card, anchor: str = "files", *, carry: bool = True) -> str:
    """Draw all of a card but the title, for a page with several cards.

    With `carry`, the card contains the recipe and the archive of its files, without their text.
    """
    return str(blocks_html(_blocks(card, anchor, carry=carry, texts=False)))


def _blocks(
    card: Card, anchor: str = "files", *, carry: bool = True, texts: bool = True
) -> list[Block]:
    result = card.result
    happened: list[Block] = []
    facts: list[Block] = []
    # The picture of a run has the plots and lines of the result already.
    if card.view:
        happened += run_view_doc(card.view, alone=True).blocks
        facts.append(facts_of_result(result))
    else:
        facts += result_doc(result).blocks
    if result.versions:
        versions = fact_table("Versions", sorted(result.versions.items()))
        facts.append(Table(versions))
    sections: dict[str, list[Block]] = {
        "What happened": happened,
        "Facts": facts,
        "Communication": [Items(card.communication)] if card.communication else [],
        **_of_kind(card),
        "How it was started": _started(card),
    }
    if card.recipe and carry:
        sections["Repeat it"] = _recipe(card.recipe, card.name, anchor, texts=texts)
    times = (result.started_s, result.ended_s, time.time())
    began, ended, now = (moment(at, "%Y-%m-%d %H:%M:%S UTC", utc=True) for at in times)
    blocks: list[Block] = [Note(f"from {began} to {ended}; this card was written {now}")]
    blocks += [Note(line, "plain") for line in card.missing]
    for title, inside in sections.items():
        if inside:
            blocks.append(Heading(title))
            blocks += inside
    return blocks


@singledispatch
def _of_kind(_card: Card) -> Mapping[str, list[Block]]:
    """Return the card sections of the job's kind, by title."""
    return {}


@_of_kind.register
def _of_finetune(card: FineTuneCard) -> Mapping[str, list[Block]]:
    profile: list[Block] = []
    if card.profile:
        profile += profile_doc(card.profile).blocks
    trace: list[Block] = []
    if card.trace:
        trace.append(Table(card.trace))
    benchmarks: list[Block] = []
    for scores in card.benchmarks:
        benchmarks += scores_doc(scores).blocks
    return {
        "Answers": _answers(card),
        "Benchmarks": benchmarks,
        "FLOPS profile": profile,
        "Trace": trace,
    }


def _answers(card: FineTuneCard) -> list[Block]:
    if card.predictions is None:
        return []
    total = len(card.predictions)
    first = Table(predictions_grid(card.predictions, _ANSWERS))
    if total <= _ANSWERS:
        return [first]
    more = Table(predictions_grid(card.predictions, _MOST_ANSWERS))
    return [first, Fold(f"more of the {count(total)} answers", [more])]


def _started(card: Card) -> list[Block]:
    texts = [("SPEC.json", card.spec), ("launch command", card.result.command)]
    files = card.recipe.files if card.recipe else {}
    for name in ("hostfile", "deepspeed.json"):
        if name in files:
            texts.append((name, _text(files[name])))
    return [Fold(name, [Code(text)]) for name, text in texts if text]


def _recipe(recipe: Recipe, name: str, anchor: str, *, texts: bool) -> list[Block]:
    packed = Markup(base64.b64encode(recipe.archive).decode())
    unpack = (
        f'sed -n \'s/^<a id="{anchor}".*base64,\\([^"]*\\)".*/\\1/p\' {shlex.quote(name)} '
        "| base64 -d > repeat.zip\npython3 -m zipfile -e repeat.zip repeat\ncd repeat"
    )
    files = sorted(recipe.files.items())
    sizes = [f"{file} ({count(len(content))} bytes)" for file, content in files]
    blocks: list[Block] = [
        Items(recipe.same, "Same as in the run:"),
        Items(recipe.differs, "Not the same, or to be had elsewhere:"),
        Code(unpack, "Unpack the files that this card carries:"),
        Code(recipe.commands, "Then:"),
        Note(", ".join(sizes)),
        Raw(render("card.html", anchor=anchor, packed=packed)),
    ]
    for file, content in files:
        is_for_reading = not file.startswith("tokenizer/") and not file.endswith(".jsonl")
        if texts and is_for_reading and len(content) <= _TEXT_FILES:
            blocks.append(Fold(file, [Code(_text(content))]))
    return blocks


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
