"""`BenchmarkResult`: the rows of a benchmark, their comparisons, and the report as a page."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.display_protocol import Displayable, LiveDisplayable, as_page
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import is_folder, read_json, user_path
from workbench.base.json_values import get_object
from workbench.base.table import data_frame
from workbench.base.words import pluralize, short_list, strip_controls
from workbench.benchmark.comparable_groups import Group, groups
from workbench.benchmark.finished_rows import kept_rows
from workbench.benchmark.grid import LeftOut
from workbench.benchmark.read import row_of
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.client.result import Card, RunResult, card_of, replace_text
from workbench.client.tables.run_rows import columns, with_options
from workbench.rundir.catalog.find import find_runs
from workbench.rundir.paths import RunPaths
from workbench.rundir.view import RunView

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger(__name__)
_NAMED = 4  # models, and techniques, in a title
DEFAULT_NAME = "benchmark"
"""Name of a benchmark that was given none."""
HTML_NAME = "report.html"
_OTHER_FORMS = (".md", ".markdown", ".html", ".htm", ".pdf", ".txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult(Displayable):
    """The rows of a benchmark.

    Prints, and shows in a notebook, as its table with the published figures beside it.
    """

    name: str
    folder: Path
    """Where its run directories are, absolute."""
    rows: tuple[BenchmarkRow, ...]
    """A row per run in the order of the grid, with any outcome."""
    left_out: tuple[LeftOut, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """Comparable rows together, repeats folded, with speed-up and efficiency."""
        return groups(self.rows)

    def to_dataframe(self) -> DataFrame:
        """Return the rows as a pandas DataFrame, a row per run, with units in the column names.

        Columns are as of `history().to_dataframe()`: figures of a run by the same names, and
        `option.NAME` for an option that differs. The fields of `BenchmarkRow` that other runs do
        not have follow. `speed_up` and `efficiency` are computed over all repeats of a row.
        """
        # The folded row of every row, with the comparisons over all repeats.
        folded: dict[int, BenchmarkRow] = {}
        for group in self.groups:
            for summary in group.summaries:
                for row in summary.rows:
                    folded[id(row)] = summary.row
        rows = []
        for row in self.rows:
            facts = row.figures()
            for name in ("speed_up", "efficiency"):
                facts[name] = getattr(folded[id(row)], name)
            rows.append(facts)
        known = {name for facts in rows for name in facts}
        jobs = [get_object(row.spec, "job") for row in self.rows]
        return data_frame(with_options(rows, jobs), [name for name in columns() if name in known])

    @property
    def from_disk(self) -> tuple[BenchmarkRow, ...]:
        """The rows that were found finished instead of run."""
        return tuple(row for row in self.rows if row.from_disk)

    def report(self, folder: str | Path | None = None) -> Path:
        """Write `report.html`, which needs no network, and return its path.

        Args:
            folder: Target folder. Default: the benchmark's folder.

        Raises:
            ConfigError: The folder is named as a file of another form, such as `report.md`.
            RunError: The folder cannot be made.
        """
        target = Path(folder or self.folder)
        name = self.name if self.name != DEFAULT_NAME else ""
        title = f"Benchmark {name}".rstrip()
        return write_report(self.rows, target, title=title)

    def plots(self) -> BenchmarkPlots:
        """Return scaling and losses as plots; a cell shows the last value."""
        return BenchmarkPlots(self)

    def __add__(self, other: BenchmarkResult) -> BenchmarkResult:
        """Append the rows of another benchmark; of a row in both, the other's is kept."""
        places = {_place(row) for row in other.rows}
        mine = tuple(row for row in self.rows if _place(row) not in places)
        rows = mine + other.rows
        left_out = self.left_out + other.left_out
        return replace(self, rows=rows, left_out=left_out)

    def __repr__(self) -> str:
        counts = Counter(row.outcome for row in self.rows)
        outcomes = [f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome]]
        ends = ", ".join(outcomes)
        from_disk = len(self.from_disk)
        rows = f"{len(self.rows)} rows, {ends}; {from_disk} from disk"
        return f"BenchmarkResult({self.name}: {rows})"


@dataclass(frozen=True, slots=True)
class BenchmarkPlots(LiveDisplayable):
    """The plots of a benchmark for a notebook; the text form names the place to see them."""

    result: BenchmarkResult


class Report:
    """The content of a report on some rows; unreadable rows are left out and named."""

    def __init__(
        self,
        rows: Sequence[BenchmarkRow],
        *,
        title: str = "",
        problems: Iterable[str] = (),
        with_cards: bool = True,
    ):
        self.title = title or _title_of(rows)
        self.rows = tuple(rows)
        self.groups = groups(rows)
        self.of_benchmark = any(_of_benchmark(row) for row in rows)
        """Whether a benchmark asked for some of the rows. Ordinary runs asked for no comparison."""
        self.views: dict[Path, RunView] = {}
        """Views of the files of the runs, by run directory."""
        self.cards: dict[Path, Card] = {}
        """By run directory of an ended run, its card: with it the FLOPS profile, the answers, the
        curves and logs."""
        self.problems = list(problems)
        """Problems with unreadable or unfinished runs, a line per problem."""
        for row in rows:
            if not row.outcome.is_terminal:
                self.problems.append(
                    f"{row.name} is {row.outcome}: the figures "
                    "are preliminary, and there is no card"
                )
            if row.path is not None and row.path not in self.views:
                self._read(row.name, row.path, with_cards)
        self.written_s = time.time()

    def _read(self, name: str, path: Path, with_card: bool) -> None:
        if not path.is_dir():
            self.problems.append(f"{name} has no card: the run directory {path} is gone")
            return
        try:
            self.views[path] = RunView(path)
            if with_card and RunPaths(path).result.exists():
                result = RunResult.load(path)
                self.cards[path] = card_of(result, HTML_NAME)
        except Exception as error:  # run boundary
            logger.debug("reading %s", path, exc_info=True)
            self.problems.append(f"{name} has no card: {error}")

    def card_of(self, row: BenchmarkRow) -> Card | None:
        """Return the card of a row's run; None where it did not end, or cannot be read."""
        if row.path is None:
            return None
        return self.cards.get(row.path)

    def view_of(self, row: BenchmarkRow) -> RunView | None:
        """Return the view of a row's run; None where it never started or cannot be read."""
        return self.views.get(row.path) if row.path else None

    def began_s_of(self, row: BenchmarkRow) -> float | None:
        """Return when a row's run was submitted, in seconds since 1970; None if unknown."""
        view = self.view_of(row)
        return view.began_s if view else None


