"""Read a trained model's answers and judge them: same text, same logic, same result on the table.

Pure from the files of a run; no model is loaded here. Judging is WikiSQL's: logical form leaves out the order of
conditions and letter case, execution runs both queries on the question's table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError, RunError
from workbench.base.shown import Shown, as_grid
from workbench.base.words import count, percent
from workbench.jobs.data.lines import Fields, read_lines
from workbench.jobs.data.sources.convert import read_tables
from workbench.jobs.data.sql import parse
from workbench.jobs.data.tables import Table, execute

if TYPE_CHECKING:
    from workbench.base.table import Grid

__all__ = ["Prediction", "Predictions", "judge", "read_predictions", "share"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One question, the expected answer and the model's."""

    source: str
    """What the model read."""
    expected: str
    """What it should have written."""
    predicted: str
    """What it wrote."""
    exact_match: bool
    """Whether the two texts are the same, apart from blanks."""
    logical_match: bool | None
    """Whether the two queries say the same; None where the expected text is no query."""
    execution_match: bool | None
    """Whether both give the same result; None where the table is not at hand."""
    table_id: str | None = None
    """The table that the question is asked of."""


@dataclass(frozen=True, slots=True)
class Predictions(Shown):
    """All answers of a run. Prints, and shows in a notebook, as a table."""

    rows: tuple[Prediction, ...]
    """The answers, in the order of the evaluation rows."""

    @property
    def exact_match(self) -> float | None:
        """Share of answers whose text is right, 0 to 1; None where there are none."""
        return share([row.exact_match for row in self.rows])

    @property
    def logical_match(self) -> float | None:
        """Share of answers that say the same, of those whose expected text is a query."""
        return share([row.logical_match for row in self.rows])

    @property
    def execution_match(self) -> float | None:
        """Share of answers that give the same result, of those that could be run."""
        return share([row.execution_match for row in self.rows])

    def table(self, limit: int = 20) -> Grid:
        """Return the first answers beside the expected ones; words that differ are marked.

        Args:
            limit: How many rows at most; the caption says how many there are.
        """
        return as_grid(self, limit)

    @property
    def summary(self) -> str:
        """How many answers there are and how many are right, in a line."""
        shares = {
            "exactly right": self.exact_match,
            "the same logic": self.logical_match,
            "the same result": self.execution_match,
        }
        right = [f"{percent(share)} {words}" for words, share in shares.items() if share is not None]
        return ", ".join([f"{count(len(self.rows))} answers", *right])

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self.rows)

    def __iter__(self) -> Iterator[Prediction]:
        """Iterate over the answers."""
        return iter(self.rows)

    def __repr__(self) -> str:
        """Return how many there are and how many are right."""
        return f"Predictions({self.summary})"


def read_predictions(path: Path, tables: Path | None = None) -> Predictions:
    """Read and judge the answers of a run."""
    try:
        if path.stat().st_size == 0:
            return Predictions(())
        lines = [_Line(data, where) for where, data in read_lines(path)]
        ids = _table_ids(tables.with_name("eval.jsonl")) if tables else {}
        for line in lines:
            line.table_id = line.table_id or ids.get(line.source)
        wanted = {line.table_id for line in lines}
        known = {table.id: table for table in read_tables(tables) if table.id in wanted} if tables else {}
    except (OSError, ConfigError) as error:
        raise RunError(f"the predictions in {path} cannot be read: {error}") from error
    return Predictions(tuple(line.judged(known) for line in lines))


def judge(source: str, expected: str, predicted: str, *, table: Table | None = None) -> Prediction:
    """Compare an answer with the expected one.

    Args:
        source: What the model read.
        expected: What it should have written.
        predicted: What it wrote.
        table: The table to run both on.

    Example:
        >>> judge("…", "SELECT a FROM table WHERE b = C AND d = 1", "SELECT A FROM table WHERE d = 1 AND b = c")
        Prediction(source='…', expected='SELECT a FROM table WHERE b = C AND d = 1', \
predicted='SELECT A FROM table WHERE d = 1 AND b = c', exact_match=False, logical_match=True, \
execution_match=None, table_id=None)
    """
    wanted, answered = parse(expected), parse(predicted)
    same = wanted is not None and answered is not None and wanted.logical_form() == answered.logical_form()
    return Prediction(
        source=source,
        expected=expected,
        predicted=predicted,
        exact_match=expected.split() == predicted.split(),
        logical_match=None if wanted is None else same,
        execution_match=None if table is None else _same_result(expected, predicted, table),
        table_id=table.id if table else None,
    )


def share(verdicts: Iterable[bool | None]) -> float | None:
    """Return the share of verdicts that hold, of those that are known; None where none is.

    Example:
        >>> share([True, False, None])
        0.5
    """
    known = [verdict for verdict in verdicts if verdict is not None]
    return sum(known) / len(known) if known else None


class _Line:
    """A line of the file, before its table is known."""

    def __init__(self, data: object, where: str) -> None:
        fields = Fields(data, where)
        self.source = " ".join([fields.text("source"), fields.words("input", fields.data.get("input", ""))]).strip()
        self.expected = fields.words("expected", fields.get("expected"))
        self.predicted = fields.words("predicted", fields.get("predicted"))
        self.table_id = fields.text("table_id") if fields.data.get("table_id") else None

    def judged(self, tables: Mapping[str, Table]) -> Prediction:
        return judge(self.source, self.expected, self.predicted, table=tables.get(self.table_id or ""))


def _table_ids(path: Path) -> dict[str, str]:
    """Return the table of each question; a question asked of several tables is left out."""
    found: dict[str, set[str]] = {}
    for where, data in read_lines(path) if path.exists() else ():
        row = Fields(data, where)
        if row.data.get("table_id"):
            found.setdefault(row.text("source"), set()).add(row.text("table_id"))
    return {source: ids.pop() for source, ids in found.items() if len(ids) == 1}


def _same_result(expected: str, predicted: str, table: Table) -> bool | None:
    wanted, answered = parse(expected), parse(predicted)
    if wanted is None:
        return None
    try:
        right = execute(wanted, table)
    except ConfigError:
        return None
    try:
        # As a bag: SQL promises no order.
        return answered is not None and Counter(execute(answered, table)) == Counter(right)
    except ConfigError:
        return False
