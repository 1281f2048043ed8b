"""Loss of a token, computed inside the output layer, in pieces and only where there is a label.

The scores of every word for every token are the largest tensors of a step with a large vocabulary.
Here the output layer scores some labelled positions, turns the scores into their loss and their
gradient, and forgets the scores. The sum of the losses passes through the rest of the model in
place of the scores, so all wrappers of a model work as usual. The loss and the gradients are those
of the whole scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.initialization import no_init_weights

from workbench.finetune.recipe.order import IGNORED

_PIECE_BYTES = 4 << 20
"""Bytes of a piece's scores in FP32 on a CPU, whose cache a piece should fit."""
_GPU_PIECE_BYTES = 512 << 20
_LEAST_TOKENS = 256
"""Fewest tokens of a piece. Every piece adds to the gradient of the whole output layer."""
_DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers")
_SHALLOW = 2
"""Layers of the copy for the test of a model's scores."""


def piece_tokens(vocabulary: int, device: str) -> int:
    """Return the number of tokens that are scored at once."""
    size = _PIECE_BYTES if device == "cpu" else _GPU_PIECE_BYTES
    return max(_LEAST_TOKENS, size // (4 * vocabulary))


def shifted(labels: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return the label of every position. A causal model predicts the label of the next token."""
    if not causal:
        return labels
    return functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values of the host on a device. The host does not wait for the device."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def returns_scores(model: Any) -> bool:
    """Return whether a model returns the scores of its output layer unchanged.

    A shallow copy without weights is run. Ranks hold parts of a model, and cannot run it alone.
    """
    config = deepcopy(model.config)
    config._attn_implementation = "eager"
    depth = getattr(config, _DEPTHS[0], None)
    for name in [name for name in _DEPTHS if getattr(config, name, None)]:
        setattr(config, name, _SHALLOW)
    # Lists with an entry for every layer.
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[:_SHALLOW])
    seen: list[Any] = []
    # An error of torch or of the model, of any type: the loss then uses whole scores.
    try:
        with FakeTensorMode(), torch.device("cpu"), torch.no_grad(), no_init_weights():
            copy = type(model)(config).eval()
            # The other ways of a mixture of experts are not for tensors without values.
            if hasattr(copy, "set_experts_implementation"):
                copy.set_experts_implementation("batched_mm")
            output = copy.get_output_embeddings()
            output.register_forward_hook(lambda _module, _inputs, scores: seen.append(scores))
            inputs = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
            if config.is_encoder_decoder:
                inputs["decoder_input_ids"] = inputs["input_ids"]
            scores = copy(**inputs, use_cache=False)["logits"]
    except Exception:
        return False
    return len(seen) == 1 and scores is seen[0]


class LeanLoss:
    """Lets a model's output layer return the loss of given labels instead of scores."""

    def __init__(self, model: Any, *, causal: bool) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.fits = returns_scores(base)
        """Whether the model returns the scores of its output layer unchanged.

        Some models scale or cap their scores. Their loss needs the scores of all tokens at once.
        """
        self.in_pieces = True
        """Whether to score a piece at a time. False scores all labelled positions at once."""
        self.right: torch.Tensor | None = None
        """Number of correctly predicted tokens of the last forward pass, if it was asked for."""
        self.plain = False
        """Whether the output layer has nothing but a weight and a bias, such as no adapters."""
        self.causal = causal
        self._armed: tuple[torch.Tensor, torch.Tensor, torch.Size] | None = None
        self._smoothing = 0.0
        self._counts_right = False
        self._layer = base.get_output_embeddings()
        if not self.fits:
            return
        self.plain = type(self._layer).forward is nn.Linear.forward
        # Like `recompute`: replace only the forward, so that hooks gather the weights as before.
        # torch.compile leaves the layer out, because the number of labels differs between batches.
        forward = partial(self._forward, self._layer.forward)
        disable: Any = torch.compiler.disable
        self._layer.forward = disable(forward)

    @contextmanager
    def of(
        self,
        labels: torch.Tensor,
        device: torch.device,
        *,
        smoothing: float = 0.0,
        counts_right: bool = False,
    ) -> Iterator[None]:
        """Let the forward pass inside the context return the loss of the labels.

        Labels on the host spare a GPU a wait for its earlier work.
        """
        if not self.fits:
            yield
            return
        targets = shifted(labels, self.causal)
        positions = targets.flatten().ne(IGNORED).nonzero().flatten()
        learned = targets.flatten()[positions]
        self._smoothing = smoothing
        self._counts_right = counts_right
        with self.at(sent(positions, device), sent(learned, device), targets.shape):
            yield

    @contextmanager
    def at(
        self, positions: torch.Tensor, targets: torch.Tensor, shape: torch.Size
    ) -> Iterator[None]:
        """Do the same with the targets of some positions in a micro-batch of a shape."""
        self._armed = positions, targets, shape
        try:
            yield
        finally:
            self._armed = None

    def total(
        self,
        outputs: Any,
        labels: torch.Tensor,
        *,
        smoothing: float = 0.0,
        counts_right: bool = False,
    ) -> torch.Tensor:
        """Return the sum of the labels' losses, from the outputs of a forward pass in `of`."""
        if self.fits:
            total: torch.Tensor = outputs["logits"][0, 0, 0]
            return total
        # The labels are shifted: shifted scores would be copied.
        scores = outputs["logits"].float().flatten(0, 1)
        targets = shifted(labels, self.causal).flatten()
        if counts_right:
            self.right = (scores.argmax(-1) == targets).sum()
        return functional.cross_entropy(scores, targets, reduction="sum", label_smoothing=smoothing)

    def targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the label of every position."""
        return shifted(labels, self.causal)

    def _forward(self, forward: Any, hidden: torch.Tensor) -> torch.Tensor:
        if self._armed is None:
            unchanged: torch.Tensor = forward(hidden)
            return unchanged
        positions, targets, shape = self._armed
        if hidden.shape[:-1] != shape:
            raise RuntimeError(
                f"the model scores {tuple(hidden.shape[:-1])} tokens, "
                f"and {tuple(shape)} have labels"
            )
        labelled = hidden.flatten(0, 1)[positions.to(hidden.device)]
        # Layers may be spread over GPUs.
        place = self._layer.weight.device
        total = self._total(forward, labelled.to(place), targets.to(place)).to(hidden.device)
        # In the shape of scores, for models that read their last scores. FSDP wants no view.
        return total.expand(1, 1, self._layer.weight.shape[0]).clone()

    def _total(self, forward: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        self.right = torch.zeros((), dtype=torch.long, device=hidden.device)
        size = max(1, len(targets))
        if self.plain and self.in_pieces:
            size = piece_tokens(layer.weight.shape[0], hidden.device.type)
        if self.plain and torch.is_grad_enabled() and _format(hidden) != torch.float16:
            total: torch.Tensor = _piece_by_piece(
                hidden, layer.weight, layer.bias, targets, size, self._smoothing
            )
            return total
        total = hidden.new_zeros((), dtype=torch.float32)
        pieces = list(zip(torch.split(hidden, size), torch.split(targets, size), strict=True))
        for piece, piece_targets in pieces:
            if torch.is_grad_enabled() and len(pieces) > 1:
                # Gradients of fp16 need the scale of the loss, known only in the backward pass.
                part = checkpoint(self._part, forward, piece, piece_targets, use_reentrant=False)
            else:
                part = self._part(forward, piece, piece_targets)
            total = total + part
        return total

    def _part(self, forward: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = forward(hidden).float()
        if self._counts_right:
            self.right += (scores.argmax(-1) == targets).sum()
        return functional.cross_entropy(
            scores, targets, reduction="sum", label_smoothing=self._smoothing
        )


class _PieceByPiece(torch.autograd.Function):
    """Sum of losses that computes its gradients in the forward pass, while there are scores.

    No scores are kept or computed twice. The gradients of the pieces are added up in FP32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        size: int,
        smoothing: float,
    ) -> torch.Tensor:
        dtype = _format(hidden)
        used = weight.to(dtype)
        used_bias = None if bias is None else bias.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        of_hidden = torch.zeros_like(hidden)
        of_weight: torch.Tensor | None = None
        of_bias: torch.Tensor | None = None
        if weight.requires_grad:
            of_weight = torch.zeros_like(weight, dtype=torch.float32)
        if bias is not None and bias.requires_grad:
            of_bias = torch.zeros_like(bias, dtype=torch.float32)
        pieces = zip(*(torch.split(t, size) for t in (hidden, targets, of_hidden)), strict=True)
        # Not torch.mm: the FLOPS profiler would count it as a part of the forward pass.
        mm = torch.ops.aten.mm.default
        with torch.autocast(hidden.device.type, enabled=False):
            for piece, piece_targets, of_piece in pieces:
                read = piece.to(dtype)
                scores = functional.linear(read, used, used_bias)
                loss, of_scores = _loss_of(scores.float(), piece_targets, smoothing)
                del scores
                total += loss
                if of_bias is not None:
                    of_bias += of_scores.sum(0)
                of_scores = of_scores.to(dtype)
                of_piece.copy_(mm(of_scores, used))
                if of_weight is not None and dtype == torch.float32:
                    of_weight.addmm_(of_scores.t(), read)
                elif of_weight is not None:
                    of_weight += mm(of_scores.t(), read)
                # Free the piece before the next one is scored.
                del of_scores
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        if of_bias is not None:
            of_bias = of_bias.to(bias.dtype)  # type: ignore[union-attr]
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        gradients = []
        for gradient in ctx.saved_tensors:
            gradients.append(None if gradient is None else gradient.mul_(factor))
        return (*gradients, None, None, None)


_piece_by_piece: Any = _PieceByPiece.apply


def _loss_of(
    scores: torch.Tensor, targets: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of some tokens, and its gradient by their scores."""
    logs = functional.log_softmax(scores, dim=-1)
    at = targets[:, None]
    loss = -(1 - smoothing) * logs.gather(-1, at).sum()
    if smoothing:
        loss -= smoothing * logs.mean(-1).sum()
    # The gradient takes the place of the logarithms.
    gradient = logs.exp_().sub_(smoothing / logs.shape[-1])
    gradient.scatter_add_(-1, at, gradient.new_full(at.shape, smoothing - 1))
    return loss, gradient


def _format(hidden: torch.Tensor) -> torch.dtype:
    """Return the number format of the output layer's arithmetic."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
