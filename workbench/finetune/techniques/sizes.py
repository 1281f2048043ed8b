"""The numbers from which a technique works out its memory and its traffic. Pure.

The planner makes `Setting` of a job and `Trace` of its model. A technique turns both into `Memory` and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from workbench.finetune.options.choices import Technique as Name

SAVED_AT_ONCE = 1 << 30
"""Bytes of weights after which rank 0 writes what it has gathered, at the end of a layer."""
FP32 = 4
"""Bytes of a number in FP32."""
# Not counted but taken as given: a CUDA context with its kernels and NCCL's buffers.
CONTEXT_BYTES = 1.0 * 2**30
FOUR_BITS = 0.5
"""Bytes of a weight in 4 bits, without its scales."""
# Bytes of a weight in NF4 with double quantisation: half a byte, a byte for each block of 64 and an FP32 number for
# 256 of those (https://arxiv.org/abs/2305.14314, section 3).
_PACKED = FOUR_BITS + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank in one place, by what they are for."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Its states, its copy of the weights in FP32 where there is one, and what its update works with."""
    activations: float = 0.0
    """What the forward pass keeps for the backward pass, and what both work with."""
    logits: float = 0.0
    """The same, of the scores of every word for every token."""
    communication: float = 0.0
    """Buckets of gradients, and weights gathered from other ranks."""
    overhead: float = 0.0
    """The runtime's own; not counted but taken as given."""
    files: float = 0.0
    """Pages of the model's files, which the kernel takes back where memory is short."""

    @property
    def total(self) -> float:
        return self.tensors + self.overhead

    @property
    def tensors(self) -> float:
        """The sum of what is in tensors; pages of files are not."""
        return float(
            sum(getattr(self, field.name) for field in fields(self)) - self.overhead - self.files
        )

    def times(self, factor: float) -> Memory:
        return Memory(**{field.name: getattr(self, field.name) * factor for field in fields(self)})

    def plus(self, other: Memory) -> Memory:
        return Memory(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


class Moment(NamedTuple):
    """What is held at a moment of a step beside weights, gradients and optimizer states: lines over the rows."""

    base: float
    """Bytes, whatever the rows."""
    row: float
    """Bytes a row."""
    logits: float
    """Those of `base` that tensors over the vocabulary take."""
    logits_row: float
    """Those of `row`."""
    gradients: float
    """Elements of gradients that parameters have got by then."""

    def held(self, rows: int) -> float:
        return max(0.0, self.base + rows * self.row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Elements of a group of parameters: a transformer layer's, or those of no layer."""

    frozen: int
    """That are not trained and stay in whole numbers of bytes."""
    trained: int
    packed: int
    """That are not trained and can be held in 4 bits."""
    largest: int
    """Of the largest one."""
    largest_packed: int
    """Of the largest one that can be held in 4 bits."""
    small: Mapping[int, int]
    """How many parameters there are of each number of elements."""

    @property
    def all(self) -> int:
        return self.frozen + self.trained + self.packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What a training step of one model holds, by arithmetic, and the sizes of its parameters."""

    moments: Mapping[str, Sequence[Moment]]
    """By arithmetic, the moments that can be the highest."""
    layers: Sequence[Parameters]
    rest: Parameters
    """What is in none of them: embeddings, the output layer, last norms."""
    part: Trace | None = None
    """What the fullest GPU holds of a model whose layers are spread over several; None where they are not."""
    gpus: int = 1
    """GPUs that it lies on."""
    unplaced: str = ""
    """Why its layers cannot be spread as they should be."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why there are no moments of an arithmetic, by its name."""

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
    def packed(self) -> int:
        return sum(group.packed for group in self._groups)

    @property
    def largest(self) -> int:
        return max(group.largest for group in self._groups)

    @property
    def largest_packed(self) -> int:
        """Elements of the largest parameter that 4 bits can hold."""
        return max(group.largest_packed for group in self._groups)

    @property
    def largest_layer(self) -> Parameters:
        return max(self.layers, key=lambda layer: layer.all, default=self.rest)

    def no_larger_than(self, elements: int) -> tuple[int, int]:
        """Return the elements of all parameters that have no more than so many each, and how many these are."""
        small = [
            (size, times)
            for g in self._groups
            for size, times in g.small.items()
            if size <= elements
        ]
        return sum(size * times for size, times in small), sum(times for _, times in small)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a technique trains, in the numbers that its memory and its speed depend on.

    Buckets and the like have DeepSpeed's own defaults:
    https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training
    """

    technique: Name
    ranks: int
    shards: int
    """Ranks that the state is cut over; fewer where replicas stand on other pods."""
    on_pod: int
    spread: bool = False
    """Whether its one rank spreads the layers over the GPUs of the pod."""
    gpu: bool
    arithmetic: str
    """Which of the trace's steps it is."""
    weight_bytes: int = 4
    """Bytes of a trained weight that is held."""
    frozen_bytes: int = 4
    """Bytes of a weight that is not trained."""
    file_bytes: float = 4
    """Bytes of a weight in the model's files."""
    compute_bytes: int = 4
    """Bytes of a weight that is computed with, where it is gathered for that."""
    packed: bool
    state_bytes: float
    """Bytes that the optimizer keeps for a trained element."""
    outer_bytes: float = 0.0
    """The same of the outer step of local SGD: the weights of the last synchronisation, and a momentum."""
    paged: bool
    """Whether these move to the host when the GPU is short."""
    update_bytes: float = 0.0
    """Bytes that an update which is not fused makes for an element beside the states."""
    accumulates: bool
    """Whether gradients live through more than one micro-batch."""
    bucket: int = 500_000_000
    """Elements of a communication bucket."""
    buckets: int = 1
    prefetch: int = 1
    """Elements, or layers under FSDP, that are gathered ahead."""
    persist: int = 100_000
    """Elements up to which ZeRO-3 keeps a parameter whole."""
    reuse: int = 1_000_000_000
    """Elements within which ZeRO-3 keeps a parameter that is needed again."""
    sub_group: int = 1_000_000_000
    """Elements that ZeRO-3 updates at once."""
    offload: tuple[str, ...] = ()
    """What is kept on the host beside a GPU: `optimizer`, `parameters`."""
    gathers_all: bool = False
    """Whether parameters stay whole from their forward to their backward pass."""
    swap_buffers: int = 0
    """Buffers of a sub-group's size that the optimizer's states pass through to a disk; 0 where they go to none."""
    weight_buffers: int = 0
    """Elements of the buffers that weights pass through to a disk; 0 where they go to none."""
    weights_kept: int = 0
    """Elements of a rank's weights up to which they stay in memory although they are offloaded to a disk."""
    reduce_bytes: int = 4
    """Bytes of a gradient on its way to the other ranks."""
    sync_steps: int = 1
    """Steps between two synchronisations of local SGD."""


class Network(Protocol):
    """What was measured between the pods of a cluster."""

    @property
    def backend(self) -> str: ...

    @property
    def latency_s(self) -> float | None: ...

    def all_reduce_s(self, size: float, ranks: int) -> float: ...

    def meet_s(self, pods: int) -> float: ...

    def wait_s(self, pods: int) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """Seconds of what the ranks of a job exchange in a step."""

    setting: Setting
    trace: Trace
    network: Network

    @property
    def pods(self) -> int:
        return self.setting.ranks // self.setting.on_pod

    @property
    def wait_s(self) -> float:
        """Seconds until every pod has come to the exchange."""
        return self.network.wait_s(self.pods)

    @property
    def reduced_s(self) -> float:
        """Seconds of an all-reduce of all gradients."""
        size = self.setting.reduce_bytes * self.trace.trained
        return self.network.all_reduce_s(size, self.setting.ranks)

    @property
    def gathered_s(self) -> float:
        """Seconds in which every rank gathers the trained weights."""
        return self.gather_s(self.trace.trained)

    def gather_s(self, elements: int) -> float:
        """Return the seconds in which every rank gathers so many weights."""
        size = self.setting.compute_bytes * elements
        return self.network.all_reduce_s(size, self.setting.ranks) / 2

    def by_layers_s(self, accumulation: int, *, persist: int, scatters: int) -> float:
        """Return the seconds of a step whose layers are gathered each by itself.

        A layer is gathered before its forward pass and, unless it was kept, its backward pass. Its
        gradients are then scattered, which gloo does by an all-reduce.

        Args:
            accumulation: Micro-batches of the step.
            persist: Elements up to which a weight stays whole; those are gathered once a step.
            scatters: Messages in which the gradients of a micro-batch are scattered.
        """
        setting, trace, network = self.setting, self.trace, self.network
        kept, small = trace.no_larger_than(persist)
        layers = [layer for layer in trace.layers if layer.largest > persist]
        twice = 0 if setting.gathers_all else sum(layer.all for layer in layers)
        gathered = max(0, trace.parameters - kept) + max(0, twice - kept)
        whole_s, kept_s = self.gather_s(gathered), self.gather_s(kept)
        reduced_s = self.reduced_s
        scattered_s = reduced_s if network.backend == "gloo" else reduced_s / 2
        gathers = (1 if setting.gathers_all else 2) * len(layers) + (trace.rest.largest > persist)
        messages = gathers + scatters
        at_the_end_s = kept_s + (small - 1) * (network.latency_s or 0.0) if small else 0.0
        latency_s = network.meet_s(self.pods)
        return accumulation * (whole_s + scattered_s + messages * latency_s) + at_the_end_s


def weights_of(setting: Setting, trace: Trace) -> float:
    """Count the bytes of a whole model as it is held, without the scales of weights in 4 bits."""
    frozen = trace.parameters - trace.trained - trace.packed
    packed = trace.packed * (FOUR_BITS if setting.packed else setting.frozen_bytes)
    return float(setting.frozen_bytes * frozen + setting.weight_bytes * trace.trained + packed)


def scales_of(setting: Setting, trace: Trace) -> float:
    """Count the bytes of the scales of weights in 4 bits, which no technique cuts up."""
    return trace.packed * (_PACKED - FOUR_BITS) * setting.packed


def turned_of(setting: Setting, trace: Trace) -> int:
    """Count the bytes of the weights that are held in another format than that of their files.

    Weights that are held in the format of their files stay pages of these files.
    """
    turned = 0
    if setting.weight_bytes != setting.file_bytes:
        turned += trace.trained * setting.weight_bytes
    if setting.frozen_bytes != setting.file_bytes:
        frozen = trace.parameters - trace.trained - trace.packed * setting.packed
        turned += frozen * setting.frozen_bytes
    return turned


def gathered_to_save(setting: Setting, trace: Trace) -> Memory:
    """Return what rank 0 gathers of the others', or brings from its GPU, before it writes it."""
    saved = trace.trained if trace.trained < trace.parameters else trace.parameters
    layer = max(trace.largest_layer.all, trace.rest.largest)
    at_once = SAVED_AT_ONCE + setting.weight_bytes * layer
    return Memory(communication=min(setting.weight_bytes * saved, at_once))
