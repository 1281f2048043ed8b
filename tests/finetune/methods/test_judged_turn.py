"""Every method takes its tokens from the judged turn alone, whatever the form of the chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.rows import prepared_row
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.registry import METHODS, method_of
from workbench.finetune.model.load import Loaded
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.recipe.order import IGNORED

pytestmark = pytest.mark.slow  # transformers

PUBLISHED = Path(str(find_spec("trl").submodule_search_locations[0])) / "chat_templates"
# Qwen 3 takes the thoughts out of the answers of the history. The template for training marks
# answers by tags of its own.
TEMPLATES = ("qwen2_5", "qwen3", "qwen2_5_training")
NAMES = [method.name for method in METHODS if method.uses_trl]
PAIRS = ("dpo", "orpo", "reward")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "Tell the time",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "clock", "arguments": {}}}

Turn = dict[str, Any]


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def said(text: str, **marks: int) -> Turn:
    return {"role": "assistant", "content": text, **marks}


EXCHANGES = [user("first?"), said("one"), user("second?"), said("two"), user("third?")]
CHATS: dict[str, tuple[list[Turn], list[Mapping[str, Any]]]] = {
    "plain": (EXCHANGES, []),
    "system": ([{"role": "system", "content": "Be brief."}, *EXCHANGES], []),
    "weight 0": ([EXCHANGES[0], said("one", weight=0), *EXCHANGES[2:]], []),
    "weight 1": ([EXCHANGES[0], said("one", weight=1), *EXCHANGES[2:]], []),
    "tools": (
        [
            user("first?"),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "noon"},
            *EXCHANGES[1:],
        ],
        TOOLS,
    ),
}


@cache
def encoder(template: str) -> Encoder:
    """Return an encoder whose tokens are bytes and the special words of Qwen's templates."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = {letter: number for number, letter in enumerate(sorted(letters.alphabet()))}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = letters
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = (PUBLISHED / f"{template}.jinja").read_text(encoding="utf-8")
    model = SimpleNamespace(
        generation_config=None, config=LlamaConfig(), get_input_embeddings=lambda: None
    )
    job = FineTune(model="tiny-llama", max_source_length=4096)
    return Encoder(Loaded(model=model, tokenizer=tokenizer, family="causal"), job)


def sharegpt(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    made = []
    for turn in turns:
        others = {key: value for key, value in turn.items() if key not in ("role", "content")}
        made.append({"from": names[turn["role"]], "value": turn["content"], **others})
    return made


def forms(method: str, turns: list[Turn], tools: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return a chat in every form that a method reads; the first form names prompt and answer."""
    good = said("three")
    beside: dict[str, Any] = {"tools": list(tools)} if tools else {}
    if method in PAIRS:
        answers = {"chosen": [good], "rejected": [said("four")]}
        return {
            "explicit": {"prompt": turns, **answers, **beside},
            "whole": {name: [*turns, *answer] for name, answer in answers.items()} | beside,
        }
    if method == "kto":
        beside["label"] = True
        return {
            "explicit": {"prompt": turns, "completion": [good], **beside},
            "messages": {"messages": [*turns, good], **beside},
            "conversations": {"conversations": sharegpt([*turns, good]), **beside},
        }
    return {
        "explicit": {"prompt": turns},
        "messages": {"messages": turns},
        "conversations": {"conversations": sharegpt(turns)},
    }


def tokens(method: str, template: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row that TRL's trainer gets, made as a run makes it."""
    example = method_of(method).rows.read(row, "line 1")
    prepared = prepared_row(json.loads(example.to_json()))
    (made,) = method_of(method).on_pods().token_rows(encoder(template), [prepared], 1)
    return dict(made)


def judged(method: str, row: Mapping[str, Any]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of the prompt and of every judged answer of a row of TRL's."""
    if method == "grpo":
        return row["prompt_ids"], []
    if method == "kto":
        return row["prompt_ids"], [row["completion_ids"]]
    if method == "dpo":
        return row["prompt_ids"], [row["chosen_ids"], row["rejected_ids"]]
    if method == "orpo":
        prompt = row["prompt_input_ids"]
        answers = []
        for name in ("chosen", "rejected"):
            labels = row[f"{name}_labels"]
            begin = len(prompt)
            assert labels[:begin] == [IGNORED] * begin
            assert row[f"{name}_input_ids"] == prompt + labels[begin:]
            answers.append(labels[begin:])
        return prompt, answers
    # A reward model scores the whole text.
    both = row["chosen_ids"], row["rejected_ids"]
    return [], [list(each) for each in both]


# Method grpo offers no functions to a model.
CASES = [(name, chat) for name in NAMES for chat in CHATS if (name, chat) != ("grpo", "tools")]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("method", "chat"), CASES)
def test_the_last_turn_of_three_exchanges_is_judged_and_nothing_else(
    method: str, template: str, chat: str
) -> None:
    turns, tools = CHATS[chat]
    given = forms(method, turns, tools)
    explicit = tokens(method, template, given["explicit"])
    for form, row in given.items():
        assert tokens(method, template, row) == explicit, form
    # The prompt is the text that the model is asked, and the answers are the rest.
    tokenizer = encoder(template).tokenizer
    plain = [{key: value for key, value in t.items() if key != "weight"} for t in turns]
    asked = tokenizer.apply_chat_template(
        plain, tools=tools or None, add_generation_prompt=True, tokenize=False
    )
    prompt, answers = judged(method, explicit)
    texts = [tokenizer.decode(answer) for answer in answers]
    if method == "reward":
        assert all(text.startswith(asked) for text in texts)
        texts = [text.removeprefix(asked) for text in texts]
    elif template != "qwen2_5_training":
        assert tokenizer.decode(prompt) == asked
    wanted = {"grpo": [], "kto": ["three"]}.get(method, ["three", "four"])
    own = [text.split("</think>")[-1].strip() for text in texts]
    assert own == [f"{word}<|im_end|>" for word in wanted]


def test_weight_0_of_the_last_answer_lets_the_label_judge_the_answer_before() -> None:
    chat = [*EXCHANGES, said("three", weight=0)]
    row = tokens("kto", "qwen2_5", {"messages": chat, "label": False})
    before = {"prompt": EXCHANGES[:3], "completion": EXCHANGES[3:4], "label": False}
    assert row == tokens("kto", "qwen2_5", before)


def test_several_judged_turns_and_an_answer_that_is_not_learned_are_refused() -> None:
    several = {"prompt": EXCHANGES[:1], "completion": [*EXCHANGES[1:], said("c")], "label": True}
    with pytest.raises(ConfigError, match=r"line 1: completion has 5 turns, and label judges a"):
        method_of("kto").rows.read(several, "line 1")
    for name in ("chosen", "rejected"):
        pair = {"prompt": EXCHANGES[:1], "chosen": [said("a")], "rejected": [said("b")]}
        pair[name] = [said("a", weight=0)]
        why = sentence("has an answer marked as not learned")
        with pytest.raises(ConfigError, match=why):
            method_of("dpo").rows.read(pair, "line 1")


def test_a_row_that_an_earlier_version_prepared_is_judged_in_its_last_turn_too() -> None:
    prepared = {
        "source": "third?",
        "target": "three",
        "messages": [*EXCHANGES, said("three")],
        "beside": {"label": True},
    }
    example = method_of("kto").rows.read(prepared, "line 1")
    assert [turn.get("weight", 1) for turn in example.messages] == [1, 0, 1, 0, 1, 1]
