"""Read the question of a row, with everything in the row that changes the question.

A system text, earlier exchanges and functions make a chat of the row. Options of a question become
lettered lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from workbench.base.json_values import Json, as_float
from workbench.finetune.data.forms.messages import (
    SYSTEM_KEYS,
    Message,
    Placed,
    has_content,
    is_turn,
    listed,
    one_filled,
    ordered,
    tools_of,
    unlearned,
)
from workbench.finetune.data.forms.table import CHOICE_KEYS, GIVEN, HISTORY, option_columns
from workbench.finetune.data.lines import Fields, is_filled, short
from workbench.finetune.data.task import Form
from workbench.finetune.options.text.prompts import source_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Question of a row in a form of text."""

    source: str
    input: str
    before: Sequence[Placed] = ()
    """Turns before the question, without the system text; they are read and not learned."""
    tools: tuple[Json, ...] = ()
    is_chat: bool = False
    """Whether the row has a system text, earlier exchanges or functions."""

    @property
    def turn(self) -> Message:
        return {"role": "user", "content": source_text(self.source, self.input)}


def question_of(row: Fields, form: Form, *, needed: bool = True) -> Question:
    """Return the question of a row, with the text and the turns before the question."""
    source = row.prose(form.asks, needed=needed)
    if form.heading:
        source, given = form.heading, source
    else:
        # A text such as "[]" is a context too.
        key = one_filled(row, GIVEN, as_json=False)
        given = row.prose(key) if key else ""
    options = options_of(row)
    if options:
        lines = "\n".join(f"{letter}. {text}" for letter, text in options.items())
        if given:
            given = f"{given}\n{lines}"
        else:
            source = f"{source}\n{lines}"
    before = _history(row)
    tools = tools_of(row)
    return Question(
        source=source,
        input=given,
        before=before,
        tools=tools,
        is_chat=bool(before or tools or one_filled(row, SYSTEM_KEYS)),
    )


def turns_before(row: Fields, form: Form, question: Question) -> tuple[Message, ...]:
    """Return the chat of a question without its answer."""
    return ordered(row, form.asks, [*question.before, (form.asks, question.turn)])


def turns_with(row: Fields, form: Form, question: Question, answer: str) -> tuple[Message, ...]:
    """Return the chat of a question and its answer."""
    turn: Message = {"role": "assistant", "content": answer}
    turns = [*question.before, (form.asks, question.turn), (form.answers, turn)]
    return ordered(row, form.asks, turns)


def answer_of_options(row: Fields, key: str) -> str:
    """Return the answer with letter and text, for a question with options.

    The row names the answer by its text, its letter or its position from 0.
    """
    options = options_of(row)
    wanted = row.prose(key, needed=False).strip()
    letters = [*options]
    found = {letter for letter, text in options.items() if wanted in (text.strip(), letter)}
    is_lettered = letters == [*ascii_uppercase[: len(letters)]]
    if is_lettered and wanted.isdigit() and int(wanted) < len(letters):
        found.add(letters[int(wanted)])
    if len(found) != 1:
        problem = "fits several of the options" if found else "is none of the options"
        row.fail(
            key,
            f"is {short(row.data[key])}, which {problem} {short(options)}; write the text of an "
            "option, its letter, or its position from 0. To leave the options out on purpose, add "
            f"'ignore': {option_names(row)} to the dataset's options",
        )
    letter = found.pop()
    return f"{letter}. {options[letter]}"


def options_of(row: Fields) -> Mapping[str, str]:
    """Return the options of a question by letter; empty for a question without options."""
    key = one_filled(row, CHOICE_KEYS)
    if not key:
        columns = option_columns(row.data)
        filled = {mark: name for mark, name in columns.items() if is_filled(row.data[name])}
        return {mark: row.prose(name) for mark, name in sorted(filled.items())}
    value = row.parsed(key, row.data[key])
    labels: object = None
    if isinstance(value, Mapping) and "text" in value:  # as in ARC: lists of texts and of labels
        labels = value.get("label")
        value = value["text"]
    elif isinstance(value, Mapping):  # as in MedQA: a text for every letter
        labels = [*value]
        value = [*value.values()]
    texts = [_text(each) for each in value] if isinstance(value, list | tuple) else []
    letters = list(ascii_uppercase[: len(texts)])
    if isinstance(labels, list | tuple):
        letters = [str(label) for label in labels]
    if not texts or not all(texts) or len({*letters}) != len(texts):
        row.fail(
            key,
            f"is {short(row.data[key])}, and the options of a question are a list of 2 to 26 "
            "texts. Write the options into the question, or leave the column out on purpose: "
            f"add 'ignore': [{key!r}] to the dataset's options",
        )
    return dict(zip(letters, texts, strict=True))


def option_names(row: Fields) -> list[str]:
    """Return the columns of the options of a question."""
    key = one_filled(row, CHOICE_KEYS)
    return [key] if key else [*option_columns(row.data).values()]


def _history(row: Fields) -> list[Placed]:
    """Return the exchanges before the question: pairs of texts, or turns."""
    value = row.data.get(HISTORY)
    if not has_content(value):
        return []
    several = row.items(HISTORY)
    if all(map(is_turn, several)):
        return unlearned(listed(row, HISTORY))
    turns: list[Placed] = []
    for number_, pair in enumerate(several):
        place = f"{HISTORY}[{number_}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            row.fail(place, f"is {short(pair)}; it must be a question and an answer, or a turn")
        asked, answer = (Fields({place: text}, row.where).prose(place) for text in pair)
        turns.append((place, {"role": "user", "content": asked}))
        turns.append((place, {"role": "assistant", "content": answer, "weight": 0}))
    return turns


def _text(value: object) -> str:
    if as_float(value) is not None:
        return json.dumps(value)
    return value if isinstance(value, str) and value.strip() else ""
