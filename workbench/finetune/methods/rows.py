"""Readers of the rows of methods: pairs of answers, judged answers, and prompts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NoReturn, cast

from workbench.base.errors import ConfigError
from workbench.base.json_values import Json, as_objects, as_str, get_object
from workbench.finetune.data.forms.asked import (
    option_names,
    options_of,
    question_of,
    turns_before,
    turns_with,
)
from workbench.finetune.data.forms.messages import (
    CHAT,
    CHAT_KEYS,
    SYSTEM_KEYS,
    TOOL_KEYS,
    TOOLS,
    Message,
    Placed,
    asking_turns,
    chat_key,
    exchanges,
    has_content,
    last_of,
    listed,
    one_filled,
    shared_turns,
    tools_of,
    unpacked,
    unread_in_turns,
)
from workbench.finetune.data.forms.table import (
    FORMS,
    HISTORY,
    PAIR,
    PAIRS,
    PROMPT_KEYS,
    beside_text,
    meant_columns,
    other_questions,
    part_columns,
    question_form,
)
from workbench.finetune.data.forms.telling import belongs_to_prompt
from workbench.finetune.data.lines import Fields, is_filled, short
from workbench.finetune.data.reading import ANSWER_ROWS, RowReader
from workbench.finetune.data.rows import BESIDE, Example, UnknownForm, prepared_row
from workbench.finetune.data.task import Form
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
_INPUT = "input"
"""Column of OpenAI's form of a pair: an object with the turns and the functions of the prompt."""
_READ_OF_INPUT = (CHAT, *SYSTEM_KEYS, *TOOL_KEYS)
"""Keys that are read of the object."""
_TAGS = (LABEL, "kto_tag")
_MARGIN = "margin"
_ORIGIN = "source"
"""Column that may be a prompt, or say where a row is from."""
_ANSWERS = frozenset(form.answers for form in FORMS)
_PROMPT_WORDS = 3  # least words of a prompt with which two answers begin
_REJECTED_KEYS = tuple(rejected for _, rejected in PAIRS)


class MethodRows(RowReader):
    """Rows of a method of TRL."""

    method: ClassVar[str]
    """Methods that read the rows, in words."""
    needs: ClassVar[str]
    """Columns of a row, in words."""
    keys: ClassVar[Sequence[str]]
    """Keys of the columns of a row."""

    def columns(self, data: Mapping[str, object]) -> Sequence[str]:
        if isinstance(data.get(BESIDE), Mapping):
            return _PREPARED
        return self._columns(data)

    def read(self, data: object, where: str, tables: Mapping[str, Table] | None = None) -> Example:
        # A prepared row of an earlier run, from a card or a manifest.
        if isinstance(data, Mapping) and isinstance(data.get(BESIDE), Mapping):
            return prepared_row(data)
        row = Fields(data, where)
        return self._read(Fields(unpacked(row.data, where), where), tables)

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
        raise UnknownForm(
            f"{row.where}: a row of method {self.method} has {self.needs}, and {key!r} is missing; "
            f"there is: {there}. Rename the columns, or name them",
            meant_columns(self.keys, part_columns(row.data)),
        )


