"""What a model can be asked: rows in any form made into questions, those of a run's own evaluation by default.

Files of the run directory are read; no model is asked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from workbench.errors import ConfigError, RunError
from workbench.runs.paths import RunPaths
from workbench.runs.state import read_json
from workbench.spec.convert import read_tables
from workbench.spec.lines import Fields, read_lines
from workbench.spec.rows import PREFIX, row_from
from workbench.spec.tables import Table

__all__ = ["Question", "RowLike", "job_options", "questions_of", "tables_of"]

RowLike = str | Mapping[str, object]
"""A row to answer: a question's text, or an object of `source` and perhaps `target` and `table_id`."""

_DEFAULT_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One row to answer."""

    source: str
    """What the model reads, complete."""
    expected: str | None = None
    """What it should write; None where nobody knows."""
    table_id: str | None = None
    """The table that is asked, where there is one."""


def questions_of(paths: RunPaths, rows: Iterable[RowLike] | None = None) -> list[Question]:
    """Make questions of rows.

    A bare text gets the instruction that the run's own rows begin with, and the expected answer of the evaluation
    row that asks the same.

    Args:
        paths: The run directory.
        rows: The rows. Default None: the first of the evaluation, as many as the run itself answered.

    Raises:
        ConfigError: A row is of no known form; names it.
        RunError: The run has no evaluation rows, and none were given.
    """
    own = _OwnRows(paths)
    if rows is None:
        limit = job_options(paths).get("predict_rows")
        first = list(islice(own.evaluation(), limit if isinstance(limit, int) and limit > 0 else _DEFAULT_ROWS))
        if not first:
            raise RunError(f"the run in {paths.root} has no evaluation rows; give rows to answer")
        return first
    if isinstance(rows, str | Mapping):
        raise ConfigError("rows is a single row; give a list of rows")
    return [_question(row, number, own) for number, row in enumerate(rows)]


def tables_of(runs: Iterable[RunPaths], questions: Iterable[Question]) -> dict[str, Table]:
    """Give the tables that questions ask of, by id, where the runs have them; the first run's win.

    Raises:
        RunError: A tables file is broken.
    """
    wanted = {question.table_id for question in questions} - {None}
    found: dict[str, Table] = {}
    for paths in runs:
        if paths.tables.exists() and wanted - found.keys():
            try:
                found = {t.id: t for t in read_tables(paths.tables) if t.id in wanted} | found
            except (OSError, ConfigError) as error:
                raise RunError(f"the tables in {paths.tables} cannot be read: {error}") from error
    return found


def job_options(paths: RunPaths) -> Mapping[str, object]:
    """Give the options of a run's job, as they travelled to the pods; empty where that is not known."""
    job = read_json(paths.job).get("job")
    return job if isinstance(job, dict) else {}


class _OwnRows:
    """The rows that a run was made of, read when they are needed."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._by_source: dict[str, Question | None] | None = None
        self._prefix: str | None = None

    def evaluation(self) -> Iterator[Question]:
        """Give the evaluation rows; those that the run answered where it has no others."""
        file = self._paths.inputs / "eval.jsonl"
        for where, data in _lines(file if file.exists() else self._paths.predictions):
            row = Fields(data, where)
            expected = row.text("target" if "target" in row.data else "expected")
            table_id = row.data.get("table_id")
            yield Question(
                source=row.text("source"), expected=expected, table_id=None if table_id is None else str(table_id)
            )

    def matching(self, text: str) -> Question | None:
        """Give the evaluation row that asks this; None where there is none, or several that differ."""
        if self._by_source is None:
            self._by_source = {}
            for question in self.evaluation():
                twice = question.source in self._by_source and self._by_source[question.source] != question
                self._by_source[question.source] = None if twice else question
        return self._by_source.get(text)

    @property
    def prefix(self) -> str:
        """The instruction before every question; empty where the rows have none."""
        if self._prefix is None:
            first = next(self.evaluation(), None)
            self._prefix = PREFIX if first is None or first.source.startswith(PREFIX) else ""
        return self._prefix


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    try:
        yield from read_lines(path) if path.exists() and path.stat().st_size else ()
    except (OSError, ConfigError) as error:
        raise RunError(f"the rows in {path} cannot be read: {error}") from error


def _question(row: RowLike, number: int, own: _OwnRows) -> Question:
    where = f"rows[{number}]"
    if isinstance(row, str):
        if not row.strip():
            raise ConfigError(f"{where} is empty")
        text = row if row.startswith(own.prefix) else own.prefix + row
        return own.matching(text) or Question(source=text)
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is {type(row).__name__}; give a text, or an object of source, target and table_id")
    if "source" in row and row.get("target") is None:
        fields, table_id = Fields(dict(row), where), row.get("table_id")
        return Question(source=fields.text("source"), table_id=None if table_id is None else str(table_id))
    known = row_from(dict(row), where)
    return Question(source=known.source, expected=known.target, table_id=known.table_id)
