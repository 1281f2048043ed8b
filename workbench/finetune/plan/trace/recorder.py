"""Record the bytes held after every operation of a step, without weights and gradients."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.finetune.model.layers import transformer_layers
from workbench.finetune.techniques.sizes import Moment


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Observe every operation and the release of every storage."""

    def __init__(self, *, vocabulary: int, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = "before"
        """Current place in the step. The names are the same for models of any depth."""
        self.moments: dict[str, list[Moment]] = {}
        """Moments by place, a moment after every operation."""
        self.gradients = 0
        self.piece_rows: float | None = None
        """Rows that the trainer scores at once; None for all. The step here scores all."""
        self.row_tokens = 0
        """Tokens of a row that have scores."""
        self._vocabulary = vocabulary
        self._rows = rows
        self._held = [0, 0, 0, 0]  # the first four numbers of a `Moment`
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        base, row, logits, logits_row = self._held
        moment = Moment(base, row, logits, logits_row, self.gradients)
        self.moments.setdefault(self.place, []).append(moment)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and operations are faster without torch's wrapper.
        return False

    def known_before(self, model: torch.nn.Module) -> None:
        """Leave the storages of a model's weights out of the count."""
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self._known:
            return
        is_logits = False
        if tensor.dim() > 1:
            width = tensor.shape[-1]
            is_logits = self._vocabulary in (width, width + 1)
        of_rows = size % self._rows == 0
        share = size // self._rows if of_rows else size
        # Places of `_held` that the storage belongs to
        changed = [int(of_rows)]
        if is_logits:
            changed.append(2 + int(of_rows))

        def gone(_: object) -> None:
            self._known.pop(key, None)
            for index in changed:
                self._held[index] -= share

        self._known[key] = weakref.ref(storage, gone)
        for index in changed:
            self._held[index] += share


def layer_stacks(model: Any) -> list[Any]:
    """Return the lists of transformer layers of a model: two for a T5, one for a Llama."""
    names = transformer_layers(model)
    stacks = []
    for module in model.modules():
        if not isinstance(module, torch.nn.ModuleList) or not len(module):
            continue
        if type(module[0]).__name__ in names:
            stacks.append(module)
    return stacks


def watch_layers(model: Any, recorder: Recorder) -> None:
    """Keep the recorder's place up to date, and drop gradients: the planner counts gradients."""
    recorder.known_before(model)
    for number, stack in enumerate(layer_stacks(model)):
        for index, layer in enumerate(stack):
            place = f"middle {index}"
            if index == 0:
                place = "first"
            elif index == len(stack) - 1:
                place = "last"
            _watch(layer, recorder, f"{number} {place}")

    def arrived(parameter: torch.Tensor) -> None:
        recorder.gradients += parameter.numel()
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(arrived)


def _watch(layer: torch.nn.Module, recorder: Recorder, name: str) -> None:
    def before(*_: object) -> None:
        is_backward = recorder.gradients or recorder.place == "loss"
        recorder.place = f"again {name}" if is_backward else f"forward {name}"

    def after(_module: object, _args: object, output: Any) -> None:
        recorder.place = f"after {name}"
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(begin)

    def begin(_gradient: object) -> None:
        recorder.place = f"backward {name}"

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def front(points: Sequence[Moment]) -> list[Moment]:
    """Keep the moments that can be the highest for some number of rows and place of the gradients.

    Example:
        >>> points = [Moment(1, 2, 0, 0, 3), Moment(1, 2, 0, 0, 4), Moment(5, 1, 0, 0, 0)]
        >>> front(points)[0].gradients
        4
    """
    # The highest come first, so none is covered by a later one.
    order = sorted(
        dict.fromkeys(points), key=lambda p: (-p.row, -p.base, -p.gradients, p.logits_row)
    )
    figures = torch.tensor(
        [(p.base, p.row, p.row - p.logits_row, p.gradients) for p in order], dtype=torch.float64
    )
    kept: list[Moment] = []
    left = torch.arange(len(order))
    while len(left):
        highest = int(left[0])
        kept.append(order[highest])
        # A moment is covered if it holds no more, however few rows are scored at once.
        covered = (figures[left] <= figures[highest]).all(dim=1)
        left = left[~covered]
    return kept
