"""Numbers for the memory of a technique. Pure functions and records.

The planner makes `Setting` from a job and `Trace` from the job's model. A technique turns both into
`Memory`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

SAVED_AT_ONCE = 1 << 30
"""Bytes of weights after which rank 0 writes the gathered weights, at the end of a layer."""
FP32 = 4
"""Bytes of a number in FP32."""
HALF = 2
"""Bytes of a number in bf16 or fp16."""
# Bytes of a CUDA context with its kernels and NCCL's buffers. Assumed; the published runs of
# tests/finetune/plan agree with the number. An H200 had 1.3 to 1.6 GiB (2026-11-27).
CONTEXT_BYTES = 1.0 * 2**30
FOUR_BITS = 0.5
"""Bytes of a weight in 4 bits, without its scales."""
# Bytes of a weight in NF4 with double quantisation: half a byte, a byte for each block of 64 and an
# FP32 number for 256 blocks (https://arxiv.org/abs/2305.14314, section 3).
_PACKED = FOUR_BITS + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of a rank in a single place, by purpose."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Optimizer states, the FP32 copy of the weights if any, and temporary memory of the update."""
    activations: float = 0.0
    """Tensors kept by the forward pass for the backward pass, and temporary memory of both."""
    logits: float = 0.0
    """The same for the scores of every word for every token."""
    communication: float = 0.0
    """Buckets of gradients, and weights gathered from other ranks."""
    overhead: float = 0.0
    """Memory of the runtime itself; assumed, not measured."""
    files: float = 0.0
    """Pages of the model's files. The kernel reclaims them when memory is short."""

    @property
    def total(self) -> float:
        return self.tensors + self.overhead

    @property
    def tensors(self) -> float:
        """Sum of the bytes in tensors, without pages of files."""
        purposes = sum(getattr(self, name) for name in _PURPOSES)
        return float(purposes - self.overhead - self.files)

    def times(self, factor: float) -> Memory:
        return Memory(**{name: getattr(self, name) * factor for name in _PURPOSES})

    def plus(self, other: Memory) -> Memory:
        return Memory(**{name: getattr(self, name) + getattr(other, name) for name in _PURPOSES})


_PURPOSES = tuple(field.name for field in fields(Memory))


class Moment(NamedTuple):
    """Memory at a moment of a step, as linear functions of the rows.

    Weights, optimizer states and gradients are not included.
    """

    base: float
    """Bytes for any number of rows."""
    row: float
    """Bytes a row."""
    logits: float
    """Bytes of `base` in tensors over the vocabulary."""
    logits_row: float
    """Bytes of `row` in tensors over the vocabulary."""
    gradients: float
    """Elements of the gradients that exist at the moment."""

    def held(self, rows: int, piece_rows: float | None = None) -> float:
        """Return the bytes of some rows, of which `piece_rows` have scores at a time."""
        of_scores = self.scored(rows, piece_rows) - self.logits
        return max(0.0, self.base + rows * (self.row - self.logits_row) + of_scores)

    def scored(self, rows: int, piece_rows: float | None = None) -> float:
        """Return the bytes of the tensors over the vocabulary."""
        at_once = rows if piece_rows is None else min(rows, piece_rows)
        return max(0.0, self.logits + at_once * self.logits_row)


