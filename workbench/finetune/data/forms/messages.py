"""Read chat rows in OpenAI's `messages` or ShareGPT's `conversations` form, and check turns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NotRequired, TypedDict

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import Json, as_objects, parse_json
from workbench.finetune.data.forms.marks import is_mark, may_be_learned
from workbench.finetune.data.lines import Fields, is_filled, json_advice, no_constant, short


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

TURN_KEYS = (*CHAT_KEYS, "prompt", "completion", "chosen", "rejected")
"""Keys that may hold turns, also as JSON text."""

TOOLS = "tools"
"""Key of the functions that the assistant may call."""

TOOL_KEYS = (TOOLS, "functions")  # OpenAI's older name
SYSTEM_KEYS = ("system", "system_prompt", "system_message")

_CALLS = ("function_call", "tool_call")
"""Roles of an assistant's turn with calls as JSON text, in ShareGPT's form and in ms-swift's."""
_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "developer": "system",  # OpenAI's newer name
    **dict.fromkeys(_CALLS, "assistant"),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(
        ("function", "observation", "ipython", "tool_response", "tool_result", "function_response"),
        "tool",
    ),
}
"""Meanings of the names of roles, in lower case."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT = re.compile(r"\s*(\[\s*)?\{")
_CALL_KEYS = {"id", "type", "function", "name", "arguments"}
# Roles allowed after each role.
_AFTER = {
    "": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def unpacked(data: Mapping[str, object], where: str) -> Mapping[str, object]:
    """Return a row whose turns are lists, also if the row holds the turns as JSON text.

    Example:
        >>> unpacked({"prompt": '[{"role": "user", "content": "Hi"}]'}, "line 1")
        {'prompt': [{'role': 'user', 'content': 'Hi'}]}
    """
    found = {}
    row = Fields(data, where)
    for key in TURN_KEYS:
        value = data.get(key)
        if isinstance(value, Mapping):
            _refuse_object(row, key, value)
        if not isinstance(value, str) or not _TEXT.match(value):
            continue
        try:
            turns = parse_json(value, parse_constant=no_constant)
        except ValueError as error:
            advice = json_advice(value)
            # Elsewhere, a text may begin like a list and be none.
            if key in CHAT_KEYS or (advice and re.search(r"'(role|from)'", value)):
                row.fail(key, f"is {short(value)}, which is not JSON: {error}{advice}")
            continue
        several = turns if isinstance(turns, list) else [turns]
        if all(is_turn(turn) for turn in several):
            found[key] = turns
        elif isinstance(turns, Mapping):
            _refuse_object(row, key, turns)
    return {**data, **found} if found else data


def _refuse_object(row: Fields, key: str, value: Mapping[str, object]) -> None:
    """Raise ConfigError for an object that holds the turns of a chat."""
    inner = chat_key(value)
    turns = value[inner] if inner else None
    if isinstance(turns, list | tuple) and is_turn(turns[0]):
        row.fail(
            key,
            f"is an object with {inner!r}, and a list of turns is needed. Name the list with the "
            f"dataset's option columns={{{key!r}: '{key}.{inner}', …}}",
        )


def turns_of(row: Fields) -> tuple[Message, ...]:
    """Return the turns in `messages` or `conversations` of a row; empty if both are missing.

    Example:
        >>> asked, answer = turns_of(Fields({"conversations": [
        ...     {"from": "human", "value": "Hi!"}, {"from": "gpt", "value": "Hello."}]}, "line 1"))
        >>> answer
        {'role': 'assistant', 'content': 'Hello.'}
    """
    key = chat_key(row.data)
    if not key:
        return ()
    return ordered(row, key, listed(row, key))


def completed_turns(row: Fields) -> tuple[Message, ...]:
    """Return the turns of a row with lists of turns in `prompt` and `completion`, as in TRL.

    The completion is learned. Assistant turns of the prompt get weight 0. Other rows have no turns.
    """
    asked = row.data.get("prompt")
    answer = row.data.get("completion")
    if not (isinstance(asked, list | tuple) and isinstance(answer, list | tuple)):
        return ()
    prompt = unlearned(listed(row, "prompt"))
    return ordered(row, "prompt", [*prompt, *listed(row, "completion")])


def exchanges(
    row: Fields, keys: Sequence[str], prompt: Sequence[Placed]
) -> list[tuple[Message, ...]]:
    """Return the turns of a row up to every answer in the lists of turns `keys`.

    Every list is an answer to the turns in `prompt`, or a whole chat.
    """
    answers = [listed(row, key) for key in keys]
    if prompt and all(_begins_with(turns, prompt) for turns in answers):
        answers = [turns[len(prompt) :] for turns in answers]
    if not prompt:
        shared = _shared(answers)
        prompt = answers[0][:shared]
        answers = [turns[shared:] for turns in answers]
    made = []
    for key, turns in zip(keys, answers, strict=True):
        if len(turns) != 1 or turns[0][1]["role"] != "assistant":
            roles = ", ".join(turn["role"] for _, turn in turns) or "none"
            row.fail(
                key,
                f"has turns after the prompt: {roles}; write a single turn of the assistant",
            )
        if turns[0][1].get("weight") == 0:
            row.fail(key, "has an answer marked as not learned; leave the mark or the row out")
        made.append(ordered(row, "prompt", [*unlearned(prompt), turns[0]]))
    return made


def shared_turns(row: Fields, keys: Sequence[str]) -> list[Placed]:
    """Return the turns with which the lists of turns `keys` begin, except their last turns."""
    answers = [listed(row, key) for key in keys]
    return answers[0][: _shared(answers)]


def _shared(answers: Sequence[Sequence[Placed]]) -> int:
    shared = 0
    shortest = min(map(len, answers))
    while shared < shortest - 1 and all(
        turns[shared][1] == answers[0][shared][1] for turns in answers
    ):
        shared += 1
    return shared


def _begins_with(turns: Sequence[Placed], prompt: Sequence[Placed]) -> bool:
    return len(turns) > len(prompt) and all(
        one["role"] == other["role"] and one["content"] == other["content"]
        for (_, one), (_, other) in zip(turns, prompt, strict=False)
    )


def unlearned(turns: Sequence[Placed]) -> list[Placed]:
    """Return turns that are read and not learned."""
    for _, turn in turns:
        if turn["role"] == "assistant":
            turn["weight"] = 0
    return list(turns)


def asking_turns(row: Fields, key: str) -> tuple[Message, ...]:
    """Return the turns of a list that ends with a question, for an answer to come."""
    made = ordered(row, key, unlearned(listed(row, key)))
    if made[-1]["role"] == "assistant":
        row.fail(
            key,
            "ends with a turn of the assistant; end the list with the question. If another column "
            f"is the question, add 'ignore': [{key!r}] to the dataset's options",
        )
    return made


def tools_of(row: Fields) -> tuple[Json, ...]:
    """Return the schemas of functions that the assistant may call, from a list or its JSON text."""
    key = one_filled(row, TOOL_KEYS)
    tools = _parsed(row, key) if key else None
    match tools:
        case None:
            return ()
        case [*schemas]:
            read = []
            for number, raw in enumerate(schemas):
                read.append(_schema(Fields(raw, row.where, f"{key}[{number}].")))
            return tuple(read)
    return row.fail(key, f"is {short(tools)}; it must be a list of JSON schemas")


def one_filled(row: Fields, keys: Sequence[str], *, as_json: bool = True) -> str:
    """Return the only filled key of several names for the same; empty if none is filled.

    With `as_json`, the JSON text of an empty list or object is empty too.
    """
    counts = has_content if as_json else is_filled
    filled = [key for key in keys if counts(row.data.get(key))]
    values = [row.data[key] for key in filled]
    if any(value != values[0] for value in values):
        row.fail(
            filled[1],
            f"is another text or list than {filled[0]!r}, and both names mean the same. To leave "
            f"one out on purpose, add 'ignore': [{filled[1]!r}] to the dataset's options",
        )
    return filled[0] if filled else ""


def has_content(value: object) -> bool:
    """Return whether a list or an object has content, also as JSON text."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}", "null")
    return is_filled(value)


