"""Chat rows as published: read into one form, and refused by file, line and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.forms.messages import unread_in_turns
from workbench.finetune.data.lines import EmptyField
from workbench.finetune.data.rows import Example, row_from
from workbench.finetune.data.sources.dataset import RowFiles, prepare
from workbench.finetune.job.checked_rows import row_refusal
from workbench.finetune.job.finetune import FineTune


def said(*turns: str) -> list[dict[str, str]]:
    """`role: content` as turns."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def calls(**options: object) -> dict[str, object]:
    """A call as OpenAI writes it."""
    return {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": "{}", **options},
    }


HELLO = said("system: Be brief.", "user: Hi", "assistant: Hello.", "user: 1+1?", "assistant: 2")
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello."},
    {"from": "human", "value": "1+1?"},
    {"from": "gpt", "value": "2"},
]


def test_both_published_forms_are_one_row_and_pass_again_as_prepared() -> None:
    row = row_from({"messages": HELLO, "id": 7}, "here")
    assert row == Example(source="1+1?", target="2", messages=tuple(HELLO))
    assert row_from({"conversations": SHAREGPT}, "here") == row
    assert row_from(json.loads(row.to_json()), "here") == row


def test_what_may_vary_is_read_into_the_one_form() -> None:
    parts = [{"type": "text", "text": "1+1"}, {"type": "text", "text": "is?"}]
    tools = [
        {"role": "user", "content": parts},
        *said("assistant: add(1, 1)", "function: 2", "assistant: It is 2."),
    ]
    row = row_from({"messages": tools, "table_id": "1-1"}, "here")
    assert (row.source, row.target, row.table_id) == ("1+1\nis?", "It is 2.", "1-1")
    assert [turn["role"] for turn in row.messages] == ["user", "assistant", "tool", "assistant"]
    # A system turn that says nothing is none, and a question that nobody answered teaches nothing.
    open_end = [{"role": "system", "content": ""}, *HELLO[1:], *said("user: And 2+2?")]
    assert row_from({"messages": open_end}, "here").messages == tuple(HELLO[1:])


@pytest.mark.parametrize("role", ["role", "from"])
@pytest.mark.parametrize("content", ["content", "value"])
def test_a_turn_s_text_is_read_beside_either_key_of_its_role(role: str, content: str) -> None:
    roles = ("user", "assistant") if role == "role" else ("human", "gpt")
    turns = [{role: name, content: text} for name, text in zip(roles, ("Hi", "Yo"), strict=True)]
    read = row_from({"messages": turns}, "here")
    assert [turn["content"] for turn in read.messages] == ["Hi", "Yo"]
    assert list(unread_in_turns({"messages": turns}, ["messages"])) == []
    turns[0] = {role: roles[0], "text": "Hi"}
    # A text under another name is no empty text, which `drop_empty` would leave out.
    with pytest.raises(ConfigError, match=r"is missing; there is: .*, text") as refused:
        row_from({"messages": turns}, "here")
    assert not isinstance(refused.value, EmptyField)


def test_calls_of_every_published_form_are_one_row() -> None:
    def row(call: dict[str, object], tools: object) -> Example:
        turns = [*said("user: 1+1?"), {"role": "assistant", "content": None, **call}]
        turns += [
            {
                "role": "tool",
                "content": 2,
                "name": "add",
                "tool_call_id": "call_1",
                "is_error": None,
            }
        ]
        return row_from(
            {"messages": [*turns, *said("assistant: It is 2.")], "tools": tools}, "here"
        )

    schema = {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    wrapped = {"type": "function", "function": schema}
    made = row({"tool_calls": [calls(arguments='{"a": 1}')]}, [wrapped])
    assert made.tools == (wrapped,)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert made.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", **call}],
    }
    assert made.messages[2] == {
        "role": "tool",
        "content": "2",
        "name": "add",
        "tool_call_id": "call_1",
    }
    assert row_from(json.loads(made.to_json()), "here") == made
    # Keys that are not meant are null; lists may be JSON as text.
    sparse = {
        "id": "call_1",
        "function": {"name": "add", "arguments": {"a": 1}},
        "other": None,
    }
    assert row({"tool_calls": [sparse]}, json.dumps([schema])) == made
    older = row({"function_call": {"name": "add", "arguments": '{"a": 1}'}}, None)
    assert older.messages[1]["tool_calls"] == [call] and older.tools == ()
    with pytest.raises(
        ConfigError, match=sentence("is {}, which is not JSON", "here: tools", "add")
    ):
        row({"tool_calls": [sparse]}, "add")
    with pytest.raises(
        ConfigError, match=sentence("the key {} is missing; there is", "here", "tools[0].name")
    ):
        row({"tool_calls": [sparse]}, [{"title": "add"}])
    with pytest.raises(
        ConfigError,
        match=sentence(
            "is {}; it must be a list of JSON schemas", "here: tools", '{"name": "add"}'
        ),
    ):
        row({"tool_calls": [sparse]}, {"name": "add"})


