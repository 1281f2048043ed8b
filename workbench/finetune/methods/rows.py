"""Readers of the rows of methods: pairs of answers, judged answers, and prompts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NoReturn

from workbench.base.errors import ConfigError
from workbench.base.json_values import part, parts, text
from workbench.finetune.data.lines import Fields, short
from workbench.finetune.data.messages import (
    CHAT_KEYS,
    TOOLS,
    Message,
    asking_turns,
    exchanges,
    is_learned,
    last_of,
    tools_of,
)
from workbench.finetune.data.reading import ANSWER_ROWS, RowReader
from workbench.finetune.data.rows import ANSWERS, BESIDE, PAIR, Example, prepared_row
from workbench.finetune.data.tasks import Table

REJECTED = "rejected"
LABEL = "label"
COLUMNS = "columns"
"""Key of the columns for reward functions, in a prepared row of prompts."""
EQUAL = "equal chosen and rejected answers"
ONE_LABEL = "the label {0} for training, where no row has the label {1}"
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Names of the arguments with which TRL calls a reward function, besides the columns."""
_PREPARED = ("source", "target", "input", "table_id", "messages", TOOLS, BESIDE)
_TAGS = (LABEL, "kto_tag")


class MethodRows(RowReader):
    """Rows of a method of TRL."""

    method: ClassVar[str]
    """Methods that read the rows, in words."""
    needs: ClassVar[str]
    """Columns of a row, in words."""

    def columns(self, data: Mapping[str, object]) -> Sequence[str]:
        if isinstance(data.get(BESIDE), Mapping):
            return _PREPARED
        return self._columns(data)

    def read(self, data: object, where: str, tables: Mapping[str, Table] | None = None) -> Example:
        # A prepared row of an earlier run, from a card or a manifest.
        if isinstance(data, Mapping) and isinstance(data.get(BESIDE), Mapping):
            return prepared_row(data)
        return self._read(Fields(data, where), tables)

    def check_named(self, name: str) -> None:
        raise ConfigError(
            f"the dataset {name!r} has questions and answers, and a row of method {self.method} "
            f"has {self.needs}; name a dataset of such rows"
        )

    def _columns(self, data: Mapping[str, object]) -> Sequence[str]:
        raise NotImplementedError

    def _read(self, row: Fields, tables: Mapping[str, Table] | None) -> Example:
        raise NotImplementedError

    def _missing(self, row: Fields, key: str) -> NoReturn:
        there = ", ".join(repr(str(name)) for name in row.data) or "nothing"
        raise ConfigError(
            f"{row.where}: a row of method {self.method} has {self.needs}, and {key!r} is missing; "
            f"there is: {there}. Rename the columns, or name them with columns={{…}}"
        )


class PairRows(MethodRows):
    """Rows of a prompt, a chosen and a rejected answer, as text or as lists of messages."""

    method = "'dpo', 'orpo' or 'reward'"
    needs = "'prompt', 'chosen' and 'rejected'"
    reads = frozenset((REJECTED,))

    def _columns(self, data: Mapping[str, object]) -> Sequence[str]:
        listed = isinstance(data.get("chosen"), list | tuple)
        return ("prompt", *PAIR, TOOLS) if listed else ("prompt", *PAIR)

    def remark(self, row: Example) -> str:
        rejected = part(row.beside, REJECTED)
        return EQUAL if text(rejected.get("content")) == row.target else ""

    def others(self, row: Example) -> Mapping[str, Example]:
        return {REJECTED: with_rejected(row)}

    def _read(self, row: Fields, tables: Mapping[str, Table] | None) -> Example:
        del tables
        for key in PAIR:
            if row.data.get(key) is None:
                self._missing(row, key)
        lists = [isinstance(row.data[key], list | tuple) for key in PAIR]
        if all(lists):
            chosen, rejected = exchanges(row, PAIR)
            for key, turns in zip(PAIR, (chosen, rejected), strict=True):
                if not is_learned(turns[-1]):
                    row.fail(key, "is marked as a turn that is not learned; remove the mark")
            return Example(
                source=last_of(chosen, "user"),
                target=chosen[-1]["content"],
                messages=chosen,
                tools=tools_of(row),
                beside={REJECTED: rejected[-1]},
            )
        if any(lists) or isinstance(row.data.get("prompt"), list | tuple):
            row.fail(
                "chosen",
                f"is {short(row.data['chosen'])}, and rejected is {short(row.data[REJECTED])}; let "
                "prompt, chosen and rejected all be text, or all be lists of messages",
            )
        prompt = row.prose("prompt", needed=False)
        chosen_text, rejected_text = (row.prose(key) for key in PAIR)
        if not prompt:
            prompt, chosen_text, rejected_text = self._split(row, chosen_text, rejected_text)
        answer: Message = {"role": "assistant", "content": rejected_text}
        return Example(source=prompt, target=chosen_text, beside={REJECTED: answer})

    def _split(self, row: Fields, chosen: str, rejected: str) -> tuple[str, str, str]:
        """Return the common beginning of two texts, and the rest of both."""
        shared = 0
        for one, other in zip(chosen, rejected, strict=False):
            if one != other:
                break
            shared += 1
        # A word belongs to the answers whole.
        while shared and not chosen[shared - 1].isspace():
            shared -= 1
        prompt = chosen[:shared].strip()
        answers = chosen[shared:].strip(), rejected[shared:].strip()
        if not prompt or not all(answers):
            row.fail(
                "chosen",
                "and rejected have no prompt, and do not begin with the same words; write the "
                "prompt as a column 'prompt'",
            )
        return prompt, *answers


