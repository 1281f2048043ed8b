"""Table of the forms of rows: the columns of a question, of its answer, and of their context.

A new form is a line of `FORMS` and a test. Chats and tables have readers of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from string import ascii_uppercase

from workbench.base.json_values import as_float
from workbench.finetune.data.forms.messages import (
    CHAT,
    CHAT_KEYS,
    SYSTEM_KEYS,
    TOOL_KEYS,
    is_turn,
)
from workbench.finetune.data.lines import is_filled
from workbench.finetune.data.task import Form
from workbench.finetune.data.tasks import TASK

SUMMARIZE = "Summarize this dialogue:"

FORMS = (
    Form("source", "target"),
    Form("instruction", "output"),
    Form("instruction", "response"),
    Form("dialogue", "summary", heading=SUMMARIZE),
    Form("dialog", "summary", heading=SUMMARIZE),
    Form("document", "summary", heading="Summarize this document:"),
    Form("article", "highlights", heading="Summarize this article:"),
    Form("prompt", "completion"),
    Form("prompt", "response"),
    Form("question", "answer"),
    Form("question", "response"),
    Form("query", "response"),
    Form("inputs", "targets"),  # FLAN, P3 and xP3
    Form("problem", "solution"),  # MATH and NuminaMath
    Form("problem", "answer"),
)
EVERY = (*FORMS, TASK.form)
ANSWERS = {
    form.asks: [other.answers for other in EVERY if other.asks == form.asks] for form in FORMS
}
"""Question key of a form, with the keys that may contain the answer."""
ALONE = "text"
"""Key of plain text."""
GIVEN = ("input", "context")
"""Keys of the context of a question, in every form without a heading."""
HISTORY = "history"
"""Key of the exchanges before the question."""
CHOICE_KEYS = ("choices", "options")
"""Keys of the options of a question."""
PROMPT_KEYS = (*SYSTEM_KEYS, HISTORY, *TOOL_KEYS, *CHOICE_KEYS)
"""Keys beside a question or a chat that change what a model is asked."""
LISTS = (HISTORY, *TOOL_KEYS, *CHOICE_KEYS)
"""Keys of lists, of which every item is read."""
ASKED = frozenset((*(form.asks for form in EVERY), *GIVEN, ALONE, *SYSTEM_KEYS))
"""Keys of a single text that a model is asked, or that it continues."""
_OPTION_STEMS = ("option", "choice", "opt", "op")
PAIR = ("chosen", "rejected")
"""Columns of two answers to a prompt, the better answer first."""
PAIRS = (
    PAIR,
    ("preferred_output", "non_preferred_output"),  # OpenAI
    ("chosen_response", "rejected_response"),
    ("response_j", "response_k"),
    # ms-swift: a whole chat with the better answer, and the other answer or its whole chat
    *((key, "rejected_response") for key in CHAT_KEYS),
    *((key, "rejected_messages") for key in CHAT_KEYS),
)
"""Columns of two answers in published datasets, the better answer first."""
_QUESTION_KEYS = [key for form in EVERY for key in (form.asks, form.answers)]
FIELDS = dict.fromkeys(
    [*_QUESTION_KEYS, *GIVEN, ALONE, CHAT, *PROMPT_KEYS, *TASK.fields, *PAIR, "label", *CHAT_KEYS]
)
"""Fields of all forms, which `columns` may name."""
_IDENTITY = re.compile(r"(^|[ _.-])(id|uuid|guid|index|idx|url)$", re.IGNORECASE)
_LIKE = 0.75  # least likeness of a column's name to a key
UNNAMED = "…"
"""Column of a key in a suggestion, where no name of a column says the key."""
_PLAIN = [form for form in FORMS if not form.heading]
_USES = ({form.asks for form in _PLAIN}, {form.answers for form in _PLAIN})


def form_of(row: Mapping[str, object]) -> Form | None:
    """Return the form of a question and an answer; None for plain text or an unknown form.

    The names of the columns decide. If a row names the columns of several forms, the form with
    more filled columns counts.

    Example:
        >>> row = {"question": "", "answer": "2", "query": None, "response": None, "text": "…"}
        >>> form_of(row)[:2]
        ('question', 'answer')
    """
    best: Form | None = None
    most = -1
    for form in EVERY:
        if form.asks in row and form.answers in row:
            count = is_filled(row[form.asks]) + is_filled(row[form.answers])
            if count > most:
                best = form
                most = count
    if most <= 0 and is_filled(row.get(ALONE)):
        return None
    return best


def question_form(row: Mapping[str, object]) -> Form | None:
    """Return the form whose question a row has, with or without the answer of the form.

    Example:
        >>> question_form({"source": "the web", "prompt": "1+1?"})[:2]
        ('prompt', 'completion')
    """
    named = [form for form in _BY_QUESTION if form.asks in row]
    filled = [form for form in named if is_filled(row[form.asks])]
    return next(iter(filled or named), None)


def other_questions(row: Mapping[str, object], form: Form) -> list[str]:
    """Return the columns of further questions than the one of a form, with another text.

    Example:
        >>> row = {"instruction": "Add.", "question": "1+1?", "prompt": "Add. 1+1?"}
        >>> other_questions(row, Form("question", "answer"))
        ['instruction']
    """
    asked = str(row[form.asks]).strip()
    others: list[str] = []
    for other in FORMS:
        text = row.get(other.asks)
        is_one = isinstance(text, str) and is_filled(text) and not other.heading
        if is_one and other.asks not in (form.asks, "source", *others):
            assert isinstance(text, str)
            if text.strip() not in asked and asked not in text:
                others.append(other.asks)
    return others


def beside_text(form: Form, row: Iterable[object]) -> list[str]:
    """Return the keys that a question in the form of text reads beside itself."""
    given = () if form.heading else GIVEN
    return [*given, HISTORY, *CHOICE_KEYS, *option_columns(row).values()]


def option_columns(names: Iterable[object]) -> dict[str, str]:
    """Return the columns that hold an option of a question each, by the mark of the option.

    Example:
        >>> option_columns(["question", "A", "B"]), option_columns(["option_a", "option_b", "C"])
        ({'A': 'A', 'B': 'B'}, {'A': 'option_a', 'B': 'option_b'})
    """
    found: dict[str, dict[str, str]] = {}
    for each in names:
        name = str(each)
        stem, mark = name[:-1].rstrip("_- ").casefold(), name[-1:]
        # A column of one small letter may be anything.
        is_stem = mark.isalnum() and stem in _OPTION_STEMS
        if is_stem or (not stem and mark and mark in ascii_uppercase[:8]):
            found.setdefault(stem, {})[mark.upper()] = name
    several = [marks for marks in found.values() if len(marks) > 1]
    return several[0] if several else {}


def _order(form: Form) -> tuple[bool, bool, bool]:
    """Return the place of a form among questions; a `source` may name where a row is from."""
    return form.asks != "prompt", form.asks == "source", bool(form.heading)


_BY_QUESTION = sorted(EVERY, key=_order)


def names_form(keys: Iterable[str]) -> Form | None:
    """Return the first form whose two keys are among `keys`."""
    present = set(keys)
    return next((form for form in EVERY if {form.asks, form.answers} <= present), None)


def suggested_columns(row: Mapping[str, object]) -> tuple[dict[str, str], bool]:
    """Return columns for the fields of the nearest form, and whether all names are near.

    Example:
        >>> suggested_columns({"Prompt": "a", " completion": "b"})
        ({'prompt': 'Prompt', 'completion': ' completion'}, True)
        >>> suggested_columns({"id": 7, "translation": {"en": "a", "fr": "b"}})
        ({'source': 'translation.en', 'target': 'translation.fr'}, False)
    """
    beside = {key: key for key in PROMPT_KEYS if is_filled(row.get(key))}
    for path, value in _paths(row):
        if isinstance(value, list | tuple) and value and all(map(is_turn, value)):
            return {CHAT: path, **beside}, False
    texts = part_columns(row, numbers=True)
    if len(row) < 2:
        return {ALONE: texts[0] if texts else UNNAMED}, False
    if len(texts) > 2:
        beside |= {key: key for key in GIVEN if key in texts}
    names = [name for name in texts if name not in beside]
    likeness: dict[Form, list[float]] = {}
    for form in FORMS:
        each = [_likeness(*pair) for pair in meant_columns(form[:2], names).items()]
        likeness[form] = [value if value >= _LIKE else 0 for value in each]
    # The name of the question counts first.
    best = max(FORMS, key=lambda form: (sum(likeness[form]), likeness[form]))
    own = meant_columns(best[:2], names)
    if UNNAMED in own.values() and len(names) == 2:
        own = {"source": names[0], "target": names[1]}
    return {**own, **beside}, min(likeness[best]) > 0


def _paths(row: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the columns of a row, and the keys of objects in columns."""
    for name, value in row.items():
        yield str(name), value
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", each) for key, each in value.items())


