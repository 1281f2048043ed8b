"""Read a model's weights, and compare weights and model: the gate for every technique.

A model without some weights would be trained from random weights. transformers reports missing
weights only in a log, and reports less under ZeRO-3, where weights have no values during the read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.integrations import deepspeed
from transformers.modeling_utils import _get_resolved_checkpoint_files, load_state_dict
from transformers.utils import logging as transformers_logging

from workbench.agent.rank import collectives as ranks
from workbench.base.errors import ConfigError
from workbench.base.files import is_folder
from workbench.base.words import pluralize
from workbench.finetune.job.weights import Tensor, check_formats, read_tensors, weight_names
from workbench.finetune.options.model.models import cached_folder

_SHOWN = 3
_MOST_SAID = 400
# Numbers in 8 bits have no infinity.
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Pair = tuple[str, str]
"""Names of two weights that the configuration ties."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Differences between the files of a model and the model of the configuration."""

    missing: Sequence[str]
    """Names of the model's weights that no file has."""
    unexpected: Sequence[str]
    """Names in the files that the model has no place for."""
    mismatched: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    """Shapes in the files and in the model, by the weight's name."""
    apart: Sequence[Pair]
    """Tied weights that have different values in the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    model: Any
    remarks: Sequence[str]
    """Sentences for the user about the model's files."""


