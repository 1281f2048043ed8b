"""The limits that are read from a model's files are those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BitsAndBytesConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.models.auto import configuration_auto, tokenization_auto

from tests.finetune.submit.folders import change
from workbench.base.errors import ConfigError
from workbench.finetune.job import architectures, limits, positions
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.tokenizer_files import tokens_of
from workbench.finetune.model import adapters
from workbench.finetune.model import load as model
from workbench.finetune.submit.prepare import check_early

COUNT = 24
SMALL: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "dff"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size"), 32),
    "rotary_dim": 8,
    "vocab_size": 40,
    "word_embed_proj_dim": 32,
}
OWN: Mapping[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "led": {"attention_window": 4},
    "xmod": {"default_language": "en_XX"},
}
"""Options without which a small model of a type cannot be made."""
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
KINDS = [
    kind
    for kind in (*positions._TABLES, *positions._AFTER_PADDING, "led")
    # Models of pictures, and heads and blocks of attention that are larger than the models here.
    if kind not in ("git", "trocr", "big_bird", "bigbird_pegasus", "codegen")
]


def small(kind: str) -> Any:
    """Return a small model of a type, with tables of `COUNT` positions."""
    made = configuration_auto.CONFIG_MAPPING[kind]
    names = {positions._TABLES.get(kind, "max_position_embeddings"), *positions._LED}
    default = made()
    changes = {name: size for name, size in SMALL.items() if hasattr(default, name)}
    changes |= {name: COUNT for name in names if hasattr(default, name)}
    changes |= OWN.get(kind, {})
    config = made(**changes, **IDS)
    config.is_decoder = not config.is_encoder_decoder
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return auto.from_config(config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_reads_as_many_tokens_as_its_table_has_positions(kind: str) -> None:
    built = small(kind)
    reading, writing = positions.positions_of(built.config.to_dict())
    assert reading is not None and writing is not None

    def read(asked: int, answered: int) -> None:
        ids = {"input_ids": torch.full((1, asked), 5)}
        if built.config.is_encoder_decoder:
            ids["decoder_input_ids"] = torch.full((1, answered), 5)
        with torch.no_grad():
            built(**ids)

    read(reading.count, writing.count)
    for more in ((1, 0), (0, 1)) if built.config.is_encoder_decoder else ((1, 0),):
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            read(reading.count + more[0], writing.count + more[1])


def test_the_classes_of_tokenizers_are_those_of_transformers() -> None:
    # Two types have another class where a package is missing.
    for kind, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items():
        found = architectures.tokenizers_by_type()[kind]
        assert name is None or found in (name, "MistralCommonBackend"), kind


def words(count: int = 30) -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, count)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="w2"
    )


@pytest.mark.parametrize("added", [(), ("<a>",), ("<a>", "<b>")])
@pytest.mark.parametrize("pad", [None, "<mine>", "<a>"])
def test_ids_are_those_of_the_loaded_tokenizer(
    added: tuple[str, ...], pad: str | None, tmp_path: Path
) -> None:
    tokenizer = words()
    tokenizer.add_tokens([*added], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    if pad is not None:
        change(tmp_path / "tokenizer_config.json", pad_token=pad)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    found = tokens_of(tmp_path)
    assert found.largest == ("w29", 29)
    ids = loaded.get_vocab()
    assert {token: ids[token] for token in found.added} == found.added
    assert max(ids.values()) == max(29, *found.added.values())
    for role in ("eos", "pad", "unk"):
        assert found.roles[role] == getattr(loaded, f"{role}_token")


LLAMA: Mapping[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
SAVED = {
    "llama": LlamaConfig(**LLAMA),
    "gpt2": GPT2Config(vocab_size=30, n_positions=64, n_embd=32, n_layer=1, n_head=4),
    "t5": T5Config(
        vocab_size=30,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "bart": BartConfig(
        **{name: size for name, size in SMALL.items() if hasattr(BartConfig(), name)},
        max_position_embeddings=64,
    ),
}


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("kind", SAVED)
def test_folders_of_save_pretrained_are_accepted(kind: str, shards: bool, tmp_path: Path) -> None:
    config = SAVED[kind]
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path, max_shard_size="4KB" if shards else "1GB")
    words().save_pretrained(tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) > 1 if shards else True
    job = FineTune(model=str(tmp_path), max_source_length=40, max_target_length=24)
    check_early(job, gpus=0)
    loaded = model.load(str(tmp_path), (), seed=0)
    limits.check_loaded(job, loaded.model.config.to_dict(), {"pad_token": 0})


def test_weights_of_4_bits_are_trained_with_qlora_alone(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)).save_pretrained(plain)
    packed = tmp_path / "packed"
    AutoModelForCausalLM.from_pretrained(
        plain,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        device_map="cpu",
    ).save_pretrained(packed)
    words().save_pretrained(packed)
    job = FineTune(model=str(packed), technique="single", peft="qlora", lora={"r": 2})
    with pytest.raises(ConfigError, match="4 bits already, and peft is 'lora'"):
        check_early(job.replace(peft="lora"), gpus=0)
    check_early(job, gpus=0)
    options = adapters.load_options(job.peft, job.number_format)
    loaded = model.placed(model.load(job.model, (), seed=0, options=options), job, gpus=0)
    adapted = adapters.attached(loaded, job).model
    ids = torch.arange(2, 12)[None]
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = [each for each in adapted.parameters() if each.requires_grad]
    assert trained and any(each.grad is not None and each.grad.abs().sum() > 0 for each in trained)
