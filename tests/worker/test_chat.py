"""What is learned of a chat: the templates of eleven model families, held against masks written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from workbench.base.errors import ConfigError
from workbench.worker.model.chat import Chat

pytestmark = pytest.mark.slow  # transformers

# The texts of the models' own tokenizer_config.json, as repositories hold them: mistral (v0.2), gemma and llama3 in
# ggml-org/llama.cpp (tests/test-chat-template.cpp); phi3 (mini) and smollm2 in copies of theirs; qwen2.5, qwen2.5-trl
# (TRL's training variant), qwen3 and deepseek3 in huggingface/trl (trl/chat_templates), without what writes tools'
# signatures, and deepseek3 without its tools' calls.
TEMPLATES = Path(__file__).parents[1] / "samples" / "chat"
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
# family: its special tokens, the start and the end of a text, and whether its tokenizer is a SentencePiece one
FAMILIES: dict[str, tuple[tuple[str, ...], str | None, str, bool]] = {
    "qwen2.5": (IM, None, "<|im_end|>", False),
    "qwen3": (IM, None, "<|im_end|>", False),
    "qwen2.5-trl": (IM, None, "<|im_end|>", False),
    "smollm2": (IM, "<|im_start|>", "<|im_end|>", False),
    "llama2": ((), "<s>", "</s>", True),
    "mistral": ((), "<s>", "</s>", True),
    "zephyr": ((), "<s>", "</s>", True),
    "llama3": (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|end_of_text|>",
        False,
    ),
    "gemma": (("<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", False),
    "phi3": (("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), None, "<|endoftext|>", False),
    "deepseek3": (("<｜User｜>", "<｜Assistant｜>"), "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", False),
}
ENDS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}  # of a turn, where a text ends otherwise
NO_SYSTEM = ("mistral", "gemma")

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "It is 2"},
]

# By hand: what the model reads, with what it learns between « and ».
BY_HAND = {
    "qwen2.5": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "«Hello.<|im_end|>»\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«It is 2<|im_end|>»"
    ],
    # Once another question follows, an answer has no thoughts before it: each answer is learned as it is asked for.
    "qwen3": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nHello.<|im_end|>»",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "Hello.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nIt is 2<|im_end|>»",
    ],
    # The line break before an answer is marked, though it is asked with; what follows the last end is not learned.
    "qwen2.5-trl": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant"
        "«\nHello.<|im_end|>\n»<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant«\nIt is 2<|im_end|>»"
    ],
    "smollm2": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "«Hello.<|im_end|>»\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«It is 2<|im_end|>»"
    ],
    "llama2": [
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]« Hello. </s>»<s>[INST] 1+1? [/INST]« It is 2 </s>»"
    ],
    "mistral": ["<s>[INST] Hi [/INST]«Hello.</s>»[INST] 1+1? [/INST]«It is 2</s>»"],
    "zephyr": [
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n«Hello.</s>»\n<|user|>\n1+1?</s>\n"
        "<|assistant|>\n«It is 2</s>»"
    ],
    "llama3": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello.<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 2<|eot_id|>»"
    ],
    "gemma": [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n«Hello.<end_of_turn>»\n"
        "<start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n«It is 2<end_of_turn>»"
    ],
    "phi3": [
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n«Hello.<|end|>»\n<|user|>\n1+1?<|end|>\n"
        "<|assistant|>\n«It is 2<|end|>»"
    ],
    "deepseek3": [
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>«Hello.<｜end▁of▁sentence｜>»"
        "<｜User｜>1+1?<｜Assistant｜>«It is 2<｜end▁of▁sentence｜>»"
    ],
}

TURNS_ONLY = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@cache
def tokenizer(family: str) -> Any:
    special, start, end, pieces = FAMILIES[family]
    made = Tokenizer(models.BPE(byte_fallback=pieces))
    split = pre_tokenizers.Metaspace(prepend_scheme="first") if pieces else pre_tokenizers.ByteLevel(False)
    made.pre_tokenizer, made.decoder = split, decoders.Metaspace() if pieces else decoders.ByteLevel()
    alphabet = [chr(letter) for letter in range(32, 127)] + ["▁", "\n"] if pieces else split.alphabet()
    texts = [turn["content"] for turn in [SYSTEM, *CHAT]] + ["[INST] user assistant system <<SYS>> [/INST]"]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=start, eos_token=end, pad_token="<pad>")
    wrapped.add_special_tokens({"extra_special_tokens": list(special)})
    wrapped.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return wrapped


@contextmanager
def template_of(family: str, template: str) -> Iterator[Any]:
    its = tokenizer(family)
    kept, its.chat_template = its.chat_template, template
    try:
        yield its
    finally:
        its.chat_template = kept


def marked(chat: Any, family: str, turns: Sequence[dict[str, str]]) -> list[str]:
    """The rows of a chat, with the learned runs between « and »."""
    return [_marked(tokenizer(family), *row) for row in chat.learned(turns)]


def _marked(its: Any, ids: list[int], marks: list[bool]) -> str:
    shown = ""
    for learned, run in groupby(zip(ids, marks, strict=True), key=lambda pair: pair[1]):
        tokens = its.convert_ids_to_tokens([token for token, _ in run])
        special = set(its.all_special_tokens)
        text = "".join(t if t in special else t.replace("Ġ", " ").replace("Ċ", "\n").replace("▁", " ") for t in tokens)
        shown += f"«{text}»" if learned else text
    return shown


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_is_what_was_marked_by_hand(family: str) -> None:
    turns = CHAT if family in NO_SYSTEM else [SYSTEM, *CHAT]
    chat = Chat(tokenizer(family))
    # A SentencePiece tokenizer writes a space before a text that begins without a special token.
    assert [row.removeprefix(" ") for row in marked(chat, family, turns)] == BY_HAND[family]
    its = tokenizer(family)
    end, eos = ENDS.get(family, its.eos_token), its.eos_token
    assert its.convert_ids_to_tokens(chat.stops) == sorted({end, eos}, key=its.convert_tokens_to_ids)
    # What is asked is what was read before the last answer, and an answer is what was said.
    (ids, marks) = chat.learned(turns)[-1]
    prompt = chat.prompt(turns[:-1])
    assert prompt == ids[: len(prompt)]
    begin = len(ids) - list(reversed(marks)).index(False)
    assert begin == len(prompt) - (family == "qwen2.5-trl")
    assert chat.answer([*ids[begin:], its.pad_token_id, its.pad_token_id]) == "It is 2"


def test_an_answer_to_a_tool_is_learned_and_what_the_tool_wrote_is_not() -> None:
    turns = [CHAT[0], CHAT[1], {"role": "tool", "content": "12"}, CHAT[3]]
    (row,) = marked(Chat(tokenizer("qwen2.5")), "qwen2.5", turns)
    assert row.endswith(
        "<|im_start|>assistant\n«Hello.<|im_end|>»\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«It is 2<|im_end|>»"
    )


def test_a_template_without_an_end_of_turn_ends_each_answer_with_the_text() -> None:
    with template_of("llama3", TURNS_ONLY) as its:
        chat = Chat(its)
        rows = marked(chat, "llama3", CHAT)
    assert chat.end is None and chat.stops == [its.eos_token_id]
    assert [row.count("<|end_of_text|>»") for row in rows] == [1, 1]
    assert rows[1].endswith("It is 2\n<|end_of_text|>»") and "user: 1+1?" in rows[1]


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        ("gemma", [SYSTEM, *CHAT], r"refuses the turns \(system, user\): System role not supported"),
        ("mistral", [CHAT[0], CHAT[0], CHAT[1]], "must alternate user/assistant"),
        # As DeepSeek-R1's: it asks for thoughts, and leaves them out of what was answered.
        (
            "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<assistant><think>\n' }}{% endif %}",
            CHAT,
            r"does not begin an answer with what it asks for one with \('<assistant><think>\\n'\)",
        ),
        (
            "{% for m in messages %}{% if not m %}{% generation %}{% endgeneration %}{% endif %}"
            "{{ m.content }}{% endfor %}",
            CHAT,
            "marks no token",
        ),
    ],
)
def test_turns_that_a_template_cannot_write_are_refused(
    template: str, turns: Sequence[dict[str, str]], message: str
) -> None:
    family = template if template in FAMILIES else "llama3"
    with template_of(family, tokenizer(family).chat_template if template in FAMILIES else template) as its:
        chat = Chat(its)
        with pytest.raises(ConfigError, match=message):
            chat.learned(turns)
