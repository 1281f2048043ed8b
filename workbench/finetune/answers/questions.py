"""Turn rows of any form into questions for a model. Default: the rows of the run's evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from workbench.base.errors import ConfigError, RunError, check_type
from workbench.base.files import read_json
from workbench.base.json_values import as_int, get_object
from workbench.finetune.data.column_checks import check_media
from workbench.finetune.data.columns import outer_columns, value_of
from workbench.finetune.data.forms.asked import question_of, turns_before
from workbench.finetune.data.forms.messages import (
    TOOLS,
    Message,
    completed_turns,
    last_of,
    tools_of,
    turns_of,
    unpacked,
)
from workbench.finetune.data.forms.table import ANSWERS, ASKED, question_form
from workbench.finetune.data.lines import Fields, read_lines
from workbench.finetune.data.rows import Example, row_from
from workbench.finetune.data.sources.convert import read_tables
from workbench.finetune.data.tasks import TASK, Table
from workbench.finetune.options.text.prompts import source_text
from workbench.rundir.paths import RunPaths

RowLike = str | Mapping[str, object] | Sequence[Mapping[str, object]]
"""Row to answer: a question's text, the turns of a chat, or a dataset row, answer optional."""

_DEFAULT_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(Example):
    """A row to answer. A chat has its turns before the answer."""

    target: str = ""
    expected: str | None = None
    """Expected answer. None: unknown."""

    @property
    def text(self) -> str:
        return self.opening or source_text(self.source, self.input)


def questions_of(paths: RunPaths, rows: Iterable[RowLike] | None = None) -> list[Question]:
    own = _OwnRows(paths)
    if rows is None:
        limit = as_int(job_options(paths).get("predict_rows")) or 0
        first = list(islice(own.evaluation(), limit if limit > 0 else _DEFAULT_ROWS))
        if not first and own.is_plain:
            raise RunError(
                f"the run in {paths.root} learned from plain "
                "text; give texts for its model to continue"
            )
        if not first:
            raise RunError(f"the run in {paths.root} has no evaluation rows; give rows to answer")
        return first
    match rows:
        case [{"role": _, "content": _}, *_]:
            raise ConfigError("rows is a single chat; give a list of chats, each a list of turns")
        case str() | Mapping():
            raise ConfigError("rows is a single row; give a list of rows")
    check_type("predict", rows, Iterable, "a list of rows")
    return [_question(row, f"rows[{number}]", own) for number, row in enumerate(rows)]


def tables_of(runs: Iterable[RunPaths], questions: Iterable[Question]) -> dict[str, Table]:
    """Return the tables of questions by id. The first run's table wins; others may be missing."""
    wanted = {question.table_id for question in questions} - {None}
    tables: dict[str, Table] = {}
    for paths in runs:
        if paths.tables.exists() and wanted - tables.keys():
            found: dict[str, Table] = {}
            try:
                for table in read_tables(paths.tables, paths.root):
                    if table.id in wanted:
                        found[table.id] = table
            except (OSError, ConfigError) as error:
                raise RunError(f"the tables in {paths.tables} cannot be read: {error}") from error
            tables = {**found, **tables}
    return tables


def job_options(paths: RunPaths) -> Mapping[str, object]:
    """Return the options of a run's job as sent to the pods, or an empty mapping if unknown."""
    return get_object(read_json(paths.job), "job")


