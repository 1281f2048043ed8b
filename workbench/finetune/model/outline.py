"""Make a model of a configuration without weights, and name the key that transformers refuses.

The module runs as a child of the notebook's process. Without torch, transformers reads the settings
and no model is made.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial, reduce
from importlib.util import find_spec
from operator import getitem
from pathlib import Path as Place
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig

from workbench.base.errors import ConfigError, shortened
from workbench.finetune.job.architectures import NEVER_RUN
from workbench.finetune.job.weights import quantizations, tensors_of

_WORD = re.compile(r"\w+(?:[.-]\w+)*")
Settings = Mapping[str, Any]
Make = Callable[[Settings], object]
"""Makes a model or the settings of an answer, and raises an error for a wrong setting."""
Path = tuple[str, ...]
"""Key within the objects of a configuration."""


def main() -> None:
    """Read a request as JSON from standard input and write the answer to standard output."""
    sys.stdout.write(json.dumps(answer(json.load(sys.stdin))))
    sys.stdout.flush()


def answer(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the error of `check` as `refused`; empty without an error."""
    try:
        check(**request)
    except ConfigError as error:
        return {"refused": str(error)}
    return {}


def check(
    folder: str,
    config: Settings,
    generation: Settings,
    *,
    scores: bool,
    tensor_parallel: bool,
    lora: Mapping[str, object] | None = None,
    weights: Sequence[object] = (),
) -> None:
    """Raise ConfigError for a setting or a weight in a model's files that transformers refuses.

    With `weights`, the folder has all files of weights. `lora` names modules of the model.
    """
    has_torch = find_spec("torch") is not None
    make = partial(_model, scores=scores) if has_torch else _configuration
    source = f"{folder}/config.json"
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        own = bool(config.get("auto_map"))
        why = (
            f"; the file names own code of the model in 'auto_map', and {NEVER_RUN}" if own else ""
        )
        raise ConfigError(
            f"{source} has model_type {kind!r}, which the transformers of this machine does not "
            f"have{why}. Give a model of transformers. If a newer transformers has the type, "
            "install that version here and on the pods"
        )
    why = _error(make, config)
    if "Unrecognized configuration class" in why:
        what = "scores texts" if scores else "learns to answer"
        language = config.get("text_config", {}).get("model_type")
        inner = f", as its part {language!r} alone," if language else ""
        raise ConfigError(
            f"{source} has model_type {kind!r}, of which transformers has no class that {what}. "
            f"Give a language model{inner} or use a Script"
        )
    if why:
        _refuse(make, config, why, source)
        raise ConfigError(
            f"{source}: transformers cannot make the model ({why}). Correct the file, or take the "
            "file from the model's author"
        )
    prepare: Make = GenerationConfig.from_dict
    if has_torch:
        from workbench.finetune.techniques.on_pods.tensor import styles_of

        model = _model(config, scores=scores)
        if tensor_parallel:
            styles_of(model)
        if weights and not any(quantizations(config)):
            _check_weights(model, folder, scores=scores)
        if lora:
            _check_names(model, lora)
        if not model.can_generate():
            return
        prepare = partial(_answer, model)
    if scores:
        return
    why = _error(prepare, generation)
    if why:
        _refuse(prepare, generation, why, f"{folder}/generation_config.json")


def _refuse(make: Make, settings: Settings, why: str, source: str) -> None:
    """Raise ConfigError with the key that causes an error, if there is such a key."""
    path = _cause(make, settings, why)
    if path:
        value = shortened(reduce(getitem, path, settings))
        raise ConfigError(
            f"{source} has {'.'.join(path)} {value}, which transformers refuses ({why}). Correct "
            "the value, or remove the key"
        )


def _configuration(settings: Settings) -> Any:
    kind = CONFIG_MAPPING[settings["model_type"]]
    return kind.from_dict(deepcopy({**settings, "quantization_config": None}))


def _model(settings: Settings, *, scores: bool) -> Any:
    from workbench.finetune.model.load import without_weights

    config = _configuration(settings)
    if scores:
        config.num_labels = 1
    return without_weights(config, scores)


def _check_weights(model: Any, folder: str, *, scores: bool) -> None:
    import torch

    from workbench.finetune.model.files.opened import check_shapes

    shapes = {}
    for name, tensor in tensors_of(Place(folder)).items():
        shapes[name] = torch.empty(tensor.shape, device="meta")
    if shapes:
        check_shapes(model, shapes, folder, scores=scores)


def _check_names(model: Any, lora: Mapping[str, object]) -> None:
    """Raise ConfigError for new adapters of modules or weights that the model does not have."""
    from workbench.finetune.model.layers import modules_to_save
    from workbench.finetune.model.targets import wanted_weights
    from workbench.finetune.options.adapters import Lora

    options = Lora.from_dict(lora)
    wanted_weights(model, options)
    # The files alone say whether tied weights are one weight.
    modules_to_save(model, options.modules_to_save, {})


def _answer(model: Any, settings: Settings) -> None:
    """Prepare an answer with the settings as `generate` does, and apply them to scores."""
    import torch
    from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor
    from transformers.modeling_outputs import BaseModelOutput

    from workbench.finetune.model.generate import GREEDY

    # `generate` gives no tokenizer to a way of decoding that it does not know.
    options = deepcopy({**settings, "stop_strings": None})
    model.generation_config = GenerationConfig.from_dict(options)
    given: dict[str, Any] = {"input_ids": torch.zeros(1, 2, dtype=torch.long)}
    if model.config.is_encoder_decoder:
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.zeros(1, 2, 1))
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


def _error(make: Make, settings: Settings) -> str:
    """Return the error of a call in words; empty without an error of the settings."""
    try:
        make(settings)
    except (ImportError, OSError, MemoryError):
        # The pods have other packages and more memory.
        return ""
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return f"{type(error).__name__}: {said}"
    return ""


def _cause(make: Make, settings: Settings, why: str) -> Path:
    """Return the key whose absence mends or else changes the error, of the named keys first."""
    named = {*_WORD.findall(why)}

    def distance(path: Path) -> int:
        if path[-1] in named:
            return 0
        return 1 if named.intersection(_WORD.findall(str(reduce(getitem, path, settings)))) else 2

    errors = {}
    for path in sorted(_paths(settings), key=distance):
        errors[path] = _error(make, _without(settings, path))
    # With several wrong keys, the next one is the error.
    causes = [path for path, after in errors.items() if after != why]
    return min(causes, key=lambda path: bool(errors[path]), default=())


def _paths(settings: Settings) -> Iterator[Path]:
    """Yield the keys of a configuration, those of inner configurations first."""
    for key, value in settings.items():
        if isinstance(value, dict) and key.endswith("_config"):
            for path in _paths(value):
                yield key, *path
        if key != "model_type":
            yield (key,)


def _without(settings: Settings, path: Path) -> Settings:
    first, *rest = path
    if rest:
        return {**settings, first: _without(settings[first], (*rest,))}
    return {key: value for key, value in settings.items() if key != first}