class PairRows(MethodRows):
    """Rows of a prompt, a chosen and a rejected answer, as text or as lists of messages."""

    method = "'dpo', 'orpo' or 'reward'"
    needs = "'prompt', 'chosen' and 'rejected'"
    keys = ("prompt", *PAIR)
    reads = frozenset(_REJECTED_KEYS)

    def _columns(self, data: Mapping[str, object]) -> Sequence[str]:
        pair = _pair_of(data)
        columns = ["prompt", *pair]
        form = question_form(data)
        if _holds_prompt(data.get(_INPUT)) or _is_prompt(data):
            columns.append(_INPUT)
        elif _prompt_key(data) != "prompt":
            columns.append(_prompt_key(data))
        elif form is not None and not isinstance(data[form.asks], list | tuple):
            columns += [form.asks, *beside_text(form, data)]
        columns += [*SYSTEM_KEYS, *TOOL_KEYS]
        return [name for name in dict.fromkeys(columns) if name in data]

    def unread_within(self, data: Mapping[str, object]) -> Iterable[str]:
        yield from super().unread_within(data)
        if not _holds_prompt(data.get(_INPUT)):
            return
        asked = Fields(data, "").child(_INPUT).data
        for name, value in asked.items():
            if name not in _READ_OF_INPUT and value is not None:
                yield f"{_INPUT}.{name}"
        for name in unread_in_turns(asked, (CHAT,)):
            yield f"{_INPUT}.{name}"

    def remark(self, row: Example) -> str:
        rejected = get_object(row.beside, REJECTED)
        return EQUAL if as_str(rejected.get("content")) == row.target else ""

    def others(self, row: Example) -> Mapping[str, Example]:
        return {REJECTED: with_rejected(row)}

    def _read(self, row: Fields, tables: Mapping[str, Table] | None) -> Example:
        del tables
        row = self._in_one_form(row)
        if any(isinstance(row.data[key], list | tuple) for key in PAIR):
            return self._chats(row)
        if isinstance(row.data.get(_prompt_key(row.data)), list | tuple):
            return self._chats(row)
        form = question_form(row.data)
        chosen, rejected = (row.prose(key) for key in PAIR)
        if form is None or not is_filled(row.data[form.asks]):
            if form is not None and form.asks != "prompt":
                row.empty(form.asks)
            prompt_text, chosen, rejected = self._split(row, chosen, rejected)
            return _pair(prompt_text, "", chosen, rejected)
        check_prompt(row, form)
        question = question_of(row, form)
        if form.asks == _ORIGIN and len(_shared_text(chosen, rejected).split()) >= _PROMPT_WORDS:
            row.fail(
                _ORIGIN,
                f"is {short(row.data[_ORIGIN])}, and chosen and rejected begin with the same "
                f"words. If the words are the prompt, add 'ignore': [{_ORIGIN!r}] to the dataset's "
                "options. If the column is the prompt, rename the column to 'prompt'",
            )
        options = options_of(row).values()
        if {text.strip() for text in options} == {chosen.strip(), rejected.strip()}:
            names = option_names(row)
            row.fail(
                form.asks,
                f"has options in {' and '.join(map(repr, names))} that are the two answers "
                "themselves. To leave the options out of the question, add "
                f"'ignore': {names} to the dataset's options. To ask with options, write them into "
                "the question too",
            )
        if not question.is_chat:
            return _pair(question.source, question.input, chosen, rejected)
        turns = turns_with(row, Form(form.asks, PAIR[0]), question, chosen)
        other: Message = {"role": "assistant", "content": rejected}
        return _pair_of_chats(turns, other, tools_of(row))

    def _in_one_form(self, row: Fields) -> Fields:
        """Return a row with the keys `chosen` and `rejected`, and with lists for single turns."""
        data = dict(row.data)
        pair = _pair_of(data)
        for key, name in zip(PAIR, pair, strict=True):
            if name not in data:
                self._missing(row, key)
            value = row.parsed(name, data[name]) if name != key else data[name]
            if not is_filled(value):
                row.empty(name)
            data[key] = [value] if isinstance(value, Mapping) else value
        other = data[PAIR[1]]
        if pair[0] in CHAT_KEYS and isinstance(other, list | tuple) and len(other) > 1:
            data |= {PAIR[0]: row.items(pair[0]), pair[0]: None}
        elif pair[0] in CHAT_KEYS:
            *prompt, chosen = row.items(pair[0])
            data |= {"prompt": prompt, PAIR[0]: [chosen], pair[0]: None}
        # OpenAI's form has the turns of the prompt in an object.
        if _holds_prompt(data.get(_INPUT)):
            asked = row.child(_INPUT)
            data["prompt"] = asked.items(CHAT)
            for name in PROMPT_KEYS:
                value = asked.data.get(name)
                if not has_content(value):
                    continue
                if name not in _READ_OF_INPUT:
                    asked.fail(
                        name,
                        "belongs to the prompt, and is not read of an object with the turns; write "
                        f"its text into {CHAT!r}, or leave the key out",
                    )
                if has_content(data.get(name)) and data[name] != value:
                    asked.fail(name, f"is another value than {name!r} of the row; keep one of both")
                data[name] = value
            data[_INPUT] = None
        elif _is_prompt(data):
            data |= {"prompt": data[_INPUT], _INPUT: None}
        return Fields(data, row.where)

    def _chats(self, row: Fields) -> Example:
        """Return a row with turns in its prompt or in its answers."""
        data = dict(row.data)
        for key in PAIR:
            if isinstance(data[key], str):
                data[key] = [{"role": "assistant", "content": data[key]}]
        row = Fields(data, row.where)
        prompt_key = _prompt_key(data)
        prompt: list[Placed] = []
        if isinstance(data.get(prompt_key), list | tuple):
            prompt = listed(row, prompt_key)
        elif question_form(data) is not None:
            prompt = self._prompt_of_text(row)
        chosen, rejected = exchanges(row, PAIR, prompt)
        return _pair_of_chats(chosen, rejected[-1], tools_of(row))

    def _prompt_of_text(self, row: Fields) -> list[Placed]:
        """Return the turns before two lists of turns, for a question that is text."""
        form = question_form(row.data)
        shared = shared_turns(row, PAIR)
        if form is None or not is_filled(row.data[form.asks]):
            return shared
        question = question_of(row, form)
        if not shared:
            return [*question.before, (form.asks, question.turn)]
        # Whole chats begin with the question, and may go on with more turns.
        asked = [turn["content"].strip() for _, turn in shared if turn["role"] == "user"]
        if form.asks == _ORIGIN and asked:
            return shared
        if question.turn["content"].strip() not in asked:
            row.fail(
                form.asks,
                f"is {short(row.data[form.asks])}, and chosen and rejected do not begin with the "
                "question; let both lists hold an answer alone, or begin with the question",
            )
        return shared

    def _split(self, row: Fields, chosen: str, rejected: str) -> tuple[str, str, str]:
        """Return the common beginning of two texts, and the rest of both."""
        prompt = _shared_text(chosen, rejected)
        begin = len(prompt)
        answers = chosen[begin:], rejected[begin:]
        if not prompt.strip() or not all(answer.strip() for answer in answers):
            row.fail(
                "chosen",
                "and rejected have no prompt, and do not begin with the same words; write the "
                "prompt as a column 'prompt'",
            )
        return prompt, *answers


