"""The folder of a model is read at submit: limits, formats, files and what is sent."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.finetune.submit import folders
from tests.finetune.submit.folders import SPECIAL, WORDS, change, weights, write
from tests.support.sentences import says, sentence
from workbench.base import entries
from workbench.base.child import HELPER, HOME, child_environment, main_of
from workbench.base.errors import ConfigError
from workbench.finetune.job import outlined
from workbench.finetune.job.architectures import WITHOUT_START, check_architecture
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.limits import check_loaded, lacking_memory, model_notes
from workbench.finetune.lm_eval.evaluate import check_trained
from workbench.finetune.model import outline
from workbench.finetune.plan.plan import plan
from workbench.finetune.plan.reading import preview
from workbench.finetune.submit.prepare import check_early
from workbench.finetune.submit.stage import sent_folder, sent_model
from workbench.finetune.submit.travels import model_files, sent_notes
from workbench.jobs.job import NewRun

ROWS = WORDS + len(SPECIAL)
LONG = {"max_source_length": 256, "max_target_length": 128}
SHORT = {"max_source_length": 40, "max_target_length": 24}


@pytest.fixture(scope="module", autouse=True)
def transformers_is_here() -> None:
    """Make the outlines of models in this process: `outlines_are_made_here` looks for it."""
    importlib.import_module("transformers")


def job_of(folder: Path, **options: Any) -> FineTune:
    return FineTune(model=str(folder), **options)


def positions(**config: object) -> Callable[[Path], object]:
    return lambda folder: folders.model(folder, **config)


def with_bom(name: str) -> Callable[[Path], object]:
    def change_it(folder: Path) -> None:
        folders.model(folder)
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())

    return change_it


def with_long_number(name: str) -> Callable[[Path], object]:
    def change_it(folder: Path) -> None:
        folders.model(folder)
        (folder / name).write_text('{"hidden_size": ' + "9" * 6000 + "}")

    return change_it


def broken(name: str) -> Callable[[Path], object]:
    def change_it(folder: Path) -> None:
        folders.model(folder)
        (folder / name).write_text("{'a': 1}")

    return change_it


def changed(name: str, **values: object) -> Callable[[Path], object]:
    def change_it(folder: Path) -> None:
        folders.model(folder)
        change(folder / name, **values)

    return change_it


def template_file(text: str) -> Callable[[Path], object]:
    return lambda folder: (folders.model(folder) / "chat_template.jinja").write_text(text)


def quantized(**settings: object) -> Callable[[Path], object]:
    return positions(quantization_config=settings)


INDEX = "model.safetensors.index.json"


def shards(folder: Path) -> None:
    folders.model(folder)
    (folder / "model.safetensors").unlink()
    shapes = [*folders.llama_shapes().items()]
    files = {}
    for number, part in enumerate((shapes[:4], shapes[4:]), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        folders.shaped(folder / name, dict(part))
        files |= dict.fromkeys(dict(part), name)
    write(folder, **{"model.safetensors.index__json": {"weight_map": files}})


def in_config(**values: object) -> Callable[[Path], object]:
    """A configuration of other weights."""
    return changed("config.json", **values)


def with_weights(
    change_it: Callable[[dict[str, list[int]]], dict[str, list[int]]], **values: object
) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        in_config(tie_word_embeddings=False, **values)(folder)
        folders.shaped(folder / "model.safetensors", change_it(folders.llama_shapes()))

    return make


def without_weights(part: str) -> Callable[[Path], object]:
    return with_weights(
        lambda shapes: {name: shape for name, shape in shapes.items() if part not in name}
    )


def base_alone(folder: Path) -> None:
    """Weights as `LlamaModel` saves them."""

    def of_base(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
        found = {name.removeprefix("model."): shape for name, shape in shapes.items()}
        return {name: shape for name, shape in found.items() if name != "lm_head.weight"}

    with_weights(of_base)(folder)


def two_names(folder: Path) -> None:
    """A second layer with the name of a wrapped model."""

    def wrapped(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
        second = {}
        for name, shape in shapes.items():
            if ".0." in name:
                second[f"module.{name.replace('.0.', '.1.')}"] = shape
        return {**shapes, **second}

    with_weights(wrapped, num_hidden_layers=2)(folder)


def without(*names: str) -> Callable[[Path], object]:
    def change_it(folder: Path) -> None:
        folders.model(folder)
        for name in names:
            (folder / name).unlink()

    return change_it


def one_shard_less(folder: Path) -> None:
    shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def shard_without_tensor(folder: Path) -> None:
    shards(folder)
    weights(folder / "model-00002-of-00002.safetensors", ["c"])


def shard_outside(folder: Path) -> None:
    shards(folder)
    change(folder / "model.safetensors.index.json", weight_map={"a": "../secret.safetensors"})


def cut_short(folder: Path) -> None:
    shards(folder)
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-2])


def longer(folder: Path) -> None:
    folders.model(folder)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def pieces(content: bytes) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        sentencepiece_alone(folder)
        (folder / "tokenizer.model").write_bytes(content)

    return make


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def pointer(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        folders.model(folder)
        (folder / name).write_bytes(POINTER)

    return make


def cut_bin(folder: Path) -> None:
    without("model.safetensors")(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(100))


def added(folder: Path) -> None:
    folders.model(folder)
    write(folder, tokenizer__json=folders.tokenizer({"[PAD]": ROWS}))
    change(folder / "tokenizer_config.json", pad_token="[PAD]")


def appended(folder: Path) -> None:
    """transformers appends a token with a role that no file has."""
    changed("tokenizer_config.json", pad_token="[PAD]")(folder)


def tensors(*names: str, dtype: str = "F32", shape: tuple[int, ...] = (2, 2)) -> Any:
    def make(folder: Path) -> None:
        folders.model(folder)
        weights(folder / "model.safetensors", names or ("a.weight",), dtype=dtype, shape=shape)

    return make


def all_tensors(*, dtype: str = "F32", masks: Sequence[str] = ()) -> Any:
    def make(folder: Path) -> None:
        folders.model(folder)
        shapes = {**folders.llama_shapes(), **dict.fromkeys(masks, (2, 2))}
        folders.shaped(folder / "model.safetensors", shapes, dtype=dtype, masks=masks)

    return make


def gone(name: str) -> Callable[[Path], object]:
    """A folder of the hub's cache whose content was removed."""

    def make(folder: Path) -> None:
        folders.model(folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / "blobs" / "0")

    return make


