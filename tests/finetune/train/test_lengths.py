"""Open limits of lengths cut no answer; given limits cut, and what is cut is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from workbench.finetune.data.rows import Example
from workbench.finetune.data.training.tokens import TokenRows
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import load as model
from workbench.finetune.model.generate import answers
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.options.text.lengths import Limits, TextLengths
from workbench.finetune.recipe.order import IGNORED

pytestmark = pytest.mark.usefixtures("one_thread")

TURNS = (
    "{% for turn in messages %}<|{{ turn['role'] }}|>{{ turn['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = "ten cat red sun dog moon six two"


def rows_of(sizes: list[int]) -> list[Example]:
    return [
        Example(source=f"say {n}", target=" ".join([WORDS] * size)) for n, size in enumerate(sizes)
    ]


ROWS = rows_of([1, 2, 4, 20])


@pytest.fixture(scope="module", params=["tiny-t5", "tiny-llama", "chat"])
def made(request: pytest.FixtureRequest) -> tuple[model.Loaded, dict[str, Any]]:
    name = "tiny-t5" if request.param == "tiny-t5" else "tiny-llama"
    template = TURNS if request.param == "chat" else None
    loaded = model.load(name, ROWS, seed=3, chat_template=template)
    return loaded, {"model": name, "chat_template": template}


def learned(row: Any) -> list[int]:
    return [label for label in row["labels"] if label != IGNORED]


def test_an_open_limit_cuts_no_answer_and_a_given_one_counts_what_it_cuts(
    made: tuple[model.Loaded, dict[str, Any]],
) -> None:
    loaded, options = made
    whole = Encoder(loaded, FineTune(**options, max_source_length=5000, max_target_length=5000))
    sizes = sorted(len(learned(row)) for row in whole.rows(ROWS))
    assert sizes[-1] > 128, "the former limit would cut the longest answer"
    left_open = Encoder(loaded, FineTune(**options))
    assert left_open.rows(ROWS) == whole.rows(ROWS)
    assert left_open.questions(ROWS) == whole.questions(ROWS)
    seen = whole.taken()
    assert (seen.cut_questions, seen.cut_answers) == (0, 0)

    most = sizes[1]
    given = Encoder(loaded, FineTune(**options, max_target_length=most))
    cut = given.rows(ROWS)
    seen = given.taken()
    assert (seen.answers, seen.cut_answers) == (4, 2)
    assert (seen.longest_answer, seen.whole_answer) == (most, sizes[-1])
    assert max(len(learned(row)) for row in cut) == most
    assert given.taken() == TextLengths(), "what was taken is counted once"


def test_answers_may_be_as_long_as_the_longest_of_the_rows(
    made: tuple[model.Loaded, dict[str, Any]],
) -> None:
    loaded, options = made
    encoder = Encoder(loaded, FineTune(**options))
    assert encoder.answer_tokens == 128
    encoder.rows(ROWS)
    encoder.lengths = encoder.taken()
    assert encoder.answer_tokens == encoder.lengths.longest_answer > 128
    assert Encoder(loaded, FineTune(**options, max_target_length=7)).answer_tokens == 7


def test_a_row_stays_within_the_positions_of_its_model(tmp_path: Path) -> None:
    tokenizer = model.load("tiny-llama", ROWS, seed=1).tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, n_inner=16
    )
    torch.manual_seed(0)
    loaded = model.Loaded(model=GPT2LMHeadModel(config), tokenizer=tokenizer, family="causal")
    long_question = Example(source=" ".join([WORDS] * 30), target="red sun")
    long_both = Example(source=" ".join([WORDS] * 30), target=" ".join([WORDS] * 30))
    text = Example(source="", target=" ".join([WORDS] * 30))
    encoder = Encoder(loaded, FineTune(model="tiny-llama", prompt="plain"))
    first, second, *pieces = encoder.rows([long_question, long_both, text])
    answer = learned(first)
    assert answer[-1] == tokenizer.eos_token_id, "the question is cut, and the answer is whole"
    assert len(first["input_ids"]) <= 64
    assert len(second["input_ids"]) == 64
    assert len(learned(second)) >= 32
    assert all(len(piece["input_ids"]) <= 64 for piece in pieces)
    seen = encoder.taken()
    assert (seen.cut_questions, seen.cut_answers) == (2, 1)
    # A model answers within its positions, however long the answers of its rows were.
    encoder.lengths = TextLengths(longest_answer=500)
    asked = encoder.questions([long_question])
    assert len(answers(loaded.model, encoder, asked, device=torch.device("cpu"))) == 1


@pytest.mark.parametrize("most", [16, 64, 4096])
@pytest.mark.parametrize("question", [1, 15, 40, 9000])
@pytest.mark.parametrize("answer", [1, 15, 40, 9000])
def test_open_limits_cut_a_question_before_an_answer(most: int, question: int, answer: int) -> None:
    source, target = Limits(source=None, target=None, most=most).of_row(question, answer)
    read = min(question, source)
    written = min(answer, target)
    assert read + written <= most
    if question + answer <= most:
        assert (read, written) == (question, answer)
    if answer <= most // 2:
        assert written == answer
    assert Limits(source=7, target=5, most=most).of_row(question, answer) == (7, 5)


def test_lengths_are_kept_with_the_tokens(tmp_path: Path) -> None:
    lengths = TextLengths(questions=2, answers=2, cut_answers=1, longest_answer=3, whole_answer=9)
    rows = TokenRows([{"input_ids": [1, 2], "labels": [1, 2]}], tmp_path, lambda: lengths)
    rows.copy_to(tmp_path / "kept")
    kept = TokenRows.read(tmp_path / "kept")
    assert kept is not None and kept.texts == rows.texts == lengths
