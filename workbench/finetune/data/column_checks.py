"""Count rows, unread columns and empty answers.

Raise ConfigError for columns of another kind of training, such as images or rejected answers, and
for columns of the prompt that the row's form does not read. Other unread columns are reported once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import try_record
from workbench.base.words import pluralize, strip_controls
from workbench.finetune.data.columns import outer_columns
from workbench.finetune.data.forms.marks import (
    is_good,
    is_row_mark,
    refuse_lists,
    row_marks,
    truth_of,
)
from workbench.finetune.data.forms.messages import (
    CHAT,
    TURN_KEYS,
    has_content,
    is_exchange,
    is_turn,
)
from workbench.finetune.data.forms.table import EVERY, GIVEN, HISTORY, option_columns
from workbench.finetune.data.forms.telling import (
    CONTEXT,
    LABEL,
    MEDIA,
    OTHERS,
    REJECTED,
    belongs_to_prompt,
    is_rejected,
    is_thought,
    is_trained,
    names_split,
    verdict_columns,
)
from workbench.finetune.data.lines import is_filled, short
from workbench.finetune.data.reading import ANSWER_ROWS, RowReader
from workbench.finetune.data.rows import Example, has_answer

LEFT_OUT = "(left out)"
"""End of a remark on rows that are not among the dataset's rows."""
_OF_MEDIA = (
    "holds images, sound or video, and FineTune learns from text alone. Use a Script for a model "
    "of media"
)
THOUGHTS = "thoughts"
"""Kind of a column with the thoughts before the answer."""
_QUESTION = "question"
"""Kind of a column that is the question in rows of another form."""
_EMPTY = f"an empty question or answer {LEFT_OUT}"
_CUT_CHAT = "turns after the last learned answer, which are left out"
_QUESTIONS = {form.asks for form in EVERY}
_MOST = 200  # most names to keep; rows may have any number of keys
_LETTERS = 80  # most letters of a name


class Written(NamedTuple):
    """Numbers of written rows, and columns and answers to correct."""

    train: int
    eval: int
    not_read: Sequence[str] = ()
    """Columns not read by any row's form, in order of first appearance."""
    empty_answers: int = 0
    """Number of training and evaluation rows with an empty answer."""
    remarks: Mapping[str, int] = {}
    """Numbers of rows by what is odd about the rows."""


def check_media(data: Mapping[str, object], where: str) -> None:
    """Raise ConfigError for a row with an image, sound or video.

    A model would not see the media.
    """
    for name, value in data.items():
        if str(name).casefold() in MEDIA and not _says_nothing(value):
            raise ConfigError(f"{where}: the column {name!r} {_OF_MEDIA}; or drop the column")