def part_columns(row: Mapping[str, object], *, numbers: bool = False) -> list[str]:
    """Return the columns and paths of texts and of turns, and last of numbers if asked for."""
    stems = Counter(str(name)[:-1] for name in row)
    parts = []
    counts = []
    for path, value in _paths(row):
        # Columns such as `response_a` and `response_b` are several answers.
        if _IDENTITY.search(path) or stems[path[:-1]] > 1:
            continue
        several = value if isinstance(value, list | tuple) else [value]
        is_text = path not in row or isinstance(value, str)
        is_text = is_text and all(isinstance(text, str) for text in several)
        if several and (is_text or all(map(is_turn, several))):
            parts.append(path)
        elif numbers and path in row and as_float(value) is not None:
            counts.append(path)
    return [*parts, *counts]


def meant_columns(keys: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the column of every key whose name says so; `…` for a key without such a column.

    A single key without a column has the only column that is left.

    Example:
        >>> meant_columns(["prompt", "chosen", "rejected"], ["lose", "win", "Prompts"])
        {'prompt': 'Prompts', 'chosen': '…', 'rejected': '…'}
    """
    left = list(names)
    found: dict[str, str] = {}
    for key in keys:
        nearest = max(left, key=lambda name: _likeness(key, name), default=UNNAMED)
        if _likeness(key, nearest) >= _LIKE:
            found[key] = nearest
            left.remove(nearest)
    missing = [key for key in keys if key not in found]
    if len(missing) == len(left) == 1:
        found[missing[0]] = left[0]
    return {key: found.get(key, UNNAMED) for key in keys}


def _likeness(key: str, name: str) -> float:
    """Return from 0 to 1 how near a name is to a key, or to a key of the same use."""
    folded = name.strip().casefold()
    is_same_use = any(key in keys and folded in keys for keys in _USES)
    return max(SequenceMatcher(None, key, folded).ratio(), _LIKE * is_same_use)
