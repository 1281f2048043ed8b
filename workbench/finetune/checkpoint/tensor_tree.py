"""Write and read a tree of tensors and plain values as two files.

The format is not pickle: a file of unknown origin can be wrong, but cannot run code.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workbench.base.errors import RunError
from workbench.base.files.disk import check_room, disk_full, free_bytes, full_disk_named
from workbench.base.process import pod_name

TENSORS = "state.safetensors"
TREE = "state.json"
# Upper bound in bytes of the tensors' names and shapes, beside their content.
_HEADERS = 1 << 20


class Packed(NamedTuple):
    """Tree in the form of its two files."""

    text: bytes
    tensors: Mapping[str, torch.Tensor]


def packed(tree: object, *, copies: bool = False) -> Packed:
    """Return the form of a tree's files, with live tensors or with copies in host memory."""
    packer = TreePacker()
    text = json.dumps(packer.pack(tree)).encode()
    if not copies:
        return Packed(text, packer.tensors)
    tensors = {}
    for name, tensor in packer.tensors.items():
        # Copies of a GPU's tensors are page-locked, and all are on their way at once.
        tensors[name] = tensor.to("cpu", non_blocking=True, copy=True)
    for device in {tensor.device for tensor in packer.tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return Packed(text, tensors)


def write_packed(folder: Path, tree: Packed) -> None:
    text = tree.text
    sizes = [tensor.numel() * tensor.element_size() for tensor in tree.tensors.values()]
    needed = sum(sizes) + len(text) + _HEADERS
    pod = pod_name()
    check_room(folder, needed, where=pod)
    try:
        with full_disk_named(folder, needed, where=pod):
            save_file(dict(tree.tensors), folder / TENSORS)
            (folder / TREE).write_bytes(text)
    # safetensors reports a failed write with this error.
    except SafetensorError as error:
        if "No space left" in str(error):
            raise disk_full(folder, needed, free_bytes(folder), where=pod) from error
        raise OSError(errno.EIO, str(error)) from error
    for name in (TENSORS, TREE):
        with (folder / name).open("rb") as written:
            os.fsync(written.fileno())


def read_tree(folder: Path) -> Any:
    """Read a tree. The tensors are views of the file, whose bytes are read when they are used."""
    try:
        tensors = load_file(folder / TENSORS)
        return unpack(json.loads((folder / TREE).read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(
            f"{folder} holds no checkpoint that can be read ({error}); resume from an earlier one"
        ) from error


class TreePacker:
    """Split trees into JSON and tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Tensors by their names in the JSON. Each tensor is contiguous and owns its memory."""
        self._names: dict[tuple[object, ...], str] = {}

    def pack(self, value: object) -> object:
        """Return the JSON form of a tree, and collect the tree's tensors.

        Example:
            >>> TreePacker().pack({"lr": 0.1, 3: (1, None)})
            {'dict': [['lr', 0.1], [3, {'tuple': [1, None]}]]}
        """
        match value:
            case None | bool() | str():
                return value
            case int():
                return int(value)  # enumerations of numbers become numbers
            case float():
                return float(value)
            case torch.Tensor():
                return {"tensor": self._name(value.detach())}
            case Mapping():
                return {"dict": [[_key(key), self.pack(each)] for key, each in value.items()]}
            case list():
                return {"list": [self.pack(each) for each in value]}
            case tuple():
                return {"tuple": [self.pack(each) for each in value]}
        raise RunError(
            f"a checkpoint cannot keep a {type(value).__name__}; give this job save_steps=0"
        )

    def _name(self, tensor: torch.Tensor) -> str:
        # A tensor in two places of the tree is written once, and is a single tensor again after
        # reading.
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in self._names:
            return self._names[key]
        name = f"t{len(self.tensors)}"
        self._names[key] = name
        # safetensors does not write parts of a larger buffer.
        own_bytes = tensor.numel() * tensor.element_size()
        is_whole = tensor.untyped_storage().nbytes() == own_bytes
        if not (is_whole and tensor.is_contiguous()):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self.tensors[name] = tensor
        return name


def unpack(packed: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree from a packer's JSON and tensors."""
    match packed:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": items}:
            return {key: unpack(each, tensors) for key, each in items}
        case {"list": values}:
            return [unpack(each, tensors) for each in values]
        case {"tuple": values}:
            return tuple(unpack(each, tensors) for each in values)
        case _:
            return packed


def _key(key: object) -> object:
    match key:
        case None | str() | int():
            return key
    raise RunError(f"a checkpoint cannot keep a dictionary with the key {key!r}")
