"""Recognize folders that hold no model of transformers, and name the way to a model."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from workbench.base.files import is_folder, is_there

ADAPTERS = "adapter_config.json"
"""File in a folder of adapters saved by peft."""
SINGLE = ("model.safetensors", "pytorch_model.bin")
"""Names of undivided weights that transformers reads."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Names of the lists of divided weights that transformers reads."""
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the weights of adapters that peft reads."""
LOST = "the link's target is gone. Download the model again"
"""Refusal of a link to no file, as in a cleaned cache of the hub."""

_STEP = re.compile(r"\d+")
_SNAPSHOTS = "snapshots"
_OTHER_TOOLS = "give a folder made by save_pretrained"
# The first form with a matching name decides. DeepSpeed's and FSDP's folders come before plain
# files of torch, because both have such files too.
_FORMS: Sequence[tuple[Sequence[str], str]] = (
    (
        (ADAPTERS,),
        "it has adapters and no whole model: merge the adapters into their base (run.merge, or "
        "merge_and_unload of peft), and give the merged folder as the base of new adapters",
    ),
    (
        ("zero_to_fp32.py", "global_step*"),
        "it is a checkpoint of DeepSpeed: run `python zero_to_fp32.py . OUT` in the folder, copy "
        "config.json and the tokenizer's files to OUT, and give OUT",
    ),
    (
        ("*_optim_states.pt", "*_model_states.pt"),
        "it is a part of a checkpoint of DeepSpeed: run `python zero_to_fp32.py . OUT` in the "
        "folder above, copy config.json and the tokenizer's files to OUT, and give OUT",
    ),
    (
        ("pytorch_model_fsdp_*",),
        "it is a checkpoint of FSDP: run `accelerate merge-weights FOLDER/NAME OUT`, copy "
        "config.json and the tokenizer's files to OUT, and give OUT",
    ),
    (
        ("*.distcp", ".metadata"),
        "it is a distributed checkpoint of torch: run `python -m "
        "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.pt`, load "
        "weights.pt into the model, and give a folder made by save_pretrained",
    ),
    (
        ("*.gguf",),
        "it has weights in GGUF, from which nothing can be trained: give the model from which the "
        "GGUF was made, or load the file with AutoModelForCausalLM.from_pretrained(FOLDER, "
        "gguf_file='NAME') and call save_pretrained",
    ),
    (
        ADAPTER_WEIGHTS,
        f"it has weights of adapters without {ADAPTERS}: save the adapters with save_pretrained "
        "of peft",
    ),
    (
        ("consolidated*", "params.json"),
        "it has weights in the form of the model's author: give the form for transformers, whose "
        "weights are named model*.safetensors",
    ),
    (
        ("tf_model*.h5", "flax_model*.msgpack", "model.ckpt*"),
        "it has weights of TensorFlow or Flax, which transformers 5 does not read: convert the "
        "weights with transformers 4, or give a folder with model.safetensors",
    ),
    (
        ("model-*-of-*.safetensors", "pytorch_model-*-of-*.bin"),
        "it has weights in parts without the list of the parts: copy model.safetensors.index.json "
        "or pytorch_model.bin.index.json too",
    ),
    (
        ("model.*.safetensors", "pytorch_model.*.bin"),
        "it has weights of a variant, which is not read: rename the file to model.safetensors or "
        "pytorch_model.bin",
    ),
    (
        ("*.safetensors", "*.pt", "*.pth", "*.ckpt", "*.bin"),
        "it has weights under another name: load the file into the model, and give a folder made "
        "by save_pretrained",
    ),
    (
        ("*.onnx", "*.nemo", "*.npz", "*.mlmodel", "*.tflite", "*.engine"),
        "it has weights of another program: give a folder made by save_pretrained",
    ),
)


def way_out(folder: Path) -> str:
    """Return what a folder without a model holds instead, and what to do.

    Example:
        >>> way_out(Path("/no/such/folder"))
        'give a folder made by save_pretrained'
    """
    inner = model_below(folder)
    if inner is not None:
        return f"its folder {inner.name!r} holds a model: give model={str(inner)!r}"
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 (names alone are needed)
    except OSError:
        return _OTHER_TOOLS
    lost = [name for name in names if is_lost(folder / name)]
    if lost:
        return f"the folder has {lost[0]!r}: {LOST}"
    for patterns, remedy in _FORMS:
        for name in names:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                remedy = remedy.replace("NAME", name).replace("FOLDER", str(folder))
                return f"the folder has {name!r}: {remedy}"
    checkpoints = [name for name in names if fnmatchcase(name, "checkpoint-*")]
    distributed = [name for name in names if is_there(folder / name / ".metadata")]
    # The optimizer's states lie beside the weights.
    distributed = [name for name in distributed if not name.startswith("optim")]
    last = max(checkpoints or distributed, key=_number, default=None)
    found = _OTHER_TOOLS if last is None else way_out(folder / last)
    return found if found == _OTHER_TOOLS else f"in the folder {last!r}, {found}"


def model_below(folder: Path) -> Path | None:
    """Return a folder below with a model or adapters; of checkpoints, the last.

    The hub's cache has its models one folder deeper.
    """
    snapshots = folder / _SNAPSHOTS
    try:
        below = [*folder.iterdir(), *(snapshots.iterdir() if is_folder(snapshots) else ())]
    except OSError:
        return None
    found = [place for place in below if is_folder(place) and holds_model(place)]
    return max(found, key=lambda place: _number(place.name), default=None)


def holds_model(folder: Path) -> bool:
    """Return whether a folder has a configuration and weights, or adapters."""
    if is_there(folder / ADAPTERS):
        return any(is_there(folder / name) for name in ADAPTER_WEIGHTS)
    return is_there(folder / "config.json") and has_weights(folder)


def is_lost(path: Path) -> bool:
    """Return whether a path is a link to a file that is gone, as in a cleaned cache of the hub."""
    return path.is_symlink() and not is_there(path)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights under a name that transformers reads."""
    return any(is_there(folder / name) for name in (*SINGLE, *INDEXES))


def _number(name: str) -> tuple[int, str]:
    """Return the last number in a name, for the order of checkpoints."""
    digits = _STEP.findall(name)
    return (int(digits[-1][:18]) if digits else -1), name
