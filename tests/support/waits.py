"""A device made up on the CPU: which calls of a training step would wait for a GPU.

Tensors that a copy to the device returned, the model's weights, and results of both count as being
on the device. A read of such a tensor on the host is a wait, and so is a copy that is not
`non_blocking`. Whether the source of a copy is pinned, without which the copy waits too, is unseen.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu", 0)
"""Device of the trainer: unlike the plain "cpu" of tensors on the host, and not asked for by name.
"""
# Operators whose result on the host, or whose size, depends on the values.
_READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "item",
}
_HOST_METHODS = {"tolist", "cpu", "numpy"}


class Waits:
    """Record of the calls that would wait."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.watching = False
        self._kept: dict[int, torch.Tensor] = {}
        """A tensor of every storage on the device, so that no storage has the place of another."""

    def put(self, tensor: torch.Tensor) -> None:
        self._kept[tensor.untyped_storage()._cdata] = tensor.detach()

    def has(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        return value.untyped_storage()._cdata in self._kept

    def note(self, what: str) -> None:
        if not self.watching:
            return
        stack = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        # `HostCopy.read` has waited for an event of an earlier step.
        if any(frame.name == "read" and "losses.py" in frame.filename for frame in stack):
            return
        last = [frame for frame in stack if "/torch/" not in frame.filename][-1]
        self.seen.append(f"{what} in {Path(last.filename).name}:{last.name}")

    @contextmanager
    def watch(self) -> Iterator[None]:
        with _Operators(self), _Methods(self):
            yield


class _Operators(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        on_device = [each for each in given if self._waits.has(each)]
        name = str(func.overloadpacket).rpartition(".")[2]
        by_mask = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool
            for each in tree_leaves(args[1:2])
        )
        if on_device and (name in _READS or by_mask):
            self._waits.note(name)
        result = func(*args, **(kwargs or {}))
        if on_device:
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    self._waits.put(each)
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        to_device = any(
            each is DEVICE or each == DEVICE for each in (*args[1:], options.get("device"))
        )
        if name == "to" and to_device and not self._waits.has(args[0]):
            if not options.get("non_blocking"):
                self._waits.note("to")
            copy = args[0].detach().clone()
            self._waits.put(copy)
            return copy
        if name in _HOST_METHODS and self._waits.has(args[0]):
            self._waits.note(name)
        result = func(*args, **options)
        made = isinstance(result, torch.Tensor) and options.get("device") == DEVICE
        if made:
            if name in ("tensor", "as_tensor"):
                self._waits.note(name)
            self._waits.put(result)
        return result