class ScoredRows(PairRows):
    """Rows of a pair for a model that scores texts."""

    def _read(self, row: Fields, tables: Mapping[str, Table] | None) -> Example:
        if is_filled(row.data.get(_MARGIN)):
            row.fail(
                _MARGIN,
                f"is {short(row.data[_MARGIN])}. TRL subtracts the number from the difference of "
                "the scores, and method 'reward' does not. To train without the column on "
                f"purpose, add 'ignore': [{_MARGIN!r}] to the dataset's options",
            )
        return super()._read(row, tables)


class LabelledRows(MethodRows):
    """Rows of a question, an answer, and whether the answer is good."""

    method = "'kto'"
    needs = "'prompt', 'completion' and a boolean 'label'"
    keys = ("prompt", "completion", LABEL)
    reads = frozenset(_TAGS)

    def read(self, data: object, where: str, tables: Mapping[str, Table] | None = None) -> Example:
        # The label judges the last turn of a chat, and no answer before.
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
        tag = one_filled(row, _TAGS, as_json=False)
        if not tag:
            for name in _TAGS:
                if name in row.data:
                    row.fail(name, "is empty; write true (a good answer) or false")
            self._missing(row, LABEL)
        value = row.data[tag]
        # A CSV table has the words. A number may be that of a class.
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.strip().casefold(), value)
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
            row.empty("completion", "is empty; fill it, or leave the row out")
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
    keys = ("prompt",)
    reads = frozenset((*_REJECTED_KEYS, *_TAGS))
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
        # Turns before the question under another name would reach the functions, and no model.
        before = (HISTORY, SYSTEM_KEYS[0])
        return tuple(
            name for name in data if name in PROMPT_KEYS or belongs_to_prompt(name) not in before
        )

    def _read(self, row: Fields, tables: Mapping[str, Table] | None) -> Example:
        del tables
        form = question_form(row.data)
        key = _prompt_key(row.data)
        if key == "prompt" and form is not None:
            key = form.asks
        elif key == "prompt":
            key = ""
        if not key:
            self._missing(row, "prompt")
        tools = tools_of(row)
        if tools:
            row.fail(TOOLS, "holds functions to call, which method 'grpo' does not offer to models")
        columns = {}
        for name, value in row.data.items():
            if name in RESERVED:
                row.fail(name, "is the name of an argument of reward functions; rename the column")
            # A row has every column of its file: another form's question is empty here.
            is_other = value is None and name in ("prompt", *CHAT_KEYS, *PROMPT_KEYS)
            if name not in (key, TOOLS) and not is_other:
                columns[str(name)] = value
        beside = {COLUMNS: columns}
        if key in CHAT_KEYS or isinstance(row.data[key], list | tuple):
            turns = asking_turns(row, key)
        else:
            assert form is not None
            check_prompt(row, form)
            question = question_of(row, form)
            if not question.is_chat:
                return Example(
                    source=question.source, input=question.input, target="", beside=beside
                )
            turns = turns_before(row, form, question)
        return Example(source=last_of(turns, "user"), target="", messages=turns, beside=beside)


