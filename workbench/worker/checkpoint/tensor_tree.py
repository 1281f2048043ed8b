"""A tree of tensors and plain values as two files: `state.safetensors` and `state.json`.

Dictionaries, lists, tuples, numbers, strings and tensors go in and come out as they were, to the last bit. There is
no pickle: a file of somebody else's can give wrong numbers, but it cannot run anything.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workbench.base.errors import RunError

__all__ = ["TENSORS", "TREE", "TreePacker", "read_tree", "unpack", "write_tree"]

TENSORS, TREE = "state.safetensors", "state.json"
_MIB = 1 << 20
_HEADERS = _MIB  # bytes; what the names and shapes of the tensors take beside their content, and more


def write_tree(folder: Path, tree: object) -> None:
    """Write a tree into a folder and see it to the disk."""
    packer = TreePacker()
    text = json.dumps(packer.pack(tree)).encode()
    needed = sum(t.numel() * t.element_size() for t in packer.tensors.values()) + len(text) + _HEADERS
    free = shutil.disk_usage(folder).free
    if free < needed:
        problem = f"the disk is full: {needed / _MIB:.0f} MiB are needed, {free / _MIB:.0f} MiB are free"
        raise OSError(errno.ENOSPC, problem)
    try:
        save_file(packer.tensors, folder / TENSORS)
    except SafetensorError as error:  # so it says that a write failed
        raise OSError(errno.EIO, str(error)) from error
    (folder / TREE).write_bytes(text)
    for name in (TENSORS, TREE):
        with (folder / name).open("rb") as written:
            os.fsync(written.fileno())


def read_tree(folder: Path) -> Any:
    """Read a tree back; its tensors are on the CPU."""
    try:
        tensors = load_file(folder / TENSORS)
        return unpack(json.loads((folder / TREE).read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(
            f"{folder} holds no checkpoint that can be read ({error}); resume from an earlier one"
        ) from error


class TreePacker:
    """Take trees apart into JSON and tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors by the names that stand for them in the JSON; each is contiguous and owns its memory."""
        self._names: dict[tuple[object, ...], str] = {}

    def pack(self, value: object) -> object:
        """Return the JSON form of a tree, and put its tensors aside.

        Example:
            >>> TreePacker().pack({"lr": 0.1, 3: (1, None)})
            {'dict': [['lr', 0.1], [3, {'tuple': [1, None]}]]}
        """
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float):
            return int(value) if isinstance(value, int) else float(value)  # enumerations of numbers become numbers
        if isinstance(value, torch.Tensor):
            return {"tensor": self._name(value.detach())}
        if isinstance(value, Mapping):
            return {"dict": [[_key(key), self.pack(each)] for key, each in value.items()]}
        if isinstance(value, list | tuple):
            return {"list" if isinstance(value, list) else "tuple": [self.pack(each) for each in value]}
        raise RunError(f"a checkpoint cannot keep a {type(value).__name__}; leave `save_steps` out for this job")

    def _name(self, tensor: torch.Tensor) -> str:
        # The same tensor in two places of the tree is written once, and is one tensor again after reading.
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in self._names:
            return self._names[key]
        name = self._names[key] = f"t{len(self.tensors)}"
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        # safetensors takes no parts of a larger buffer.
        kept = tensor if whole and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
        self.tensors[name] = kept
        return name


def unpack(packed: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Make the tree that a packer took apart.

    Example:
        >>> unpack({"dict": [["lr", 0.1], [3, {"tuple": [1, None]}]]}, {})
        {'lr': 0.1, 3: (1, None)}
    """
    if not isinstance(packed, dict):
        return packed
    ((kind, inside),) = packed.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {key: unpack(each, tensors) for key, each in inside}
    values = [unpack(each, tensors) for each in inside]
    return values if kind == "list" else tuple(values)


def _key(key: object) -> object:
    if key is None or isinstance(key, str | int):
        return key
    raise RunError(f"a checkpoint cannot keep a dictionary with the key {key!r}")