BEGIN = Moment(base=0.0, row=0.0, logits=0.0, logits_row=0.0, gradients=0.0)
"""Begin of a step, before any activation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Elements of a group of parameters: in a transformer layer, or outside of all layers."""

    frozen: int
    """Elements without training and stay in whole numbers of bytes."""
    trained: int
    packed: int
    """Elements without training and can be stored in 4 bits."""
    largest: int
    """Elements of the largest parameter."""
    largest_packed: int
    """Elements of the largest parameter that can be stored in 4 bits."""
    small: Mapping[int, int]
    """Number of parameters by their number of elements."""
    matrices: int = 0
    """Trained elements of matrices, outside of embeddings and heads."""

    @property
    def all(self) -> int:
        return self.frozen + self.trained + self.packed

    def cut(self, ranks: int) -> Parameters:
        """Return the part of a rank if `ranks` ranks share the parameters."""
        return Parameters(
            frozen=self.frozen // ranks,
            trained=self.trained // ranks,
            packed=self.packed // ranks,
            largest=self.largest // ranks,
            largest_packed=self.largest_packed // ranks,
            small={size // ranks: times for size, times in self.small.items()},
            matrices=self.matrices // ranks,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Memory of a training step of a model, by arithmetic, and the sizes of the parameters."""

    moments: Mapping[str, Sequence[Moment]]
    """Moments that can have the highest memory, by arithmetic."""
    layers: Sequence[Parameters]
    rest: Parameters
    """Parameters outside of all layers: embeddings, the output layer, last norms."""
    piece_rows: float | None = None
    """Rows whose scores are computed at once. None: all rows."""
    row_tokens: int = 0
    """Tokens of a row that have scores, with padding."""
    part: Trace | None = None
    """Part on the fullest GPU, for a model whose layers are spread over several GPUs; else None."""
    gpus: int = 1
    """Number of GPUs with a part of the model."""
    unplaced: str = ""
    """Why the layers cannot be spread as requested."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why an arithmetic has no moments, by its name."""

    @property
    def _groups(self) -> Sequence[Parameters]:
        return (self.rest, *self.layers)

    @property
    def parameters(self) -> int:
        return sum(group.all for group in self._groups)

    @property
    def trained(self) -> int:
        return sum(group.trained for group in self._groups)

    @property
    def matrices(self) -> int:
        """Trained elements of the hidden layers' matrices."""
        return sum(group.matrices for group in self._groups)

    @property
    def packed(self) -> int:
        return sum(group.packed for group in self._groups)

    @property
    def largest(self) -> int:
        return max(group.largest for group in self._groups)

    @property
    def largest_packed(self) -> int:
        """Elements of the largest parameter storable in 4 bits."""
        return max(group.largest_packed for group in self._groups)

    @property
    def largest_layer(self) -> Parameters:
        return max(self.layers, key=lambda layer: layer.all, default=self.rest)

    def cut(self, ranks: int) -> Trace:
        """Return the part of a rank if `ranks` ranks share the weights of every layer.

        The few whole weights of a layer, for example norms, count as shared.
        """
        if ranks == 1:
            return self
        part = replace(self, layers=[layer.cut(ranks) for layer in self.layers])
        share = part.trained / max(1, self.trained)
        moments = {}
        for arithmetic, whole in self.moments.items():
            moments[arithmetic] = [
                moment._replace(gradients=share * moment.gradients) for moment in whole
            ]
        return replace(part, moments=moments)

    @property
    def is_tied(self) -> bool:
        """Whether the output layer has no separate weight, beside the embeddings."""
        return self.rest.small.get(self.rest.largest, 0) < 2

    def no_larger_than(self, elements: int) -> int:
        """Return the elements of all parameters with at most `elements` elements."""
        small_elements = 0
        for group in self._groups:
            for size, times in group.small.items():
                if size <= elements:
                    small_elements += size * times
        return small_elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Numbers of a technique's training for the prediction of memory.

    Buckets and similar sizes have DeepSpeed's own defaults:
    https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training
    """

    technique: str
    ranks: int
    shards: int
    """Ranks that share the state; fewer than all ranks if other pods have replicas."""
    on_pod: int
    sharers: int = 1
    """Ranks that share the weights of each layer."""
    spread: bool = False
    """Whether the single rank spreads the layers over the GPUs of the pod."""
    gpu: bool
    arithmetic: str
    """Key of the arithmetic in the trace's moments."""
    weight_bytes: int = 4
    """Bytes of a trained weight in memory."""
    frozen_bytes: int = 4
    """Bytes of a weight that is not trained."""
    file_bytes: float = 4
    """Bytes of a weight in the model's files."""
    saved_bytes: int = 4
    """Bytes of a weight in the saved model."""
    compute_bytes: int = 4
    """Bytes of a gathered weight in computations."""
    packed: bool
    state_bytes: float
    """Bytes of optimizer states for a trained element."""
    matrix_state_bytes: float | None = None
    """The same for an element of a hidden layer's matrix. None: `state_bytes`."""
    outer_bytes: float = 0.0
    """Bytes of local SGD's outer step for a trained element.

    The outer step keeps the weights of the last synchronisation, and a momentum.
    """
    paged: bool
    """Whether optimizer states move to the host when the GPU is short of memory."""
    update_bytes: float = 0.0
    """Temporary bytes of an update that is not fused, for an element, beside the states."""
    updates_apart: bool = False
    """Whether the optimizer updates one tensor after another, also on a GPU."""
    accumulates: bool
    """Whether gradients are kept for more than one micro-batch."""
    bucket: int = 500_000_000
    """Elements of a communication bucket."""
    buckets: int = 1
    prefetch: int = 1
    """Elements, or layers under FSDP, that are gathered ahead."""
    persist: int = 100_000
    """Largest number of elements of a parameter that ZeRO-3 keeps whole."""
    live: int = 1_000_000_000
    """Elements of whole parameters from which on ZeRO-3 gathers nothing ahead."""
    reuse: int = 1_000_000_000
    """Distance in elements within which ZeRO-3 keeps a parameter for its next use."""
    sub_group: int = 1_000_000_000
    """Elements in one update of ZeRO-3."""
    offload: tuple[str, ...] = ()
    """Parts of the state on the host beside a GPU: `optimizer`, `parameters`."""
    pinned: tuple[str, ...] = ()
    """Parts of `offload` in page-locked memory of the host."""
    gathers_all: bool = False
    """Whether parameters stay whole from their forward to their backward pass."""
    swap_buffers: int = 0
    """Buffers of a sub-group's size for optimizer states on a disk; 0 without a disk."""
    weight_buffers: int = 0
    """Elements of the buffers for weights on a disk; 0 without a disk."""
    weights_kept: int = 0
    """Elements of a rank's weights that stay in memory, at most, despite an offload to a disk."""
    reduce_bytes: int = 4
    """Bytes of a gradient in messages to other ranks."""
    reduces_once: bool = False
    """Whether a rank keeps whole gradients until the last micro-batch of a step."""
    sequences: float = 1.0
    """Sequences that the model reads for a row: 2 for a pair of answers."""
    reference_bytes: int = 0
    """Bytes of a weight of a frozen reference model; 0 without such a model."""
    in_pieces: bool = True
    """Whether the trainer scores a piece of the tokens at a time, where the model allows it."""
    score_bytes: float | None = None
    """Bytes of the scores of a token at the peak of a method's own loss. None: as traced."""
    scored_tokens: int | None = None
    """Tokens that a method's own loss scores at once. None: all."""
    process_gib: float | None = None
    """Measured memory of a process on CPUs before its model. None: assumed."""
    copies_saved: bool = False
    """Whether a checkpoint is copied to host memory while training continues."""
    cache_bytes: float = 0.0
    """Bytes of the keys and values of all answers that a rank writes at once."""


def weights_of(setting: Setting, trace: Trace) -> float:
    """Return the bytes of a whole model in memory, without the scales of weights in 4 bits."""
    frozen = trace.parameters - trace.trained - trace.packed
    packed = trace.packed * (FOUR_BITS if setting.packed else setting.frozen_bytes)
    return float(setting.frozen_bytes * frozen + setting.weight_bytes * trace.trained + packed)


def states_of(setting: Setting, trace: Trace) -> float:
    """Return the bytes of the optimizer states of all trained weights."""
    states = setting.state_bytes * trace.trained
    if setting.matrix_state_bytes is not None:
        states += (setting.matrix_state_bytes - setting.state_bytes) * trace.matrices
    return states


def scales_of(setting: Setting, trace: Trace) -> float:
    """Return the bytes of the scales of weights in 4 bits. No technique shards the scales."""
    return trace.packed * (_PACKED - FOUR_BITS) * setting.packed


def turned_of(setting: Setting, trace: Trace) -> int:
    """Return the bytes of the weights in memory whose format differs from the files' format.

    Weights in the files' format stay pages of the files.
    """
    turned = 0
    if setting.weight_bytes != setting.file_bytes:
        turned += trace.trained * setting.weight_bytes
    if setting.frozen_bytes != setting.file_bytes:
        frozen = trace.parameters - trace.trained - trace.packed * setting.packed
        turned += frozen * setting.frozen_bytes
    return turned


def pinned_bytes(size: float) -> float:
    """Return the bytes of torch for a page-locked tensor: the next power of two.

    `CachingHostAllocatorImpl::allocate` of torch 2.13 (at/ATen/core/CachingHostAllocator.h) rounds
    every tensor up, and keeps freed tensors for later tensors of the same size.

    Example:
        >>> pinned_bytes(5 * 2**20) / 2**20
        8.0
    """
    return float(1 << (math.ceil(size) - 1).bit_length()) if size > 0 else 0.0


def pinned_one_by_one(trace: Trace, *, size: float, shards: int) -> float:
    """Return the bytes of all parameters' shards, page-locked separately, `size` bytes an element.

    Example:
        >>> group = Parameters(
        ...     frozen=0, trained=12, packed=0, largest=6, largest_packed=0, small={6: 2}
        ... )
        >>> pinned_one_by_one(Trace(moments={}, layers=[], rest=group), size=4, shards=2)
        32.0
    """
    total = 0.0
    for group in (trace.rest, *trace.layers):
        for elements, times in group.small.items():
            total += times * pinned_bytes(size * math.ceil(elements / shards))
    return total


def gathered_to_save(setting: Setting, trace: Trace) -> Memory:
    """Return the memory of weights gathered by rank 0, or copied from rank 0's GPU, to save."""
    saved = trace.trained if trace.trained < trace.parameters else trace.parameters
    layer = max(trace.largest_layer.all, trace.rest.largest)
    at_once = SAVED_AT_ONCE + setting.weight_bytes * layer
    return Memory(communication=min(setting.weight_bytes * saved, at_once))