def marked_template(folder: Path) -> None:
    folders.model(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8-sig")


def in_template(folder: Path) -> None:
    folders.model(folder)
    write(folder, tokenizer__json=folders.tokenizer({"<|turn|>": ROWS + 7}))
    change(folder / "tokenizer_config.json", chat_template="<|turn|>{{ messages[0].content }}")


def others(*names: str, model_too: bool = True) -> Callable[[Path], object]:
    """A folder of another tool: the small files of a model, and other files in place of weights."""

    def make(folder: Path) -> None:
        folders.model(folder)
        (folder / "model.safetensors").unlink()
        if not model_too:
            (folder / "config.json").unlink()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"x")

    return make


def last_checkpoint(folder: Path) -> None:
    for step in (90, 500):
        folders.model(folder / f"checkpoint-{step}")
    write(folder, trainer_state__json={})


def adapters_without_base(folder: Path) -> None:
    write(folder, adapter_config__json={"base_model_name_or_path": "/gone/base", "r": 8})
    weights(folder / "adapter_model.safetensors")


def adapters_with(key: str, value: object) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        write(folder, adapter_config__json={"base_model_name_or_path": "tiny-llama", key: value})
        weights(folder / "adapter_model.safetensors")

    return make


def adapters_of_adapters(folder: Path) -> None:
    adapters_with("r", 8)(folder)
    change(folder / "adapter_config.json", base_model_name_or_path=str(folder))


def adapters_without_weights(folder: Path) -> None:
    write(folder, adapter_config__json={"base_model_name_or_path": "tiny-llama", "r": 8})


FOR_TOOLS = {"name": "tool_use", "template": "{{ tools }}{{ messages[0].content }}"}


def inner_activation(folder: Path) -> None:
    language = {"vocab_size": ROWS, "hidden_activation": "geluu"}
    folders.model(folder, model_type="gemma3", text_config=language, vocab_size=ROWS)


def encoder_decoder(model: dict[str, Any], **tokens: object) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        folders.model(folder, **{"decoder_start_token_id": 0, **model})
        change(folder / "tokenizer_config.json", **tokens)

    return make


