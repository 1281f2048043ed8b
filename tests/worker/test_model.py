from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch  # transformers first: without it there is nothing to test

from workbench.jobs.data.rows import Example
from workbench.worker.model import load as model

EXAMPLES = [
    Example(source=f"translate to SQL: Which {name} has {n}?", target=f'SELECT {name} FROM table WHERE no = "{n}"')
    for n, name in enumerate(["city", "crêpe", "player", "année"] * 5)
]
NASTY = [
    'He said "Ann\'s", 1,234.50 — naïve; 東京 🚂 \t two  blanks',
    " leading and trailing ",
    "SELECT COUNT Player (2003-06) FROM table WHERE Years in Toronto = 1995-96 AND a > -7",
    "line\nbreak\r\n",
    "",
    "<pad",
    "a" * 300,
]


@pytest.fixture(scope="module")
def loaded() -> model.Loaded:
    return model.load("tiny-t5", EXAMPLES, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("text", NASTY)
def test_every_text_comes_back_exactly(loaded: model.Loaded, text: str) -> None:
    tokens = loaded.tokenizer(text)["input_ids"]
    assert tokens[-1] == loaded.tokenizer.eos_token_id
    assert loaded.tokenizer.decode(tokens, skip_special_tokens=True) == text


@pytest.mark.slow
def test_a_cut_text_keeps_its_end_token(loaded: model.Loaded) -> None:
    tokens = loaded.tokenizer("a b c d e f g h", truncation=True, max_length=4)["input_ids"]
    assert len(tokens) == 4
    assert tokens[-1] == loaded.tokenizer.eos_token_id


@pytest.mark.slow
def test_the_seed_alone_makes_the_weights(loaded: model.Loaded) -> None:
    again, other = model.load("tiny-t5", EXAMPLES, seed=3), model.load("tiny-t5", EXAMPLES, seed=4)
    first, second, third = (each.model.shared.weight for each in (loaded, again, other))
    assert first.equal(second)
    assert not first.equal(third)
    assert model.parameter_count(loaded.model) == sum(p.numel() for p in loaded.model.parameters())


@pytest.mark.slow
def test_the_vocabulary_fits_the_model_and_dropout_is_off(loaded: model.Loaded) -> None:
    assert loaded.model.config.vocab_size >= len(loaded.tokenizer)
    assert loaded.model.config.dropout_rate == 0.0


@pytest.mark.slow
def test_a_model_as_it_was_before_its_first_step(loaded: model.Loaded, tmp_path: Path) -> None:
    again = model.initial("tiny-t5", loaded.tokenizer, seed=3)
    mine, its = loaded.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    loaded.tokenizer.save_pretrained(tmp_path)
    loaded.model.save_pretrained(tmp_path)
    folder = model.initial(str(tmp_path), None, seed=9)
    assert all(torch.equal(mine[name], value) for name, value in folder.model.state_dict().items())
