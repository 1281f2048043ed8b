"""Convert rows of known forms to the trainer's form. Errors name place and field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import Json
from workbench.finetune.data.columns import value_of
from workbench.finetune.data.forms.asked import (
    answer_of_options,
    options_of,
    question_of,
    turns_with,
)
from workbench.finetune.data.forms.messages import (
    CHAT,
    CHAT_KEYS,
    SYSTEM_KEYS,
    TOOL_KEYS,
    TOOLS,
    Message,
    answered,
    chat_key,
    completed_turns,
    is_turn,
    last_of,
    tools_of,
    turns_of,
    unpacked,
)
from workbench.finetune.data.forms.table import (
    ALONE,
    ASKED,
    FIELDS,
    FORMS,
    LISTS,
    PAIR,
    beside_text,
    form_of,
    names_form,
    other_questions,
    suggested_columns,
)
from workbench.finetune.data.lines import Fields, is_filled, short
from workbench.finetune.data.task import Form
from workbench.finetune.data.tasks import TASK, Table

_SINGLE_TURN = (
    "is of a single turn, and a chat is a row. Write the turns of a chat as a list 'messages' of "
    "one row"
)
_ALONE = "To learn the texts alone, add 'ignore': ['{}'] to the dataset's options"
BESIDE = "beside"
"""Key of the parts of a prepared row that only the job's method reads."""


class UnknownForm(ConfigError):
    """The columns of a row fit no form. `columns` are the columns that the fields may have."""

    def __init__(self, message: str, columns: Mapping[str, str]) -> None:
        super().__init__(message)
        self.columns = columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    source: str
    """Input of the model, or the instruction; empty for plain text to learn from."""
    target: str
    table_id: str | None = None
    """Id of the table for the question; None for a row without a table."""
    input: str = ""
    """Input of the instruction, if the row has a separate field."""
    messages: tuple[Message, ...] = ()
    """Turns of a chat up to the last answer.

    `source` and `target` are the last question and answer.
    """
    tools: tuple[Json, ...] = ()
    """Schemas of functions that a chat's assistant may call."""

    opening: str = ""
    """Beginning of the answer, if the model only continues a text."""
    is_cut: bool = dataclasses.field(default=False, compare=False)
    """Whether turns of the chat after the last answer are left out."""
    beside: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Parts of the row for the job's method alone, for example a rejected answer."""

    @property
    def asks(self) -> bool:
        """Whether the row has a question, as opposed to plain text."""
        return bool(self.source or self.input or self.messages)

    def to_json(self) -> str:
        row: dict[str, object] = {"source": self.source}
        if self.input:
            row["input"] = self.input
        row["target"] = self.target
        row["table_id"] = self.table_id
        if self.messages:
            row[CHAT] = self.messages
        if self.tools:
            row[TOOLS] = self.tools
        if self.beside:
            row[BESIDE] = self.beside
        return json.dumps(row, ensure_ascii=False)


Refusal = Callable[[Example], str]
"""Function that returns the reason why a model cannot learn from a row; empty if possible."""


def any_row(_: Example) -> str:
    """Accept every row."""
    return ""


def row_from(data: object, where: str, tables: Mapping[str, Table] | None = None) -> Example:
    """Convert a row of any known form to the trainer's form."""
    row = Fields(data, where)
    row = Fields(unpacked(row.data, where), where)
    # From the surest form to the weakest: a chat, the task's columns, a pair of columns, a text.
    turns = turns_of(row) or completed_turns(row)
    if turns:
        return chat_example(row, turns)
    if TASK.columns(row.data):
        asked = TASK.read(row, tables)
        return Example(source=asked.question, target=asked.answer, table_id=asked.table_id)
    form = form_of(row.data)
    if form is not None:
        return _of_form(row, form)
    # Columns beside a text that another form would read are refused, not left out.
    if ALONE in row.data:
        if isinstance(row.data.get("role"), str):
            row.fail("role", f"{_SINGLE_TURN}. {_ALONE.format('role')}")
        if is_filled(row.data.get("label")):
            columns = {"source": ALONE, "target": "label"}
            row.fail(
                "label",
                f"belongs to a text. To learn the label as the answer, add 'columns': {columns} to "
                f"the dataset's options. {_ALONE.format('label')}",
            )
        others = other_questions(row.data, Form(ALONE, ALONE))
        if others:
            columns = {"source": others[0], "target": ALONE}
            row.fail(
                others[0],
                f"is no part of {ALONE!r}. To learn {ALONE!r} as the answer, add 'columns': "
                f"{columns} to the dataset's options. {_ALONE.format(others[0])}",
            )
        return Example(source="", target=row.prose(ALONE))
    for key in CHAT_KEYS:
        if key in row.data:
            row.empty(key)
    return refuse_unknown(row)


