"""Convert rows of known forms to the trainer's form. Errors name place and field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import Json
from workbench.finetune.data.columns import value_of
from workbench.finetune.data.lines import Fields
from workbench.finetune.data.messages import (
    CHAT,
    CHAT_KEYS,
    TOOLS,
    Message,
    answered,
    chat_key,
    completed_turns,
    last_of,
    tools_of,
    turns_of,
)
from workbench.finetune.data.task import Form
from workbench.finetune.data.tasks import TASK, Table

SUMMARIZE = "Summarize this dialogue:"

_FORMS = (
    Form("source", "target", given="input"),
    Form("instruction", "output", given="input"),
    Form("instruction", "response", given="context"),
    Form("dialogue", "summary", heading=SUMMARIZE),
    Form("dialog", "summary", heading=SUMMARIZE),
    Form("document", "summary", heading="Summarize this document:"),
    Form("article", "highlights", heading="Summarize this article:"),
    Form("prompt", "completion"),
    Form("question", "answer", given="context"),
    Form("query", "response"),
)
_EVERY = (*_FORMS, TASK.form)
ANSWERS = {
    form.asks: [other.answers for other in _EVERY if other.asks == form.asks] for form in _FORMS
}
"""Question key of a form, with the keys that may contain the answer."""
NESTED = (*TASK.nested, *CHAT_KEYS)
"""Keys with objects or lists as values; a CSV table contains their JSON text."""
_ALONE = "text"
_KEYS = [key for form in _EVERY for key in (form.asks, form.answers, form.given) if key]
BESIDE = "beside"
"""Key of the parts of a prepared row that only the job's method reads."""
PAIR = ("chosen", "rejected")
"""Columns of two answers to a prompt, the better answer first."""
_FIELDS = dict.fromkeys([*_KEYS, _ALONE, CHAT, TOOLS, *TASK.fields, *PAIR, "label"])


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
    turns = turns_of(row) or completed_turns(row)
    if turns:
        return _chat(row, turns)
    if TASK.columns(row.data):
        asked = TASK.read(row, tables)
        return Example(source=asked.question, target=asked.answer, table_id=asked.table_id)
    return _written(row)


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
        ('instruction', 'output', 'input')
    """
    if _chat_of(data):
        columns = [*CHAT_KEYS, TOOLS, "table_id"]
        # A prepared chat row repeats the last question and answer.
        if {"source", "target", "table_id"} <= data.keys():
            columns += ["source", "target"]
        return tuple(columns)
    of_task = TASK.columns(data)
    if of_task:
        return of_task
    form = _form_in(data)
    if form is not None:
        beside = "table_id" if form.asks == "source" else ""
        if form.asks == "prompt" and isinstance(data["prompt"], list | tuple):
            beside = TOOLS
        names = (form.asks, form.answers, form.given, beside)
        return tuple(name for name in names if name)
    return (_ALONE,) if _ALONE in data else ()


def has_answer(columns: Iterable[str]) -> bool:
    """Return whether the columns include an answer: a chat, or a question with an answer."""
    names = set(columns)
    form = _form_of(names)
    return bool(names & {*CHAT_KEYS}) or (form is not None and form is not TASK.form)


def renamed(data: object, columns: Mapping[str, str], where: str) -> Mapping[str, object]:
    """Return a row's fields, read as the names, paths and templates in `columns` state."""
    row = Fields(data, where)
    fields = {}
    for field, named in columns.items():
        fields[field] = value_of(row.data, named, f"{where}: the column for {field!r},")
    return fields


def check_columns(columns: Mapping[str, str]) -> Mapping[str, str]:
    """Return the columns of fields; raise ConfigError for unknown or incomplete fields."""
    for field in columns:
        if field not in _FIELDS:
            raise one_of("dataset columns: the field", field, _FIELDS)
    whole = {_ALONE, CHAT, "prompt", *PAIR}
    if columns and _form_of(columns) is None and not whole & columns.keys():
        raise ConfigError(
            f"dataset columns name only {_listed(columns)}, and a row needs more: "
            f"{_nearest(columns)}. With `columns`, name the column of every field, also of one "
            "whose column has the field's name."
        )
    return columns


def _chat(row: Fields, turns: Sequence[Message]) -> Example:
    learned = answered(turns)
    if not learned:
        row.fail(chat_key(row) or "completion", "has no turn of the assistant to learn from")
    table_id = row.text("table_id") if row.data.get("table_id") is not None else None
    source = last_of(learned, "user")
    target = last_of(learned, "assistant")
    return Example(
        source=source,
        target=target,
        table_id=table_id,
        messages=learned,
        tools=tools_of(row),
    )


def _written(row: Fields) -> Example:
    form = _form_in(row.data)
    if form is not None:
        return _of_form(row, form)
    if _ALONE in row.data:
        return Example(source="", target=row.prose(_ALONE))
    present = _listed(row.data) or "nothing"
    raise ConfigError(
        f"{row.where}: no known form of a row has the columns {present}; {_nearest(row.data)}"
    )


def _of_form(row: Fields, form: Form) -> Example:
    if form.heading:
        asked = row.prose(form.asks, needed=False)
        return Example(source=form.heading, input=asked, target=row.prose(form.answers))
    prepared = form.asks == "source"
    table_id = None
    if prepared and row.data.get("table_id") is not None:
        table_id = row.text("table_id")
    given = row.prose(form.given, needed=False) if form.given else ""
    for key in (form.asks, form.answers):
        if form.asks == "prompt" and isinstance(row.data[key], list | tuple):
            row.fail(
                key,
                "is a list; let both 'prompt' and 'completion' "
                "be lists of messages, or both be text",
            )
    source = row.prose(form.asks, needed=not prepared)
    # Some published datasets have empty answers. Plain text to learn from must not be empty.
    target = row.prose(form.answers, needed=not (source or given))
    return Example(
        source=source,
        target=target,
        table_id=table_id,
        input=given,
    )


def _chat_of(data: Mapping[str, object]) -> bool:
    return any(data.get(key) is not None for key in CHAT_KEYS)


def _form_in(data: Mapping[str, object]) -> Form | None:
    """Return the two-key form of a row; None for plain text or an unknown form."""
    # A table's row has every column of the table. Ignore empty columns unless no other form fits.
    filled = {key for key, value in data.items() if value is not None}
    form = _form_of(filled)
    if form is None and _ALONE not in filled:
        return _form_of(data)
    return form


def _form_of(keys: Iterable[str]) -> Form | None:
    present = set(keys)
    return next((form for form in _EVERY if {form.asks, form.answers} <= present), None)


def _nearest(keys: Iterable[str]) -> str:
    """Return a hint with the most similar form and its missing keys."""
    names = [str(key) for key in keys]

    def likeness(form: Form) -> tuple[int, float]:
        missing = [key for key in form[:2] if key not in names]
        others = [name.lower() for name in names if name not in form]
        nearest = 0.0
        for key in missing:
            for other in others:
                nearest = max(nearest, SequenceMatcher(None, key, other).ratio())
        return -len(missing), nearest

    form = max(_EVERY, key=likeness)
    missing = " and ".join(repr(key) for key in form[:2] if key not in names)
    return (
        f"the nearest is {form.asks!r} and {form.answers!r}, and {missing} "
        f"{'are' if ' and ' in missing else 'is'} missing: rename the columns, or "
        "name those that hold them, as in columns={'source': …, 'target': …}"
    )


def _listed(names: Iterable[object]) -> str:
    return ", ".join(repr(str(name)) for name in names)
