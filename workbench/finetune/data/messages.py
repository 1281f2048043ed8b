"""Read chat rows in OpenAI's `messages` or ShareGPT's `conversations` form, and check turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NotRequired, TypedDict

from workbench.base import json_values
from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import Json, parse_json, parts
from workbench.finetune.data.lines import Fields, no_constant, short


class Message(TypedDict):
    role: str
    """One of system, user, assistant and tool."""
    content: str
    tool_calls: NotRequired[Sequence[Json]]
    """Function calls of the assistant, in OpenAI's form, with `arguments` as an object."""
    name: NotRequired[str]
    """Name of the function whose result a tool turn contains."""
    tool_call_id: NotRequired[str]
    weight: NotRequired[int]
    """0 for an assistant turn that is read and not learned; absent in all other turns."""


Shape = tuple[object, ...]
"""Structure of a chat without its words."""

CHAT = "messages"
"""Key of the turns in a chat row."""

CHAT_KEYS = (CHAT, "conversations")

TOOLS = "tools"
"""Key of the functions that the assistant may call."""

_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "developer": "system",  # OpenAI's newer name
    "function": "tool",
}
_CALL = "function_call"
"""ShareGPT's name for an assistant turn with calls as JSON text."""
_SHAREGPT = {
    _CALL: "assistant",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}
