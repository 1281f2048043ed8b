"""Marks of a turn that decide whether the turn is learned, under the names of other trainers."""

from __future__ import annotations

from workbench.base import json_values
from workbench.finetune.data.lines import Fields, short

_LEARNED = frozenset(
    (
        "weight",
        "loss",
        "lossweight",
        "lossscale",
        "lossmask",
        "train",
        "trains",
        "training",
        "trainable",
        "istrainable",
        "trainonturn",
        "trainthis",
        "totrain",
        "shouldtrain",
        "learn",
        "learned",
        "learnable",
        "islearned",
        "tolearn",
        "computeloss",
        "calculateloss",
        "calcloss",
        "useloss",
        "withloss",
        "hasloss",
        "supervised",
    )
)
"""Marks that are true for a turn to learn, in lower case and without other signs than letters."""
_MASKED = frozenset(
    (
        "masked",
        "ismasked",
        "maskloss",
        "ignore",
        "ignored",
        "ignoreloss",
        "notrain",
        "donottrain",
        "dontlearn",
        "noloss",
        "skip",
        "skiploss",
        "skiptrain",
        "skiptraining",
        "exclude",
        "excluded",
        "contextonly",
    )
)
"""Marks that are true for a turn that is not learned."""
_UNCLEAR = frozenset(
    (
        "mask",
        "traindetail",
        "trainingdetail",
        "messagefieldtrainingdetail",
    )
)
"""Marks that mean opposite things in different trainers, or a part of a turn."""


def is_mark(name: object) -> bool:
    """Return whether a key of a turn decides whether the turn is learned.

    Example:
        >>> is_mark("train_on_turn"), is_mark("Loss"), is_mark("content")
        (True, True, False)
    """
    return _folded(name) in _LEARNED | _MASKED | _UNCLEAR


def may_be_learned(turn: Fields, role: str) -> bool:
    """Return whether the marks of a turn allow the turn to be learned.

    Raises:
        ConfigError: A mark is neither true nor false, or marks contradict each other.
    """
    verdicts: dict[str, bool] = {}
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
        verdicts[key] = is_true != (folded in _MASKED)
        if role != "assistant" and is_true and folded in _LEARNED:
            turn.fail(
                key,
                f"is {short(value)} in a turn of {role!r}; only turns of the assistant are learned",
            )
    if len(set(verdicts.values())) > 1:
        names = " and ".join(map(repr, verdicts))
        turn.fail(next(iter(verdicts)), f"contradicts another mark of the turn: {names}")
    return role != "assistant" or all(verdicts.values())


def _truth(turn: Fields, key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().casefold() in ("true", "false"):
        return value.strip().casefold() == "true"
    if json_values.number(value) not in (0, 1):
        turn.fail(
            key,
            f"is {short(value)}; it must be 0 or false, or 1 or true: a turn is learned or not, "
            "and no part of its loss can be chosen",
        )
    return bool(value)


def _folded(name: object) -> str:
    return "".join(letter for letter in str(name).casefold() if letter.isalpha())
