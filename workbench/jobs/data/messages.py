"""Chat rows: OpenAI's `messages` and ShareGPT's `conversations`, read into one form and checked turn by turn. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from workbench.base.errors import ConfigError, one_of
from workbench.jobs.data.lines import Fields, short

__all__ = ["CHAT", "CHAT_KEYS", "Message", "answered", "asked", "chat_key", "last_of", "turns_of"]

Message = Mapping[str, str]
"""One turn: `role` (system, user, assistant or tool) and `content`."""

CHAT = "messages"
"""The key of a chat row's turns."""

CHAT_KEYS = (CHAT, "conversations")

_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",  # OpenAI's newer word for it
    "function": "tool",
}
_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
# Who may speak after whom.
_AFTER = {"": ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}


def turns_of(row: Fields) -> tuple[Message, ...]:
    """Return the turns of a row that holds `messages` or `conversations`; empty where it holds neither.

    Example:
        >>> asked, answer = turns_of(Fields({"conversations": [
        ...     {"from": "human", "value": "Hi!"}, {"from": "gpt", "value": "Hello."}]}, "line 1"))
        >>> answer
        {'role': 'assistant', 'content': 'Hello.'}
    """
    key = chat_key(row)
    if not key:
        return ()
    turns = [_turn(row, f"{key}[{number}]", raw) for number, raw in enumerate(row.items(key))]
    # An empty system turn is how many published sets write that there is none.
    kept = [(place, turn) for place, turn in turns if turn["content"] or turn["role"] != "system"]
    _check_order(row, key, kept)
    return tuple(turn for _, turn in kept)


def chat_key(row: Fields) -> str:
    """Return the key that holds a row's turns; empty where there is none."""
    return next((key for key in CHAT_KEYS if row.data.get(key) is not None), "")


def answered(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Return the turns up to the assistant's last one: what follows teaches nothing."""
    last = max((number for number, turn in enumerate(turns) if turn["role"] == "assistant"), default=-1)
    return tuple(turns[: last + 1])


def asked(messages: Sequence[Message], question: str, system: str | None) -> list[Message]:
    """Return the turns that come before a row's last answer, those of a plain question too.

    Example:
        >>> [turn["role"] for turn in asked((), "1+1?", "Be brief.")]
        ['system', 'user']
    """
    turns = list(messages) or [{"role": "user", "content": question}]
    if turns[-1]["role"] == "assistant":
        turns.pop()
    return turns if system is None or turns[0]["role"] == "system" else [{"role": "system", "content": system}, *turns]


def last_of(turns: Sequence[Message], role: str) -> str:
    """Return what a role said last; empty where it said nothing."""
    return next((turn["content"] for turn in reversed(turns) if turn["role"] == role), "")


def _turn(row: Fields, place: str, raw: object) -> tuple[str, Message]:
    turn = Fields(raw, row.where, f"{place}.")
    key, value = ("role", "content") if "role" in turn.data else ("from", "value")
    named = turn.text(key)
    roles = _ROLES if key == "role" else _ROLES | _SHAREGPT
    if named not in roles:
        raise one_of(f"{row.where}: {place}.{key}", named, list(roles))
    role = roles[named]
    if turn.data.get("tool_calls") or turn.data.get("function_call"):
        turn.fail("tool_calls", "is not read; write the call into content, as the model should write it")
    content = _content(turn, value)
    if not content and role in ("user", "assistant"):
        turn.fail(value, f"is empty, and the turn is the {role}'s; fill it, or leave the row out")
    return place, {"role": role, "content": content}


def _content(turn: Fields, key: str) -> str:
    match turn.data.get(key):
        case [*parts]:  # OpenAI's form of texts and images
            texts = []
            for part in parts:
                match part:
                    case {"type": "text", "text": str(text)}:
                        texts.append(text)
                    case _:
                        turn.fail(key, f"holds {short(part)}; only parts of type 'text' are read")
            return Fields({key: "\n".join(texts)}, turn.where, turn.path).prose(key, needed=False)
    return turn.prose(key, needed=False)


def _check_order(row: Fields, key: str, turns: Sequence[tuple[str, Message]]) -> None:
    spoken = [(place, turn["role"]) for place, turn in turns]
    if spoken and spoken[0][1] == "system":
        spoken = spoken[1:]
    if not spoken:
        row.fail(key, "has no turn of a user")
    for (_, before), (place, role) in pairwise([("", ""), *spoken]):
        if role not in _AFTER[before]:
            follows = f"follows the turn of {before!r}" if before else "comes first"
            problem = f"{follows}; there must stand one of {' or '.join(map(repr, _AFTER[before]))}"
            if role == "system":
                problem = "stands after other turns; a system turn comes first, once"
            raise ConfigError(f"{row.where}: {place} is of {role!r} and {problem}")
