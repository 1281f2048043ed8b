"""What is learned of a chat: templates of over a dozen model families against masks by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.model.text.chat import Chat

pytestmark = pytest.mark.slow  # transformers

# The models' own texts, whole: of trl's package, which
# carries many of them, or beside the other samples.
PUBLISHED = Path(str(find_spec("trl").submodule_search_locations[0])) / "chat_templates"
SAMPLES = Path(__file__).parents[2] / "samples" / "chat"
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TURNS = ("<start_of_turn>", "<end_of_turn>")
COHERE = tuple(
    f"<|{word}_TOKEN|>" for word in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT")
)
GPT_OSS = tuple(
    f"<|{word}|>" for word in ("start", "end", "message", "channel", "call", "return", "constrain")
)
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
# family: its special tokens, the start and the end of a
# text, and whether its tokenizer is a SentencePiece one
FAMILIES: dict[str, tuple[tuple[str, ...], str | None, str, bool]] = {
    "qwen2_5": (IM, None, "<|im_end|>", False),
    "qwen3": (IM, None, "<|im_end|>", False),
    "qwen2_5_training": (IM, None, "<|im_end|>", False),
    "smollm2": (IM, "<|im_start|>", "<|im_end|>", False),
    "llama2": ((), "<s>", "</s>", True),
    "mistral": ((), "<s>", "</s>", True),
    "zephyr": ((), "<s>", "</s>", True),
    "llama3": (HEADERS, "<|begin_of_text|>", "<|end_of_text|>", False),
    "llama3_1": (HEADERS, "<|begin_of_text|>", "<|end_of_text|>", False),
    "gemma": (TURNS, "<bos>", "<eos>", False),
    "gemma3": (TURNS, "<bos>", "<eos>", False),
    "phi3": (("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), None, "<|endoftext|>", False),
    "cohere": (COHERE, "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", False),
    "glm4moe": (
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        None,
        "<|endoftext|>",
        False,
    ),
}
OTHERS = {"gptoss": (GPT_OSS, None, "<|return|>", False)} | dict.fromkeys(
    ("deepseekv3", "deepseekv3_training", "idefics3", "lfm2"),
    (DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", False),
)
ENDS = {  # of a turn, where a text ends otherwise
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
}
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
    "qwen2_5": [
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "«Hello.<|im_end|>»\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«It "
        "is 2<|im_end|>»"
    ],
    # Once another question follows, an answer has no thoughts
    # before it: each answer is learned as it is asked for.
    "qwen3": [
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nHello.<|im_end|>»",
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "Hello.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nIt is 2<|im_end|>»",
    ],
    # The line break before an answer is marked, though it is
    # asked with; what follows the last end is not learned.
    "qwen2_5_training": [
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant"
        "«\nHello.<|im_end|>\n»"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant«\nIt is 2<|im_end|>»"
    ],
    "smollm2": [
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "«Hello.<|im_end|>»\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«It "
        "is 2<|im_end|>»"
    ],
    "llama2": [
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]« "
        "Hello. </s>»<s>[INST] 1+1? [/INST]« It is 2 </s>»"
    ],
    "mistral": ["<s>[INST] Hi [/INST]«Hello.</s>»[INST] 1+1? [/INST]«It is 2</s>»"],
    "zephyr": [
        "<|system|>\nBe "
        "brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n«Hello.</s>»\n<|user|>\n1+1?</s>\n"
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
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n«Hello.<|end|>»\n"
        "<|user|>\n1+1?<|end|>\n"
        "<|assistant|>\n«It is 2<|end|>»"
    ],
    "llama3_1": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello.<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 2<|eot_id|>»"
    ],
    "gemma3": [
        "<bos><start_of_turn>user\nBe "
        "brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n«Hello.<end_of_turn>»\n"
        "<start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n«It is 2<end_of_turn>»"
    ],
    "cohere": [
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«Hello.<|END_OF_TURN_TOKEN|>»"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>1+1?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«It is 2<|END_OF_TURN_TOKEN|>»"
    ],
    # Its turns have no end: each answer ends with the text.
    "glm4moe": [
        "[gMASK]<sop><|system|>\nBe "
        "brief.<|user|>\nHi<|assistant|>«\n<think></think>\nHello.<|endoftext|>»",
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\n<think></think>\nHello."
        "<|user|>\n1+1?"
        "<|assistant|>«\n<think></think>\nIt is 2<|endoftext|>»",
    ],
}

TURNS_ONLY = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@cache
def tokenizer(family: str) -> Any:
    special, start, end, pieces = (FAMILIES | OTHERS)[family]
    made = Tokenizer(models.BPE(byte_fallback=pieces))
    split = (
        pre_tokenizers.Metaspace(prepend_scheme="first")
        if pieces
        else pre_tokenizers.ByteLevel(False)
    )
    made.pre_tokenizer, made.decoder = (
        split,
        decoders.Metaspace() if pieces else decoders.ByteLevel(),
    )
    alphabet = (
        [chr(letter) for letter in range(32, 127)] + ["▁", "\n"] if pieces else split.alphabet()
    )
    texts = [turn["content"] for turn in [SYSTEM, *CHAT]] + [
        "[INST] user assistant system <<SYS>> [/INST]"
    ]
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=start, eos_token=end, pad_token="<pad>"
    )
    wrapped.add_special_tokens({"extra_special_tokens": list(special)})
    published, sample = (folder / f"{family}.jinja" for folder in (PUBLISHED, SAMPLES))
    wrapped.chat_template = (published if published.exists() else sample).read_text(
        encoding="utf-8"
    )
    return wrapped


@contextmanager
def template_of(family: str, template: str) -> Iterator[Any]:
    its = tokenizer(family)
    kept, its.chat_template = its.chat_template, template
    try:
        yield its
    finally:
        its.chat_template = kept


def marked(chat: Any, family: str, turns: Sequence[Any], tools: Sequence[Any] = ()) -> list[str]:
    """The rows of a chat, with the learned runs between « and »."""
    return [_marked(tokenizer(family), *row) for row in chat.learned(turns, tools)]


def _marked(its: Any, ids: list[int], marks: list[bool]) -> str:
    shown = ""
    for learned, run in groupby(zip(ids, marks, strict=True), key=lambda pair: pair[1]):
        tokens = its.convert_ids_to_tokens([token for token, _ in run])
        special = set(its.all_special_tokens)
        text = "".join(
            t if t in special else t.replace("Ġ", " ").replace("Ċ", "\n").replace("▁", " ")
            for t in tokens
        )
        shown += f"«{text}»" if learned else text
    return shown


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_of_weight_0_is_read_and_not_learned(family: str) -> None:
    turns = CHAT if family in NO_SYSTEM else [SYSTEM, *CHAT]
    unlearned = [{**turn, "weight": 0} if turn["content"] == "Hello." else turn for turn in turns]
    # By hand: the same rows without the marks of the
    # first answer; a row of that answer alone is no row.
    first, *others = BY_HAND[family]
    expected = [first.replace("«", "", 1).replace("»", "", 1), *others]
    made = [row.removeprefix(" ") for row in marked(Chat(tokenizer(family)), family, unlearned)]
    assert made == [row for row in expected if "«" in row]


def test_a_template_that_marks_several_answers_as_one_is_refused_with_turns_of_weight_0() -> None:
    whole = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with (
        template_of("smollm2", whole) as its,
        pytest.raises(
            ConfigError,
            match=sentence("give a template without these tags as chat_template=", 1, 2),
        ),
    ):
        Chat(its).learned([CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_is_what_was_marked_by_hand(family: str) -> None:
    turns = CHAT if family in NO_SYSTEM else [SYSTEM, *CHAT]
    chat = Chat(tokenizer(family))
    # A SentencePiece tokenizer writes a space before a text that begins without a special token.
    assert [row.removeprefix(" ") for row in marked(chat, family, turns)] == BY_HAND[family]
    its = tokenizer(family)
    end, eos = ENDS.get(family, its.eos_token), its.eos_token
    assert its.convert_ids_to_tokens(chat.stops) == sorted(
        {end, eos}, key=its.convert_tokens_to_ids
    )
    # What is asked is what was read before the last answer, and an answer is what was said.
    (ids, marks) = chat.learned(turns)[-1]
    prompt = chat.prompt(turns[:-1])
    assert prompt == ids[: len(prompt)]
    begin = len(ids) - list(reversed(marks)).index(False)
    assert begin == len(prompt) - (family == "qwen2_5_training")
    assert chat.answer([*ids[begin:], its.pad_token_id, its.pad_token_id]) == "It is 2"


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add one.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALLING = [
    CHAT[2],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "12", "name": "add"},
    CHAT[3],
]
# By hand, but for what a template writes of the tools themselves (…).
CALLS = {
    "qwen2_5": [
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
        "You are a helpful assistant.…<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        '«<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "«It is 2<|im_end|>»"
    ],
    "llama3_1": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n…1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '«{"name": "add", "parameters": {"a": 1}}<|eot_id|>»'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"12"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 2<|eot_id|>»"
    ],
    # A turn of calls ends with a token of its own.
    "gptoss": [
        "<|start|>system<|message|>…<|start|>user<|message|>1+1?<|end|><|start|>assistant"
        '« to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>»'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"12"<|end|>'
        "<|start|>assistant"
        "«<|channel|>final<|message|>It is 2<|return|>»"
    ],
    # With thoughts before each answer that follows the
    # question, none before those once another is asked.
    "qwen3": [
        "<|im_start|>system\n…<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>»',
        "<|im_start|>system\n…<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nIt is 2<|im_end|>»",
    ],
}


@pytest.mark.parametrize("family", CALLS)
def test_calls_are_learned_and_what_tools_are_and_return_is_not(family: str) -> None:
    chat = Chat(tokenizer(family))
    rows = marked(chat, family, CALLING, [ADD])
    assert len(rows) == len(CALLS[family])
    for row, by_hand in zip(rows, CALLS[family], strict=True):
        before, after = by_hand.split("…")
        assert row.startswith(before) and row.endswith(after)
        assert '"add"' in (between := row[len(before) : -len(after)]) or "type add =" in between
        assert "«" not in between
    # The model is asked with its tools, and a call is an answer.
    (ids, marks) = chat.learned(CALLING[:2], [ADD])[-1]
    prompt = chat.prompt(CALLING[:1], [ADD])
    assert prompt == ids[: marks.index(True)]
    assert "add" in chat.answer(ids[len(prompt) :])
    assert ids[-1] in chat.stops


def test_arguments_are_written_as_the_template_takes_them_and_what_it_leaves_out_is_refused() -> (
    None
):
    # DeepSeek's takes them as text, and knows no tools' schemas.
    (row,) = marked(
        Chat(tokenizer("deepseekv3_training")), "deepseekv3_training", [*CALLING[:3], CHAT[3]]
    )
    assert '``json\n{"a":1}\n```' in row.replace(" ", "")
    for family, turns, tools, what in (
        ("deepseekv3_training", CALLING, [ADD], "the row's tools"),
        ("lfm2", CALLING, [ADD], "the assistant's tool_calls"),
        ("phi3", [*CHAT[:2], CALLING[2], CHAT[3]], [], "the content of a turn of 'tool'"),
        ("idefics3", CHAT, [], "the content of a turn of 'user'"),  # it takes parts, not texts
    ):
        with pytest.raises(
            ConfigError, match=f"the chat template leaves out {what}; give one that writes it"
        ):
            Chat(tokenizer(family)).learned(turns, tools)
    with pytest.raises(ConfigError, match="only supports single tool-calls"):
        twice = {**CALLING[1], "tool_calls": CALLING[1]["tool_calls"] * 2}
        Chat(tokenizer("llama3_1")).learned([CALLING[0], twice, *CALLING[2:]], [ADD])


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
        (
            "gemma",
            [SYSTEM, *CHAT],
            sentence(
                "the chat template refuses the turns ({})",
                "system, user, assistant, user, assistant",
                "System role not supported",
            ),
        ),
        ("mistral", [CHAT[0], CHAT[0], CHAT[1]], "must alternate user/assistant"),
        # It asks for thoughts, and leaves them out of what was answered.
        (
            "deepseekv3",
            CHAT,
            sentence("give one that does as chat_template=", "<｜Assistant｜><think>\\n"),
        ),
        (
            "{% for m in messages %}{% if not m %}{% generation %}{% endgeneration %}{% endif %}"
            "{{ m.content }}{% endfor %}",
            CHAT,
            sentence("the chat template marks no token of an answer between its"),
        ),
    ],
)
def test_turns_that_a_template_cannot_write_are_refused(
    template: str, turns: Sequence[dict[str, str]], message: str
) -> None:
    family = template if template in FAMILIES | OTHERS else "llama3"
    with template_of(
        family, tokenizer(family).chat_template if family == template else template
    ) as its:
        chat = Chat(its)
        with pytest.raises(ConfigError, match=message):
            chat.learned(turns)
