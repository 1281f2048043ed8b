"""Raise what transformers raises for a model's settings, on a machine without torch.

Some settings are read by models alone, and torch makes models: the ranks check those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, GenerationConfig

from workbench.base.files import read_given

_ENTRY = re.compile(r'^ {4,12}\(?"([\w-]{1,64})"[:,]', re.MULTILINE)
_FORMAT = re.compile(r"(torch\.)?((bfloat|float|u?int)\d\w*|half|float|double|auto)")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
_NUMBERS = (
    *("min_length", "max_time", "guidance_scale", "no_repeat_ngram_size", "repetition_penalty"),
    *("encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
)
"""Settings of greedy answers with which transformers computes, without a check of its own."""
_OF_TEXT = ("rope_type", "type")
"""Keys of rotary positions that are no numbers."""


def check_described(settings: Mapping[str, Any], *, scores: bool) -> None:
    """Make a configuration, and look up what a model would look up. The errors are unnamed."""
    kind = settings["model_type"]
    config = CONFIG_MAPPING[kind].from_dict(deepcopy({**settings, "quantization_config": None}))
    mapping = "CAUSAL_LM"
    if config.is_encoder_decoder:
        mapping = "SEQ_TO_SEQ_CAUSAL_LM"
    if scores:
        mapping = "SEQUENCE_CLASSIFICATION"
    table = f"MODEL_FOR_{mapping}_MAPPING_NAMES = OrderedDict("
    _find(kind, "models/auto/modeling_auto.py", table, "Unrecognized configuration class")
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for value in (getattr(each, key, None) for key in _ACTIVATIONS):
            if isinstance(value, str):
                _find(value, "activations.py", "ACT2CLS = {", f"function {value} is unknown")
        for positions in _rotary(getattr(each, "rope_parameters", None)):
            rope = positions.get("rope_type", "default")
            if not hasattr(each, f"_validate_{rope}_rope_parameters"):
                raise KeyError(rope)
            for key, value in positions.items():
                if isinstance(value, str) and key not in _OF_TEXT:
                    raise TypeError(f"{key} must be a number")
    if isinstance(config.dtype, str) and not _FORMAT.fullmatch(config.dtype):
        raise AttributeError(f"module 'torch' has no attribute {config.dtype!r}")


def check_answers(settings: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for settings of answers of a wrong type or value."""
    check_stops(settings)
    GenerationConfig.from_dict(deepcopy({**settings}))
    for name in _NUMBERS:
        if isinstance(settings.get(name), str):
            raise TypeError(f"{name} must be a number")


def check_stops(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for texts to stop at that are no texts."""
    texts = settings.get("stop_strings")
    if texts is not None and not (texts and all(isinstance(text, str) for text in texts)):
        raise ValueError("it must be a text or a list of texts")


def _rotary(settings: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of rotary positions, also of each kind of layer."""
    if isinstance(settings, Mapping):
        inner = [each for each in settings.values() if isinstance(each, Mapping)]
        yield from inner or [settings]


def _find(name: str, file: str, table: str, problem: str) -> None:
    """Raise KeyError for a name that is not in a table of a module that needs torch."""
    source = read_given(Path(transformers.__file__).parent / file)
    # Both kinds of tables end with a bracket at the begin of a line.
    entries = re.split(r"\n[})]", source.partition(table)[2], maxsplit=1)[0]
    names = _ENTRY.findall(entries)
    if names and name not in names:
        raise KeyError(problem)
