"""An exported folder is read alike by transformers 4 and by the version that wrote the folder."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.model.files.older_form import add_older_keys, check_one_table

ROOT = Path(__file__).parents[3]
# Versions of tokenizers, by the version of transformers.
OLDER = {"4.57.6": "0.22.2", "4.45.2": "0.20.3"}
HUB = "huggingface_hub==0.36.2"
NEWER_THAN_4_45 = {
    "deepseek_v3",
    "ernie4_5_moe",
    "gemma3",
    "gemma3_text",
    "gemma3n_text",
    "glm4_moe",
    "gpt_oss",
    "granitemoehybrid",
    "llama4_text",
    "olmo2",
    "phimoe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
}
# transformers 4.45 computes other logits from each Mamba 2, also from a Mamba 2 of its own.
WRONG_IN_4_45 = {"mamba2"}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_embeddings_that_transformers_4_would_drop_are_not_exported(kind: str, side: str) -> None:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    sizes = {"d_model": 16, "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1}
    config = transformers.AutoConfig.for_model(kind, vocab_size=20, pad_token_id=1, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
        check_one_table(model)
        part = getattr(model, f"get_{side}")()
        part.set_input_embeddings(torch.nn.Embedding(20, 16))
    with pytest.raises(ConfigError, match=sentence("reads a single table")):
        check_one_table(model)


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "dtype": "bfloat16"},
            {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"},
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        ),
        (
            {
                "model_type": "gpt_neox",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 2e4,
                    "partial_rotary_factor": 0.5,
                },
            },
            {"rotary_emb_base": 2e4, "rotary_pct": 0.5},
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {
                    "model_type": "gemma3_text",
                    "rope_parameters": {
                        "full_attention": {**LINEAR, "rope_theta": 1e6},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    },
                },
            },
            {
                "text_config": {
                    "rope_theta": 1e6,
                    "rope_local_base_freq": 1e4,
                    "rope_scaling": LINEAR,
                }
            },
        ),
        (
            {"model_type": "t5", "scale_decoder_outputs": False, "tie_word_embeddings": True},
            {"tie_word_embeddings": False},
        ),
        ({"model_type": "qwen3_moe", "num_local_experts": 64}, {"num_experts": 64}),
        ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, {"time_step_limit": [0.0, 1e999]}),
    ],
)
def test_a_configuration_holds_the_keys_of_both_versions(
    newer: Mapping[str, object], older: Mapping[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(newer))
    add_older_keys(tmp_path)
    both = json.loads((tmp_path / "config.json").read_text())
    inner = older.get("text_config")
    if inner:
        assert both["text_config"] == {**both["text_config"], **inner}
        older = {}
    assert both == {**both, **older}
    # The keys of the version that wrote the file stay.
    assert both.keys() >= newer.keys()
    assert both.get("rope_parameters") == newer.get("rope_parameters")


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
}
GEMMA = {**SMALL, "head_dim": 8, "query_pre_attn_scalar": 8}
MIXTURE = {**SMALL, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
OWN_HEAD = "llama-own-head"
"""Model whose configuration ties the output layer, and whose files have another one."""
# Published forms of configurations, as bases on the hub have them.
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "llama-theta": {"model_type": "llama", **SMALL, "rope_theta": 1e6},
    "llama-3": {"model_type": "llama", **SMALL, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama-linear": {
        "model_type": "llama",
        **SMALL,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "qwen2-yarn": {"model_type": "qwen2", **SMALL, "rope_theta": 1e6, "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 8, "rope_theta": 1e6},
    "mistral": {"model_type": "mistral", **SMALL, "rope_theta": 1e6, "sliding_window": None},
    "gemma2": {"model_type": "gemma2", **GEMMA},
    "gemma3": {
        "model_type": "gemma3_text",
        **GEMMA,
        "num_hidden_layers": 7,
        "rope_theta": 1e6,
        "rope_local_base_freq": 5e3,
        "rope_scaling": LINEAR,
        "sliding_window": 8,
    },
    "phi3": {
        "model_type": "phi3",
        **SMALL,
        "pad_token_id": 0,
        "original_max_position_embeddings": 32,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 99,
        "n_positions": 64,
    },
    "neox": {"model_type": "gpt_neox", **SMALL, "rotary_pct": 0.5, "rotary_emb_base": 2e4},
    "stablelm": {
        "model_type": "stablelm",
        **SMALL,
        "partial_rotary_factor": 0.5,
        "rope_theta": 3e4,
    },
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "rope_theta": 1e6},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **MIXTURE,
        "head_dim": 8,
        "num_experts": 4,
        "rope_theta": 1e6,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **SMALL,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "olmo2": {"model_type": "olmo2", **SMALL, "rope_theta": 5e5},
    "granite-hybrid": {
        "model_type": "granitemoehybrid",
        **SMALL,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "shared_intermediate_size": 32,
    },
    "t5": {"model_type": "t5", **T5},
    "t5-1.1": {
        "model_type": "t5",
        **T5,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "mt5": {"model_type": "mt5", **T5, "tie_word_embeddings": False},
    "bart": {"model_type": "bart", **BART},
    OWN_HEAD: {"model_type": "llama", **SMALL, "tie_word_embeddings": False},
    "pegasus": {"model_type": "pegasus", **BART},
}


@pytest.fixture(scope="module", params=OLDER)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def older(version: str) -> Mapping[str, str]:
    """Return the environment of a process with transformers 4, installed once below build/."""
    place = ROOT / "build" / f"transformers-{version}"
    if not (place / f"transformers-{version}.dist-info").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place)]
        pins = [f"transformers=={version}", f"tokenizers=={OLDER[version]}", HUB]
        made = subprocess.run([*pip, *pins], capture_output=True, text=True, timeout=600)
        if made.returncode:
            pytest.skip(f"transformers 4 cannot be installed here: {made.stderr[-300:]}")
    # On a busy machine, threads that wait for each other take minutes for tiny models.
    return {
        **os.environ,
        "PYTHONPATH": str(place),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def read_with_older(older: Mapping[str, str], arguments: list[str]) -> Mapping[str, Any]:
    program = str(Path(__file__).with_name("folder_reader.py"))
    read = subprocess.run(
        [sys.executable, program, *arguments],
        env=dict(older),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not read.returncode, read.stderr[-2000:]
    return dict(json.loads(read.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of models and of tokenizers, each as published and as saved here."""
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("folders")
    save_models(root / "models")
    export_families(root / "models")
    save_tokenizers(root / "tokenizers")
    yield root
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def got(older: Mapping[str, str], root: Path) -> Mapping[str, Any]:
    """What one process of transformers 4 reads of all saved folders."""
    models = [f"models:{folder}" for folder in saved_models(root)]
    return read_with_older(
        older, models + [f"tokens:{root / 'tokenizers' / name}" for name in TOKENIZERS]
    )


