"""Check the files of weights in a model's folder. Only names, sizes and headers are read."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from workbench.base.errors import ConfigError
from workbench.base.files import is_there
from workbench.base.json_values import Json, as_int, as_list, as_str, get_object, parse_json
from workbench.base.words import pluralize
from workbench.finetune.job.given_files import POINTER, read_object, refuse_pointer
from workbench.finetune.options.adapters import ALL_LINEAR, Lora
from workbench.finetune.options.model.folders import (
    ADAPTER_WEIGHTS,
    ADAPTERS,
    INDEXES,
    SINGLE,
    way_out,
)
from workbench.finetune.options.model.models import language_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

_AGAIN = "Copy the file again"
_HEAD = "lm_head"
# Ends of the names of tied embeddings and output layers.
_TIED = (_HEAD, "embed_tokens", "shared", "wte", "embed_in", "embed_out", "word_embeddings")
_LARGEST_HEADER = 100_000_000  # the limit of safetensors
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_PICKLE = b"\x80"  # torch before 1.6
# Formats of safetensors that a quantization reads together with scales.
_WHOLE = ("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
_EIGHT_BITS = "F8"
_COMPLEX = "C"
_SCALES = (".weight_scale", ".weight_scale_inv", ".scale")
_PACKED = ("weight", "qweight", "weight_packed", "W_q")
"""Ends of the names of packed weights: of bitsandbytes, GPTQ, compressed-tensors and HQQ."""
QUANTIZED = ("quantization_config", "compression_config")
"""Keys of a configuration that describe quantized weights."""
_STACKS = ("layers", "h", "blocks")
_OWNERS = ("model", "transformer")
_WORDS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|shared)\.weight$")
_OF_ONE = (
    "Give the config.json of these weights, or the weights of this config.json; weights that are "
    "missing would begin at random"
)


class Tensor(NamedTuple):
    """Entry of a tensor in the header of a safetensors file."""

    kind: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


def weight_names(folder: Path) -> list[str]:
    """Return the names of the files of weights that transformers reads in a folder.

    The list of divided weights comes first. Empty for a folder without weights.

    Raises:
        ConfigError: The list of divided weights is damaged, or names a file outside the folder.
    """
    named = as_str(read_object(folder / "config.json").get("transformers_weights"))
    if named:
        return [_inside(named, folder / "config.json")]
    # The order is that of transformers.
    for single, index in zip(SINGLE, INDEXES, strict=True):
        if is_there(folder / single):
            return [single]
        if is_there(folder / index):
            files = get_object(read_object(folder / index), "weight_map").values()
            names = {_inside(as_str(name), folder / index) for name in files}
            if not names:
                raise ConfigError(f"{folder / index} has no 'weight_map' with files. {_AGAIN}")
            return [index, *sorted(names)]
    return []


def check_weights(folder: Path, *, scores: bool = False) -> None:
    """Raise ConfigError if weights are missing in a model's folder, or if a file is cut short.

    A model that `scores` texts has a new output layer.
    """
    names = weight_names(folder)
    if not names:
        raise ConfigError(f"model folder {str(folder)!r} has no weights; {way_out(folder)}")
    missing = [name for name in names if not is_there(folder / name)]
    if missing:
        which = folder / (names[0] if len(names) > 1 else "config.json")
        raise ConfigError(
            f"{which} names {missing[0]!r}, and the file is not in the folder: {len(missing)} of "
            f"{len(names) - 1 or 1} files of weights are missing. Copy the missing files, or save "
            "the model again"
        )
    tensors = tensors_of(folder)
    config = read_object(folder / "config.json")
    if not any(quantizations(config)):
        check_formats(tensors, f"model folder {str(folder)!r}")
        _check_sizes(tensors, config, folder, scores=scores)
    if len(names) > 1 and names[1].endswith(".safetensors"):
        for tensor, file in get_object(read_object(folder / names[0]), "weight_map").items():
            if tensor not in tensors:
                raise ConfigError(
                    f"{folder / names[0]} names the tensor {tensor!r} in {file!r}, and no file of "
                    "weights has the tensor. Save the model again"
                )


def quantizations(config: Json) -> Iterator[tuple[str, Json]]:
    """Yield key and settings of the quantizations that a configuration describes."""
    for key in QUANTIZED:
        settings = get_object(config, key) or get_object(language_of(config), key)
        if settings:
            yield key, settings


def tensors_of(folder: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a folder's weights by name; empty for files of torch.

    Raises:
        ConfigError: A file is damaged, or has weights without numbers.
    """
    tensors = dict[str, Tensor]()
    for name in weight_names(folder):
        if not name.endswith(".json"):
            found = read_tensors(folder / name)
            _check_filled(found, folder / name)
            tensors |= found
    return tensors


