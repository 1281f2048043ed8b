"""Judge a model's answers, and write them to `predictions.jsonl` as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import ConfigError, RunError
from workbench.finetune.data.lines import Fields, read_lines
from workbench.finetune.data.sources.convert import read_tables
from workbench.finetune.data.task import Verdicts
from workbench.finetune.data.tasks import TASK, Table

_WRITTEN = ("source", "expected", "predicted", "exact_match", "table_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A question, the expected answer and a model's answer. An undecided verdict is None."""

    source: str
    expected: str | None
    """Expected answer; None if unknown."""
    predicted: str
    exact_match: bool | None = None
    """Whether the two texts are equal apart from whitespace."""
    logical_match: bool | None = None
    """Whether both answers mean the same; None if the expected text is only text."""
    execution_match: bool | None = None
    """Whether both answers return the same result on the table; None without a table."""
    table_id: str | None = None
    """Id of the table for the question."""
    input: str = ""

    @property
    def is_right(self) -> bool | None:
        """Whether any verdict is True; None if no answer was expected."""
        verdicts = {self.exact_match, self.logical_match, self.execution_match} - {None}
        return any(verdicts) if verdicts else None


def judge(
    source: str,
    expected: str | None,
    predicted: str,
    *,
    table: Table | None = None,
    table_id: str | None = None,
    input: str = "",
) -> Answer:
    """Compare an answer with the expected answer.

    Args:
        source: Input of the model.
        expected: Expected answer; None if unknown.
        predicted: Answer of the model.
        table: Table to run both answers on.
        table_id: Id of the table if the table is missing.
        input: Input of the instruction, if the row has a separate field.

    Example:
        >>> judge("1 + 1?", "It is 2.", "It  is 2.").exact_match
        True
    """
    exact = None
    verdicts = Verdicts()
    if expected is not None:
        exact = expected.split() == predicted.split()
        verdicts = TASK.judge(expected, predicted, table)
    return Answer(
        source=source,
        expected=expected,
        predicted=predicted,
        exact_match=exact,
        logical_match=verdicts.logical,
        execution_match=verdicts.execution,
        table_id=table.id if table else table_id,
        input=input,
    )


def share(verdicts: Iterable[bool | None]) -> float | None:
    """Return the share of True among verdicts that are not None; None if all verdicts are None.

    Example:
        >>> share([True, False, None])
        0.5
    """
    certain = [verdict for verdict in verdicts if verdict is not None]
    return sum(certain) / len(certain) if certain else None


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Write answers as JSON lines."""
    with path.open("w", encoding="utf-8") as out:
        for answer in answers:
            names = (*_WRITTEN, "input") if answer.input else _WRITTEN
            record = {name: getattr(answer, name) for name in names}
            out.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_answers(path: Path, tables: Path | None = None) -> list[Answer]:
    """Read the answers of a run and judge them, with the run's tables if given."""
    try:
        if path.stat().st_size == 0:
            return []
        rows = [Fields(data, where) for where, data in read_lines(path, path.parent)]
        of_source: dict[str, str] = {}
        if tables:
            of_source = _table_ids(tables.with_name("eval.jsonl"), tables.parent.parent)

        ids: list[str | None] = []
        for row in rows:
            if row.data.get("table_id"):
                ids.append(row.text("table_id"))
            else:
                ids.append(of_source.get(_source(row)))
        # Only the tables of these rows are kept: a release has thousands.
        by_id = {}
        if tables:
            for table in read_tables(tables, tables.parent.parent):
                if table.id in ids:
                    by_id[table.id] = table
        answers = []
        for row, table_id in zip(rows, ids, strict=True):
            # A score, and an answer that rewards judge, have nothing to compare with.
            expected = row.get("expected")
            answer = judge(
                _source(row),
                None if expected is None else row.words("expected", expected),
                row.words("predicted", row.get("predicted")),
                table=by_id.get(table_id or ""),
                table_id=table_id,
            )
            answers.append(answer)
        return answers
    except (OSError, ConfigError) as error:
        raise RunError(f"the predictions in {path} cannot be read: {error}") from error


def _source(row: Fields) -> str:
    source = row.text("source")
    given = row.words("input", row.data.get("input", ""))
    return f"{source} {given}".strip()


def _table_ids(path: Path, run: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    ids_of: dict[str, set[str]] = {}
    for where, data in read_lines(path, run):
        row = Fields(data, where)
        if row.data.get("table_id"):
            ids_of.setdefault(row.text("source"), set()).add(row.text("table_id"))
    return {source: ids.pop() for source, ids in ids_of.items() if len(ids) == 1}