class RowTally:
    """Counter of the rows of a stream, with all columns and all columns read."""

    def __init__(
        self,
        ignore: Sequence[str] = (),
        reader: RowReader = ANSWER_ROWS,
        *,
        given: Mapping[str, object] | None = None,
        drop_empty: bool = False,
    ) -> None:
        self.reader = reader
        """Reader of the rows for the method of the job."""
        self.given = given or {}
        """Options of the dataset that a remedy repeats."""
        self.rows = 0
        self.empty_rows = 0
        """Number of rows without a needed field."""
        self._first_empty = ""
        self._drop_empty = drop_empty
        self.empty_answers = 0
        self.cut_chats = 0
        """Number of chats with turns after the last learned answer, which are left out."""
        self.remarks: Counter[str] = Counter()
        self.marked: Counter[str] = Counter()
        """Numbers of rows that a mark takes from learning, by the name of the mark."""
        self._positions: dict[str, str] = {}
        """First place of every position by which an answer names an option."""
        self._ignore = frozenset(ignore)
        self._there: dict[str, None] = {}
        self._read: set[str] = set()
        # Most rows have the same columns as the row before, so its results are reused.
        self._last_names: tuple[object, ...] = ()
        self._telling: list[Any] = []
        self._verdicts: set[str] = set()
        self._prompting: dict[Any, str] = {}
        self._marks: list[Any] = []
        self._splits: dict[Any, bool] = {}
        self._last_shape: object = None
        self._last_read: tuple[set[str], bool] = set(), False

    def check(self, data: object, columns: Mapping[str, str], where: str) -> None:
        """Raise ConfigError for a row of another kind of training than learning an answer."""
        if not isinstance(data, Mapping):
            return
        names = tuple(data)
        if names != self._last_names:
            self._look_at(data, {*self._ignore, *_all_columns(columns.values(), data)})
            self._last_names = names
        if self._mark_of(data, where):
            return
        for name in self._telling:
            if _says_nothing(data[name]):
                continue
            fields: Iterable[str] = data
            if columns:
                fields = [
                    field
                    for field, named in columns.items()
                    if _all_columns([named], data) <= data.keys()
                ]
            problem = self._split_problem(name, data[name])
            chooses = name in self._verdicts
            problem = problem or _problem(name, data[name], fields, chooses=chooses)
            if problem:
                raise ConfigError(
                    f"{where}: the column {name!r} {problem}. To train without the column on "
                    f"purpose, add 'ignore': [{name!r}] to the dataset's options"
                )

    def _look_at(self, data: Mapping[str, object], meant: Collection[str]) -> None:
        """Record the columns whose values say how a row is to be learned."""
        self._telling = []
        self._prompting = {}
        self._marks = []
        self._verdicts = {*verdict_columns(map(str, data))}
        options = {*option_columns(data).values()}
        others = OTHERS - self.reader.reads
        is_of_pair = bool({*REJECTED} & self.reader.reads)
        # A label, or a rejected answer, judges the answers of a row.
        is_judged = is_of_pair or LABEL in self.reader.reads
        for name in data:
            if name in meant:
                continue
            judges = not is_judged and is_good(name) is not None
            is_other = str(name).strip().casefold() in others
            is_other = is_other or (not is_of_pair and is_rejected(name))
            if is_other or judges or name in self._verdicts or names_split(name):
                self._telling.append(name)
            key = CONTEXT if name in options else belongs_to_prompt(name)
            if key is None and not is_of_pair and is_thought(name):
                key = THOUGHTS
            if key is None and name in _QUESTIONS - {"source"}:  # a source may be an origin
                key = _QUESTION
            if key is not None:
                self._prompting[name] = key
            if is_row_mark(name):
                self._marks.append(name)

    def _split_problem(self, name: str, value: object) -> str:
        """Return the problem of rows for training among rows for evaluation; empty for others."""
        trained = is_trained(value) if names_split(name) else None
        if trained is None or self._splits.setdefault(name, trained) == trained:
            return ""
        return (
            f"is {short(value)}, and rows before are of another split: rows of one file are all "
            "for training, or all for evaluation. Write the rows of each split into a file of its "
            "own, and name the files as 'train' and 'eval' of a dataset of kind 'files'"
        )

    def is_unlearned(self, data: object, where: str) -> bool:
        """Return whether a mark takes a row, which was checked, from learning; count the row.

        Raises:
            ConfigError: A mark is neither true nor false, or marks contradict each other.
        """
        if not self._marks or not isinstance(data, Mapping):
            return False
        mark = self._mark_of(data, where)
        if not mark:
            return False
        self.marked[mark] += 1
        self._add(data)
        return True

    def _mark_of(self, data: Mapping[str, object], where: str) -> str:
        """Return the mark that takes a row from learning; empty if there is none."""
        marks = row_marks(data, self._marks, where)
        self._read |= marks.keys()
        return next(iter(marks), "") if not any(marks.values()) else ""

    def without_ignored(self, data: object) -> object:
        """Return a row without the columns to leave out on purpose."""
        if not self._ignore or not isinstance(data, Mapping):
            return data
        return {name: value for name, value in data.items() if name not in self._ignore}

    def take(
        self, data: object, columns: Mapping[str, str], fields: object, row: Example, where: str
    ) -> None:
        """Count a row, and record the columns that the row's form reads.

        `fields` are the row's fields, read from the columns in `columns`.
        """
        assert isinstance(data, Mapping) and isinstance(fields, Mapping)
        self.rows += 1
        self.empty_answers += self._lacks_answer(row)
        self.cut_chats += row.is_cut
        remark = self.reader.remark(row)
        if remark:
            self.remarks[remark] += 1
        position = _position(fields, row)
        if position:
            self._positions.setdefault(position, where)
        if row.messages:
            rest = {name: value for name, value in data.items() if name not in self._ignore}
            refuse_lists(rest, self._marks, [turn["role"] for turn in row.messages], where)
        # The form of a row depends on its columns, on the empty columns, and on whether the row is
        # a chat.
        shape = (tuple(data), [is_filled(value) for value in data.values()], bool(row.messages))
        is_known = shape == self._last_shape and not row.messages
        if not is_known:
            self._last_shape = shape
            own: set[str] = set()
            read = self.reader.columns(fields)
            for field in read:
                own |= _all_columns([columns.get(field, field) if columns else field], data)
            in_text = any(isinstance(fields.get(key), str) for key in _QUESTIONS & {*read})
            self._last_read = own, in_text
        own, in_text = self._last_read
        self._check_prompt(data, columns, row, where)
        if is_known:
            return
        if in_text and not columns and not row.messages:
            self._check_turns(data, own, where)
        self._read |= own
        self._add(data)
        self._add(self.reader.unread_within(fields))

    def _check_prompt(
        self, data: Mapping[str, object], columns: Mapping[str, str], row: Example, where: str
    ) -> None:
        """Raise ConfigError for a part of the prompt or of the answer that a form leaves out."""
        own, in_text = self._last_read
        options = option_columns(data).values() if self._prompting else ()
        for name, key in self._prompting.items():
            if name in own or not _asks(name, data[name]):
                continue
            is_part = key in (CONTEXT, THOUGHTS, _QUESTION)
            # The readers of texts refuse two questions.
            if key == _QUESTION and in_text:
                continue
            # Forms to summarize read no context. Plain text has everything in itself.
            if key == CONTEXT and in_text and name in GIVEN and not columns:
                continue
            if is_part and not in_text and (not row.messages or name in options):
                continue
            # Turns, and an answer with thoughts, often have the text in themselves.
            if (key == THOUGHTS or (is_part and not in_text)) and _stands_in(data[name], row):
                continue
            problem = _unread_prompt(name, key, columns, is_chat=not in_text)
            raise ConfigError(f"{where}: the column {name!r} {problem}")

    def _check_turns(self, data: Mapping[str, object], own: set[str], where: str) -> None:
        """Raise ConfigError for turns of a chat that a question and its answer leave out."""
        for name in data.keys() - own - self._ignore - {*TURN_KEYS}:
            value = _unpacked(data[name])
            if not isinstance(value, list | tuple) or not value:
                continue
            if all(map(is_exchange, value)):
                problem = _unread_prompt(str(name), HISTORY, {}, is_chat=False)
                raise ConfigError(f"{where}: the column {name!r} {problem}")
            if all(map(is_turn, value)):
                columns = {CHAT: str(name)}
                raise ConfigError(
                    f"{where}: the column {name!r} holds turns of a chat, and the row is read as "
                    f"a question and its answer. To learn the chat, add 'columns': {columns} to "
                    "the dataset's options. Earlier turns of the question belong into a column "
                    f"'history'. To train without the column on purpose, add 'ignore': [{name!r}]"
                )

    def leave_out(self, problem: str) -> None:
        """Count a row without a needed field. Without `drop_empty`, `check_empty` refuses it."""
        self.empty_rows += 1
        self._first_empty = self._first_empty or problem

    def drops(self, row: Example) -> bool:
        """Return whether a row is left out because its answer is empty."""
        return self._drop_empty and self._lacks_answer(row)

    def _lacks_answer(self, row: Example) -> bool:
        return self.reader.has_answers and row.asks and not row.messages and not row.target

    def check_empty(self) -> None:
        """Raise ConfigError for rows without a needed field, unless they are dropped."""
        if self.empty_rows and not self._drop_empty:
            every = self.rows + self.empty_rows
            remedy = "add 'drop_empty': True to the dataset's options"
            if self.given:
                remedy = f"dataset={ {**self.given, 'drop_empty': True} }"
            raise ConfigError(
                f"{self._first_empty}; {self.empty_rows} of {pluralize(every, 'row')} "
                f"{'has' if self.empty_rows == 1 else 'have'} an empty field that is needed. Fill "
                f"the field, or leave out rows with an empty question or answer: {remedy}"
            )

    def check_end(self, what: str) -> None:
        """Raise ConfigError for a stream whose rows cannot be learned, after its last row."""
        self.check_empty()
        if self.marked and not self.rows:
            marks = [*self.marked]
            raise ConfigError(
                f"{what}: every row ({self.marked.total()}) has a mark not to learn the row: "
                f"{', '.join(map(repr, marks))}. Correct the marks, or add 'ignore': {marks} to "
                "the dataset's options"
            )

    def _add(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._there and len(self._there) < _MOST:
                self._there[name] = None

    def not_read(self, *others: RowTally) -> list[str]:
        """Return the columns that no row of this stream and `others` read, as printable text."""
        there: dict[str, None] = {}
        read: set[str] = set()
        for tally in (self, *others):
            there |= tally._there
            read |= tally._read
        return [strip_controls(name)[:_LETTERS] for name in there if name not in read]

    def check_ignored(self, *others: RowTally) -> None:
        """Raise ConfigError if an ignored column is in no row."""
        there: dict[str, None] = {}
        for tally in (self, *others):
            there |= tally._there
        for name in self._ignore:
            if len(there) < _MOST and name not in there:
                raise one_of("dataset ignore: the column", name, there)

    def check_positions(self, other: RowTally) -> None:
        """Raise ConfigError for positions of options that may count from 0 or from 1."""
        places = {**other._positions, **self._positions}
        if places and "0" not in places:
            position, where = min(places.items())
            raise ConfigError(
                f"{where}: the answer is {position}, a position of an option, and no row has 0: "
                "the positions may count from 0 or from 1. Write the option's letter or text as "
                "the answer of every row"
            )

    def check_answers(self, what: str) -> None:
        """Raise ConfigError if half of the rows or more have an empty answer."""
        if self.empty_answers and 2 * self.empty_answers >= self.rows:
            raise ConfigError(
                f"{what}: {self.empty_answers} of {pluralize(self.rows, 'row')} have an empty "
                "answer, so a model would learn to answer nothing. Fill the answers, leave the "
                "rows out, or name the column of the answers with columns={…}"
            )
        for remark, count in self.remarks.items():
            if 2 * count >= self.rows:
                raise ConfigError(
                    f"{what}: {count} of {pluralize(self.rows, 'row')} have {remark}. Leave these "
                    "rows out"
                )


def written(counts: tuple[int, int], train: RowTally, evaluation: RowTally, name: str) -> Written:
    """Return the counts of two streams of rows.

    Raise ConfigError for problems that need all rows: empty answers and unknown ignored columns.
    """
    train.check_end(name)
    evaluation.check_end(f"the rows to evaluate on with {name}")
    train.check_answers(name)
    evaluation.check_answers(f"the rows to evaluate on with {name}")
    train.check_ignored(evaluation)
    train.check_positions(evaluation)
    empty = train.empty_answers + evaluation.empty_answers
    remarks = dict(train.remarks + evaluation.remarks)
    left_out = train.empty_rows + evaluation.empty_rows
    if left_out:
        remarks[_EMPTY] = left_out
    cut_chats = train.cut_chats + evaluation.cut_chats
    if cut_chats:
        remarks[_CUT_CHAT] = cut_chats
    for mark, count in (train.marked + evaluation.marked).items():
        remarks[f"the mark {strip_controls(mark)!r} not to learn the row {LEFT_OUT}"] = count
    return Written(
        *counts,
        not_read=train.not_read(evaluation),
        empty_answers=empty,
        remarks=remarks,
    )


def _position(fields: Mapping[str, object], row: Example) -> str:
    """Return the position by which a row's answer names an option; empty for other answers."""
    letter, dot, option = row.target.partition(". ")
    for form in EVERY if dot and len(letter) == 1 else ():
        value = str(fields.get(form.answers, "")).strip()
        if value.isdigit() and letter == chr(ord("A") + int(value)) and value != option:
            return value
    return ""


def _asks(name: str, value: object) -> bool:
    """Return whether a column of the prompt has content. A number is one only as an option."""
    key = belongs_to_prompt(name)
    is_number = isinstance(value, bool | int | float)
    # An argument of a template has any value.
    is_read = key == "" or (key is None and not is_thought(name))
    return has_content(value) and (not is_number or is_read)


def _stands_in(value: object, row: Example) -> bool:
    """Return whether the texts of a value are parts of a row's texts. A word is no text."""
    said = [row.source, row.input, row.target]
    for turn in row.messages:
        said += [each for each in turn.values() if isinstance(each, str)]
    texts = [text.strip() for text in _texts(value)]
    # Some languages write no space between words.
    prose = [text for text in texts if len(text.split()) > 1 or not text.isascii()]
    return all(any(text in each for each in said) for text in prose)


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            inner = _unpacked(value)
            yield from [value] if inner is value else _texts(inner)
        case Mapping():
            for each in value.values():
                yield from _texts(each)
        case [*several]:
            for each in several:
                yield from _texts(each)


def _unpacked(value: object) -> object:
    """Return the list or object of a JSON text, as in a CSV table; any other value as given."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        parsed = try_record(value)
        return value if parsed is None else parsed
    return value


def _unread_prompt(name: str, key: str, columns: Mapping[str, str], *, is_chat: bool) -> str:
    """Return the problem of a column that the form of a row does not read."""
    part = "prompt"
    if key == THOUGHTS:
        part = "answer"
        remedy = f"Write the text into the answer, as in '<think>{{{name}}}</think>{{answer}}'"
        remedy += " of the dataset's option columns"
        if is_chat:
            remedy = (
                "Write the text into the assistant's turn: into 'content', or into a key that the "
                "chat template reads, such as 'reasoning_content'"
            )
    elif is_chat and key in (CONTEXT, _QUESTION):
        remedy = "Write the text into a turn of the chat"
    elif key == CONTEXT and belongs_to_prompt(name) is None:
        # An option of a question has a column of its own.
        remedy = f"Write {{{name}}} into the template of the question in columns"
    elif not key:
        remedy = "Write the effect into the rows, or give a chat_template"
    elif columns:
        remedy = f"Add {key!r}: {name!r} to columns"
    elif key != name:
        remedy = f"Did you mean {key!r}? Rename the column"
    else:
        remedy = "Use rows of another form"
    return (
        f"belongs to the {part}, and the form of the row does not read the column. {remedy}. To "
        f"train without the column on purpose, add 'ignore': [{name!r}] to the dataset's options"
    )


def _all_columns(named: Iterable[str], data: Mapping[str, object]) -> set[str]:
    """Return the columns of a row that names, paths and templates read."""
    return {column for each in named for column in outer_columns(each, data)}


def _says_nothing(value: object) -> bool:
    if isinstance(value, str):
        return value.strip() in ("", "[]")  # a CSV table contains lists as JSON text
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def _problem(name: str, value: object, fields: Iterable[str], *, chooses: bool) -> str:
    """Return the problem of a telling column and a remedy; empty if there is no problem.

    `chooses` says that the column may name the better one of several answers.
    """
    folded = name.strip().casefold()
    if folded in MEDIA:
        return _OF_MEDIA
    if is_rejected(name):
        return (
            "holds answers to avoid, and the job's method does not read the column. Use "
            "method='dpo' to learn preferences"
        )
    if chooses:
        return (
            f"is {short(value)}, which says which of several answers is better, and no form reads "
            "the column. Write the better answer of each row as 'chosen' and the other as "
            "'rejected', or the better one alone as the answer"
        )
    is_verdict = folded in OTHERS and isinstance(value, bool)
    if folded in OTHERS and isinstance(value, str):
        is_verdict = value.strip().casefold() in ("true", "false")
    good = is_good(name)
    if good is not None:
        is_verdict = truth_of(value) == (not good)
    if is_verdict and has_answer([*fields]):
        return (
            "is true or false beside an answer, and answers that are not good would be learned "
            "too. Keep only the rows with good answers, or use method='kto'"
        )
    return ""