def _of_benchmark(row: BenchmarkRow) -> bool:
    """Whether a benchmark submitted the run. Rows that never started are of a benchmark."""
    if row.path is None:
        return True
    info = read_json(RunPaths(row.path).info)
    return bool(get_object(info, "benchmark"))


def _title_of(rows: Sequence[BenchmarkRow]) -> str:
    """Name the runs, models and techniques of a report."""
    models = dict.fromkeys(row.model.rstrip("/").rpartition("/")[2] for row in rows)
    named = [strip_controls(model) for model in models if model]
    techniques = dict.fromkeys(strip_controls(row.technique) for row in rows if row.technique)
    title = pluralize(len(rows), "run")
    if named:
        title += f" of {short_list(named, _NAMED)}"
    if techniques:
        title += f": {short_list(list(techniques), _NAMED)}"
    return title


def write_report(
    rows: Sequence[BenchmarkRow],
    folder: Path,
    *,
    title: str = "",
    problems: Iterable[str] = (),
) -> Path:
    """Write `report.html` into a folder and return its path; an old file is replaced atomically.

    The default title names what the rows are.
    """
    target = user_path(folder).absolute()
    if target.suffix.lower() in _OTHER_FORMS and not target.is_dir():
        raise ConfigError(
            f"{target.name} is a file of another form. A report is the page {HTML_NAME}: give the "
            "folder for the page."
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise RunError(f"{target} cannot be made: {why}") from error
    report = Report(rows, title=title, problems=problems)
    html = target / HTML_NAME
    replace_text(html, as_page(report))
    return html


def rows_below(places: Iterable[Path]) -> tuple[list[BenchmarkRow], list[str]]:
    """Read all runs below some folders: a benchmark's rows in its order, other rows by age."""
    rows: list[BenchmarkRow] = []
    broken: list[str] = []
    seen: set[Path] = set()
    given = [user_path(place).absolute() for place in places]
    for place in given:
        if not is_folder(place):
            raise ConfigError(
                f"there is no folder {place}; give run directories, "
                "a cluster's directory or a benchmark's folder"
            )
        found = {paths.root.resolve() for paths in find_runs(place)}
        read: list[BenchmarkRow] = []
        for root in sorted(found - seen):
            seen.add(root)
            # Run boundary: damaged files of a run must not hide the other runs.
            try:
                read.append(row_of(root))
            except Exception as error:
                logger.debug("reading %s", root, exc_info=True)
                broken.append(f"{root} cannot be read: {error}")
        # A run that the benchmark ran again since is left out.
        kept = kept_rows(place)
        newest = [row for row in read if not _run_again_since(row, kept)]
        older = len(read) - len(newest)
        if older:
            broken.append(f"{older} older run(s) left out: newer runs of the same rows exist")
        rows += _in_order(newest, kept)
    if not rows and not broken:
        named = ", ".join(map(str, given)) or "nothing"
        raise ConfigError(
            f"no run is at or below {named}; give run directories (with a run.json) or folders "
            "above"
        )
    return rows, broken


def _run_again_since(row: BenchmarkRow, kept: Sequence[BenchmarkRow]) -> bool:
    """Whether the benchmark took another run for this row.

    By name, as the folder may have been moved.
    """
    if row.path is None:
        return False
    place = _place(row)
    taken = []
    for other in kept:
        if _place(other) == place and other.path:
            taken.append(other.path.name)
    return bool(taken) and row.path.name not in taken


def _place(row: BenchmarkRow) -> tuple[str, int]:
    """Return key and repeat, the place of a row in a benchmark."""
    return row.key, row.repeat


def _in_order(read: Sequence[BenchmarkRow], kept: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    """Sort rows in the order of the benchmark, with never started rows; others come last."""
    # The benchmark knows the cost of a row in money; the run directory does not.
    costs = {_place(row): row.cost for row in kept}
    rows = []
    for row in read:
        cost = row.cost or costs.get(_place(row))
        rows.append(replace(row, cost=cost))
    # Rows that never started have no run directory.
    there = {_place(row) for row in read}
    for row in kept:
        never_started = row.path is None and row.outcome.is_terminal
        if never_started and _place(row) not in there:
            rows.append(row)
    numbers = {_place(row): number for number, row in enumerate(kept)}
    last = len(kept)

    def order(row: BenchmarkRow) -> tuple[int, str]:
        return numbers.get(_place(row), last), row.name

    return sorted(rows, key=order)