@pytest.mark.parametrize("key", ["role", "from"])
@pytest.mark.parametrize(
    ("named", "role"),
    [
        *((name, "user") for name in ("human", "Human", "USER", "prompter")),
        *((name, "assistant") for name in ("gpt", "Assistant", "bot", "AI", "model")),
        *((name, "tool") for name in ("observation", "ipython", "tool_response", "tool-result")),
    ],
)
def test_a_role_has_every_usual_name(key: str, named: str, role: str) -> None:
    turns = said("user: 1?", "assistant: Look.", "tool: 1", "assistant: 1")
    turns = [{key: turn["role"], "value": turn["content"]} for turn in turns]
    for turn in turns:
        turn[key] = named if turn[key] == role else turn[key]
    read = row_from({"conversations": turns}, "here").messages
    assert [turn["role"] for turn in read] == ["user", "assistant", "tool", "assistant"]


def test_a_call_of_sharegpt_is_a_turn_of_the_assistant() -> None:
    written = {"name": "add", "arguments": {"a": 1, "b": 1}}
    schema = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}

    def row(call: object) -> Example:
        # As LLaMA-Factory's own glaive_toolcall_en_demo.json
        # has it: schemas and calls are JSON as text.
        turns = [
            {"from": "human", "value": "1+1?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": '{"sum": 2}'},
            {"from": "gpt", "value": "It is 2."},
        ]
        return row_from({"conversations": turns, "tools": json.dumps([schema])}, "here")

    made, call = row(written), {"type": "function", "function": written}
    assert made.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (made.messages[2]["role"], made.tools) == (
        "tool",
        ({"type": "function", "function": schema},),
    )
    assert row([written, written]).messages[1]["tool_calls"] == [call, call]
    assert row_from(json.loads(made.to_json()), "here") == made
    with pytest.raises(
        ConfigError,
        match=sentence(
            "is {}; it must be an object, or JSON text of one",
            "here: conversations[1].value.arguments",
            "[1]",
        ),
    ):
        row({"name": "add", "arguments": [1]})
    broken = [{"from": "human", "value": "1+1?"}, {"from": "function_call", "value": "add(1, 1)"}]
    with pytest.raises(
        ConfigError,
        match=sentence("which is not JSON of a call", "conversations[1].value", "add(1, 1"),
    ):
        row_from({"conversations": broken}, "here")