def chat_key(row: Mapping[str, object]) -> str:
    """Return the key of a row's turns; empty if the row has no turns."""
    return next((key for key in CHAT_KEYS if is_filled(row.get(key))), "")


def unread_in_turns(row: Mapping[str, object], keys: Iterable[str]) -> Iterator[str]:
    """Yield the keys of turns in the columns `keys` that are not read, as `messages.thoughts`.

    A key with the value null is left out, because tables have every key in every turn.
    """
    for key in keys:
        if key not in TURN_KEYS:
            continue
        value = row.get(key)
        for turn in as_objects([value] if isinstance(value, Mapping) else value):
            read = _keys_read(turn)
            for name, each in turn.items():
                if each is not None and name not in read:
                    yield f"{key}.{name}"
            for call in as_objects(turn.get("tool_calls")):
                for name, each in call.items():
                    if each is not None and name not in _CALL_KEYS:
                        yield f"{key}.tool_calls.{name}"


def _keys_read(turn: Mapping[str, object]) -> set[str]:
    """Return the keys that are read of a turn."""
    read = {str(name) for name in turn if is_mark(name)} | {"tool_calls", "function_call"}
    read |= {_role_key(turn), _content_key(turn)}
    if _role_of(turn) == "tool":
        read |= {"name", "tool_call_id"}
    return read


