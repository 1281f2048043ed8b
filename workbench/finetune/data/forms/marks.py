"""Marks that decide whether a turn or a row is learned, under the names of other trainers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn

from workbench.base import json_values
from workbench.base.errors import ConfigError
from workbench.finetune.data.lines import Fields, short

_LEARNED = frozenset(
    (
        "weight",
        "loss",
        "lossweight",
        "lossscale",
        "lossmask",
        "steplossmask",
        "train",
        "trains",
        "training",
        "trainable",
        "trainonturn",
        "trainthis",
        "learn",
        "learned",
        "learnable",
        "supervise",
        "supervised",
    )
)
"""Marks that are true for a turn to learn, in lower case: only letters and digits."""
_MASKED = frozenset(
    ("masked", "ignore", "ignored", "skip", "skipped", "exclude", "excluded", "contextonly")
)
"""Marks that are true for a turn that is not learned."""
_YES = (
    *("is", "to", "do", "should", "use", "with", "has", "for", "compute", "calculate", "calc"),
    *("enable", "include", "includein", "outputwith", "usefor", "usedfor"),
)
_NO = (
    *("no", "not", "donot", "dont", "without", "skip", "ignore", "mask", "exclude", "excludefrom"),
    *("disable", "isnot", "notfor"),
)
"""Words before a mark: the first keep the meaning of the mark, the others turn it round."""
_UNCLEAR = frozenset(("mask", "traindetail", "trainingdetail", "messagefieldtrainingdetail"))
"""Marks that mean opposite things in different trainers, or a part of a turn."""

_ROWS_LEARNED = frozenset(
    (
        *("sampleweight", "exampleweight", "rowweight", "instanceweight"),
        *("keep", "kept", "retain", "use", "usable", "include", "included", "select", "selected"),
        *("valid", "approved"),
    )
)
"""Further marks that are true for a row to learn."""
_ROWS_MASKED = _MASKED | frozenset(
    (
        *("discard", "discarded", "drop", "dropped", "remove", "removed"),
        *("delete", "deleted", "invalid", "unusable", "filterout", "filteredout"),
    )
)
"""Further marks that are true for a row that is not learned."""
_ROWS = re.compile("(this|me|row|sample|example|instance|record)+$")
"""Words after a mark of a row."""
_ROWS_UNCLEAR = frozenset(("filter", "filtered", "isfiltered"))
"""Marks that are true for the rows to learn, or for the others."""
_GOOD = {
    *("correct", "good", "accepted", "verified", "desirable", "passed", "safe", "helpful"),
    *("harmless", "acceptable"),
}
_BAD = {
    *("bad", "wrong", "incorrect", "undesirable", "toxic", "harmful", "unsafe", "flagged"),
    *("duplicate", "corrupt", "corrupted", "broken", "failed", "rejected"),
}
_JUDGED = {"is", "was", "the", "answer", "response", "output", "completion", "row", "marked", "as"}
"""Words before a judgement of the answer of a row."""
_OF_LEARNING = {
    *("loss", "train", "training", "trainable", "learn", "learned", "learning", "backprop"),
    *("supervise", "supervised", "supervision", "mask", "masked", "grad", "gradient"),
}
_AGAINST = {"no", "not", "without", "skip", "ignore", "ignored", "exclude", "mask", "masked"}
"""Words that turn the meaning of a word of learning round."""
_TRUTHS = {
    **dict.fromkeys(("true", "yes", "y", "on", "1", "1.0"), True),
    **dict.fromkeys(("false", "no", "n", "off", "0", "0.0"), False),
}
"""Words of truth in a table of text."""


def is_mark(name: object) -> bool:
    """Return whether a key of a turn decides whether the turn is learned.

    Example:
        >>> is_mark("train_on_turn"), is_mark("Loss"), is_mark("content")
        (True, True, False)
    """
    return _meaning(name) is not None or _folded(name) in _UNCLEAR


def _meaning(
    name: object, learned: Collection[str] = _LEARNED, masked: Collection[str] = _MASKED
) -> bool | None:
    """Return whether a true mark allows the turn to be learned; None for no mark."""
    folded = _folded(name)
    is_not = any(folded.startswith(word) and folded.removeprefix(word) in learned for word in _NO)
    if is_not or any(folded.removeprefix(word) in masked for word in ("", "is", "to", "should")):
        return False
    for word in ("", *_YES):
        if folded.startswith(word) and folded.removeprefix(word) in learned:
            return True
    return None


def _row_meaning(name: object) -> bool | None:
    """Return whether a true mark allows the row to be learned; None for no mark."""
    meaning = _meaning(name)
    if meaning is not None:
        return meaning
    return _meaning(_ROWS.sub("", _folded(name)), _ROWS_LEARNED, _ROWS_MASKED)


def may_be_learned(turn: Fields, role: str) -> bool:
    """Return whether the marks of a turn allow the turn to be learned.

    Raises:
        ConfigError: A mark is neither true nor false, or marks contradict each other.
    """
    verdicts: dict[str, bool] = {}
    # Each mark is read by itself: packages name the same wish in opposite words.
    for name, value in turn.data.items():
        folded = _folded(name)
        if value is None or not is_mark(name):
            continue
        key = str(name)
        if folded in _UNCLEAR:
            turn.fail(
                key,
                f"is {short(value)}, which other trainers read in different ways; write "
                '"weight": 0 for a turn that is read and not learned, or leave the key out',
            )
        is_true = _truth(turn, key, value)
        verdicts[key] = is_true == _meaning(name)
        if role != "assistant" and is_true and _meaning(name):
            turn.fail(
                key,
                f"is {short(value)} in a turn of {role!r}; only turns of the assistant are learned",
            )
    # Two marks that disagree leave no safe reading.
    if len(set(verdicts.values())) > 1:
        names = " and ".join(map(repr, verdicts))
        turn.fail(next(iter(verdicts)), f"contradicts another mark of the turn: {names}")
    if role != "assistant":
        return True
    if not verdicts:
        _refuse_doubts(turn)
    return all(verdicts.values())


def _refuse_doubts(turn: Fields) -> None:
    """Raise ConfigError for an answer that a mark of rows or a judgement speaks against."""
    for name, value in turn.data.items():
        for learned in (_row_meaning(name), is_good(name), _may_mark(name)):
            if learned is not None and truth_of(value) == (not learned):
                turn.fail(
                    str(name),
                    f"is {short(value)}, and the turn would be learned. Write "
                    '"weight": 0 for a turn that is read and not learned, or "weight": 1',
                )


def _may_mark(name: object) -> bool | None:
    """Return whether a true value under a name asks to learn the turn. None: a name of no mark."""
    words = {*words_of(str(name))}
    if not words & _OF_LEARNING:
        return None
    # A mask of the loss is true for what is learned.
    return not words & (_AGAINST - {"mask"} if "loss" in words else _AGAINST)


def is_good(name: object) -> bool | None:
    """Return whether a true value in a column praises the answer; None for no judgement.

    Example:
        >>> is_good("is_correct"), is_good("answer_is_wrong"), is_good("correct_answer")
        (True, False, None)
    """
    *before, last = words_of(str(name)) or [""]
    if not {*before} <= _JUDGED or last not in _GOOD | _BAD:
        return None
    return last in _GOOD


def is_row_mark(name: object) -> bool:
    """Return whether a column may decide whether the row is learned."""
    return _row_meaning(name) is not None or _folded(name) in _UNCLEAR | _ROWS_UNCLEAR


def row_marks(data: Mapping[str, object], names: Iterable[str], where: str) -> dict[str, bool]:
    """Return whether each mark in `names` allows a row to be learned, for marks with a value.

    A text that is no word of truth is no mark. Null and an empty text are no value.

    Raises:
        ConfigError: A mark is another number, has opposite meanings, or contradicts another mark.
    """
    verdicts: dict[str, bool] = {}
    for name in names:
        verdict = _verdict(name, data[name], where)
        if verdict is not None:
            verdicts[name] = verdict
    if len(set(verdicts.values())) > 1:
        several = " and ".join(map(repr, verdicts))
        _refuse_mark(where, next(iter(verdicts)), f"contradicts another mark of the row: {several}")
    return verdicts


def refuse_lists(
    data: Mapping[str, object], names: Collection[str], roles: Sequence[str], where: str
) -> None:
    """Raise ConfigError for a list of marks beside the turns of a chat.

    Under any name, true and false for as many turns may be such a list.
    """
    lengths = (len(roles), roles.count("assistant"))
    for name, value in data.items():
        if not isinstance(value, list | tuple) or not value:
            continue
        truths = {truth_of(each) for each in value if not isinstance(each, str)}
        if name in names or (len(value) in lengths and truths == {True, False}):
            problem = (
                f"is {short(value)}, and the marks of turns are read of the turns alone. Write "
                '"weight": 0 into every turn that is not learned'
            )
            _refuse_mark(where, name, problem)


def _verdict(name: str, value: object, where: str) -> bool | None:
    """Return whether a mark of a row allows the row to be learned; None for no mark."""
    figure = _figure(value)
    if figure is None:
        return None
    folded = _folded(name)
    if folded in _UNCLEAR | _ROWS_UNCLEAR:
        problem = f"is {short(value)}, which other trainers read in different ways"
        _refuse_mark(where, name, problem)
    if figure not in (0, 1):
        problem = f"is {short(value)}; it must be 0 or 1, because a row is learned or not"
        _refuse_mark(where, name, problem)
    return (figure == 1) == _row_meaning(name)


def truth_of(value: object) -> bool | None:
    """Return the truth of a value: of a boolean, of 0 or 1, or of a word of truth; else None.

    Example:
        >>> truth_of("No"), truth_of(1), truth_of(0.5)
        (False, True, None)
    """
    figure = _figure(value)
    return bool(figure) if figure in (0, 1) else None


def words_of(name: str) -> list[str]:
    """Return the lower-case words of a name such as `chat_history` or `chatHistory`."""
    apart = ""
    before = ""
    for letter in name:
        if letter.isupper() and before.islower():
            apart += " "
        apart += letter if letter.isalnum() else " "
        before = letter
    return apart.casefold().split()


def _figure(value: object) -> float | None:
    """Return the number of a value, and 1 or 0 for truth; None for other values and texts."""
    if isinstance(value, str):
        folded = value.strip().casefold()
        value = _TRUTHS.get(folded, folded)
    try:
        return float(value) if isinstance(value, str | bool) else json_values.as_float(value)
    except ValueError:
        return None


def _refuse_mark(where: str, name: str, problem: str) -> NoReturn:
    raise ConfigError(
        f"{where}: the column {name!r} {problem}. To learn the rows in spite of the "
        f"column, rename the column, or add 'ignore': [{name!r}] to the dataset's options"
    )


def _truth(turn: Fields, key: str, value: object) -> bool:
    truth = truth_of(value)
    if truth is None:
        turn.fail(
            key,
            f"is {short(value)}; it must be 0 or false, or 1 or true: a turn is learned or not, "
            "and no part of its loss can be chosen",
        )
    return truth


def _folded(name: object) -> str:
    return "".join(letter for letter in str(name).casefold() if letter.isalnum())