def test_of_a_prompt_and_a_completion_of_messages_the_completion_is_learned() -> None:
    row = row_from({"prompt": HELLO[:4], "completion": HELLO[4:], "tools": None}, "here")
    read = [*HELLO[:2], {**HELLO[2], "weight": 0}, *HELLO[3:]]
    assert row == Example(source="1+1?", target="2", messages=tuple(read))  # type: ignore[arg-type]
    assert row_from(json.loads(row.to_json()), "here") == row
    with pytest.raises(
        ConfigError,
        match=sentence("let both 'prompt' and 'completion' be lists of messages", "here: prompt"),
    ):
        row_from({"prompt": HELLO[:4], "completion": "2"}, "here")
    with pytest.raises(
        ConfigError,
        match=sentence(
            "let both 'prompt' and 'completion' be lists of messages", "here: completion"
        ),
    ):
        row_from({"prompt": "1+1?", "completion": HELLO[4:]}, "here")
    with pytest.raises(
        ConfigError,
        match=sentence("follows the turn of", "here", "completion[0]", "user")
        + sentence("is of {} and"),
    ):
        row_from({"prompt": HELLO[:4], "completion": said("user: 2")}, "here")


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            said("user: Hi", "assistent: Hello."),
            r"messages\[1\].role 'assistent' is not known: did you mean 'assis",
        ),
        (
            said("user: Hi", "assistant:  "),
            r"messages\[1\].content is empty, and the turn is the assistant's; fill it",
        ),
        (said("user: Hi"), "messages has no turn of the assistant to learn from"),
        (said("system: Be brief."), "messages has no turn of a user"),
        ([], "messages is empty"),
        (
            said("assistant: Hi", "user: Hello."),
            r"messages\[0\] is of 'assistant' and comes first; .* 'user'",
        ),
        (
            said("user: Hi", "user: You?", "assistant: Hi"),
            r"messages\[1\] is of 'user' .* Join the two turns into one",
        ),
        (
            said("user: Hi", "assistant: Hi", "system: No."),
            r"messages\[2\] is of 'system' and stands after other",
        ),
        (
            said("user: Hi", "tool: 2", "assistant: Hi"),
            r"messages\[1\] is of 'tool' .* one of 'assistant'",
        ),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            r"messages\[0\].content holds .*; only parts of type",
        ),
        ([{"role": "user", "content": True}], r"messages\[0\].content is true; it must be text"),
        ([{"content": "Hi"}], r'messages\[0\] is .*Write a turn as \{"role": "user", "content"'),
        (["Hi"], r"messages\[0\] is \"Hi\"; it must be an object"),
        ("Hi", 'messages is "Hi"; it must be a list'),
        (
            [
                *said("user: Hi"),
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            ],
            r"the key 'messages\[1\].tool_calls\[0\].name' is missing; there is: id",
        ),
        (
            [
                *said("user: Hi"),
                {"role": "assistant", "content": "", "tool_calls": [calls(arguments="{a")]},
            ],
            r'messages\[1\].tool_calls\[0\].function.arguments is "{a", which is not JSON',
        ),
        (
            [
                *said("user: Hi"),
                {
                    "role": "assistant",
                    "content": "",
                    "function_call": {"name": "f", "arguments": [1]},
                },
            ],
            r"messages\[1\].function_call.arguments is \[1\]; it must be an object",
        ),
        (
            [{"role": "user", "content": "Hi", "tool_calls": [calls()]}],
            r"messages\[0\].tool_calls stands in a turn of 'user'; "
            r"only the assistant calls functions",
        ),
    ],
)
def test_turns_that_make_no_sense_are_refused_by_line_and_field(
    tmp_path: Path, turns: object, message: str
) -> None:
    good = tmp_path / "eval.jsonl"
    good.write_text(json.dumps({"messages": HELLO}) + "\n")
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"messages": HELLO}) + "\n" + json.dumps({"messages": turns})
    )
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 2: (.*)" + message):
        prepare(RowFiles(train=str(tmp_path / "train.jsonl"), eval=str(good)), tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "tiny-t5"},
            "is a row of messages, and the model answers a source: use a causal model with a chat",
        ),
        (
            {"model": "tiny-llama"},
            "and the model 'tiny-llama' has no chat template; set chat_template",
        ),
        (
            {"model": "me/llama", "prompt": "alpaca"},
            "and prompt is 'alpaca'; drop prompt, or use 'chat'",
        ),
    ],
)
def test_a_model_that_cannot_chat_is_refused_before_anything_starts(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": HELLO}) + "\n")
    rows = RowFiles(train=str(tmp_path / "rows.jsonl"), eval=str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1 .*" + message):
        prepare(rows, tmp_path / "out", refusal=row_refusal(FineTune(**options)))
    for able in ({"model": "me/llama"}, {"model": "tiny-llama", "chat_template": "{{ messages }}"}):
        assert (
            prepare(rows, tmp_path / "out", refusal=row_refusal(FineTune(**able))).train_rows == 1
        )