def prepared_row(raw: Mapping[str, object]) -> Example:
    """Return a row from the JSON that `Example.to_json` wrote."""
    fields = Fields(raw, "")
    turns = turns_of(fields)
    table_id = raw.get("table_id")
    beside = raw.get(BESIDE)
    return Example(
        source=str(raw["source"]),
        target=str(raw["target"]),
        input=str(raw.get("input") or ""),
        table_id=None if table_id is None else str(table_id),
        messages=turns,
        tools=tools_of(fields) if turns else (),
        beside=beside if isinstance(beside, Mapping) else {},
    )


def columns_read(data: Mapping[str, object]) -> Sequence[str]:
    """Return the columns that a row's form reads; empty for a row of unknown form.

    Example:
        >>> columns_read({"instruction": "Sort.", "output": "1 2", "text": "Below is …"})
        ('instruction', 'output')
    """
    key = chat_key(data)
    if key:
        columns = [key, *SYSTEM_KEYS, *TOOL_KEYS, "table_id"]
        # A prepared chat row repeats the last question and answer.
        if {"source", "target", "table_id"} <= data.keys():
            columns += ["source", "target"]
        return tuple(name for name in columns if name == key or name in data)
    of_task = TASK.columns(data)
    if of_task:
        return of_task
    form = form_of(data)
    if form is None:
        return (ALONE,) if ALONE in data else ()
    beside = [*SYSTEM_KEYS, *TOOL_KEYS]
    if not isinstance(data[form.asks], list | tuple):
        beside += beside_text(form, data)
    if form.asks == "source":
        beside.append("table_id")
    return (form.asks, form.answers, *(name for name in beside if name in data))


def has_answer(columns: Sequence[str]) -> bool:
    """Return whether the columns include an answer: a chat, or a question with an answer."""
    form = names_form(columns)
    return bool({*columns} & {*CHAT_KEYS}) or (form is not None and form is not TASK.form)


def renamed(data: object, columns: Mapping[str, str], where: str) -> Mapping[str, object]:
    """Return a row's fields, read as the names, paths and templates in `columns` state."""
    row = Fields(data, where)
    fields = {}
    for field, named in columns.items():
        what = f"{where}: the column for {field!r},"
        if field in LISTS and named in row.data:
            fields[field] = row.data[named]
        else:
            fields[field] = value_of(row.data, named, what, is_answer=field not in ASKED)
    return fields


def check_columns(columns: Mapping[str, str]) -> Mapping[str, str]:
    """Return the columns of fields; raise ConfigError for unknown or incomplete fields."""
    for field in columns:
        if field not in FIELDS:
            raise one_of("dataset columns: the field", field, FIELDS)
    whole = {ALONE, *CHAT_KEYS, "prompt", *PAIR}
    if columns and names_form(columns) is None and not whole & columns.keys():
        missing = "the columns of a question and of an answer, as 'source' and 'target',"
        for form in FORMS:
            if form.asks in columns or form.answers in columns:
                other = form.answers if form.asks in columns else form.asks
                missing = repr(other)
                break
        raise ConfigError(
            f"dataset columns name only {_listed(columns)}, and a row needs {missing} too. With "
            "`columns`, name the column of every field, also of one whose column has the field's "
            "name."
        )
    return columns


def chat_example(row: Fields, turns: Sequence[Message]) -> Example:
    """Return a row of turns, up to the last answer to learn."""
    learned = answered(turns)
    if not learned:
        row.fail(chat_key(row.data) or "completion", "has no turn of the assistant to learn from")
    table_id = row.text("table_id") if is_filled(row.data.get("table_id")) else None
    return Example(
        source=last_of(learned, "user"),
        target=last_of(learned, "assistant"),
        table_id=table_id,
        messages=learned,
        tools=tools_of(row),
        is_cut=len(learned) < len(turns),
    )