def _role_key(turn: Mapping[str, object]) -> str:
    return "role" if "role" in turn else "from"


def _content_key(turn: Mapping[str, object]) -> str:
    """Return the key of a turn's content: the one beside the key of the role, if both are there."""
    keys = ("content", "value") if "role" in turn else ("value", "content")
    return next((key for key in keys if key in turn), keys[0])


def _role_of(turn: Mapping[str, object]) -> str:
    named = _folded(turn.get("role", turn.get("from")))
    return _ROLES.get(named, named)


def _folded(role: object) -> str:
    return str(role).casefold().replace("-", "_").replace(" ", "_")


def is_turn(value: object) -> bool:
    """Return whether a value is an object with the role of a turn."""
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def is_exchange(value: object) -> bool:
    """Return whether a value is a question and an answer: two texts, or texts by role.

    Two words may be anything, as the name and the kind of a place.

    Example:
        >>> is_exchange(["Who is it?", "Ann."]), is_exchange({"human": "Hi!", "gpt": "Hello."})
        (True, True)
        >>> is_exchange(["Paris", "city"]), is_exchange({"name": "Ann"}), is_exchange([0.1, 0.2])
        (False, False, False)
    """
    if isinstance(value, Mapping):
        return len(value) > 1 and all(_folded(key) in _ROLES for key in value)
    if not isinstance(value, list | tuple) or list(map(type, value)) != [str, str]:
        return False
    return any(len(text.split()) > 1 for text in value)


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


Placed = tuple[str, Message]
"""Turn with its place in the row."""


def listed(row: Fields, key: str) -> list[Placed]:
    """Return the turns of a list, with their places in the row."""
    turns = []
    for number, raw in enumerate(row.items(key)):
        place = f"{key}[{number}]"
        if not is_turn(raw):
            row.fail(
                place,
                f"is {short(raw)}; it must be an object. Write a turn as "
                '{"role": "user", "content": …}, or as {"role": "assistant", "content": …}',
            )
        turns.append(_turn(row, place, raw))
    return turns


def ordered(row: Fields, key: str, turns: Sequence[Placed]) -> tuple[Message, ...]:
    """Return the turns after the row's system text, and check their order.

    Empty system turns are left out.
    """
    # Many published datasets write an empty system turn for no system turn.
    kept = [(place, turn) for place, turn in turns if turn["content"] or turn["role"] != "system"]
    beside = one_filled(row, SYSTEM_KEYS)
    if beside:
        system: Message = {"role": "system", "content": row.prose(beside)}
        if not kept or kept[0][1]["role"] != "system":
            kept = [(beside, system), *kept]
        elif kept[0][1] != system:
            row.fail(beside, f"is another text than {kept[0][0]}.content; leave out one of the two")
    _check_order(row, key, kept)
    return tuple(turn for _, turn in kept)