def elements_of(folder: Path) -> int:
    """Return the number of elements of a folder's weights. 0: unknown without reading all weights.

    Only the headers of safetensors files have the sizes.
    """
    files = [folder / name for name in weight_names(folder) if not name.endswith(".json")]
    if not all(map(is_there, files)):
        return 0
    return sum(tensor.elements for file in files for tensor in read_tensors(file).values())


def check_tied(job: FineTuneOptions, config: Json, folder: Path) -> None:
    """Raise ConfigError for adapters of a weight that embeddings and output layer share."""
    is_tied = job.peft != "none" and config.get("tie_word_embeddings") is True
    names = _names_of_tensors(folder)
    if not is_tied or job.lora.get("resume_from") or not names:
        return
    # Weights apart in the files stay apart.
    if any(name.endswith(f"{_HEAD}.weight") for name in names):
        return
    options = Lora.from_dict(job.lora)
    named = {"modules_to_save": options.modules_to_save}
    if options.target_modules != ALL_LINEAR:
        named["target_modules"] = options.target_modules
    for option, modules in named.items():
        for name in modules:
            if name.rpartition(".")[2] in _TIED:
                raise ConfigError(
                    f"lora {option} names {name!r}, and config.json of {job.model!r} ties the "
                    "embeddings and the output layer (tie_word_embeddings): both are one weight. "
                    "Drop the name, or train all weights with peft='none'"
                )


def _names_of_tensors(folder: Path) -> Iterable[str]:
    """Return the names of a folder's tensors; empty if unknown without reading all weights."""
    names = weight_names(folder)
    if len(names) > 1:
        return get_object(read_object(folder / names[0]), "weight_map")
    return read_tensors(folder / names[0]) if names and is_there(folder / names[0]) else ()


def unread_weights(folder: Path) -> str:
    """Return a note on a second form of the weights in a folder; empty without such files."""
    read = weight_names(folder)
    others = [name for name in (*SINGLE, *INDEXES) if is_there(folder / name) and name not in read]
    if not (read and others):
        return ""
    return (
        f"the weights of the model are read from {read[0]}, and {' and '.join(others)} not at all"
    )


def check_adapters(folder: Path) -> None:
    """Raise ConfigError if a folder of adapters has no weights, or if the file is cut short."""
    names = [name for name in ADAPTER_WEIGHTS if is_there(folder / name)]
    if not names:
        raise ConfigError(
            f"{folder} has {ADAPTERS} and no {ADAPTER_WEIGHTS[0]}, the weights of the adapters. "
            "Save the adapters with save_pretrained of peft"
        )
    read_tensors(folder / names[0])