class _OwnRows:
    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._by_source: dict[str, Question | None] | None = None
        self._prefix: str | None = None

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns of the dataset's rows by field, if the job named them."""
        columns = get_object(get_object(job_options(self._paths), "dataset"), "columns")
        return {field: str(named) for field, named in columns.items()}

    def evaluation(self) -> Iterator[Question]:
        return (question for question in self._all() if question.text)

    def _all(self) -> Iterator[Question]:
        file = self._paths.inputs / "eval.jsonl"
        if not file.exists():
            file = self._paths.predictions
        for where, data in _lines(file, self._paths.root):
            row = Fields(data, where)
            table_id = row.data.get("table_id")
            turns = turns_of(row)
            if turns:
                yield _question_of_turns(row, turns)
                continue
            yield Question(
                source=row.prose("source", needed=False),
                input=row.prose("input", needed=False),
                expected=row.prose("target" if "target" in row.data else "expected", needed=False),
                table_id=None if table_id is None else str(table_id),
            )

    @property
    def is_plain(self) -> bool:
        first = next(self._all(), None)
        return first is not None and not first.text

    def matching(self, text: str) -> Question | None:
        """Return the evaluation row with this text. None: no row, or several unlike rows."""
        if self._by_source is None:
            self._by_source = {}
            for question in self.evaluation():
                if sum(turn["role"] == "user" for turn in question.messages) > 1:
                    # The earlier turns are a part of the question.
                    continue
                # Unlike rows with the same text stay without a match.
                text_of = question.text.strip()
                known = self._by_source.get(text_of, question)
                self._by_source[text_of] = question if known == question else None
        return self._by_source.get(text.strip())

    @property
    def prefix(self) -> str:
        if self._prefix is None:
            first = next(self.evaluation(), None)
            is_plain = first is not None and not first.source.startswith(TASK.prefix)
            self._prefix = "" if is_plain else TASK.prefix
        return self._prefix


def _lines(path: Path, run: Path) -> Iterator[tuple[str, object]]:
    try:
        yield from read_lines(path, run) if path.exists() and path.stat().st_size else ()
    except (OSError, ConfigError) as error:
        raise RunError(f"the rows in {path} cannot be read: {error}") from error


def _question(row: RowLike, where: str, own: _OwnRows) -> Question:
    match row:
        case str():
            return _question_of_text(row, where, own)
        case Mapping():
            return _question_of_row(_by_field(row, own.columns, where), where)
        case [*turns]:
            return _question_of_row({"messages": turns}, where)
    raise ConfigError(
        f"{where} is {type(row).__name__}; give a text, or an object of source, target and table_id"
    )


def _by_field(
    row: Mapping[str, object], columns: Mapping[str, str], where: str
) -> Mapping[str, object]:
    """Return a row with the names of fields, if it has the columns that the dataset named."""
    if any(field in row for field in columns):
        return row
    fields = {}
    for field, named in columns.items():
        if all(column in row for column in outer_columns(named, row)):
            what = f"{where}: the column for {field!r},"
            fields[field] = value_of(row, named, what, is_answer=field not in ASKED)
    return fields or row


def _question_of_text(text: str, where: str, own: _OwnRows) -> Question:
    if not text.strip():
        raise ConfigError(f"{where} is empty")
    if own.is_plain:
        return Question(source="", opening=text)
    if not text.startswith(own.prefix):
        text = own.prefix + text
    return own.matching(text) or Question(source=text)


def _question_of_turns(row: Fields, turns: Sequence[Message]) -> Question:
    answered = turns[-1]["role"] == "assistant"
    return Question(
        source=last_of(turns, "user"),
        # The chat template decides how a call is written.
        expected=turns[-1]["content"] if answered and "tool_calls" not in turns[-1] else None,
        table_id=None if row.data.get("table_id") is None else row.text("table_id"),
        messages=tuple(turns[:-1] if answered else turns),
        tools=tools_of(row),
    )


def _question_of_row(row: Mapping[str, object], where: str) -> Question:
    check_media(row, where)
    row = unpacked(row, where)
    if isinstance(row.get("prompt"), list | tuple) and row.get("completion") is None:
        row = {"messages": row["prompt"], TOOLS: row.get(TOOLS)}
    fields = Fields(row, where)
    turns = turns_of(fields) or completed_turns(fields)
    if turns:
        return _question_of_turns(fields, turns)
    form = question_form(row)
    is_known = form is None or any(row.get(key) is not None for key in ANSWERS.get(form.asks, ()))
    if form is not None and not is_known and not TASK.columns(row):
        question = question_of(fields, form)
        if not question.is_chat:
            return Question(source=question.source, input=question.input)
        return _question_of_turns(fields, turns_before(fields, form, question))
    made = row_from(row, where)
    if made.messages:
        return _question_of_turns(fields, made.messages)
    if not made.asks:
        return Question(source="", opening=made.target)
    return Question(
        source=made.source,
        input=made.input,
        expected=made.target,
        table_id=made.table_id,
    )