def _turn(row: Fields, place: str, raw: object) -> tuple[str, Message]:
    turn = Fields(raw, row.where, f"{place}.")
    key = _role_key(turn.data)
    value = _content_key(turn.data)
    named = turn.text(key)
    if _folded(named) not in _ROLES:
        raise one_of(f"{row.where}: {place}.{key}", named, list(_ROLES))
    role = _role_of(turn.data)
    calls = list(_calls(turn))
    content = _content(turn, value)
    if _folded(named) in _CALLS:
        calls = _written_calls(turn, value, content)
        content = ""
    if calls and role != "assistant":
        turn.fail("tool_calls", f"stands in a turn of {role!r}; only the assistant calls functions")
    read = _keys_read(turn.data)
    if not content and not calls and role in ("user", "assistant"):
        if any(isinstance(turn.data[name], str) for name in turn.data.keys() - read):
            # A turn that has its text under another name is not empty.
            turn.get(value)
        turn.empty(value, f"is empty, and the turn is the {role}'s; fill it, or leave the row out")
    made: Message = {"role": role, "content": content}
    if not may_be_learned(turn, role):
        made["weight"] = 0
    if calls:
        made["tool_calls"] = calls
    if role == "tool" and turn.data.get("name"):
        made["name"] = turn.text("name")
    if role == "tool" and turn.data.get("tool_call_id"):
        made["tool_call_id"] = turn.text("tool_call_id")
    # Further keys are for the chat template, which may read them, as thoughts.
    for name, further in turn.data.items():
        if name not in read and further is not None:
            made[name] = further  # type: ignore[literal-required]
    return place, made


def _calls(turn: Fields) -> Iterator[Json]:
    # OpenAI's older form of a single call.
    single = turn.parsed("function_call", turn.data.get("function_call"))
    if single:
        yield _call(Fields(single, turn.where, f"{turn.path}function_call."))
    if turn.data.get("tool_calls"):
        for number, raw in enumerate(turn.items("tool_calls")):
            place = f"{turn.path}tool_calls[{number}]."
            yield _call(Fields(raw, turn.where, place))


def _written_calls(turn: Fields, key: str, content: str) -> list[Json]:
    """Return the calls that a `function_call` turn of ShareGPT contains as JSON text."""
    try:
        written = parse_json(content, parse_constant=no_constant)
    except ValueError as error:
        turn.fail(
            key,
            f"is {short(content)}, which is not JSON of a "
            f'call, as {{"name": …, "arguments": …}}: {error}{json_advice(content)}',
        )
    several = written if isinstance(written, list) else [written]
    calls = []
    for raw in several:
        call = Fields(raw, turn.where, f"{turn.path}{key}.")
        calls.append(_call(call))
    return calls


def _call(call: Fields) -> Json:
    function = call.child("function") if call.data.get("function") is not None else call
    arguments = _parsed(function, "arguments") or {}
    if not isinstance(arguments, Mapping):
        function.fail(
            "arguments", f"is {short(arguments)}; it must be an object, or JSON text of one"
        )
    identity = {"id": call.text("id")} if call.data.get("id") is not None else {}
    written = {"name": function.text("name"), "arguments": arguments}
    return {**identity, "type": "function", "function": written}


def _schema(tool: Fields) -> Json:
    function = tool.child("function") if tool.data.get("function") is not None else tool
    function.text("name")
    return {"type": "function", "function": function.data}


def _parsed(fields: Fields, key: str) -> object:
    value = fields.data.get(key)
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, parse_constant=no_constant) if value.strip() else None
    except ValueError as error:
        fields.fail(key, f"is {short(value)}, which is not JSON: {error}{json_advice(value)}")


def without_nulls(value: object) -> object:
    """Remove null values of objects. A table of objects has every key in every object."""
    match value:
        case Mapping():
            return {key: without_nulls(each) for key, each in value.items() if each is not None}
        case [*several]:
            return [without_nulls(each) for each in several]
    return value


def _content(turn: Fields, key: str) -> str:
    match turn.data.get(key):
        case [*parts]:  # OpenAI's list of texts and images
            texts = []
            for part in parts:
                match part:
                    case {"text": str(text)} if part.get("type", "text") in _TEXT_PARTS:
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
        row.empty(key, "has no turn of a user")
    for (_, before), (place, role) in pairwise([("", ""), *spoken]):
        if role not in _AFTER[before]:
            follows = f"follows the turn of {before!r}" if before else "comes first"
            problem = f"{follows}; there must stand one of {' or '.join(map(repr, _AFTER[before]))}"
            if role == "system":
                problem = (
                    "stands after other turns; a system turn comes first, once. Join the texts of "
                    "the system, or leave the turn out"
                )
            elif not before:
                problem = f"{problem}. Leave the turn out, or write the question before the turn"
            elif (before, role) == ("tool", "user"):
                problem = (
                    f"{problem}. Write the assistant's answer to the tool before the turn, or "
                    "leave the turn out"
                )
            elif role == before:
                problem = f"{problem}. Join the two turns into one, or leave one of them out"
            raise ConfigError(f"{row.where}: {place} is of {role!r} and {problem}")