def _check_filled(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise ConfigError for weights without numbers, which a model sharded by ZeRO-3 leaves."""
    weights = [name for name in tensors if name.rpartition(".")[2] == "weight"]
    empty = [name for name in weights if not tensors[name].elements]
    if empty:
        raise ConfigError(
            f"{path} has {pluralize(len(empty), 'weight')} without numbers, such as {empty[0]}: "
            "ZeRO-3 had sharded the weights when the file was written. Write the weights again "
            "with zero_to_fp32.py, or with stage3_gather_16bit_weights_on_model_save"
        )


def check_formats(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise ConfigError for complex numbers, and for numbers of a quantization without settings.

    transformers would drop the imaginary parts, and read the packed numbers without their scales.
    `source` names the model in messages.
    """
    scaled = any(name.endswith(_SCALES) for name in tensors)
    for name, tensor in tensors.items():
        if tensor.kind.startswith(_COMPLEX):
            raise ConfigError(
                f"{source} has the weight {name} in the format {tensor.kind}: of complex numbers "
                "the imaginary parts would be dropped. Save the model with real numbers"
            )
        eighth = tensor.kind.startswith(_EIGHT_BITS) and scaled
        is_packed = name.rpartition(".")[2] in _PACKED or name.endswith("_blocks")  # MXFP4
        if is_packed and len(tensor.shape) > 1 and (tensor.kind in _WHOLE or eighth):
            raise ConfigError(
                f"{source} has the weight {name} in the format {tensor.kind}, the numbers of a "
                f"quantization, and config.json has no {QUANTIZED[0]!r}: the weights would be read "
                "without their scales. Give the model before its quantization"
            )


def _check_sizes(
    tensors: Mapping[str, Tensor], config: Json, folder: Path, *, scores: bool
) -> None:
    """Raise ConfigError if layers, words or the output layer of a configuration have no weights.

    The ranks compare all weights. Without torch, only names and shapes are known.
    """
    inner = language_of(config)
    layers = as_int(inner.get("num_hidden_layers")) or 0
    stacks = dict[str, set[str]]()
    for stack, number in filter(None, map(_layer_of, tensors)):
        stacks.setdefault(stack, set()).add(number)
    most = max(map(len, stacks.values()), default=layers)
    if most < layers:
        raise ConfigError(
            f"{folder / 'config.json'} has num_hidden_layers {layers}, and the files have weights "
            f"of {most} layers under one name. {_OF_ONE}"
        )
    rows = as_int(inner.get("vocab_size"))
    words = [name for name in tensors if _WORDS.search(name)]
    if not rows or not words:
        return
    has_fewer = [name for name in words if max(tensors[name].shape, default=0) < rows]
    # Some models have a row for padding more.
    if len(words) == 1 and has_fewer:
        raise ConfigError(
            f"{folder / 'config.json'} has vocab_size {rows}, and {words[0]} in the files has the "
            f"shape {list(tensors[words[0]].shape)}. {_OF_ONE}"
        )
    heads = [name for name, tensor in tensors.items() if rows in tensor.shape and name not in words]
    tied = {each.get("tie_word_embeddings") for each in (config, inner)}
    if (
        config.get("tie_word_embeddings") is False
        and True not in tied
        and len(words) == 1
        and not (heads or scores)
    ):
        raise ConfigError(
            f"model folder {str(folder)!r} has no output layer: no tensor but {words[0]} has a row "
            f"for each of the {rows} words (vocab_size), and config.json has tie_word_embeddings "
            "false. The folder may hold the base of a model, as LlamaModel saves it: save the "
            "language model, such as LlamaForCausalLM"
        )


def _layer_of(name: str) -> tuple[str, str] | None:
    """Return the stack of layers and the number of a layer in the name of a weight."""
    parts = name.split(".")
    for place, (kind, number) in enumerate(pairwise(parts)):
        is_owned = not place or parts[place - 1] in _OWNERS
        if kind in _STACKS and number.isdecimal() and is_owned:
            return ".".join(parts[:place]), number
    return None


def _inside(name: str, source: Path) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ConfigError(
            f"{source} names the file of weights {name[:200]!r}, which is not in the folder. Save "
            "the model again"
        )
    return name


def read_tensors(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file by name; empty for a file of torch."""
    try:
        facts = path.stat()
        return _tensors_at(path, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


@lru_cache(maxsize=1024)
def _tensors_at(path: Path, size: int, _mtime_ns: int) -> Mapping[str, Tensor]:
    with path.open("rb") as file:
        begin = file.read(len(POINTER))
        refuse_pointer(path, begin)
        if path.suffix != ".safetensors":
            if not begin.startswith(_PICKLE) and not zipfile.is_zipfile(path):
                raise ConfigError(
                    f"{path} has {size} bytes and is no complete file of torch: its end is "
                    f"missing. {_AGAIN}"
                )
            return {}
        length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
        if size < _LENGTH_BYTES or length > _LARGEST_HEADER:
            raise ConfigError(f"{path} has {size} bytes and is no safetensors file. {_AGAIN}")
        file.seek(_LENGTH_BYTES, os.SEEK_SET)
        header = _header(file.read(length), path)
    needed = _LENGTH_BYTES + length + max(map(_end, header.values()), default=0)
    if needed != size:
        raise ConfigError(f"{path} has {size} bytes, and its header names {needed}. {_AGAIN}")
    return {name: _tensor(entry) for name, entry in header.items()}


def _header(data: bytes, path: Path) -> Mapping[str, Json]:
    try:
        header = get_object({"header": parse_json(data)}, "header")
    except ValueError as error:
        raise ConfigError(f"{path} is no safetensors file: {error}. {_AGAIN}") from error
    return {name: get_object(header, name) for name in header if name != "__metadata__"}


def _tensor(entry: Json) -> Tensor:
    sizes = tuple(as_int(size) or 0 for size in as_list(entry.get("shape")))
    return Tensor(as_str(entry.get("dtype")), sizes)


def _end(entry: Json) -> int:
    """Return the last byte of a tensor after the header."""
    offsets = as_list(entry.get("data_offsets"))
    return (as_int(offsets[-1]) or 0) if offsets else 0
