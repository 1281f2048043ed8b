"""Check the numbers of a model's configuration and of its settings of answers, without libraries.

transformers accepts contradictory numbers, and computes with the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isnan

from workbench.base.errors import ConfigError, shortened
from workbench.base.json_values import Json, as_int, as_list

_CORRECT = "Correct the value, or take the file from the model's author"
_COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "d_model", "n_embd", "n_layer"),
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "d_ff"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "factor"),
    *("sliding_window", "n_head", "num_layers"),
)
"""Numbers with which no model computes unless they are positive."""
_NUMBERS = (*_COUNTS, "max_position_embeddings", "n_positions")
_OBJECTS = ("rope_scaling", "rope_parameters", "text_config", "id2label", "label2id")
_FORMATS = ("dtype", "torch_dtype")
_FORMAT = re.compile(r"(torch\.)?((bfloat|float|u?int)\d\w*|half|float|double|auto)")
_DROPOUT = re.compile(r"(^|_)(dropout|pdrop|dropout_rate|dropout_prob)$")
_PARTS = ("text_config", "encoder", "decoder", "rope_scaling", "rope_parameters")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LENGTHS = (("min_length", "max_length"), ("min_new_tokens", "max_new_tokens"))
_OF_ANSWERS = (
    *("min_length", "max_length", "min_new_tokens", "max_new_tokens", "max_time"),
    *("guidance_scale", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("repetition_penalty", "encoder_repetition_penalty"),
)
_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")


def check_numbers(config: Json, source: str) -> None:
    """Raise ConfigError for values in a configuration without a meaning for any model.

    Example:
        >>> check_numbers({"num_attention_heads": 4, "num_key_value_heads": 3}, "config.json")
        Traceback (most recent call last):
        ...
        workbench.base.errors.ConfigError: config.json has num_key_value_heads 3, and \
num_attention_heads is 4, no multiple of it. Correct the value, or take the file from the model's \
author
    """
    for key, value, problem in _problems(config):
        raise ConfigError(f"{source} has {key} {shortened(value)}{problem}. {_CORRECT}")


def check_answer_numbers(settings: Json, source: str) -> None:
    """Raise ConfigError for settings of answers with which no answer could end, or be begun."""
    for key, value, problem in _problems_of_answers(settings):
        raise ConfigError(
            f"{source} has {key} {shortened(value)}{problem}. Correct the value, or remove the key"
        )


Problem = tuple[str, object, str]
"""Key, value and problem."""


def _problems(config: Json) -> Iterator[Problem]:
    for key, value in config.items():
        problem = _problem(key, value)
        if problem:
            yield key, value, problem
    heads, shared = (as_int(config.get(f"num_{each}_heads")) for each in ("attention", "key_value"))
    if heads and shared and heads % shared:
        problem = f", and num_attention_heads is {heads}, no multiple of it"
        yield "num_key_value_heads", shared, problem
    chosen = as_int(config.get("num_experts_per_tok")) or 0
    for key in _EXPERTS:
        experts = as_int(config.get(key))
        if experts and chosen > experts:
            yield "num_experts_per_tok", chosen, f", and {key} is {experts}"
    for name in _PARTS:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            for key, value, problem in _problems(inner):
                yield f"{name}.{key}", value, problem


def _problem(key: str, value: object) -> str:
    """Return why no model means a value of a configuration; empty for other values."""
    match value:
        case float() if isnan(value):
            return "; it must be a number"
        case str() if key in _NUMBERS:
            return "; it must be a number, without quotes"
        case str() if key in _FORMATS and not _FORMAT.fullmatch(value):
            return ", which is no number format of torch, such as 'bfloat16'"
        case int() | float() if key in _COUNTS and value <= 0:
            return "; it must be more than 0"
        case int() | float() if _DROPOUT.search(key) and not 0 <= value <= 1:
            return "; it must be a share between 0 and 1"
    if key in _OBJECTS and value is not None and not isinstance(value, Mapping):
        return "; it must be an object"
    return ""


def _problems_of_answers(settings: Json) -> Iterator[Problem]:
    for key in _OF_ANSWERS:
        value = settings.get(key)
        if isinstance(value, str) or (isinstance(value, float) and isnan(value)):
            yield key, value, "; it must be a number"
    for least, most in _LENGTHS:
        fewest, largest = as_int(settings.get(least)), as_int(settings.get(most))
        if largest is not None and largest < 1:
            yield most, largest, "; it must be more than 0"
        elif fewest is not None and largest is not None and fewest > largest:
            yield least, fewest, f", and {most} is {largest}: no answer could end"
    for key in _LISTS:
        value = settings.get(key)
        if value is not None and not isinstance(value, list):
            yield key, value, "; it must be a list"
    texts = settings.get("stop_strings")
    given = as_list(texts) if not isinstance(texts, str) else [texts]
    if texts is not None and not (given and all(isinstance(each, str) for each in given)):
        yield "stop_strings", texts, "; it must be a text or a list of texts"
    ends = settings.get("eos_token_id")
    ends = as_list(ends) or [ends]
    if all(end in as_list(settings.get("suppress_tokens")) for end in ends):
        yield "suppress_tokens", ends, ", which end an answer: no answer could end"
