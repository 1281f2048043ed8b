"""What a model is asked is the beginning of what it learned, token by token, for any template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from workbench.base.errors import ConfigError
from workbench.finetune.data.forms.messages import turns_of
from workbench.finetune.data.lines import Fields
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.limits import template_of
from workbench.finetune.model.text.chat import Chat
from workbench.finetune.options.text.templates import unread

pytestmark = pytest.mark.slow  # transformers

PUBLISHED = Path(str(find_spec("trl").submodule_search_locations[0])) / "chat_templates"  # type: ignore[union-attr, index]
# TRL's templates for training alone mark their answers, and are asked with other templates.
TEMPLATES = sorted(
    path.stem
    for path in PUBLISHED.glob("*.jinja")
    if not path.stem.endswith("_training") and path.stem != "llava_next"  # writes images alone
)
# Qwen's own pattern: several line breaks are one piece.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|</?think>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")
LINES = ["\n\n", "\n\n\n", "assistant\n\n", " \n", "</", "Hello.", "It is 2", "user", "system"]


def chat(*turns: tuple[str, str], thoughts: str = "") -> list[dict[str, str]]:
    made = [{"role": role, "content": content} for role, content in turns]
    if thoughts:
        made[-1] |= {"reasoning_content": thoughts, "thinking": thoughts}
    return made


CHATS = {
    "a turn": chat(("user", "1+1?"), ("assistant", "It is 2")),
    "line breaks": chat(("user", "1+1?\n\n"), ("assistant", "\n\nIt is\n\n2\n")),
    "spaces": chat(("user", " 1+1? "), ("assistant", "  It is 2  ")),
    "thoughts": chat(("user", "1+1?"), ("assistant", "It is 2"), thoughts="one and one"),
    "exchanges": chat(
        ("user", "Hi"), ("assistant", "Hello."), ("user", "1+1?"), ("assistant", "It is 2")
    ),
    "a system turn": chat(("system", "Be brief."), ("user", "1+1?"), ("assistant", "It is 2")),
}


@cache
def tokenizer(name: str, pieces: bool) -> Any:
    template = (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
    made = Tokenizer(models.BPE(byte_fallback=pieces))
    alphabet: Sequence[str] = pre_tokenizers.ByteLevel.alphabet()
    if pieces:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace()
        alphabet = [*map(chr, range(32, 127)), "▁", "\n"]
    else:
        split = pre_tokenizers.Split(Regex(QWEN), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(LINES * 9, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    special = list(dict.fromkeys(SPECIAL.findall(template)))
    wrapped.add_special_tokens({"extra_special_tokens": special})
    wrapped.chat_template = template
    return wrapped


@pytest.mark.parametrize("pieces", [False, True], ids=["bytes", "pieces"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_asked_begins_what_is_learned(name: str, pieces: bool) -> None:
    its = tokenizer(name, pieces)
    tried = Chat(its)
    for case, turns in CHATS.items():
        try:
            rows = tried.learned(turns)  # type: ignore[arg-type]
            asked = tried.prompt(turns[:-1])  # type: ignore[arg-type]
        # The template does not know such turns, and says so.
        except ConfigError:
            continue
        ids, marks = rows[-1]
        assert ids[: len(asked)] == asked, (case, its.decode(asked), its.decode(ids))
        assert "It is" in its.decode(ids[len(asked) :]), case
        assert all(marks[len(asked) :]), case


def test_line_breaks_before_an_answer_are_asked_and_learned_in_the_same_tokens() -> None:
    its = tokenizer("qwen3_5_think", False)
    asked = Chat(its).prompt(CHATS["a turn"][:-1])  # type: ignore[arg-type]
    ((ids, _),) = Chat(its).learned(CHATS["a turn"])  # type: ignore[arg-type]
    whole = its(its.decode(ids), add_special_tokens=False).input_ids
    assert whole[: len(asked)] != asked, "in one text, both line breaks are a single token"
    assert its.decode(whole) == its.decode(ids)


TAGGED = [
    path.stem
    for path in sorted(PUBLISHED.glob("*.jinja"))
    if "generation %}" in path.read_text(encoding="utf-8")
]
# These templates write images, or write only contents that are lists.
NO_TEXTS = ("idefics3_training", "llava_next_training", "smolvlm_training")
ANSWERS = ("Hello.", "It is 2", "It is 2, again.")


def learned_texts(its: Any, ids: Sequence[int], marks: Sequence[object]) -> list[str]:
    """Return the text of each run of marked tokens, without the white space around the run."""
    runs = groupby(zip(ids, marks, strict=True), key=lambda pair: bool(pair[1]))
    return [its.decode([token for token, _ in run]).strip() for is_marked, run in runs if is_marked]


@pytest.mark.parametrize("lead", ["", "\n"], ids=["word", "line"])
@pytest.mark.parametrize("name", TAGGED)
def test_answers_between_generation_tags_are_those_of_transformers(name: str, lead: str) -> None:
    its = tokenizer(name, False)
    turns = []
    for question, answer in zip(("Hi", "1+1?", "Again?"), ANSWERS, strict=True):
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": lead + answer})
    try:
        ((ids, marks),) = Chat(its).learned(turns)  # type: ignore[arg-type]
    except ConfigError:
        assert name in NO_TEXTS
        return
    made = its.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    whole, mask = made["input_ids"], made["assistant_masks"]
    if ids == whole[: len(ids)]:
        assert marks == [bool(mark) for mark in mask[: len(ids)]]
    # Text after the end of the last turn is not learned, and a missing end is added. A last
    # answer that the template begins within a token has other tokens, and the same text.
    *others, last = learned_texts(its, whole, mask)
    *read, ending = learned_texts(its, ids, marks)
    assert (read, last.startswith(ending.removesuffix("</s>").rstrip())) == (others, True)
    for answer, text in zip(ANSWERS, [*read, ending], strict=True):
        assert answer in text


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "gptoss"])
def test_thoughts_are_learned_where_the_template_writes_thoughts(name: str) -> None:
    its = tokenizer(name, False)
    raw = {"messages": CHATS["thoughts"]}
    turns = turns_of(Fields(raw, "line 1"))
    *_, (ids, marks) = Chat(its).learned(turns)
    learned = its.decode([token for token, mark in zip(ids, marks, strict=True) if mark])
    assert "one and one" in learned
    assert "It is 2" in learned


def test_keys_of_turns_are_unread_where_the_template_does_not_read_them(tmp_path: Path) -> None:
    template = (
        "{{ m.role }}{{ m['content'] }}{% if m.thinking is string %}{{ m.thinking }}{% endif %}"
    )
    names = ["messages.thinking", "messages.id", "thinking", "rejected.thinking"]
    assert unread(template, names) == ["messages.id", "thinking"]
    assert unread("", names) == names
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(template)
    assert template_of(FineTune(model=str(tmp_path))) == template
    assert template_of(FineTune(model=str(tmp_path), prompt="plain")) == ""
    assert template_of(FineTune(model="tiny-llama", chat_template="{{ m }}")) == "{{ m }}"


def test_keys_that_the_template_does_not_read_change_no_token() -> None:
    its = tokenizer("qwen2_5", False)
    extra = [{**turn, "id": "7", "thinking": "one and one"} for turn in CHATS["a turn"]]
    turns = turns_of(Fields({"messages": extra}, "line 1"))
    assert Chat(its).learned(turns) == Chat(its).learned(CHATS["a turn"])  # type: ignore[arg-type]
