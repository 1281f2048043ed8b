"""Rows of text as tokens, held to what transformers itself makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch  # transformers first: without it there is nothing to test

from workbench.base.errors import ConfigError
from workbench.jobs.finetune import FineTune
from workbench.jobs.model import Family
from workbench.jobs.prompts import wording
from workbench.worker.answer.generate import answers
from workbench.worker.answer.serve import placement
from workbench.worker.data.rows import IGNORED, Example, Row, aligned
from workbench.worker.model import load as model
from workbench.worker.model.encode import Encoder

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = [
    Example(source=f"Name {n} towns.", input="in order" if n % 2 else "", target=", ".join(["Lund", "Graz"] * n))
    for n in range(1, 9)
]
TEXT = Example(source="", target="Once upon a time\nthere was a queen, and " + "the queen had a cat, and " * 12)


@pytest.fixture(scope="module")
def llama() -> model.Loaded:
    return model.load("tiny-llama", [*EXAMPLES, TEXT], seed=3, wording=wording("alpaca"))


@pytest.fixture(scope="module")
def t5() -> model.Loaded:
    return model.load("tiny-t5", EXAMPLES, seed=3)


def encoder(loaded: model.Loaded, **options: object) -> Encoder:
    return Encoder(
        loaded, FineTune(**{"model": f"tiny-{'llama' if loaded.family is Family.CAUSAL else 't5'}", **options})
    )


def text_of(loaded: model.Loaded, ids: list[int]) -> str:
    return loaded.tokenizer.decode(ids)


def texts(model: Any, encoder: Encoder, rows: Sequence[Row]) -> list[str]:
    by_number = answers(model, encoder, rows, device=model.device)
    return [by_number[number] for number in range(len(rows))]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["plain", "alpaca", "llama2-chat", "Q: {instruction} ({input}) A: "])
def test_a_causal_row_is_prompt_and_answer_and_only_the_answer_is_learned(llama: model.Loaded, prompt: str) -> None:
    made = encoder(llama, prompt=prompt)
    for example, row, question in zip(EXAMPLES, made.rows(EXAMPLES), made.questions(EXAMPLES), strict=True):
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
def test_learning_from_all_counts_the_prompt_too_but_for_its_first_token(llama: model.Loaded) -> None:
    (row,) = encoder(llama, loss_on="all").rows(EXAMPLES[:1])
    assert row["labels"] == [IGNORED, *row["input_ids"][1:]]


@pytest.mark.slow
def test_plain_text_is_learned_whole_in_pieces(llama: model.Loaded) -> None:
    rows = encoder(llama, prompt="alpaca", max_source_length=20, max_target_length=12).rows([TEXT])
    assert len(rows) > 2
    assert all(len(row["input_ids"]) <= 32 and row["input_ids"][0] == llama.tokenizer.bos_token_id for row in rows)
    assert text_of(llama, [i for row in rows for i in row["input_ids"][1:]]) == TEXT.target + "</s>"
    assert all(row["labels"] == [IGNORED, *row["input_ids"][1:]] for row in rows)


@pytest.mark.slow
def test_what_is_too_long_is_cut_within_its_form_and_a_cut_answer_does_not_end(llama: model.Loaded) -> None:
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
    (short,) = encoder(llama, max_source_length=9).questions([Example(source=TEXT.target, target="")])
    assert len(short["input_ids"]) <= 9
    assert text_of(llama, short["input_ids"]).endswith("\n")
    with pytest.raises(ConfigError, match="max_source_length is 30, which the prompt form 'alpaca' takes alone"):
        encoder(llama, prompt="alpaca", max_source_length=30).rows([long])


@pytest.mark.slow
def test_the_loss_of_aligned_logits_is_the_model_s_own(llama: model.Loaded) -> None:
    made = encoder(llama)
    batch = made.collator(made.rows(EXAMPLES))
    with torch.no_grad():
        theirs = llama.model(**batch).loss
        logits, labels = aligned(
            llama.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"], True
        )
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert aligned(logits, labels, False) == (logits, labels)


@pytest.mark.slow
def test_answers_depend_on_no_neighbour_and_hold_no_prompt(llama: model.Loaded) -> None:
    made = encoder(llama, prompt="alpaca", max_target_length=6)
    torch.manual_seed(5)
    noisy = model.initial("tiny-llama", llama.tokenizer, seed=3).model
    for weights in noisy.parameters():
        weights.data += 0.1 * torch.randn_like(weights)
    rows = made.questions([*EXAMPLES, Example(source="", target="", opening="Once upon")])
    together = texts(noisy, made, rows)
    assert together == [texts(noisy, made, [row])[0] for row in rows]
    assert len(set(together)) > 1
    assert not any("###" in text for text in together)
    ids = torch.tensor([rows[0]["input_ids"]])
    plain = noisy.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert llama.tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True) == together[0]
    assert text_of(llama, rows[-1]["input_ids"]) == "<s>Once upon"


@pytest.mark.slow
def test_an_encoder_decoder_model_reads_the_input_too_and_learns_from_no_plain_text(t5: model.Loaded) -> None:
    made = encoder(t5)
    (row,) = made.rows(EXAMPLES[:1])
    assert text_of(t5, row["input_ids"]) == "Name 1 towns.\nin order</s>"
    assert text_of(t5, row["labels"]) == "Lund, Graz</s>"
    with pytest.raises(ConfigError, match=r"row 2 is plain text, from which 'tiny-t5' cannot learn"):
        made.rows([EXAMPLES[0], TEXT])


@pytest.mark.slow
def test_what_only_the_model_s_files_say_is_refused_when_they_are_known(t5: model.Loaded) -> None:
    for options in ({"precision": "fp16"}, {"prompt": "alpaca"}, {"loss_on": "all"}):
        job = FineTune(model="somebody/some-model", **options)  # which tells no family by its name
        with pytest.raises(ConfigError, match=f"{options.get('precision') or next(iter(options))}"):
            Encoder(t5, job)


@pytest.mark.slow
def test_a_causal_folder_without_padding_token_trains_and_answers(llama: model.Loaded, tmp_path: Path) -> None:
    llama.model.save_pretrained(tmp_path)
    bare = type(llama.tokenizer)(tokenizer_object=llama.tokenizer.backend_tokenizer, eos_token="</s>", bos_token="<s>")
    bare.save_pretrained(tmp_path)
    loaded = model.load(str(tmp_path), (), seed=0)
    assert (loaded.family, loaded.tokenizer.pad_token) == (Family.CAUSAL, "</s>")
    assert model.weight_bytes(str(tmp_path)) == 4 * model.parameter_count(llama.model)
    mine = encoder(llama, max_target_length=6)
    its = Encoder(loaded, FineTune(model=str(tmp_path), max_target_length=6))
    assert its.rows(EXAMPLES) == mine.rows(EXAMPLES)
    first, again = (texts(each.model, e, e.questions(EXAMPLES[:3])) for each, e in ((llama, mine), (loaded, its)))
    assert first == again
    one, small, large = str(tmp_path), 10_000, 10**12
    assert placement(one, [small]) == placement(one, [large, large]) == placement("tiny-llama", [small, small]) == {}
    spread = model.load(one, (), seed=0, options=placement(one, [small, small]))
    assert texts(spread.model, its, its.questions(EXAMPLES[:3])) == first
    half = model.load(str(tmp_path), (), seed=0, options={"dtype": torch.bfloat16})
    assert half.model.dtype is torch.bfloat16