T5 = {"model_type": "t5", "is_encoder_decoder": True}
BART = {
    "model_type": "bart",
    "is_encoder_decoder": True,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
LED = {**BART, "model_type": "led", "max_encoder_position_embeddings": 512}
LORA = {"peft": "lora"}
QLORA = {"peft": "qlora"}
REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, Any], list[str]]] = {
    # Positions: file, key, number, and the lengths of the job.
    "gpt2": (
        positions(model_type="gpt2", n_positions=64),
        LONG,
        ["config.json", "n_positions 64", "384"],
    ),
    "gpt2 answers": (
        positions(model_type="gpt2", n_positions=64),
        {"max_target_length": 65},
        ["n_positions 64, and max_target_length is 65: the model"],
    ),
    "gpt2 packed": (
        positions(model_type="gpt2", n_positions=64),
        {"packing": True, "max_source_length": 60, "max_target_length": 5},
        ["n_positions 64", "65", "packing"],
    ),
    "opt": (
        positions(model_type="opt", max_position_embeddings=64),
        LONG,
        ["max_position_embeddings 64"],
    ),
    "gptj": (positions(model_type="gptj", n_positions=64), LONG, ["n_positions 64"]),
    "roberta": (
        positions(model_type="roberta", max_position_embeddings=66, pad_token_id=1),
        {"max_source_length": 40, "max_target_length": 25},
        ["max_position_embeddings 64", "65"],
    ),
    "bart reads": (
        positions(**BART),
        {"max_source_length": 65, "max_target_length": 64},
        ["max_position_embeddings 64", "max_source_length is 65"],
    ),
    "bart writes": (
        positions(**BART),
        {"max_source_length": 64, "max_target_length": 65},
        ["max_position_embeddings 64", "max_target_length is 65"],
    ),
    "led writes": (
        positions(**LED, max_decoder_position_embeddings=64),
        {"max_source_length": 512, "max_target_length": 65},
        ["max_decoder_position_embeddings 64", "max_target_length is 65"],
    ),
    # Tokens.
    "pad beyond": (
        added,
        {},
        ["pad_token '[PAD]'", f"id {ROWS}", f"{ROWS} embeddings", "config.json"],
    ),
    "pad appended": (appended, {}, ["pad_token '[PAD]'", f"id {ROWS}", f"{ROWS} embeddings"]),
    "template's token beyond": (
        in_template,
        {},
        ["'<|turn|>'", f"id {ROWS + 7}", f"{ROWS} embeddings"],
    ),
    "words beyond": (
        positions(vocab_size=9),
        {},
        ["_token '", "9 embeddings", "resize_token_embeddings"],
    ),
    "no end": (
        changed("tokenizer_config.json", eos_token=...),
        {},
        ["tokenizer_config.json", "'eos_token'"],
    ),
    "no end, no padding": (
        changed("tokenizer_config.json", eos_token=None, pad_token=None),
        {},
        ["tokenizer_config.json", "'eos_token'"],
    ),
    **{
        f"{side} {value!r}": (
            changed("tokenizer_config.json", **{side: value}),
            {},
            ["tokenizer_config.json", f"{side} {value!r}", "'left' or 'right'"],
        )
        for side, value in (("padding_side", "middle"), ("truncation_side", None))
    },
    **{
        f"longest text {longest!r}": (
            changed("tokenizer_config.json", model_max_length=longest),
            {},
            ["tokenizer_config.json", f"model_max_length {longest!r}", "without quotes"],
        )
        for longest in ("512", [512])
    },
    "byte order mark in chat_template.jinja": (
        marked_template,
        {},
        ["chat_template.jinja", "byte order mark"],
    ),
    **{
        f"chat_template.jinja {text!r}": (
            template_file(text),
            {},
            ["chat_template.jinja is empty", "Remove the file"],
        )
        for text in ("", " \n")
    },
    "no end, and no template for all rows": (
        changed("tokenizer_config.json", eos_token=..., pad_token=None, chat_template=[FOR_TOOLS]),
        {},
        ["tokenizer_config.json", "'eos_token'"],
    ),
    **{
        f"no end, {model['model_type']} {settings}": (
            encoder_decoder(model, **settings),
            {},
            ["tokenizer_config.json", "'eos_token'"],
        )
        for model in (T5, BART)
        for settings in (
            {"eos_token": ...},
            {"eos_token": None},
            {"eos_token": "", "pad_token": ...},
            {"eos_token": None, "tokenizer_class": "T5Tokenizer"},
        )
    },
    "no padding": (
        encoder_decoder(T5, eos_token=..., pad_token=None, sep_token="</s>"),
        {},
        ["tokenizer_config.json", "'pad_token'"],
    ),
    "no start": (positions(**T5), {}, ["config.json", "'decoder_start_token_id'"]),
    "no start, null": (
        positions(**T5, decoder_start_token_id=None),
        {},
        ["'decoder_start_token_id'"],
    ),
    # Formats.
    "own code": (
        positions(model_type="mine", auto_map={"AutoConfig": "m.C"}),
        {},
        ["config.json", "auto_map", "'mine'", "never run"],
    ),
    "own code without a type": (
        positions(model_type=None, auto_map={"AutoConfig": "m.C"}),
        {},
        ["config.json", "auto_map", "never run"],
    ),
    **{
        f"{key} {value!r}": (
            positions(num_local_experts=4, **{key: value}),
            {},
            ["config.json has", key, fact],
        )
        for key, value, fact in [
            *((key, "2", "'2'") for key in ("num_hidden_layers", "rms_norm_eps", "head_dim")),
            ("rope_scaling", {"type": "linear"}, "'factor'"),
            ("rope_scaling", {"type": "yarn", "factor": "4"}, "factor '4'"),
            ("rope_scaling", {"rope_type": "nope", "factor": 2.0}, "'nope'"),
            ("rope_scaling", "yarn", "'yarn'"),
            ("rope_parameters", [1], "[1]"),
            ("rope_theta", "1e4", "'1e4'"),
            ("hidden_act", "geluu", "'geluu'"),
            ("hidden_act", None, "expected str"),
            ("hidden_size", 0, "hidden_size 0"),
            ("rope_theta", 0.0, "rope_theta 0.0"),
            ("rms_norm_eps", -1.0, "more than 0"),
            ("sliding_window", 0, "sliding_window 0"),
            ("num_key_value_heads", 0, "more than 0"),
            ("num_hidden_layers", 0, "more than 0"),
            ("num_key_value_heads", 3, "num_attention_heads is 2"),
            ("num_experts_per_tok", 5, "num_local_experts is 4"),
            ("attention_dropout", -0.1, "between 0 and 1"),
            ("rope_theta", float("nan"), "must be a number"),
            ("layer_types", ["full"], "layer_types"),
            ("id2label", ["a"], "['a']"),
            ("pad_token_id", "2", "the id of a token"),
            ("pad_token_id", -1, f"{ROWS} embeddings"),
            ("bos_token_id", [1], "the id of a token"),
            ("eos_token_id", [1, "2"], "the id of a token"),
        ]
    },
    "sizes that do not fit": (
        positions(num_attention_heads=3),
        {},
        ["config.json has num_key_value_heads 2", "num_attention_heads is 3"],
    ),
    "activation of gpt2": (
        positions(model_type="gpt2", activation_function="gelu_newest"),
        {},
        ["config.json has activation_function 'gelu_newest'"],
    ),
    "activation of an inner configuration": (
        inner_activation,
        {},
        ["config.json has text_config.hidden_activation 'geluu'"],
    ),
    "start as a list": (
        positions(**T5, decoder_start_token_id=[0]),
        {},
        ["decoder_start_token_id [0]"],
    ),
    "start beyond the embeddings": (
        positions(**T5, decoder_start_token_id=ROWS),
        {},
        [f"decoder_start_token_id {ROWS}", f"{ROWS} embeddings"],
    ),
    **{
        f"a format that torch has not, {key}": (
            positions(**{key: "fp16"}),
            {},
            ["config.json", key, "'fp16'", "no number format"],
        )
        for key in ("dtype", "torch_dtype")
    },
    "attention of GPUs": (
        positions(attn_implementation="flash_attention_2"),
        {},
        ["config.json", "'flash_attention_2'", "attn_implementation='sdpa'"],
    ),
    "own code of the tokenizer": (
        changed(
            "tokenizer_config.json",
            tokenizer_class="MineTokenizer",
            auto_map={"AutoTokenizer": ["mine.MineTokenizer", None]},
        ),
        {},
        ["tokenizer_config.json", "auto_map", "'MineTokenizer'", "never run"],
    ),
    "tokens alone": (without("tokenizer_config.json"), {}, ["tokenizer_config.json", "eos_token"]),
    **{
        f"numbers in {dtype} {names[1:]}": (
            tensors(*names, dtype=dtype),
            {},
            ["a.weight", dtype, "scales"],
        )
        for dtype, names in [
            ("I8", ()),
            ("U8", ()),
            ("I32", ()),
            ("F8_E4M3", ("a.weight", "a.weight_scale_inv")),
            ("F8_E4M3", ("a.weight", "a.scale")),
            ("BOOL", ("a.weight",)),
        ]
    },
    **{
        f"packed as {name}": (tensors(name, dtype=dtype), {}, [name, dtype, "scales"])
        for name, dtype in [
            ("h.0.q_proj.qweight", "I32"),
            ("h.0.q_proj.weight_packed", "I32"),
            ("h.0.q_proj.W_q", "U8"),
            ("h.0.mlp.experts.gate_up_proj_blocks", "U8"),
        ]
    },
    "sharded when saved": (tensors(shape=(0,)), {}, ["a.weight", "zero_to_fp32.py"]),
    **{
        f"gone {name}": (gone(name), {}, [name, "link's target"])
        for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    },
    "parts without their list": (
        others("model-00001-of-00002.safetensors"),
        {},
        ["model.safetensors.index.json"],
    ),
    "the hub's folder of a model": (
        lambda folder: folders.model(folder / "snapshots" / "abc"),
        {},
        ["snapshots/abc'"],
    ),
    "unknown type": (positions(model_type="lama"), {}, ["config.json", "'lama'", "transformers"]),
    "no language model": (positions(model_type="vit"), {}, ["config.json", "'vit'"]),
    "scores": (positions(model_type="codegen"), {"method": "reward"}, ["'codegen'", "scores"]),
    "too many layers": (positions(num_hidden_layers=10**7), {}, ["num_hidden_layers = 10000000"]),
    "too many words": (positions(vocab_size=10**15), {}, ["vocab_size = 1000000000000000"]),
    "too many keys": (positions(**dict.fromkeys(map(str, range(5000)))), {}, [" keys (4096 at"]),
    "too many keys inside": (
        positions(text_config=dict.fromkeys(map(str, range(70_000)))),
        {},
        ["70000 keys (65536 at most)"],
    ),
    "4 bit with lora": (
        quantized(quant_method="bitsandbytes", load_in_4bit=True),
        LORA,
        ["4 bits", "qlora"],
    ),
    "4 bit alone": (quantized(load_in_4bit=True), {}, ["bitsandbytes", "4 bits", "qlora"]),
    "8 bit": (quantized(quant_method="bitsandbytes", load_in_8bit=True), QLORA, ["8 bits"]),
    **{
        f"{method} {peft}": (
            quantized(quant_method=method),
            {"peft": peft},
            ["config.json", "quantization_config", f"'{method}'"],
        )
        for method, peft in [
            ("gptq", "none"),
            ("awq", "lora"),
            ("fp8", "qlora"),
            ("mxfp4", "lora"),
            ("compressed-tensors", "none"),
            ("hqq", "lora"),
            ("torchao", "qlora"),
        ]
    },
    **{
        f"answers with {name} {value!r}": (
            changed("generation_config.json", **{name: value}),
            {},
            ["generation_config.json", name, fact],
        )
        for name, value, fact in [
            ("repetition_penalty", "1.1", "'1.1'"),
            ("repetition_penalty", 2, "strictly positive float"),
            ("no_repeat_ngram_size", 2.0, "positive integer"),
            ("min_length", "3", "'3'"),
            ("max_new_tokens", 0, "more than 0"),
            ("early_stopping", "yes", "'never'"),
            ("cache_implementation", "nope", "'dynamic'"),
            ("watermarking_config", {"nope": 1}, "unexpected keyword"),
            ("sequence_bias", [[[ROWS], 1.0]], f"[{ROWS}]"),
            ("eos_token_id", "</s>", "the id of a token"),
            ("eos_token_id", ["1"], "the id of a token"),
            ("suppress_tokens", 5, "must be a list"),
            ("bad_words_ids", [5, 6], "list of lists"),
            ("bad_words_ids", [[ROWS]], f"[{ROWS}]"),
            ("forced_eos_token_id", ROWS, f"{ROWS} embeddings"),
            ("stop_strings", [5], "stop_strings [5]"),
            ("stop_strings", [], "stop_strings []"),
            ("guidance_scale", "1.5", "'1.5'"),
            ("max_time", "1", "'1'"),
            ("exponential_decay_length_penalty", [1], "[1]"),
            ("max_time", float("nan"), "must be a number"),
            ("suppress_tokens", [3, WORDS + 1], "no answer could end"),
        ]
    },
    **{
        f"{least} above {most}": (
            changed("generation_config.json", **{least: 9, most: 8}),
            {},
            ["generation_config.json has", f"{least} 9", f"{most} is 8", "no answer could end"],
        )
        for least, most in (("min_length", "max_length"), ("min_new_tokens", "max_new_tokens"))
    },
    "several settings of answers": (
        changed("generation_config.json", early_stopping="yes", max_new_tokens=0, top_k=[]),
        {},
        ["generation_config.json has"],
    ),
    # Files.
    **{
        f"byte order mark in {name}": (with_bom(name), {}, [name, "byte order mark"])
        for name in (
            "config.json",
            "tokenizer_config.json",
            "tokenizer.json",
            "generation_config.json",
        )
    },
    **{
        f"a number of 6,000 digits in {name}": (
            with_long_number(name),
            {},
            [name, "a number of too many digits"],
        )
        for name in ("config.json", "tokenizer_config.json", "generation_config.json")
    },
    **{
        f"no JSON in {name}": (broken(name), {}, [f"{name} line 1 column 2"])
        for name in (
            "config.json",
            "tokenizer_config.json",
            "tokenizer.json",
            "generation_config.json",
        )
    },
    "shard missing": (
        one_shard_less,
        {},
        ["model.safetensors.index.json", "'model-00002-of-00002.safetensors'", "1 of 2"],
    ),
    "tensor missing": (
        shard_without_tensor,
        {},
        ["model.safetensors.index.json", "names the tensor 'model.layers.0."],
    ),
    "shard outside": (shard_outside, {}, ["model.safetensors.index.json", "../secret"]),
    "no head": (without_weights("lm_head"), {}, ["no output layer", "LlamaForCausalLM"]),
    "base alone": (base_alone, {}, ["no output layer", "embed_tokens.weight"]),
    "layer missing": (in_config(num_hidden_layers=2), {}, ["num_hidden_layers 2", "1 layers"]),
    "two names of layers": (two_names, {}, ["num_hidden_layers 2", "1 layers"]),
    "more words than embeddings": (
        in_config(vocab_size=ROWS + 9),
        {},
        [f"vocab_size {ROWS + 9}", "embed_tokens.weight", f"[{ROWS}, 16]"],
    ),
    "complex numbers": (
        tensors("a.weight", dtype="C64"),
        {},
        ["a.weight", "C64", "imaginary parts"],
    ),
    "cut short": (cut_short, {}, ["model-00001-of-00002.safetensors", "bytes"]),
    "longer": (longer, {}, ["model.safetensors", "bytes"]),
    **{
        f"pointer {name}": (pointer(name), {}, [name, "git lfs pull"])
        for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    },
    "pointer of pieces": (pieces(POINTER), {}, ["tokenizer.model", "git lfs pull"]),
    "empty pieces": (pieces(b""), {}, ["tokenizer.model", "empty"]),
    "bin cut short": (cut_bin, {}, ["pytorch_model.bin", "104 bytes"]),
    "no tokenizer": (
        without("tokenizer.json", "tokenizer_config.json"),
        {},
        ["tokenizer.json", "AutoTokenizer", "save_pretrained"],
    ),
    "settings of a tokenizer alone": (
        without("tokenizer.json"),
        {},
        ["tokenizer.json", "AutoTokenizer"],
    ),
    "adapters without their base": (adapters_without_base, LORA, ["/gone", "resume_from"]),
    **{
        f"adapters with {key}": (adapters_with(key, value), LORA, ["adapter_config.json", *facts])
        for key, value, facts in [
            ("peft_type", "IA3", ["'IA3'", "'LORA'"]),
            ("target_modules", r".*q_proj", ["target_modules", "Script"]),
            ("r", 0, ["lora r is 0"]),
        ]
    },
    "adapters of adapters": (adapters_of_adapters, LORA, ["no whole model", "merge_and_unload"]),
    "adapters without weights": (adapters_without_weights, LORA, ["adapter_model.safetensors"]),
    # Folders of other tools.
    "no weights": (others(), {}, ["no weights", "save_pretrained"]),
    "DeepSpeed": (
        others("zero_to_fp32.py", "latest", "global_step8/x.pt"),
        {},
        ["zero_to_fp32.py . OUT"],
    ),
    "DeepSpeed without config": (
        others("global_step8/x.pt", model_too=False),
        {},
        ["zero_to_fp32.py . OUT"],
    ),
    "FSDP": (others("pytorch_model_fsdp_0/__0_0.distcp"), {}, ["accelerate merge-weights"]),
    "FSDP of another number": (others("pytorch_model_fsdp_1/x"), {}, ["/pytorch_model_fsdp_1 OUT"]),
    "DCP": (others("__0_0.distcp", ".metadata", model_too=False), {}, ["dcp_to_torch"]),
    "DCP below": (
        others("model/__0_0.distcp", "model/.metadata", "optim/.metadata", model_too=False),
        {},
        ["in the folder 'model'", "dcp_to_torch"],
    ),
    "GGUF": (others("m.Q4.gguf", model_too=False), {}, ["GGUF", "gguf_file"]),
    "state dict": (
        others("epoch9.ckpt", model_too=False),
        {},
        ["'epoch9.ckpt'", "save_pretrained"],
    ),
    "original": (
        others("consolidated.00.pth", "params.json", model_too=False),
        {},
        ["consolidated.00.pth"],
    ),
    "TensorFlow": (others("tf_model.h5"), {}, ["TensorFlow"]),
    "ONNX": (others("model.onnx"), {}, ["'model.onnx'"]),
    "variant": (others("model.fp16.safetensors"), {}, ["variant", "model.safetensors"]),
    "last checkpoint": (last_checkpoint, {}, ["checkpoint-500'"]),
    "last checkpoint of DeepSpeed": (
        others("checkpoint-9/zero_to_fp32.py", "checkpoint-10/zero_to_fp32.py", model_too=False),
        {},
        ["'checkpoint-10'", "zero_to_fp32.py . OUT"],
    ),
    "folder of a run": (lambda folder: folders.model(folder / "model"), {}, ["/model'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_is_refused_before_the_pods_start(case: str, tmp_path: Path) -> None:
    make, options, facts = REFUSED[case]
    folder = tmp_path / "their"
    make(folder)
    with pytest.raises(ConfigError) as refused:
        check_early(job_of(folder, **options), gpus=0)
    for fact in facts:
        assert fact in str(refused.value)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("kind", ["mistral3", "llava", "qwen2_5_vl", "pixtral", "idefics3", "clip"])
def test_a_model_of_several_media_without_a_class_for_text_is_refused_by_name(
    kind: str, tmp_path: Path
) -> None:
    refusal = sentence("of which transformers has no class that", kind)
    for more, part in (
        ({"text_config": {"model_type": "ministral3"}}, "'ministral3' alone"),
        ({}, ""),
    ):
        folder = folders.model(tmp_path / (part or "none"), model_type=kind, **more)
        with pytest.raises(ConfigError, match=rf"{refusal}.*{part}"):
            check_early(job_of(folder), gpus=0)


def text_halves(mapping: Any) -> Iterator[str]:
    """Yield composite types whose class for text saves a type that the mapping does not have."""
    for kind, name in mapping._model_mapping.items():
        config = mapping._load_attr_from_module(kind, mapping._config_mapping[kind])
        if not config.sub_configs:
            continue
        own = mapping._load_attr_from_module(kind, name).config_class
        if own not in mapping:
            yield kind


@pytest.mark.parametrize("option", ["target_modules", "target_parameters", "modules_to_save"])
@pytest.mark.parametrize("name", ["nope", "qproj"])
def test_names_of_adapters_are_compared_with_the_model(
    option: str, name: str, tmp_path: Path
) -> None:
    folder = folders.model(tmp_path / "mine")
    lora = {"target_modules": ["q_proj"], option: [name]}
    with pytest.raises(ConfigError, match=f"lora {option}: the .* '{name}' is not known.*q_proj"):
        check_early(job_of(folder, peft="lora", lora=lora), gpus=0)
    known = "v_proj.weight" if option == "target_parameters" else "v_proj"
    lora = {"target_modules": ["q_proj"], option: [known]}
    check_early(job_of(folder, peft="lora", lora=lora), gpus=0)


@pytest.mark.slow
def test_a_composite_model_whose_saved_language_model_no_class_reads_is_refused() -> None:
    from transformers.models.auto import modeling_auto as auto

    known = set(text_halves(auto.MODEL_FOR_CAUSAL_LM_MAPPING))
    known |= set(text_halves(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING))
    assert "mllama" in known
    for kind in known:
        refusal = sentence("whose language model transformers trains and saves alone", kind)
        with pytest.raises(ConfigError, match=refusal):
            check_architecture(FineTune(model="folder"), {"model_type": kind}, "config.json")


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = folders.model(tmp_path / "m", model_type="gpt2", n_positions=64)
    job = job_of(folder, **LONG).chosen(gpus=0, ranks=1, apart=False)
    root = tmp_path / "run"
    (root / "inputs").mkdir(parents=True)
    with pytest.raises(ConfigError):
        job.prepare(NewRun(root=root, asked=job, ranks=1, gpus=0))
    assert not [path for path in root.rglob("*") if path.is_file()]


def heavy(folder: Path, elements: int) -> Path:
    """Make a model folder whose file of weights has a header and a hole."""
    folders.model(folder)
    entry = {"dtype": "F32", "shape": [elements // 1024, 1024], "data_offsets": [0, 4 * elements]}
    header = json.dumps({"a": entry}).encode()
    weights_file = folder / "model.safetensors"
    weights_file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(weights_file, 8 + len(header) + 4 * elements)
    return folder


@pytest.mark.parametrize(
    ("options", "ranks", "need_gib"),
    [
        ({"technique": "single"}, 1, 4.0),
        ({"technique": "ddp", "precision": "bf16"}, 2, 4.0),
        ({"technique": "zero1", "precision": "bf16"}, 2, 2.0),
        ({"technique": "ddp", "peft": "lora", "precision": "bf16"}, 2, 2.0),
        ({"technique": "fsdp"}, 4, 1.0),
        ({"technique": "zero3", "precision": "bf16"}, 4, 0.5),
    ],
)
def test_weights_that_alone_exceed_a_pod_are_named(
    tmp_path: Path, options: dict[str, Any], ranks: int, need_gib: float
) -> None:
    job = job_of(heavy(tmp_path / "m", 2**30), **options)
    assert lacking_memory(job, ranks=ranks, memory_gib=need_gib) == ""
    why = lacking_memory(job, ranks=ranks, memory_gib=need_gib - 0.01)
    assert says(why, "pods=…) shows which technique fits", f"{need_gib:.2f}")


def test_weights_of_unknown_size_and_offloaded_ones_are_not_judged(tmp_path: Path) -> None:
    folder = heavy(tmp_path / "m", 2**30)
    assert not lacking_memory(job_of(folder, technique="zero3-offload"), ranks=2, memory_gib=0.1)
    assert not lacking_memory(FineTune(), ranks=2, memory_gib=1e-6)
    (folder / "model.safetensors").unlink()
    assert not lacking_memory(job_of(folder), ranks=2, memory_gib=0.1)


def test_a_submit_warns_of_weights_that_alone_exceed_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlined, "_refusal", lambda request: "")
    job = job_of(heavy(tmp_path / "m", 2**30), technique="single", **SHORT)
    job = job.chosen(gpus=0, ranks=1, apart=False)
    for name, gpus, memory_gib, warned in (("a", 0, 3.0, 1), ("b", 0, 5.0, 0), ("c", 1, 3.0, 0)):
        root = tmp_path / name
        (root / "inputs").mkdir(parents=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job.prepare(NewRun(root=root, asked=job, ranks=1, gpus=gpus, memory_gib=memory_gib))
        ours = [each for each in caught if "weights" in str(each.message)]
        assert len(ours) == warned


@pytest.mark.parametrize("ask", [plan, preview])
def test_plan_and_preview_refuse_the_same_models(
    ask: Callable[[FineTune], object], tmp_path: Path
) -> None:
    folder = folders.model(tmp_path / "m", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="gptq"):
        ask(job_of(folder))


def causal(kind: str, **config: object) -> Callable[[Path], object]:
    return positions(model_type=kind, **config)


def sentencepiece_alone(folder: Path) -> None:
    without("tokenizer.json")(folder)
    (folder / "tokenizer.model").write_bytes(b"\x0a")
    write(folder, tokenizer_config__json={"tokenizer_class": "LlamaTokenizer"})


def bytes_alone(folder: Path) -> None:
    positions(**T5, decoder_start_token_id=0)(folder)
    write(folder, tokenizer__json=None, tokenizer_config__json={"tokenizer_class": "ByT5Tokenizer"})


def bin_alone(folder: Path) -> None:
    without("model.safetensors")(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02" + bytes(9))


def multimodal(folder: Path) -> None:
    folders.model(folder, model_type="gemma3", text_config={"vocab_size": ROWS})
    change(folder / "config.json", vocab_size=...)
    write(folder, preprocessor_config__json={}, processor_config__json={})


def image_token(folder: Path) -> None:
    folders.model(folder, model_type="gemma3_text")
    write(folder, tokenizer__json=folders.tokenizer({"<image_soft_token>": ROWS}))


def mask_beyond(folder: Path) -> None:
    """facebook/bart-large-cnn has an embedding less than its vocabulary has tokens."""
    folders.model(folder, **{**BART, "vocab_size": WORDS})
    vocabulary = {f"w{number}": number for number in range(WORDS)}
    write(folder, tokenizer__json=None, vocab__json={**vocabulary, "<mask>": WORDS})
    write(folder, tokenizer_config__json={"tokenizer_class": "BartTokenizer"})
    (folder / "merges.txt").write_text("")


def picture_in_template(folder: Path) -> None:
    image_token(folder)
    change(folder / "tokenizer_config.json", chat_template="<image_soft_token>{{ messages }}")


def default_end(folder: Path) -> None:
    changed("tokenizer_config.json", tokenizer_class="GPT2Tokenizer", eos_token=...)(folder)


def chat_alone(folder: Path) -> None:
    """A chat template writes the end of an answer by itself."""
    template = "{{ messages[0].content }}"
    changed("tokenizer_config.json", eos_token=..., chat_template=template)(folder)


def several_templates(folder: Path) -> None:
    named = {"name": "default", "template": "{{ messages[0].content }}"}
    changed("tokenizer_config.json", eos_token=..., chat_template=[FOR_TOOLS, named])(folder)


def start_in_generation(folder: Path) -> None:
    positions(**T5)(folder)
    change(folder / "generation_config.json", decoder_start_token_id=0)


ACCEPTED: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "llama": (positions(), {}),
    "several templates": (several_templates, {}),
    "no longest text": (changed("tokenizer_config.json", model_max_length=None), {}),
    "gpt2 with open lengths": (causal("gpt2", n_positions=64), {}),
    "gpt2 within 64": (causal("gpt2", n_positions=64), SHORT),
    "gpt2 packed within 64": (causal("gpt2", n_positions=64), {**SHORT, "packing": True}),
    "opt within 64": (causal("opt", max_position_embeddings=64), SHORT),
    "bart within 64": (positions(**BART), {"max_source_length": 64, "max_target_length": 64}),
    "bloom": (causal("bloom"), {"max_source_length": 4000}),
    "t5": (positions(**T5, decoder_start_token_id=0), {"max_source_length": 4000}),
    "t5 with the start elsewhere": (start_in_generation, {}),
    "t5 with a separator": (encoder_decoder(T5, eos_token=..., sep_token="</s>"), {}),
    "t5 without padding": (encoder_decoder(T5, pad_token=...), {}),
    "mbart, whose languages choose the start": (
        positions(**{**BART, "model_type": "mbart", "decoder_start_token_id": None}),
        {},
    ),
    "byt5": (bytes_alone, {}),
    "sentencepiece": (sentencepiece_alone, {}),
    "shards": (shards, {}),
    ".bin": (bin_alone, {}),
    "multimodal": (multimodal, {}),
    "token of images": (image_token, {}),
    "token of images in the template": (picture_in_template, {}),
    "mask without an embedding": (mask_beyond, {**SHORT}),
    "own code of a known type": (
        causal("phi3", pad_token_id=0, auto_map={"AutoConfig": "m.C"}),
        {},
    ),
    "ends of another vocabulary": (positions(eos_token_id=50256, bos_token_id=50256), {}),
    "default end": (default_end, {}),
    "chat": (chat_alone, {}),
    "4 bit": (quantized(quant_method="bitsandbytes", load_in_4bit=True), QLORA),
    "other attention than the file's": (
        positions(attn_implementation="flash_attention_2"),
        {"attn_implementation": "sdpa"},
    ),
    "settings of answers": (
        changed(
            "generation_config.json",
            repetition_penalty=1.1,
            eos_token_id=[1, 2],
            bad_words_ids=[[1], [2, 3]],
            stop_strings=["\n"],
            exponential_decay_length_penalty=[4, 1.5],
            guidance_scale=1.5,
            sequence_bias=[[[3], 1.0]],
            temperature="0.7",
            chat_format="chatml",
        ),
        {},
    ),
    "8 bits without scales": (all_tensors(dtype="F8_E4M3"), {}),
    "a mask in whole numbers": (all_tensors(masks=["h.0.attn.bias"]), {}),
    "own code of a known tokenizer": (
        changed("tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.M", None]}),
        {},
    ),
    "more embeddings than tokens": (positions(vocab_size=ROWS + 64), {}),
    "reward": (causal("llama"), {"method": "reward"}),
}


@pytest.mark.parametrize("change_it", [without_weights("mlp.up_proj"), without_weights("norm")])
def test_weights_of_a_folder_are_compared_with_the_model(
    change_it: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    change_it(folder)
    refusal = sentence("weights that are missing would begin at random", "LlamaForCausalLM", "lack")
    with pytest.raises(ConfigError, match=refusal):
        check_early(job_of(folder), gpus=0)
    # The weights may be copied again at the same place.
    folders.model(folder)
    check_early(job_of(folder), gpus=0)
    (folder / "model.safetensors").unlink()
    plan(job_of(folder, technique="single"), techniques=["single"])


@pytest.mark.usefixtures("outline_in_a_child")
def test_a_child_makes_the_outline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.model(tmp_path / "mine", rope_scaling={"rope_type": "nope", "factor": 2.0})
    with pytest.raises(ConfigError, match=sentence("which transformers refuses")):
        check_early(job_of(folder), gpus=0)
    # Without transformers here, the ranks find out.
    outlined._refusal.cache_clear()
    monkeypatch.setattr(entries, "OUTLINE", "workbench.no.such.module")
    check_early(job_of(folder), gpus=0)


@pytest.mark.parametrize(
    "case", [case for case in REFUSED if case.startswith(("no start", "no end", "no padding"))]
)
def test_missing_tokens_are_named_without_torch(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlined, "_refusal", lambda request: "")
    test_a_folder_is_refused_before_the_pods_start(case, tmp_path)


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, path, target)

sys.meta_path[:] = [Others if each is PathFinder else each for each in sys.meta_path]
"""
OF_MODELS = (
    "rope_scaling {'rope_type': 'nope'",
    "hidden_act 'geluu'",
    "activation of",
    "no language model",
    "scores",
    "answers with repetition_penalty 2",
    "answers with no_repeat_ngram_size 2.0",
    "answers with sequence_bias",
    "answers with bad_words_ids",
    "answers with exponential_decay",
)
"""Cases that a model alone refuses, and no model is made without torch."""


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torch from the outlines of models."""
    outlined._refusal.cache_clear()
    monkeypatch.setattr(outline, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("case", [case for case in REFUSED if not case.startswith(OF_MODELS)])
def test_a_folder_is_refused_without_torch(case: str, tmp_path: Path) -> None:
    test_a_folder_is_refused_before_the_pods_start(case, tmp_path)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("case", ACCEPTED)
def test_a_good_folder_is_accepted_without_torch(case: str, tmp_path: Path) -> None:
    test_a_good_folder_is_accepted(case, tmp_path)


def test_an_outline_is_made_without_torch(tmp_path: Path) -> None:
    request = {
        "folder": "their",
        "config": {**folders.LLAMA, "layer_types": ["full"]},
        "generation": {},
        "scores": False,
        "tensor_parallel": False,
    }
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    run = subprocess.run(
        [sys.executable, *main_of(entries.OUTLINE)],
        input=json.dumps(request),
        env={**child_environment(**HELPER), "PYTHONPATH": f"{tmp_path}{os.pathsep}{HOME}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "config.json has layer_types ['full']" in json.loads(run.stdout)["refused"]


@pytest.mark.slow
def test_every_type_without_a_default_start_is_known() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    found = set()
    for kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        config = CONFIG_MAPPING[kind]
        start = getattr(config(), "decoder_start_token_id", None)
        if start is None and config().is_encoder_decoder:
            found.add(kind)
    # The languages of these two choose the start.
    assert found - {"mbart", "plbart"} == set(WITHOUT_START)


def of_dataset(folder: Path, text: str) -> FineTune:
    rows = folder / "rows.jsonl"
    rows.write_text(text)
    return job_of(folder, dataset=str(rows), technique="single", **SHORT)


@pytest.mark.parametrize("ask", ["submit", "preview"])
def test_wrong_rows_are_named_before_the_model_is_made(
    ask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make the model takes seconds."""
    made = []

    def refusal(request: str) -> str:
        made.append(request)
        return "the model is refused"

    monkeypatch.setattr(outlined, "_refusal", refusal)
    folder = folders.model(tmp_path / "m")
    root = tmp_path / "run"
    (root / "inputs").mkdir(parents=True)

    def look(job: FineTune) -> None:
        if ask == "preview":
            preview(job)
        job = job.chosen(gpus=0, ranks=1, apart=False)
        job.prepare(NewRun(root=root, asked=job, ranks=1, gpus=0))

    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        look(of_dataset(folder, '{"colour": "red"}\n'))
    assert not made
    with pytest.raises(ConfigError, match="the model is refused"):
        look(of_dataset(folder, '{"source": "w1", "target": "w2"}\n' * 40))
    assert made


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_good_folder_is_accepted(case: str, tmp_path: Path) -> None:
    make, options = ACCEPTED[case]
    make(tmp_path / "mine")
    check_early(job_of(tmp_path / "mine", **options), gpus=0)


def test_a_configuration_in_the_hubs_cache_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    write(
        tmp_path / "models--me--mine" / "snapshots" / "abc",
        config__json={"model_type": "gpt2", "n_positions": 64},
    )
    with pytest.raises(ConfigError, match="n_positions 64"):
        check_early(FineTune(model="me/mine", **LONG), gpus=0)
    check_early(FineTune(model="me/other", **LONG), gpus=0)


def test_ranks_refuse_what_the_notebook_could_not_know() -> None:
    job = FineTune(model="me/mine")
    config = {"model_type": "gpt2", "n_positions": 64, "vocab_size": 9}
    with pytest.raises(ConfigError, match="n_positions 64"):
        check_loaded(job.replace(**LONG), config, {})
    with pytest.raises(ConfigError, match=r"pad_token .* id 9, and the model has 9"):
        check_loaded(job.replace(**SHORT), config, {"eos_token": 8, "pad_token": 9})
    check_loaded(job.replace(**SHORT), config, {"eos_token": 8, "pad_token": None})
    packed = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    check_loaded(job.replace(peft="qlora"), packed, {})
    with pytest.raises(ConfigError, match="peft is 'lora'"):
        check_loaded(job.replace(peft="lora"), packed, {})


def test_lengths_beyond_rotary_positions_and_unused_tokens_are_noted(tmp_path: Path) -> None:
    image_token(tmp_path / "m")
    job = job_of(tmp_path / "m", max_source_length=500, max_target_length=13)
    beyond, unused = model_notes(job)
    assert "512 tokens" in beyond and "513 tokens" in beyond
    assert "<image_soft_token>" in unused and f"{ROWS} embeddings" in unused
    assert [*model_notes(job_of(folders.model(tmp_path / "n")))] == []


def second_weights(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def named_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")


def for_images(folder: Path) -> None:
    write(folder, chat_template__json={"chat_template": "{{ messages }}"})


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (second_weights, ["model.safetensors", "pytorch_model.bin not at all"]),
        (named_templates, ["rag.jinja", "chat_template="]),
        (for_images, ["chat_template.json", "chat_template="]),
    ],
)
def test_files_of_a_model_that_nothing_reads_are_noted(
    make: Callable[[Path], None], facts: list[str], tmp_path: Path
) -> None:
    folder = folders.model(tmp_path / "m")
    make(folder)
    (note,) = model_notes(job_of(folder))
    for fact in facts:
        assert fact in note
    if make is not second_weights:
        assert not [*model_notes(job_of(folder, prompt="plain"))]


def test_a_folder_of_rows_is_looked_at_early(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"source": "a", "target": "b"}\n')
    check_early(FineTune(dataset=str(tmp_path)), gpus=0)


def test_only_files_that_are_read_are_sent(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shards(folder)
    read = {path.name for path in folder.iterdir()}
    for name in (
        "added_tokens.json",
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "qwen.tiktoken",
        "sentencepiece.bpe.model",
        "source.spm",
        "special_tokens_map.json",
        "spiece.model",
        "tekken.json",
        "tokenizer.model",
        "tokenizer.model.v3",
        "vocab.json",
        "vocab.txt",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
        read.add(name)
    for name in (
        ".git/objects/ab",
        "README.md",
        "checkpoint-500/model.safetensors",
        "checkpoint-500/optimizer.pt",
        "consolidated.00.pth",
        "events.out.tfevents.1",
        "global_step8/x_optim_states.pt",
        "model-00003-of-00003.safetensors",
        "modeling_own.py",
        "onnx/model.onnx",
        "optimizer.pt",
        "original/consolidated.pth",
        "pytorch_model.bin",
        "rng_state_0.pth",
        "runs/events",
        "tf_model.h5",
        "train.json",
        "trainer_state.json",
        "training_args.bin",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    assert set(model_files(folder)) == read
    assert [*sent_notes(job_of(folder))] == []


class Store:
    """A pod that sees no folder of this machine, in a folder of this machine."""

    name = "pod-0"

    def __init__(self, store: Path) -> None:
        self.store = store

    def sees(self, place: Path) -> bool:
        return False

    def put_once(self, local: Path, digest: str) -> str:
        place = self.store / digest
        shutil.copy(local, place)
        return str(place)

    def run(self, argv: list[str]) -> None:
        subprocess.run(argv, check=True, timeout=300)


def test_a_sent_folder_is_a_whole_model(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shards(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("x")
    (folder / "optimizer.pt").write_bytes(b"x")
    (tmp_path / "pod").mkdir()
    pod: Any = Store(tmp_path / "pod")
    sent = Path(sent_model(pod, folder))
    assert sent.parent == tmp_path / "pod"
    assert model_files(sent) == model_files(folder)
    assert not (sent / "optimizer.pt").exists()
    check_early(job_of(sent), gpus=0)
    # A folder of tasks for lm-eval is sent as a whole.
    assert (Path(sent_folder(pod, folder)) / "optimizer.pt").exists()


def test_a_trained_model_is_checked_before_an_evaluation(tmp_path: Path) -> None:
    trained = folders.model(tmp_path / "run" / "model")
    base = folders.model(tmp_path / "base", quantization_config={"quant_method": "gptq"})
    check_trained(trained, job_of(base), before=False)
    with pytest.raises(ConfigError, match="gptq"):
        check_trained(trained, job_of(base), before=True)
    (trained / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        check_trained(trained, job_of(base), before=False)
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors"):
        check_trained(trained, job_of(base, peft="lora"), before=False)


def test_large_files_that_stay_are_named(tmp_path: Path) -> None:
    folder = folders.model(tmp_path / "out")
    (folder / "checkpoint-500").mkdir()
    with (folder / "checkpoint-500" / "optimizer.pt").open("wb") as file:
        file.truncate(3 << 30)
    (note,) = sent_notes(job_of(folder))
    assert "checkpoint-500/optimizer.pt" in note and "3.0 GiB" in note


def test_adapters_are_sent_without_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    write(folder, adapter_config__json={}, tokenizer__json={}, trainer_state__json={})
    weights(folder / "adapter_model.safetensors")
    (folder / "optimizer.pt").write_bytes(b"x")
    assert model_files(folder) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    ]


def test_every_file_of_a_tokenizer_of_transformers_is_sent(tmp_path: Path) -> None:
    found = find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("needs transformers")
    source = Path(found.origin).parent
    pattern = re.compile(r"^VOCAB_FILES_NAMES = (\{.*?\})", re.DOTALL | re.MULTILINE)
    names: set[str] = set()
    for path in source.glob("models/*/tokenization_*.py"):
        for found in pattern.findall(path.read_text()):
            names.update(re.findall(r':\s*"([^"]+)"', found))
    assert len(names) > 10
    for name in names:
        (tmp_path / name).write_text("{}")
    assert set(model_files(tmp_path)) == names