@pytest.fixture(scope="module")
def wanted(root: Path) -> Mapping[str, Mapping[str, Any]]:
    """What the version that wrote the folders reads of the saved models."""
    from tests.finetune.results.folder_reader import read

    return {str(folder): read(str(folder)) for folder in saved_models(root)}


def saved_models(root: Path) -> list[Path]:
    return [each for each in sorted((root / "models").iterdir()) if each.name != "published"]


def save_models(root: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from workbench.finetune.model.files.saving import save_model

    for name, shape in FAMILIES.items():
        published = root / "published" / name
        published.mkdir(parents=True)
        (published / "config.json").write_text(json.dumps(shape))
        config = AutoConfig.from_pretrained(published)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        torch.manual_seed(0)
        model = kind.from_config(config)
        if shape.get("tie_word_embeddings") is False:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        # The configuration stays as published, and the weights have the names of the hub.
        model.save_pretrained(published)
        whole = {**shape, "architectures": [type(model).__name__]}
        if name == OWN_HEAD:
            whole["tie_word_embeddings"] = True
        (published / "config.json").write_text(json.dumps(whole))
        save_model(kind.from_pretrained(published), root / name, read=True)


def export_families(root: Path) -> None:
    """Export a model of every family that the tests train, from weights with the hub's names."""
    import tests.support.tinyfamilies as families
    from tests.support.familyfolders import CAUSAL, TRANSLATORS, folder_of
    from tests.support.tinyfolders import change_weights
    from workbench.finetune.answers.serving.export import export_model
    from workbench.finetune.export.folder import SHARD
    from workbench.finetune.model.load import load

    def as_on_the_hub(state: dict[str, Any]) -> dict[str, Any]:
        inner = "vision_tower."
        return {name.replace(inner, f"{inner}vision_model."): v for name, v in state.items()}

    made = []
    for name in families.FAMILIES:
        made.append(root / "published" / f"trained-{name}")
        families.build(name, made[-1])
        if name == "gemma3":
            change_weights(made[-1], as_on_the_hub)
    trained = {name.replace("_", "") for name in families.FAMILIES}
    for name, options in {**CAUSAL, **TRANSLATORS}.items():
        # A family of both lists is exported once, unless its output layer is the embedding.
        if name.lower() not in trained or "tie_word_embeddings" in options:
            made.append(folder_of(name, root / "published" / f"read-{name}"))
    for folder in made:
        export_model(load(str(folder), (), seed=0), root / folder.name, None, SHARD)


@pytest.mark.slow
@pytest.mark.long
def test_models_have_equal_frequencies_and_logits(
    version: str, got: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Any]]
) -> None:
    unknown, differing = set(), set()
    for folder, numbers in wanted.items():
        kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
        theirs = got[folder]
        if theirs.get("unknown"):
            unknown.add(kind)
            continue
        if theirs["logits"] != pytest.approx(numbers["logits"], abs=1e-5, rel=1e-5):
            differing.add(kind)
        assert theirs["missing"] == numbers["missing"] == [], folder
        # transformers 4 keeps the frequencies of Phi-MoE in no buffer, and of Gemma 3 also those of
        # types of layers that the model lacks.
        expected = set() if kind == "phimoe" else set(map(tuple, numbers["frequencies"]))
        assert expected <= set(map(tuple, theirs["frequencies"])), folder
        assert theirs["dtype"] == numbers["dtype"], folder
    assert unknown == (NEWER_THAN_4_45 if version == "4.45.2" else set())
    assert differing == (WRONG_IN_4_45 if version == "4.45.2" else set())


