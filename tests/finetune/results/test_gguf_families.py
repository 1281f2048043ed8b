"""Exported models of many families as GGUF: llama.cpp scores the next word as transformers does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoTokenizer

import tests.support.tinyfamilies as families
from workbench import FineTune
from workbench.base.errors import ConfigError
from workbench.finetune.answers.serving.export import export_model
from workbench.finetune.answers.serving.gguf import answer
from workbench.finetune.export.folder import SHARD
from workbench.finetune.model.load import load

pytestmark = [pytest.mark.slow, pytest.mark.long]
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt_neox",
    "gpt2",
    "bloom",
    "mixtral",
    "granitemoe",
    "mamba",
)
PROMPT = "say red"
CLOSE = 0.01
"""llama.cpp keeps keys and values in FP16."""
ASK = """
import json, os, sys, xllamacpp
files, prompt, words = json.loads(sys.argv[1])
for name, file in files.items():
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = 128
    params.warmup = False
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": words}
    reply = xllamacpp.Server(params).handle_completions(asked)
    [first] = reply["choices"][0]["logprobs"]["content"]
    scores = {each["id"]: each["logprob"] for each in first["top_logprobs"]}
    print("SCORES " + json.dumps([name, scores]), flush=True)
os._exit(0)
"""


def exported(name: str, root: Path) -> Path:
    """Export a model whose scores depend on every weight."""
    families.build(name, root / "base")
    loaded = load(str(root / "base"), (), seed=0)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape)) if weight.dim() == 1 else weight.mul_(3)
    export_model(loaded, root / "exported", None, SHARD)
    return root / "exported"


def converted(folder: Path) -> Path:
    file = folder.parent / "model.gguf"
    job = FineTune(model=str(folder.parent / "base")).to_dict()
    answer({"op": "convert", "job": job, "model": str(folder), "file": str(file), "gguf": "f32"})
    return file


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Restore what the child of the product sets, and compute on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return {name: exported(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def scores(folders: Mapping[str, Path]) -> Mapping[str, Mapping[str, float]]:
    """Logarithms of the probabilities of every next word in llama.cpp, by family."""
    files = {name: str(converted(folder)) for name, folder in folders.items()}
    request = json.dumps([files, PROMPT, len(families.tokenizer(ends=False))])
    command = [sys.executable, "-c", ASK, request]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SCORES ")]
    assert len(lines) == len(files), done.stderr[-2000:]
    return dict(json.loads(line.removeprefix("SCORES ")) for line in lines)


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_scores_the_next_word_as_transformers_does(
    name: str, folders: Mapping[str, Path], scores: Mapping[str, Mapping[str, float]]
) -> None:
    model = families.read(folders[name], pairs=False).eval()
    ids = AutoTokenizer.from_pretrained(folders[name])(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0, -1], dim=-1)
    assert len(scores[name]) > len(families.WORDS)
    for token, score in scores[name].items():
        assert score == pytest.approx(float(expected[int(token)]), abs=CLOSE)


@pytest.mark.usefixtures("scores")
def test_a_window_that_llama_cpp_does_not_know_limits_the_context(
    folders: Mapping[str, Path],
) -> None:
    window = json.loads((folders["mistral"] / "config.json").read_text())["sliding_window"]
    fields = GGUFReader(folders["mistral"].parent / "model.gguf").fields
    assert fields["llama.context_length"].contents() == window


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma", "reads the tokens of a GemmaForCausalLM from tokenizer.model"),
        ("phi3", "reads the tokens of a Phi3ForCausalLM from tokenizer.model"),
        ("opt", "does not know the architecture 'OPTForCausalLM'"),
        ("mpt", "does not know the architecture 'MptForCausalLM'"),
        ("qwen3_moe", "a Qwen3MoeForCausalLM with norm_topk_prob = True alone, and .* has False"),
        ("phi", "a PhiForCausalLM with num_key_value_heads = 4 alone, and .* has 2"),
        ("olmoe", "an? OlmoeForCausalLM with num_key_value_heads = 4 alone, and .* has 2"),
        ("llama4_text", r"a Llama4ForCausalLM with moe_layers = \[0, 1\] alone, and .* has \[1\]"),
        ("gemma3_text", "a Gemma3ForCausalLM with query_pre_attn_scalar = 8 alone, and .* has 256"),
    ],
)
def test_a_family_that_the_converter_cannot_convert_is_refused_by_name(
    name: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        converted(exported(name, tmp_path))
