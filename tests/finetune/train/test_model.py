from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from workbench.finetune.data.rows import Example
from workbench.finetune.model import load as model
from workbench.finetune.model.files import saving

EXAMPLES = [
    Example(
        source=f"translate to SQL: Which {name} has {n}?",
        target=f'SELECT {name} FROM table WHERE no = "{n}"',
    )
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
    again = model.load("tiny-t5", (), tokenizer=loaded.tokenizer, seed=3)
    mine, its = loaded.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    loaded.tokenizer.save_pretrained(tmp_path)
    loaded.model.save_pretrained(tmp_path)
    folder = model.load(str(tmp_path), (), seed=9)
    assert all(torch.equal(mine[name], value) for name, value in folder.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "mixtral"])
def test_a_model_is_saved_in_several_files_and_is_the_same_again(
    loaded: model.Loaded, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    monkeypatch.setattr(saving, "SAVED_AT_ONCE", 1 << 14)
    saved, reader = loaded.model, AutoModelForSeq2SeqLM
    if kind == "mixtral":  # whose files have a weight for each expert, and the model one for all
        sizes = {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
        }
        config = MixtralConfig(
            **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4
        )
        MixtralForCausalLM(config).save_pretrained(tmp_path / "first")
        saved, reader = (
            AutoModelForCausalLM.from_pretrained(tmp_path / "first"),
            AutoModelForCausalLM,
        )
    saving.save_model(saved, tmp_path / "model", read=kind == "mixtral")
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 1 and max(file.stat().st_size for file in files) < 2_500_000
    again = reader.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in saved.state_dict().items())
    if kind == "mixtral":
        names = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())[
            "weight_map"
        ]
        assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names
    monkeypatch.undo()
    saving.save_model(saved, tmp_path / "model", read=False)  # nothing of the files before is left
    assert [file.name for file in (tmp_path / "model").glob("model*")] == ["model.safetensors"]