@pytest.mark.slow
@pytest.mark.long
def test_a_saved_model_is_the_published_one(
    root: Path, wanted: Mapping[str, Mapping[str, Any]]
) -> None:
    from tests.finetune.results.folder_reader import read

    for folder, numbers in wanted.items():
        published = read(str(root / "models" / "published" / Path(folder).name))
        assert numbers["logits"] == pytest.approx(published["logits"], abs=1e-5, rel=1e-5), folder


def bytes_tokenizer(special: list[str], start: str = "") -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["The quick brown fox", "two spaces"], trainer)
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, tokenizer.token_to_id(start))]
        )
    return tokenizer


def sentencepieces(special: list[str], start: str = "", end: str = "") -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*special, *every_byte], show_progress=False
    )
    tokenizer.train_from_iterator(["The quick brown fox", "two spaces", "Hi there x y"], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    around = [token for token in (start, "$A", end) if token]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(around),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (start, end) if token],
    )
    return tokenizer


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
META = ["<unk>", "<s>", "</s>"]
# Kind of model, tokenizer, and the published tokenizer_config.json.
TOKENIZERS: Mapping[str, tuple[str, Callable[[], Any], Mapping[str, object]]] = {
    "fast": (
        "llama",
        lambda: bytes_tokenizer(["<s>", "</s>", "<|end|>"], "<s>"),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "<|end|>",
            "chat_template": TEMPLATE,
        },
    ),
    "llama": (
        "llama",
        lambda: sentencepieces(META, "<s>"),
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **ENDS},
    ),
    "llama-without-start": (
        "llama",
        lambda: sentencepieces(META),
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, **ENDS},
    ),
    "llama-with-end": (
        "llama",
        lambda: sentencepieces(META, "<s>", "</s>"),
        {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True, **ENDS},
    ),
    "mistral": (
        "mistral",
        lambda: sentencepieces([*META, "[INST]", "[/INST]"], "<s>"),
        {
            "tokenizer_class": "LlamaTokenizer",
            "additional_special_tokens": ["[INST]", "[/INST]"],
            "chat_template": TEMPLATE,
            **ENDS,
        },
    ),
    "qwen2": (
        "qwen2",
        lambda: bytes_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "chat_template": TEMPLATE,
        },
    ),
    "gemma": (
        "gemma2",
        lambda: sentencepieces(["<pad>", "<eos>", "<bos>", "<unk>", "<turn>"], "<bos>"),
        {
            "tokenizer_class": "GemmaTokenizer",
            "add_bos_token": True,
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "additional_special_tokens": ["<turn>"],
        },
    ),
    "gpt2": ("gpt2", lambda: bytes_tokenizer(["<|endoftext|>"]), {"model_max_length": 1024}),
    "templates-by-name": (
        "llama",
        lambda: bytes_tokenizer(["<s>", "</s>"]),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": [
                {"name": "default", "template": TEMPLATE},
                {"name": "tool_use", "template": f"tools {TEMPLATE}"},
            ],
        },
    ),
}


def save_tokenizers(root: Path) -> None:
    from transformers import AutoTokenizer

    from workbench.finetune.model.files.older_form import save_tokenizer

    for name, (kind, make, config) in TOKENIZERS.items():
        published = root / "published" / name
        for folder in (published, root / name):
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        make().save(str(published / "tokenizer.json"))
        (published / "tokenizer_config.json").write_text(json.dumps(config))
        save_tokenizer(AutoTokenizer.from_pretrained(published), root / name)


@pytest.mark.slow
@pytest.mark.long
def test_tokenizers_make_equal_tokens_and_turns(got: Mapping[str, Any], root: Path) -> None:
    from tests.finetune.results.folder_reader import read_tokens

    for name in TOKENIZERS:
        folder = root / "tokenizers" / name
        wanted = read_tokens(str(folder))
        assert wanted == read_tokens(str(root / "tokenizers" / "published" / name)), name
        assert got[str(folder)] == wanted, name
    template = json.loads((root / "tokenizers" / "qwen2" / "tokenizer_config.json").read_text())
    assert template["chat_template"] == TEMPLATE
