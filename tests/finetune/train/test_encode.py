"""Rows of text as tokens, held to what transformers itself makes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.answers.serving.serve import placement
from workbench.finetune.data.rows import Example, row_from
from workbench.finetune.data.training.rows import Row
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import load as model
from workbench.finetune.model.generate import answers
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.options.text.prompts import wording
from workbench.finetune.recipe.lean_loss import shifted
from workbench.finetune.recipe.order import IGNORED

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = [
    Example(
        source=f"Name {n} towns.",
        input="in order" if n % 2 else "",
        target=", ".join(["Lund", "Graz"] * n),
    )
    for n in range(1, 9)
]
TEXT = Example(
    source="", target="Once upon a time\nthere was a queen, and " + "the queen had a cat, and " * 12
)


@pytest.fixture(scope="module")
def llama() -> model.Loaded:
    return model.load("tiny-llama", [*EXAMPLES, TEXT], seed=3, wording=wording("alpaca"))


@pytest.fixture(scope="module")
def t5() -> model.Loaded:
    return model.load("tiny-t5", EXAMPLES, seed=3)


def encoder(loaded: model.Loaded, **options: object) -> Encoder:
    return Encoder(
        loaded,
        FineTune(**{"model": f"tiny-{'llama' if loaded.family == 'causal' else 't5'}", **options}),
    )


def text_of(loaded: model.Loaded, ids: list[int]) -> str:
    return loaded.tokenizer.decode(ids)


def texts(model: Any, encoder: Encoder, rows: Sequence[Row]) -> list[str]:
    by_number = answers(model, encoder, rows, device=model.device)
    return [by_number[number] for number in range(len(rows))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt", ["plain", "alpaca", "llama2-chat", "Q: {instruction} ({input}) A: "]
)
def test_a_causal_row_is_prompt_and_answer_and_only_the_answer_is_learned(
    llama: model.Loaded, prompt: str
) -> None:
    made = encoder(llama, prompt=prompt)
    for example, row, question in zip(
        EXAMPLES, made.rows(EXAMPLES), made.questions(EXAMPLES), strict=True
    ):
        ids, labels = list(row["input_ids"]), list(row["labels"])
        learned = labels.count(IGNORED)
        assert labels == [IGNORED] * learned + ids[learned:]
        assert text_of(llama, ids[learned:]) == example.target + "</s>"
        assert question["input_ids"] == ids[:learned]
        assert text_of(llama, ids[:learned]).count("<s>") == 1
        assert text_of(llama, ids).startswith("<s>")
        assert example.source in text_of(llama, ids[:learned])
        assert example.input in text_of(llama, ids[:learned])


@pytest.mark.slow
def test_a_tokenizer_that_writes_no_end_behind_a_target_is_named(t5: model.Loaded) -> None:
    assert encoder(t5).writes_end
    loaded = replace(t5, tokenizer=copy.deepcopy(t5.tokenizer))
    loaded.tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    silent = encoder(loaded)
    assert not silent.writes_end
    end = loaded.tokenizer.eos_token_id
    for row in silent.rows(EXAMPLES):
        assert end not in row["labels"]
    loaded.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=sentence("has no eos_token")):
        encoder(loaded)


@pytest.mark.slow
def test_learning_from_all_counts_the_prompt_too_but_for_its_first_token(
    llama: model.Loaded,
) -> None:
    (row,) = encoder(llama, loss_on="all").rows(EXAMPLES[:1])
    assert row["labels"] == [IGNORED, *row["input_ids"][1:]]


@pytest.mark.slow
def test_plain_text_is_learned_whole_in_pieces(llama: model.Loaded) -> None:
    rows = encoder(llama, prompt="alpaca", max_source_length=20, max_target_length=12).rows([TEXT])
    assert len(rows) > 2
    assert all(
        len(row["input_ids"]) <= 32 and row["input_ids"][0] == llama.tokenizer.bos_token_id
        for row in rows
    )
    assert text_of(llama, [i for row in rows for i in row["input_ids"][1:]]) == TEXT.target + "</s>"
    assert all(row["labels"] == [IGNORED, *row["input_ids"][1:]] for row in rows)


@pytest.mark.slow
def test_what_is_too_long_is_cut_within_its_form_and_a_cut_answer_does_not_end(
    llama: model.Loaded,
) -> None:
    long = Example(source="Tell me of the queen.", input=TEXT.target, target=TEXT.target)
    made = encoder(llama, prompt="alpaca", max_source_length=100, max_target_length=9)
    (row,), (question,) = made.rows([long]), made.questions([long])
    prompt = text_of(llama, question["input_ids"])
    assert 90 < len(question["input_ids"]) <= 100
    assert "Tell me of the queen." in prompt
    assert "Once upon" in prompt
    assert prompt.endswith("\n\n### Response:")
    assert len(row["input_ids"]) == len(question["input_ids"]) + 9
    assert row["labels"][-1] != llama.tokenizer.eos_token_id
    (short,) = encoder(llama, max_source_length=9).questions(
        [Example(source=TEXT.target, target="")]
    )
    assert len(short["input_ids"]) <= 9
    assert text_of(llama, short["input_ids"]).endswith("\n")
    with pytest.raises(
        ConfigError,
        match=sentence("the prompt form {} takes alone", 30, "alpaca")
        + sentence("a question may have"),
    ):
        encoder(llama, prompt="alpaca", max_source_length=30).rows([long])
    # A length that is left open is not named as a limit of the job.
    with pytest.raises(
        ConfigError,
        match=sentence("max_source_length is left open, and a row has", 2048)
        + sentence("a question may have"),
    ):
        encoder(llama, system="Be brief. " * 4096, prompt="llama2-chat").rows([long])


@pytest.mark.slow
def test_the_loss_of_shifted_labels_is_the_model_s_own(llama: model.Loaded) -> None:
    made = encoder(llama)
    batch = made.collator(made.rows(EXAMPLES))
    with torch.no_grad():
        theirs = llama.model(**batch).loss
        logits = llama.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = shifted(batch["labels"], True)
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert torch.equal(shifted(batch["labels"], False), batch["labels"])


@pytest.mark.slow
def test_answers_depend_on_no_neighbour_and_hold_no_prompt(llama: model.Loaded) -> None:
    made = encoder(llama, prompt="alpaca", max_target_length=6)
    torch.manual_seed(5)
    noisy = model.load("tiny-llama", (), tokenizer=llama.tokenizer, seed=3).model
    for weights in noisy.parameters():
        weights.data += 0.1 * torch.randn_like(weights)
    rows = made.questions([*EXAMPLES, Example(source="", target="", opening="Once upon")])
    together = texts(noisy, made, rows)
    assert together == [texts(noisy, made, [row])[0] for row in rows]
    assert len(set(together)) > 1
    assert not any("###" in text for text in together)
    ids = torch.tensor([rows[0]["input_ids"]])
    plain = noisy.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )
    assert llama.tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True) == together[0]
    assert text_of(llama, rows[-1]["input_ids"]) == "<s>Once upon"


@pytest.mark.slow
def test_an_encoder_decoder_model_reads_the_input_too_and_learns_from_no_plain_text(
    t5: model.Loaded,
) -> None:
    made = encoder(t5)
    (row,) = made.rows(EXAMPLES[:1])
    assert text_of(t5, row["input_ids"]) == "Name 1 towns.\nin order</s>"
    assert text_of(t5, row["labels"]) == "Lund, Graz</s>"
    with pytest.raises(
        ConfigError,
        match=sentence("it answers a source", 2, "plain text", "tiny-t5"),
    ):
        made.rows([EXAMPLES[0], TEXT])


@pytest.mark.slow
def test_what_only_the_model_s_files_say_is_refused_when_they_are_known(t5: model.Loaded) -> None:
    for options in ({"precision": "fp16"}, {"prompt": "alpaca"}, {"loss_on": "all"}):
        job = FineTune(model="somebody/some-model", **options)  # which tells no family by its name
        with pytest.raises(ConfigError, match=f"{options.get('precision') or next(iter(options))}"):
            Encoder(t5, job)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["source", "target"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_row_with_a_token_that_has_no_embedding_is_refused(
    name: str, part: str, request: pytest.FixtureRequest
) -> None:
    known = request.getfixturevalue(name)
    loaded = replace(known, tokenizer=copy.deepcopy(known.tokenizer))
    free = loaded.model.config.vocab_size - len(loaded.tokenizer)
    loaded.tokenizer.add_tokens([f"<new{n}>" for n in range(free + 1)])
    its = encoder(loaded)
    row = Example(source="Name a town", target="Lund")
    if free:
        assert its.rows([replace(row, **{part: "a <new0> town"})])
    words = sentence("Take the token out of the rows")
    with pytest.raises(ConfigError, match=words):
        its.rows([replace(row, **{part: f"a <new{free}> town"})])


@pytest.mark.slow
def test_a_causal_folder_without_padding_token_trains_and_answers(
    llama: model.Loaded, tmp_path: Path
) -> None:
    llama.model.save_pretrained(tmp_path)
    bare = type(llama.tokenizer)(
        tokenizer_object=llama.tokenizer.backend_tokenizer, eos_token="</s>", bos_token="<s>"
    )
    bare.save_pretrained(tmp_path)
    loaded = model.load(str(tmp_path), (), seed=0)
    assert (loaded.family, loaded.tokenizer.pad_token) == ("causal", "</s>")
    assert model.weight_bytes(str(tmp_path)) == 4 * model.parameter_count(llama.model)
    mine = encoder(llama, max_target_length=6)
    its = Encoder(loaded, FineTune(model=str(tmp_path), max_target_length=6))
    assert its.rows(EXAMPLES) == mine.rows(EXAMPLES)
    first, again = (
        texts(each.model, e, e.questions(EXAMPLES[:3]))
        for each, e in ((llama, mine), (loaded, its))
    )
    assert first == again
    one, small, large = str(tmp_path), 10_000, 10**12
    assert (
        placement(one, [small])
        == placement(one, [large, large])
        == placement("tiny-llama", [small, small])
        == {}
    )
    spread = model.load(one, (), seed=0, options=placement(one, [small, small]))
    assert texts(spread.model, its, its.questions(EXAMPLES[:3])) == first
    half = model.load(str(tmp_path), (), seed=0, options={"dtype": torch.bfloat16})
    assert half.model.dtype is torch.bfloat16


# Each turn with its role before it and an end after it, as ChatML.
TURNS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHAT = Example(
    source="And towns?",
    target="Lund, Graz",
    messages=(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a town."},
        {"role": "assistant", "content": "Graz"},
        {"role": "user", "content": "And towns?"},
        {"role": "assistant", "content": "Lund, Graz"},
    ),
)


@pytest.fixture(scope="module")
def chatting() -> model.Loaded:
    return model.load("tiny-llama", [*EXAMPLES, CHAT], seed=3, chat_template=TURNS)


def shown(loaded: model.Loaded, row: Row) -> str:
    """A row as text, with what is learned after a `»`."""
    begin = next(n for n, label in enumerate(row["labels"]) if label != IGNORED)
    return (
        text_of(loaded, list(row["input_ids"][:begin]))
        + "»"
        + text_of(loaded, list(row["input_ids"][begin:]))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(None, [1]), (77, [1, 77]), ([7, 77], [1, 7, 77]), (1, 1), ([7, 1], [7, 1])],
)
def test_answers_end_with_the_token_that_rows_are_learned_with(
    before: object, after: object
) -> None:
    loaded = model.load("tiny-llama", EXAMPLES, seed=3)
    loaded.model.generation_config.eos_token_id = before
    made = encoder(loaded)
    assert made.rows([EXAMPLES[0]])[0]["input_ids"][-1] == 1
    assert loaded.model.generation_config.eos_token_id == after


@pytest.mark.slow
def test_templates_without_a_default_write_no_prompts() -> None:
    loaded = model.load("tiny-llama", EXAMPLES, seed=3)
    loaded.tokenizer.chat_template = {"rag": TURNS}
    assert encoder(loaded).template == ""
    with pytest.raises(ConfigError, match=sentence("has no chat template")):
        encoder(loaded, prompt="chat")


@pytest.mark.slow
def test_under_a_chat_template_every_form_of_row_is_turns_and_the_end_of_a_turn_stops(
    chatting: model.Loaded,
) -> None:
    made = encoder(chatting, chat_template=TURNS, system="Be kind.")
    end, eos = chatting.tokenizer.convert_tokens_to_ids(["<|end|>", "</s>"])
    assert chatting.model.generation_config.eos_token_id == sorted([eos, end])
    asked, chat, plain = made.rows([EXAMPLES[0], CHAT, TEXT])[:3]
    assert shown(chatting, asked) == (
        "<|system|>Be kind.<|end|><|user|>Name 1 towns.\nin "
        "order<|end|><|assistant|>»Lund, Graz<|end|>"
    )
    # A system turn of the row's own stands; both answers
    # are learned, with their ends, and nothing else is.
    assert text_of(chatting, list(chat["input_ids"])).startswith(
        "<|system|>Be brief.<|end|><|user|>Name a town."
    )
    learned = [
        token
        for token, label in zip(chat["input_ids"], chat["labels"], strict=True)
        if label != IGNORED
    ]
    assert text_of(chatting, learned) == "Graz<|end|>Lund, Graz<|end|>"
    assert plain["labels"] == [IGNORED, *plain["input_ids"][1:]]  # plain text is learned as it is
    whole = encoder(chatting, chat_template=TURNS, loss_on="all").rows([CHAT])[0]
    assert whole["labels"] == [IGNORED, *whole["input_ids"][1:]]
    (question,) = made.questions([CHAT])
    assert text_of(chatting, list(question["input_ids"])).endswith(
        "<|user|>And towns?<|end|><|assistant|>"
    )
    answer = chatting.tokenizer(
        "Lund<|end|>Graz", add_special_tokens=False, return_tensors="pt"
    ).input_ids
    assert made.texts(answer) == ["Lund"]


@pytest.mark.slow
def test_a_chat_that_is_too_long_loses_its_first_exchanges_and_keeps_its_system_turn(
    chatting: model.Loaded,
) -> None:
    whole = encoder(chatting, chat_template=TURNS).questions([CHAT])[0]["input_ids"]
    made = encoder(
        chatting, chat_template=TURNS, max_source_length=len(whole) - 1, max_target_length=2
    )
    (row,), (question,) = made.rows([CHAT]), made.questions([CHAT])
    left = "<|system|>Be brief.<|end|><|user|>And towns?<|end|><|assistant|>"
    assert text_of(chatting, list(question["input_ids"])) == left
    text, learned = shown(chatting, row).split("»")
    assert (
        text == left and "Lund, Graz".startswith(learned) and learned != "Lund, Graz"
    )  # a cut answer does not end
    shorter = encoder(
        chatting, chat_template=TURNS, max_source_length=len(question["input_ids"]) - 1
    )
    (cut,) = shorter.questions([CHAT])
    assert text_of(chatting, list(cut["input_ids"])).startswith(
        "<|system|>Be brief.<|end|><|user|>And"
    )
    assert text_of(chatting, list(cut["input_ids"])).endswith("<|end|><|assistant|>")
    with pytest.raises(
        ConfigError,
        match=sentence(
            "the chat template takes alone (with the tools of a row that has", "row 1", 4
        )
        + sentence("a question may have"),
    ):
        encoder(chatting, chat_template=TURNS, max_source_length=4).rows([CHAT])


@pytest.mark.slow
def test_a_chat_without_a_template_is_refused_on_the_ranks_too(
    llama: model.Loaded, t5: model.Loaded
) -> None:
    loaded = model.load("tiny-llama", EXAMPLES, seed=3)
    with pytest.raises(
        ConfigError,
        match=sentence("row {} is a row of messages, and", 2, "tiny-llama")
        + sentence("or use a model with a chat template"),
    ):
        encoder(loaded).rows([EXAMPLES[0], CHAT])
    with pytest.raises(
        ConfigError,
        match=sentence("row {} is a row of messages, and", 1, "prompt is 'alpaca'"),
    ):
        encoder(llama, prompt="alpaca").questions([CHAT])
    with pytest.raises(
        ConfigError,
        match=sentence("it answers a source", 1, "tiny-t5") + sentence("a row of messages"),
    ):
        encoder(t5).rows([CHAT])
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS
    )
    loaded.tokenizer.chat_template = refusing  # as a model of the hub has its own
    with pytest.raises(
        ConfigError,
        match=sentence(
            "the chat template refuses the turns ({})", "row 1", "system, user", "no system"
        ),
    ):
        Encoder(loaded, FineTune(model="me/on-the-hub", system="Be kind.")).rows(EXAMPLES)


def test_special_tokens_that_a_row_writes_are_not_doubled(
    llama: model.Loaded, t5: model.Loaded
) -> None:
    made = encoder(llama, prompt="plain")
    start = made.tokenizer.bos_token
    pairs = [
        Example(source="say red", target="red"),
        Example(source=f"{start}say red", target="red</s>"),
    ]
    bare, written = made.rows(pairs)
    assert written == bare
    assert list(bare["input_ids"]).count(made.tokenizer.eos_token_id) == 1
    assert made.questions(pairs)[0] == made.questions(pairs)[1]
    assert made.target(pairs[1]) == "red"
    texts = [
        Example(source="", target="say red"),
        Example(source="", target=f"{start}say red</s>"),
    ]
    assert made.rows(texts[:1]) == made.rows(texts[1:])
    answers_of = ["red", "red</s>", "red</s>\n"]
    first, *others = encoder(t5).rows([Example(source="say red", target=a) for a in answers_of])
    assert [row["labels"] for row in others] == [first["labels"]] * 2


def test_a_plain_prompt_begins_as_the_tokenizer_begins_its_texts() -> None:
    own = model.load("tiny-llama", EXAMPLES, seed=3)
    prefixes = own.tokenizer.backend_tokenizer
    # As GLM's `[gMASK]<sop>`: tokens that are no `bos_token`.
    own.tokenizer.add_special_tokens({"extra_special_tokens": ["[gMASK]", "<sop>"]})
    mask, sop = own.tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    prefixes.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[("[gMASK]", mask), ("<sop>", sop)]
    )
    made = encoder(own, prompt="plain")
    asked = [Example(source="Name 1 towns.", target="Lund")]
    (question,) = made.questions(asked)
    (row,) = made.rows(asked)
    expected = own.tokenizer("Name 1 towns.\n").input_ids
    assert expected[:2] == [mask, sop]
    assert question["input_ids"] == expected
    assert row["input_ids"][: len(expected)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("behind", ["", "\n", " \n"])
@pytest.mark.parametrize("of_turn", [False, True], ids=["end of text", "end of turn"])
def test_a_chat_does_not_double_special_tokens_of_its_turns(
    chatting: model.Loaded, of_turn: bool, behind: str
) -> None:
    begin, end = chatting.tokenizer.bos_token, chatting.tokenizer.eos_token
    if of_turn:
        # As `<|im_end|>`: the template ends turns with a token that is no `eos_token`.
        assert end != "<|end|>"
        end = "<|end|>"
    made = encoder(chatting, chat_template="{{ bos_token }}" + TURNS)
    bare = Example(source="say red", target="red")
    written = Example(source=f"{begin}say red{end}{behind}", target=f"red{end}{behind}")
    assert made.rows([written]) == made.rows([bare])
    assert made.questions([written]) == made.questions([bare])
    assert made.target(written) == "red"


@pytest.mark.slow
@pytest.mark.parametrize("value", ["x", "", False, 0, [], {}])
def test_a_template_sees_keys_of_turns_with_every_value(
    chatting: model.Loaded, value: object
) -> None:
    template = TURNS.replace("m.content", "m.content + (m.mood | tojson if 'mood' in m else '')")
    made = encoder(chatting, chat_template=template)
    turns = [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red"}]
    turns[1]["mood"] = value  # type: ignore[assignment]
    example = row_from({"messages": turns}, "here")
    (row,) = made.rows([example])
    plain = chatting.tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template)
    assert chatting.tokenizer.decode(row["input_ids"]) == plain
    assert json.dumps(value) in plain