class LabelledRows(MethodRows):
    """Rows of a question, an answer, and whether the answer is good."""

    method = "'kto'"
    needs = "'prompt', 'completion' and a boolean 'label'"
    reads = frozenset(_TAGS)

    def read(self, data: object, where: str, tables: Mapping[str, Table] | None = None) -> Example:
        # A row that an earlier version prepared may have several learned turns.
        return judged_alone(super().read(data, where, tables))

    def remaining(self, row: Example) -> Mapping[str, object]:
        return {LABEL: row.beside.get(LABEL)}

    def remarks(self, train: Iterable[Example]) -> Mapping[str, int]:
        labels = Counter(row.beside.get(LABEL) is True for row in train)
        if len(labels) != 1:
            return {}
        ((good, rows),) = labels.items()
        return {ONE_LABEL.format(str(good).lower(), str(not good).lower()): rows}

    def _columns(self, data: Mapping[str, object]) -> Sequence[str]:
        return (*ANSWER_ROWS.columns(data), *_TAGS)

    def _read(self, row: Fields, tables: Mapping[str, Table] | None) -> Example:
        tag = next((name for name in _TAGS if row.data.get(name) is not None), "")
        if not tag:
            self._missing(row, LABEL)
        value = row.data[tag]
        # A CSV table has the words.
        if isinstance(value, str) and value.strip().casefold() in ("true", "false"):
            value = value.strip().casefold() == "true"
        if not isinstance(value, bool):
            row.fail(tag, f"is {short(value)}; write true (a good answer) or false")
        completion = row.data.get("completion")
        if isinstance(completion, list | tuple) and len(completion) > 1:
            row.fail(
                "completion",
                f"has {len(completion)} turns, and {tag} judges a single turn of the assistant; "
                "move the turns before the last one to 'prompt'",
            )
        others = {name: each for name, each in row.data.items() if name not in _TAGS}
        read = ANSWER_ROWS.read(others, row.where, tables)
        if not read.asks:
            self._missing(row, "prompt")
        if not read.target and not read.messages:
            row.fail("completion", "is empty; fill it, or leave the row out")
        return Example(
            source=read.source,
            target=read.target,
            table_id=read.table_id,
            input=read.input,
            messages=read.messages,
            tools=read.tools,
            beside={LABEL: value},
        )


class PromptRows(MethodRows):
    """Rows of a prompt; reward functions receive the other columns."""

    method = "'grpo'"
    needs = "'prompt' (or a question of a known form), and columns for the reward functions"
    reads = frozenset((REJECTED, *_TAGS))
    has_answers = False

    def remaining(self, row: Example) -> Mapping[str, object]:
        return columns_of(row)

    def joined(self, rows: Iterable[Example]) -> Callable[[Example], Example] | None:
        names: dict[str, None] = {}
        kinds = set()
        for row in rows:
            names |= dict.fromkeys(columns_of(row))
            kinds.add(frozenset(columns_of(row)))
        # A reward function gets a list of every column in every call.
        return partial(_with_columns, names) if len(kinds) > 1 else None

    def _columns(self, data: Mapping[str, object]) -> Sequence[str]:
        return tuple(data)

    def _read(self, row: Fields, tables: Mapping[str, Table] | None) -> Example:
        del tables
        asks = ("prompt", *CHAT_KEYS, *ANSWERS)
        key = next((name for name in asks if row.data.get(name) is not None), "")
        if not key:
            self._missing(row, "prompt")
        if row.data.get(TOOLS):
            row.fail(TOOLS, "holds functions to call, which method 'grpo' does not offer to models")
        columns = {}
        for name, value in row.data.items():
            if name in RESERVED:
                row.fail(name, "is the name of an argument of reward functions; rename the column")
            if name not in (key, TOOLS):
                columns[str(name)] = value
        beside = {COLUMNS: columns}
        if isinstance(row.data[key], list | tuple):
            turns = asking_turns(row, key)
            return Example(
                source=last_of(turns, "user"),
                target="",
                messages=turns,
                beside=beside,
            )
        return Example(source=row.prose(key), target="", beside=beside)


def judged_alone(row: Example) -> Example:
    """Return a chat whose last turn alone is learned, with weight 0 for the answers before."""
    if not row.messages:
        return row
    *before, judged = row.messages
    turns: list[Message] = []
    for turn in before:
        turns.append({**turn, "weight": 0} if turn["role"] == "assistant" else turn)
    return replace(row, messages=(*turns, judged))


def rejected_of(row: Example) -> Message:
    """Return the rejected answer of a row of a pair."""
    rejected = part(row.beside, REJECTED)
    turn: Message = {"role": "assistant", "content": text(rejected.get("content"))}
    calls = parts(rejected.get("tool_calls"))
    if calls:
        turn["tool_calls"] = calls
    return turn


def with_rejected(row: Example) -> Example:
    """Return a row of a pair with the rejected answer in place of the chosen one."""
    rejected = rejected_of(row)
    messages = (*row.messages[:-1], rejected) if row.messages else ()
    return replace(row, target=rejected["content"], messages=messages)


def _with_columns(names: Iterable[str], row: Example) -> Example:
    """Return a row with all columns in `names`; None where the row has none."""
    columns = {**dict.fromkeys(names), **columns_of(row)}
    return replace(row, beside={**row.beside, COLUMNS: columns})


def columns_of(row: Example) -> Mapping[str, object]:
    """Return the columns of a row for reward functions."""
    return part(row.beside, COLUMNS)
