"""Make a model of a configuration without weights, and name the key that transformers refuses.

The module runs as a child of the notebook's process.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput

from workbench.base.child import limited_time
from workbench.finetune.model.generate import GREEDY

_LIMIT_S = 60.0
_MOST_SAID = 300
_WORD = re.compile(r"\w+(?:[.-]\w+)*")
Settings = Mapping[str, Any]
Paths = Iterator[tuple[str, ...]]


def main() -> None:
    """Read a request as JSON from standard input and write the answer to standard output."""
    with limited_time(_LIMIT_S):
        answer = refusal(json.load(sys.stdin))
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


def refusal(request: Mapping[str, Any]) -> dict[str, str]:
    """Return `file`, `key` and `why` of the first setting that is refused; empty without one.

    `config` and `generation` of the request are the settings of the two files. With `scores`, the
    model scores texts. An empty `key`: no single key is the cause.
    """
    config, generation = request["config"], request["generation"]

    def make(settings: Settings) -> Any:
        return _model(settings, scores=request["scores"])

    why = _error(make, config)
    if why:
        return {"file": "config.json", "key": _cause(make, config, why), "why": why}
    model = make(config)
    if request["scores"] or not model.can_generate():
        return {}

    def answer(settings: Settings) -> None:
        _answer(model, settings)

    why = _error(answer, generation)
    key = _cause(answer, generation, why) if why else ""
    return {"file": "generation_config.json", "key": key, "why": why} if key else {}


def _model(settings: Settings, *, scores: bool) -> Any:
    kind = CONFIG_MAPPING[settings["model_type"]]
    config = kind.from_dict(deepcopy({**settings, "quantization_config": None}))
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if scores:
        family = AutoModelForSequenceClassification
        config.num_labels = 1
    with torch.device("meta"):
        # A kernel that the configuration names may be missing here.
        return family.from_config(config, dtype=torch.float32, attn_implementation="eager")


def _answer(model: Any, settings: Settings) -> None:
    """Prepare an answer with the settings as `generate` does, and apply them to scores."""
    options = deepcopy({**settings})
    # `generate` gives no tokenizer to a way of decoding that it does not know.
    texts = options.pop("stop_strings", None)
    if texts is not None and not (texts and all(isinstance(text, str) for text in texts)):
        raise ValueError("it must be a text or a list of texts")
    model.generation_config = GenerationConfig.from_dict(options)
    given: dict[str, Any] = {"input_ids": torch.zeros(1, 2, dtype=torch.long)}
    if model.config.is_encoder_decoder:
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.zeros(1, 2, 1))
        if model.generation_config.decoder_start_token_id is None:
            given["decoder_start_token_id"] = 0
    words = model.config.get_text_config(decoder=True).vocab_size

    def apply(_: Any, tokens: Any, logits_processor: Any, stopping_criteria: Any, **__: Any) -> Any:
        # The first and the last token of an answer, which some settings force.
        for written in (tokens, torch.cat([tokens, tokens[:, :1]], 1)):
            scores = torch.zeros(1, words)
            for each in logits_processor:
                if isinstance(each, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                    scores = scores * each.guidance_scale  # without the pass through the model
                else:
                    scores = each(written, scores)
            stopping_criteria(written, scores)
        return tokens

    model.generate(
        **given,
        **{name: value for name, value in GREEDY.items() if name in settings},
        attention_mask=torch.ones(1, 2, dtype=torch.long),
        max_new_tokens=2,
        pad_token_id=0,
        custom_generate=apply,
    )


def _error(make: Callable[[Settings], object], settings: Settings) -> str:
    """Return the error of a call in words; empty without an error of the settings."""
    try:
        make(settings)
    except (ImportError, OSError, MemoryError):
        # The pods have other packages and more memory.
        return ""
    except Exception as error:
        said = " ".join(str(error).split())[:_MOST_SAID]
        return f"{type(error).__name__}: {said}"
    return ""


def _cause(make: Callable[[Settings], object], settings: Settings, why: str) -> str:
    """Return the key without which the call succeeds, with the keys named in the error first."""
    named = {*_WORD.findall(why)}

    def distance(path: tuple[str, ...]) -> int:
        if path[-1] in named:
            return 0
        value = settings
        for key in path:
            value = value[key]
        return 1 if named.intersection(_WORD.findall(str(value))) else 2

    for path in sorted(_paths(settings), key=distance):
        if not _error(make, _without(settings, path)):
            return ".".join(path)
    return ""


def _paths(settings: Settings) -> Paths:
    """Yield the keys of a configuration, those of inner configurations first."""
    for key, value in settings.items():
        if isinstance(value, dict) and (key.endswith("_config") or key in ("encoder", "decoder")):
            for path in _paths(value):
                yield key, *path
        if key != "model_type":
            yield (key,)


def _without(settings: Settings, path: tuple[str, ...]) -> Settings:
    first, *rest = path
    if rest:
        return {**settings, first: _without(settings[first], tuple(rest))}
    return {key: value for key, value in settings.items() if key != first}