def read_weights(
    auto: Any,
    outline: Any,
    name: str,
    source: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    scores: bool,
) -> Opened:
    """Read the weights of a model and check that the files hold all weights.

    Args:
        auto: Class of transformers to read the model.
        outline: Model of the configuration on the meta device.
        name: Folder or hub id, as for `from_pretrained`.
        source: Options of `from_pretrained` to choose the files.
        options: Other options of `from_pretrained`.
        scores: Whether the model scores texts: the output layer may be new.

    Raises:
        ConfigError: Weights are missing, have other shapes, or cannot be read.
    """
    apart: Sequence[Pair] = ()
    packed = options.get("quantization_config") or getattr(
        outline.config, "quantization_config", None
    )
    # transformers compares nothing while DeepSpeed shards the weights that are read.
    if deepspeed.is_deepspeed_zero3_enabled() and not packed:
        with without_sharding(), quiet(), named_errors(name), _refusals(name):
            report = _rehearsed(outline, name, source)
        _check(report, outline, name, scores=scores)
        apart = report.apart
    with named_errors(name), _refusals(name), _untied(outline, apart), _in_parts(outline):
        model, info = auto.from_pretrained(
            name,
            **source,
            **options,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    report = _report(outline, model, info, apart)
    _check(report, outline, name, scores=scores)
    if getattr(outline.config, "quantization_config", None) is None:
        with named_errors(name):
            _check_formats(name, source["revision"])
    return Opened(model=model, remarks=list(_remarks(report, outline, name, scores=scores)))


@contextmanager
def without_sharding() -> Iterator[None]:
    """Let transformers make whole models, without the immediate cut of ZeRO-3."""
    held = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = held


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the warnings and reports of transformers."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


@contextmanager
def _in_parts(outline: Any) -> Iterator[None]:
    """Name the technique in errors of a model whose own code reads weights during its making."""
    try:
        yield
    except (IndexError, ValueError) as error:
        if not deepspeed.is_deepspeed_zero3_enabled():
            raise
        raise ConfigError(
            f"transformers cannot make a {type(outline).__name__} with sharded weights ({error}). "
            "Use technique 'fsdp' or 'zero2'"
        ) from error


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Raise the libraries' errors about files as errors with the model's name."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            f"model {name!r} lacks a file of weights: {Path(str(error.filename or error)).name}. "
            "Copy the whole folder again"
        ) from error
    except SafetensorError as error:
        raise ConfigError(
            f"a file of weights of model {name!r} cannot be read: {error}. Copy the folder again"
        ) from error
    except RuntimeError as error:
        if "above report" not in str(error):
            raise
        raise ConfigError(
            f"transformers cannot convert the weights of model {name!r}; the table LOAD REPORT in "
            "run.logs(stream='stderr') names them. Copy the folder again, or save the model with "
            "another version of transformers"
        ) from error


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Raise an error of a library about the content of a model's files with the model's name.

    The libraries check the files with errors of many classes, and one of plain `Exception`. Errors
    of disks, of the hub and of memory are no errors of the content.
    """
    try:
        yield
    except (ConfigError, OSError, MemoryError, RuntimeError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:_MOST_SAID]
        raise ConfigError(
            f"model {name!r} cannot be read: {type(error).__name__}: {said}. Correct the file with "
            "this value (config.json, tokenizer_config.json, generation_config.json, "
            "adapter_config.json, or the weights), or take the file from the model's author"
        ) from error


def check_values(model: Any, name: str) -> str:
    """Raise ConfigError for weights without a use, in a single pass over the numbers.

    NaN and infinity make every loss NaN, and zeros in all matrices or in the embeddings leave
    nothing to tell apart. Every rank must call the function. transformers reads such weights
    without a word.

    Returns:
        A note on other matrices of zeros; empty without such matrices.
    """
    filled = dict[str, float]()
    is_sharded = False
    for weight, parameter in model.named_parameters():
        # ZeRO-3 keeps the rank's part beside an empty tensor.
        held = getattr(parameter, "ds_tensor", parameter)
        is_sharded |= held is not parameter
        # Numbers in 4 bits, which have no infinity, stand in the bytes of any type.
        if hasattr(parameter, "quant_state") or held.dtype not in _REAL:
            continue
        least, most = extremes(held)
        if not math.isfinite(least) or not math.isfinite(most):
            kind = str(held.dtype).removeprefix("torch.")
            raise ConfigError(
                f"model {name!r}: {weight} holds numbers that are not finite (NaN or infinity) in "
                f"{kind}, so every loss would be NaN. Copy the file of weights again, take an "
                "earlier checkpoint, or use precision 'bf16' or 'fp32' if the precision is fp16"
            )
        # New adapters begin with zeros in one of their two matrices.
        if len(getattr(parameter, "ds_shape", parameter.shape)) > 1 and ".lora_" not in weight:
            filled[weight] = float(least != 0 or most != 0)
    if is_sharded:
        filled = dict(zip(filled, ranks.sums([*filled.values()]), strict=True))
    zeros = [weight for weight, count in filled.items() if not count]
    if not zeros:
        return ""
    found = f"model {name!r}: {len(zeros)} of {len(filled)} matrices hold zeros alone: "
    words = model.get_input_embeddings()
    is_word = [each for each, value in model.named_parameters() if value is words.weight]
    if len(zeros) == len(filled) or set(is_word).intersection(zeros):
        raise ConfigError(
            f"{found}{_first(zeros)}. The model could not tell words apart. Copy the files of "
            "weights again: a download that was cut may leave zeros"
        )
    return f"{found}{_first(zeros)}. If this is not meant, copy the files of weights again"


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """Return the least and the largest number, NaN if one is NaN. No second tensor is made."""
    if not values.numel() or values.dtype not in _REAL:
        return 0.0, 0.0
    least, most = torch.aminmax(values.detach())
    return float(least), float(most)


def check_shapes(outline: Any, shapes: Mapping[str, Any], name: str, *, scores: bool) -> None:
    """Raise ConfigError if files with tensors of these shapes lack weights of a model.

    Args:
        outline: Model of the configuration on the meta device.
        shapes: Tensors without values, by name.
        name: Folder of the model in messages.
        scores: Whether the model scores texts: the output layer may be new.
    """
    with quiet():
        model, info = _matched(outline, shapes)
    _check(_report(outline, model, info, ()), outline, name, scores=scores)


def _check_formats(name: str, revision: str) -> None:
    """Raise ConfigError for formats that were read as other numbers.

    Submit saw the headers of a folder alone. Files of the hub are in the cache after loading.
    """
    folder = Path(name) if is_folder(Path(name)) else cached_folder(name, revision)
    if folder is None:
        return
    tensors = dict[str, Tensor]()
    for file in weight_names(folder):
        if file.endswith(".safetensors"):
            tensors |= read_tensors(folder / file)
        elif not file.endswith(".json"):
            for key, value in load_state_dict(str(folder / file), map_location="meta").items():
                kind = "F" if value.is_floating_point() else "C" if value.is_complex() else "I"
                tensors[key] = Tensor(f"{kind}{8 * value.dtype.itemsize}", tuple(value.shape))
    check_formats(tensors, f"model {name!r}")


def _rehearsed(outline: Any, name: str, source: Mapping[str, Any]) -> Report:
    """Read only names and shapes, and report the differences."""
    files, _ = _get_resolved_checkpoint_files(
        pretrained_model_name_or_path=name,
        variant=None,
        gguf_file=None,
        use_safetensors=None,
        user_agent=None,
        is_remote_code=False,
        download_kwargs={"revision": source.get("revision")},
    )
    places = {}
    shapes = {}
    for file in files or ():
        for key, value in load_state_dict(file, map_location="meta").items():
            places[key] = file
            shapes[key] = value
    model, info = _matched(outline, shapes)
    # Without values transformers leaves two tied weights apart if the files have both.
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    both = [pair for pair in tied.items() if not _is_one(model, pair)]
    apart = _with_other_values(model, both, places) if both else ()
    return _report(outline, model, info, apart)


def _matched(outline: Any, shapes: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Read tensors without values into a model; return the model and the report."""
    model, info = type(outline).from_pretrained(
        None,
        config=outline.config,
        state_dict=shapes,
        device_map={"": "meta"},
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return model, info


def _is_one(model: Any, pair: Pair) -> bool:
    first, second = pair
    one: bool = model.get_parameter(first) is model.get_parameter(second)
    return one


def _with_other_values(
    model: Any, pairs: Sequence[Pair], places: Mapping[str, str]
) -> Sequence[Pair]:
    """Return the pairs of weights whose values in the files differ."""
    renamings = []
    for step in get_model_conversion_mapping(model):
        if isinstance(step, WeightRenaming):
            renamings.append(step)
    wanted = {name for pair in pairs for name in pair}
    state = model.state_dict()
    values = {}
    for key, file in places.items():
        renamed, _ = rename_source_key(key, renamings, [], model.base_model_prefix, state)
        if renamed in wanted:
            values[renamed] = load_state_dict(file)[key]
    return [(one, two) for one, two in pairs if not torch.equal(values[one], values[two])]


@contextmanager
def _untied(outline: Any, apart: Sequence[Pair]) -> Iterator[None]:
    """Make models without the ties of some weights.

    Under ZeRO-3 transformers ties weights without a look at the values.
    """
    targets = {target for target, _ in apart}
    held: dict[Any, Any] = {}
    for prefix, part in outline.named_modules():
        if not targets or not isinstance(part, PreTrainedModel) or type(part) in held:
            continue
        ties = part.get_expanded_tied_weights_keys(all_submodels=False)
        kept = {}
        for target, origin in ties.items():
            if f"{prefix}.{target}".lstrip(".") not in targets:
                kept[target] = origin
        if len(kept) < len(ties):
            held[type(part)] = part._tied_weights_keys
            type(part)._tied_weights_keys = kept
    try:
        yield
    finally:
        for kind, keys in held.items():
            kind._tied_weights_keys = keys


def _report(outline: Any, model: Any, info: Mapping[str, Any], apart: Sequence[Pair]) -> Report:
    tied = outline.get_expanded_tied_weights_keys(all_submodels=True)
    # transformers forgets the ties of weights that have different values in the files.
    kept = {*model.all_tied_weights_keys, *(target for target, _ in apart)}
    forgotten = [pair for pair in tied.items() if pair[0] not in kept]
    return Report(
        missing=sorted(info["missing_keys"]),
        unexpected=sorted(info["unexpected_keys"]),
        mismatched={name: (there, here) for name, there, here in info["mismatched_keys"]},
        apart=[*apart, *forgotten],
    )


def _check(report: Report, outline: Any, name: str, *, scores: bool) -> None:
    kind = type(outline).__name__
    every = len(outline.state_dict())
    for weight, (there, here) in sorted(report.mismatched.items()):
        number = len(report.mismatched)
        raise ConfigError(
            f"model {name!r}: {weight} has the shape {_shape(there)} in the files and "
            f"{_shape(here)} in config.json{_beside(number - 1)}. Give the config.json of these "
            "weights, or the weights of this config.json"
        )
    missing = report.missing
    if scores:  # the output layer may be new
        base = f"{outline.base_model_prefix}."
        missing = [key for key in missing if key.startswith(base)]
    if not missing:
        return
    others = ""
    unexpected = list(report.unexpected)
    if unexpected:
        others = (
            f" The files have {pluralize(len(unexpected), 'weight')} with names that the model"
            f" does not know: {_first(unexpected)}."
        )
    raise ConfigError(
        f"model {name!r}: the files lack {len(missing)} of the {every} weights of a {kind}: "
        f"{_first(missing)}.{others} Copy the folder again, or correct the names in the files or "
        "the sizes in config.json; weights that are missing would begin at random"
    )


def _remarks(report: Report, outline: Any, name: str, *, scores: bool) -> Iterator[str]:
    # The output layer over the words is replaced in a model that scores texts.
    unexpected = [key for key in report.unexpected if not (scores and key.startswith("lm_head."))]
    if unexpected:
        yield (
            f"model {name!r}: {pluralize(len(unexpected), 'weight')} of the files were not read, "
            f"because a {type(outline).__name__} of this config.json has no place for them: "
            f"{_first(unexpected)}"
        )
    for target, origin in report.apart:
        yield (
            f"model {name!r}: config.json ties {target} to {origin}, and the files have different "
            "values for them. Both are kept and trained apart, as transformers does"
        )


def _first(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _beside(number: int) -> str:
    return f", and {pluralize(number, 'other weight')} differ too" if number else ""


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(str(size) for size in sizes)