def refuse_unknown(row: Fields) -> NoReturn:
    """Raise the error for a row whose columns fit no form."""
    present = _listed(row.data) or "nothing"
    columns, is_near = suggested_columns(row.data)
    advice = "Name the columns of the question and of the answer"
    texts = [each for each in row.data.values() if isinstance(each, str)]
    said = [name for name in _lists_of(row, str) if len(texts) < 2 and name not in LISTS]
    nested = [] if CHAT in columns else _lists_of(row, Mapping)
    if is_near:
        meant = [f"{field!r} for {name!r}" for field, name in columns.items() if field != name]
        advice = f"Did you mean {' and '.join(meant)}? Rename the columns, or name them"
    elif is_turn(row.data):
        advice = f"A turn {_SINGLE_TURN}. Otherwise, name the columns"
    elif nested:
        advice = (
            f"The column {nested[0]!r} is a list of objects. Write every object as a row of its "
            f"own, or the turns of a chat as a list {CHAT!r}. Otherwise, name the columns"
        )
    elif said:
        advice = (
            f"The column {said[0]!r} is a list of texts. Write every text as a turn of a list "
            f'{CHAT!r}, as {{"role": "user", "content": …}}. Otherwise, name the columns'
        )
    elif len(row.data) < 2:
        advice = "A row has a question and an answer, or a text to continue. Name the columns"
    raise UnknownForm(
        f"{row.where}: no known form of a row has the columns {present}. {advice}", columns
    )


def _lists_of(row: Fields, kind: type) -> list[str]:
    """Return the columns that are lists of texts, or of objects."""
    lists = {name: each for name, each in row.data.items() if isinstance(each, list | tuple)}
    return [
        str(name)
        for name, several in lists.items()
        if several and all(isinstance(each, kind) for each in several)
    ]


def _of_form(row: Fields, form: Form) -> Example:
    if form is TASK.form:
        row.empty(form.answers)
    for key in (form.asks, form.answers):
        if form.asks == "prompt" and isinstance(row.data[key], list | tuple):
            row.fail(
                key,
                "is a list; let both 'prompt' and 'completion' "
                "be lists of messages, or both be text",
            )
    others = other_questions(row.data, form)
    if others and is_filled(row.data[form.asks]):
        named = {form.asks: f"{{{others[0]}}}\n{{{form.asks}}}", form.answers: form.answers}
        row.fail(
            form.asks,
            f"and {others[0]!r} are both questions. To ask both, add 'columns': {named} to the "
            f"dataset's options. To leave one out, add 'ignore': [{others[0]!r}]",
        )
    table_id = None
    needed = True
    if form.asks == "source":
        # A prepared row of plain text has an empty source, and the key of a table.
        is_prepared = row.data["source"] == "" and "table_id" in row.data
        needed = not is_prepared and not is_filled(row.data.get("input"))
        if is_filled(row.data.get("table_id")):
            table_id = row.text("table_id")
    question = question_of(row, form, needed=needed)
    if options_of(row):
        answer = answer_of_options(row, form.answers)
    else:
        # Some published datasets have empty answers. Plain text must not be empty.
        asks = question.source or question.input
        answer = row.prose(form.answers, needed=bool(form.heading) or not asks)
        mark = answer.strip()
        if len(mark) == 1 and isinstance(row.data.get(mark), str):
            row.fail(
                form.answers,
                f"is {short(answer)}, and the row has a column of this name. Call the columns of "
                "options 'A', 'B' and so on, and the model reads them. To learn the letter alone, "
                f"add 'ignore': [{mark!r}] to the dataset's options",
            )
    if not question.is_chat:
        return Example(
            source=question.source, target=answer, table_id=table_id, input=question.input
        )
    if not answer:
        row.empty(form.answers)
    turns = turns_with(row, form, question, answer)
    return Example(
        source=last_of(turns, "user"),
        target=answer,
        table_id=table_id,
        messages=turns,
        tools=question.tools,
    )


def _listed(names: object) -> str:
    assert isinstance(names, Mapping)
    return ", ".join(repr(str(name)) for name in names)