def check_prompt(row: Fields, form: Form) -> None:
    """Raise ConfigError for a question if another column may be the prompt too."""
    asked = str(row.data[form.asks])
    others = other_questions(row.data, form) if form.asks != "prompt" else []
    chat = chat_key(row.data)
    said = [str(turn.get("content", turn.get("value"))) for turn in as_objects(row.data.get(chat))]
    if said and not any(asked.strip() in each for each in said):
        others.append(chat)
    if form.asks == _ORIGIN:
        # A source may say where the row is from.
        for name, value in row.data.items():
            is_longer = isinstance(value, str) and len(value.split()) > len(asked.split())
            is_known = name in (*_ANSWERS, *PAIR) or belongs_to_prompt(name) is not None
            if is_longer and not is_known:
                others.append(str(name))
    if others:
        row.fail(
            form.asks,
            f"and {others[0]!r} may both be the prompt. Rename the column of the prompt to "
            f"'prompt', or leave one out: add 'ignore': [{others[0]!r}] to the dataset's options",
        )


def _pair_of(data: Mapping[str, object]) -> tuple[str, str]:
    """Return the names of a row's columns of two answers."""
    return next((pair for pair in PAIRS if {*pair} <= data.keys()), PAIR)


def _prompt_key(data: Mapping[str, object]) -> str:
    """Return the key of the turns of a prompt, or `prompt` for a question of another form."""
    return "prompt" if is_filled(data.get("prompt")) else chat_key(data) or "prompt"


def _holds_prompt(value: object) -> bool:
    """Return whether a value is an object with the turns of a prompt, as in OpenAI's form."""
    if isinstance(value, str):
        return value.lstrip().startswith('{"messages"')
    return isinstance(value, Mapping) and "messages" in value


def _shared_text(one: str, other: str) -> str:
    """Return the whole words with which two texts begin."""
    shared = 0
    for letter, its in zip(one, other, strict=False):
        if letter != its:
            break
        shared += 1
    # A word belongs to the answers whole.
    while shared and not one[shared - 1].isspace():
        shared -= 1
    return one[:shared].rstrip()


def _is_prompt(row: Mapping[str, object]) -> bool:
    """Return whether `input` is the only question of a row, as in Argilla's pairs of Orca."""
    is_alone = question_form(row) is None and not chat_key(row)
    return is_alone and isinstance(row.get(_INPUT), str) and is_filled(row[_INPUT])


def _pair(source: str, given: str, chosen: str, rejected: str) -> Example:
    answer: Message = {"role": "assistant", "content": rejected}
    return Example(source=source, input=given, target=chosen, beside={REJECTED: answer})


def _pair_of_chats(
    chosen: tuple[Message, ...], rejected: Message, tools: tuple[Json, ...]
) -> Example:
    return Example(
        source=last_of(chosen, "user"),
        target=chosen[-1]["content"],
        messages=chosen,
        tools=tools,
        beside={REJECTED: rejected},
    )


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
    rejected = get_object(row.beside, REJECTED)
    turn: Message = {"role": "assistant", "content": ""}
    # The answer has its calls and thoughts, as the chosen answer has.
    turn.update(cast(Message, rejected))
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
    return get_object(row.beside, COLUMNS)