_TURN = {
    *(
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "function_call",
        "name",
        "tool_call_id",
        "weight",
        "train",
    )
}
"""Keys that are read of a turn."""
# Roles allowed after each role.
_AFTER = {
    "": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def turns_of(row: Fields) -> tuple[Message, ...]:
    """Return the turns in `messages` or `conversations` of a row; empty if both are missing.

    Example:
        >>> asked, answer = turns_of(Fields({"conversations": [
        ...     {"from": "human", "value": "Hi!"}, {"from": "gpt", "value": "Hello."}]}, "line 1"))
        >>> answer
        {'role': 'assistant', 'content': 'Hello.'}
    """
    key = chat_key(row)
    if not key:
        return ()
    return _ordered(row, key, _listed(row, key))


def completed_turns(row: Fields) -> tuple[Message, ...]:
    """Return the turns of a row with lists of turns in `prompt` and `completion`, as in TRL.

    The completion is learned. Assistant turns of the prompt get weight 0. Other rows have no turns.
    """
    asked = row.data.get("prompt")
    answer = row.data.get("completion")
    if not (isinstance(asked, list | tuple) and isinstance(answer, list | tuple)):
        return ()
    prompt = _listed(row, "prompt")
    completion = _listed(row, "completion")
    for _, turn in prompt:
        if turn["role"] == "assistant":
            turn["weight"] = 0
    return _ordered(row, "prompt", [*prompt, *completion])


def exchanges(row: Fields, keys: Sequence[str]) -> list[tuple[Message, ...]]:
    """Return the turns of a row up to every answer in the lists of turns `keys`.

    `prompt` has the turns before the answers. Without `prompt`, all answers begin with the turns.
    """
    answers = [_listed(row, key) for key in keys]
    if row.data.get("prompt") is not None:
        prompt = _listed(row, "prompt")
    else:
        shared = 0
        shortest = min(map(len, answers))
        while shared < shortest - 1 and all(
            turns[shared][1] == answers[0][shared][1] for turns in answers
        ):
            shared += 1
        prompt = answers[0][:shared]
        answers = [turns[shared:] for turns in answers]
    for _, turn in prompt:
        if turn["role"] == "assistant":
            turn["weight"] = 0
    made = []
    for key, turns in zip(keys, answers, strict=True):
        if len(turns) != 1 or turns[0][1]["role"] != "assistant":
            roles = ", ".join(turn["role"] for _, turn in turns) or "none"
            row.fail(
                key,
                f"has turns after the prompt: {roles}; write a single turn of the assistant",
            )
        made.append(_ordered(row, "prompt", [*prompt, turns[0]]))
    return made


def asking_turns(row: Fields, key: str) -> tuple[Message, ...]:
    """Return the turns of a list that ends with a question, for an answer to come."""
    turns = _listed(row, key)
    for _, turn in turns:
        if turn["role"] == "assistant":
            turn["weight"] = 0
    made = _ordered(row, key, turns)
    if made[-1]["role"] == "assistant":
        row.fail(key, "ends with a turn of the assistant; end the list with the question")
    return made


def tools_of(row: Fields) -> tuple[Json, ...]:
    """Return the schemas of functions that the assistant may call, from a list or its JSON text."""
    listed = _parsed(row, TOOLS)
    match listed:
        case None:
            return ()
        case [*schemas]:
            read = []
            for number, raw in enumerate(schemas):
                tool = Fields(_filled(raw), row.where, f"{TOOLS}[{number}].")
                read.append(_schema(tool))
            return tuple(read)
    return row.fail(TOOLS, f"is {short(listed)}; it must be a list of JSON schemas")


def chat_key(row: Fields) -> str:
    """Return the key of a row's turns; empty if the row has no turns."""
    return next((key for key in CHAT_KEYS if row.data.get(key) is not None), "")


def unread_in_turns(row: Mapping[str, object]) -> Iterator[str]:
    """Yield the filled keys of turns that are not read, such as `messages.thoughts`."""
    for key in (*CHAT_KEYS, "prompt", "completion"):
        for turn in parts(row.get(key)):
            for name, value in turn.items():
                if value and name not in _TURN:
                    yield f"{key}.{name}"


def is_learned(turn: Message) -> bool:
    """Return whether a turn is an assistant turn to learn."""
    return turn["role"] == "assistant" and turn.get("weight") != 0


def answered(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Return the turns up to the last learned turn."""
    end = 0
    for number, turn in enumerate(turns, 1):
        if is_learned(turn):
            end = number
    return tuple(turns[:end])


def asked(messages: Sequence[Message], question: str, system: str | None) -> list[Message]:
    """Return the turns before a row's last answer, also for a row with a plain question.

    Example:
        >>> [turn["role"] for turn in asked((), "1+1?", "Be brief.")]
        ['system', 'user']
    """
    turns = list(messages) or [{"role": "user", "content": question}]
    if turns[-1]["role"] == "assistant":
        turns.pop()
    if system is not None and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    return turns


def answer_of(messages: Sequence[Message], target: str) -> Message:
    return messages[-1] if messages else {"role": "assistant", "content": target}


def shape_of(turns: Sequence[Message], tools: Sequence[Json]) -> Shape:
    """Return role, presence of content and number of calls per turn, and whether tools exist."""
    shapes = []
    for turn in turns:
        calls = len(turn.get("tool_calls", ()))
        shapes.append((turn["role"], bool(turn["content"]), calls))
    return (bool(tools), *shapes)


def last_of(turns: Sequence[Message], role: str) -> str:
    """Return the last content of a role; empty if the role has no turn."""
    for turn in reversed(turns):
        if turn["role"] == role:
            return turn["content"]
    return ""


def _listed(row: Fields, key: str) -> list[tuple[str, Message]]:
    """Return the turns of a list, with their places in the row."""
    return [_turn(row, f"{key}[{number}]", raw) for number, raw in enumerate(row.items(key))]


def _ordered(row: Fields, key: str, turns: Sequence[tuple[str, Message]]) -> tuple[Message, ...]:
    """Return the turns without empty system turns, and check their order."""
    # Many published datasets write an empty system turn for no system turn.
    kept = [(place, turn) for place, turn in turns if turn["content"] or turn["role"] != "system"]
    _check_order(row, key, kept)
    return tuple(turn for _, turn in kept)


def _turn(row: Fields, place: str, raw: object) -> tuple[str, Message]:
    turn = Fields(raw, row.where, f"{place}.")
    key, value = ("role", "content") if "role" in turn.data else ("from", "value")
    named = turn.text(key)
    others = {_CALL: "assistant"} if key == "role" else _SHAREGPT
    roles = _ROLES | others
    if named not in roles:
        raise one_of(f"{row.where}: {place}.{key}", named, list(roles))
    role = roles[named]
    calls = list(_calls(turn))
    content = _content(turn, value)
    if named == _CALL:
        calls = _written_calls(turn, value, content)
        content = ""
    if calls and role != "assistant":
        turn.fail("tool_calls", f"stands in a turn of {role!r}; only the assistant calls functions")
    if not content and not calls and role in ("user", "assistant"):
        turn.fail(value, f"is empty, and the turn is the {role}'s; fill it, or leave the row out")
    made: Message = {"role": role, "content": content}
    if not _weight(turn, role):
        made["weight"] = 0
    if calls:
        made["tool_calls"] = calls
    if role == "tool" and turn.data.get("name"):
        made["name"] = turn.text("name")
    if role == "tool" and turn.data.get("tool_call_id"):
        made["tool_call_id"] = turn.text("tool_call_id")
    # Further keys are for the chat template, which may read them, as thoughts.
    for name, value in turn.data.items():
        if name not in _TURN and value:
            made[name] = value  # type: ignore[literal-required]
    return place, made


def _weight(turn: Fields, role: str) -> int:
    """Return 0 for an assistant turn that is not learned, else 1."""
    if turn.data.get("train") is False:
        turn.fail("train", 'is false; write "weight": 0 for a turn that is read and not learned')
    weight = turn.data.get("weight")
    if weight is None:
        return 1
    if json_values.number(weight) not in (0, 1):
        turn.fail("weight", f"is {short(weight)}; it must be 0 (not learned) or 1 (learned)")
    if weight and role != "assistant":
        turn.fail("weight", f"is 1 in a turn of {role!r}; only turns of the assistant are learned")
    return int(bool(weight)) if role == "assistant" else 1


def _calls(turn: Fields) -> Iterator[Json]:
    single = turn.data.get("function_call")  # OpenAI's older form of a single call
    if single:
        yield _call(Fields(_filled(single), turn.where, f"{turn.path}function_call."))
    if turn.data.get("tool_calls"):
        for number, raw in enumerate(turn.items("tool_calls")):
            place = f"{turn.path}tool_calls[{number}]."
            yield _call(Fields(_filled(raw), turn.where, place))


def _written_calls(turn: Fields, key: str, content: str) -> list[Json]:
    """Return the calls that a `function_call` turn of ShareGPT contains as JSON text."""
    try:
        written = parse_json(content, parse_constant=no_constant)
    except ValueError as error:
        turn.fail(
            key,
            f"is {short(content)}, which is not JSON of a "
            f'call, as {{"name": …, "arguments": …}}: {error}',
        )
    several = written if isinstance(written, list) else [written]
    calls = []
    for raw in several:
        call = Fields(_filled(raw), turn.where, f"{turn.path}{key}.")
        calls.append(_call(call))
    return calls


def _call(call: Fields) -> Json:
    function = call.child("function") if "function" in call.data else call
    arguments = _parsed(function, "arguments") or {}
    if not isinstance(arguments, Mapping):
        function.fail(
            "arguments", f"is {short(arguments)}; it must be an object, or JSON text of one"
        )
    identity = {"id": call.text("id")} if "id" in call.data else {}
    written = {"name": function.text("name"), "arguments": _filled(arguments)}
    return {**identity, "type": "function", "function": written}


def _schema(tool: Fields) -> Json:
    function = tool.child("function") if "function" in tool.data else tool
    function.text("name")
    return {"type": "function", "function": function.data}


def _parsed(fields: Fields, key: str) -> object:
    value = fields.data.get(key)
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, parse_constant=no_constant) if value.strip() else None
    except ValueError as error:
        fields.fail(key, f"is {short(value)}, which is not JSON: {error}")


def _filled(value: object) -> object:
    """Remove null values. A table of objects has every key in every object."""
    match value:
        case Mapping():
            filled = {}
            for key, each in value.items():
                if each is not None:
                    filled[key] = _filled(each)
            return filled
        case [*several]:
            return [_filled(each) for each in several]
    return value


def _content(turn: Fields, key: str) -> str:
    match turn.data.get(key):
        case [*parts]:  # OpenAI's list of texts and images
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
            elif role == before:
                problem = f"{problem}. Join the two turns into one, or leave one of them out"
            raise ConfigError(f"{row.where}: {place} is of {role!r} and {problem}")
