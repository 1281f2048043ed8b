"""How much memory a rank needs at the highest moment of a training step, and a pod from loading to saving. Pure.

Who holds weights, gradients and optimizer states how long is read in the code of torch 2.13 and DeepSpeed 0.19.8 and
held to measured steps by tests/planner/test_measured.py. A model is read from pages of its files, which the ranks of a
pod share and the kernel can take back. Each rank turns them into its own format a tensor at a time (FSDP a layer),
under ZeRO-3 rank 0 alone reads. Rank 0 writes what it gathers as soon as it is `SAVED_AT_ONCE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from workbench.jobs.choices import Technique
from workbench.planner.setting import Setting
from workbench.planner.tracing import Moment, Parameters, Trace

SAVED_AT_ONCE = 1 << 30
"""Bytes of weights after which rank 0 writes what it has gathered, at the end of a layer."""

_FP32 = 4
_FOUR_BITS = 0.5
_PACKED = _FOUR_BITS + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4 with double quantisation: half a byte, a byte for each block of 64 and an FP32 number for
256 of those (https://arxiv.org/abs/2305.14314, section 3)."""
# Not counted but taken as given: a CUDA context with its kernels and NCCL's buffers, and what a process with torch,
# transformers and DeepSpeed imported holds. On CPUs 0.35 to 0.40 GiB were seen of ranks that were forked, 0.44 to
# 0.49 of other ranks (torch 2.13, on 2026-11-24); CUDA's libraries come on top of that, and were not measured.
_CONTEXT_BYTES = 1.0 * 2**30
_PROCESS_BYTES = 0.8 * 2**30
_CPU_PROCESS_BYTES = 0.42 * 2**30


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    gpu: Memory | None
    """On its GPU; None where it computes on the CPU."""
    host: Memory


def need_of(setting: Setting, trace: Trace, rows: int) -> Need:
    passed = Moment(base=0.0, row=0.0, logits=0.0, logits_row=0.0, gradients=trace.trained)
    moments = [
        _at(setting, trace, moment, rows) for moment in (*trace.moments[setting.arithmetic], passed)
    ]
    moments.append(_update(setting, trace))
    device = max((pair[0] for pair in moments), key=lambda memory: memory.total)
    host = max((pair[1] for pair in moments), key=lambda memory: memory.total)
    if not setting.gpu:  # all of it is in the pod's memory: the highest moment is that of the sum
        both = max((d.plus(h) for d, h in moments), key=lambda memory: memory.total)
        return Need(gpu=None, host=replace(both, overhead=_CPU_PROCESS_BYTES))
    return Need(
        gpu=replace(device, overhead=_CONTEXT_BYTES), host=replace(host, overhead=_PROCESS_BYTES)
    )


def _at(setting: Setting, trace: Trace, moment: Moment, rows: int) -> tuple[Memory, Memory]:
    device, host = _kept(setting, trace)
    logits = max(0.0, moment.logits + rows * moment.logits_row)
    held = moment.held(rows)
    if setting.packed:  # a layer's weights are unpacked one matrix at a time
        held += trace.largest_packed * setting.compute_bytes
    gradients, communication = _backward(setting, trace, moment)
    moving = Memory(
        activations=max(0.0, held - logits),
        logits=logits,
        gradients=gradients,
        communication=communication,
    )
    return device.plus(moving), host


def _update(setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
    device, host = _kept(setting, trace)
    trained, shard = trace.trained, trace.trained / setting.shards
    technique = setting.technique
    # Fused AdamW and SGD without momentum make nothing; the outer step of local SGD, which is not fused, does.
    makes = max(setting.update_bytes, _FP32 if setting.outer_bytes else 0.0)
    if not technique.uses_deepspeed:
        on_host = not setting.gpu or "optimizer" in setting.offload
        at_once = min(trace.largest, trained) / setting.shards if on_host else shard
        if setting.offload:
            return device, host.plus(Memory(optimizer=makes * at_once))
        work = Memory(gradients=_FP32 * shard, optimizer=makes * at_once)
        if technique is Technique.DDP:
            work = replace(work, communication=_FP32 * trained)
        return device.plus(work), host
    # DeepSpeed updates its whole part at once (ZeRO-3 a sub-group of it), from a copy of its gradients in FP32.
    at_once = min(shard, setting.sub_group) if technique.zero_stage == 3 else shard
    work = Memory(gradients=_FP32 * at_once, optimizer=makes * at_once)
    if technique.zero_stage < 3:
        if "optimizer" in setting.offload:  # the gradients lie there in FP32 already
            return device, host.plus(replace(work, gradients=0.0))
        return device.plus(replace(work, gradients=(_FP32 + setting.weight_bytes) * shard)), host
    device = device.plus(
        Memory(communication=float(setting.weight_bytes * trace.no_larger_than(setting.persist)[0]))
    )
    if "optimizer" not in setting.offload:
        return device.plus(work), host
    return device, host.plus(
        Memory(optimizer=work.optimizer + work.gradients * int(not setting.gpu))
    )


def _kept(setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
    """Return what a rank holds between two steps, on its device and on the host."""
    scales = trace.packed * (_PACKED - _FOUR_BITS) * setting.packed  # which FSDP leaves whole
    trained, shards = trace.trained, setting.shards
    stage = setting.technique.zero_stage
    weights = _weights(setting, trace)
    if stage == 3 or setting.technique is Technique.FSDP:
        weights /= shards
    master = _FP32 * trained / shards if stage else 0.0
    states = setting.state_bytes * trained / shards
    gradients = setting.weight_bytes * trained / shards if stage == 3 else 0.0
    bucket = float(setting.bucket * setting.weight_bytes) if stage == 3 else 0.0
    device = Memory(
        parameters=scales, communication=bucket, optimizer=setting.outer_bytes * trained
    )
    host = Memory()
    if "parameters" in setting.offload:
        if (
            setting.weight_buffers
        ):  # DeepSpeed keeps so many of its trained elements here all the same (`max_in_cpu`)
            here = setting.weight_buffers + min(setting.weights_kept, trained / shards)
            weights = setting.weight_bytes * here
        host = host.plus(Memory(parameters=weights))
    else:
        device = device.plus(Memory(parameters=weights))
    if setting.swap_buffers:
        through = setting.swap_buffers * _FP32 * min(trained / shards, setting.sub_group)
        return device, host.plus(Memory(optimizer=through, gradients=gradients))
    if "optimizer" in setting.offload:
        # Gradients are kept there in FP32, by ZeRO-3 beside those of the weights' own format.
        host = host.plus(
            Memory(optimizer=master + states, gradients=gradients + _FP32 * trained / shards)
        )
        if (
            stage in (1, 2)
        ):  # `param_buffer_of_bit16_for_cpu_offload_groups`, `temp_grad_buffer_for_cpu_` and `_gpu_`
            largest = Memory(communication=float(setting.weight_bytes * trace.largest))
            updated = Memory(optimizer=setting.weight_bytes * trained / shards)
            return device.plus(largest), host.plus(largest).plus(updated)
        return device, host
    if setting.paged and setting.gpu:
        return device.plus(Memory(optimizer=master, gradients=gradients)), host.plus(
            Memory(optimizer=states)
        )
    return device.plus(Memory(optimizer=master + states, gradients=gradients)), host


def _weights(setting: Setting, trace: Trace) -> float:
    """Count the bytes of a whole model as it is held, without the scales of weights in 4 bits."""
    frozen = trace.parameters - trace.trained - trace.packed
    packed = trace.packed * (_FOUR_BITS if setting.packed else setting.frozen_bytes)
    return float(setting.frozen_bytes * frozen + setting.weight_bytes * trace.trained + packed)


def _backward(setting: Setting, trace: Trace, moment: Moment) -> tuple[float, float]:
    trained, arrived, technique = (
        trace.trained,
        min(moment.gradients, trace.trained),
        setting.technique,
    )
    held = trained if setting.accumulates else arrived
    if technique.replicates:
        return _FP32 * held, float(_FP32 * trained) if technique is Technique.DDP else 0.0
    if technique is Technique.FSDP:
        return 0.0 if setting.offload else _FP32 * held / setting.shards, _gathered_by_fsdp(
            setting, trace, moment
        )
    size = setting.weight_bytes
    bucket = min(setting.bucket, trained)
    reduced = bucket if arrived >= bucket else 0
    if technique.zero_stage == 3:
        # A full bucket is copied, cut and reduced into parts.
        return 0.0, size * (_gathered_by_zero3(setting, trace, moment) + 3 * reduced)
    # A GPU's buckets are there as a whole, of a CPU's only what has been written; what is reduced is copied together.
    buckets = setting.bucket * setting.buckets
    written = (buckets if arrived else 0) if setting.gpu else min(buckets, arrived)
    sent = float(size * (written + reduced))
    if technique is Technique.ZERO1 and setting.accumulates:
        return float(size * trained), sent
    full = (arrived > setting.bucket or setting.accumulates) and "optimizer" not in setting.offload
    return size * trained / setting.shards if full else 0.0, sent


def _gathered_by_zero3(setting: Setting, trace: Trace, moment: Moment) -> float:
    # A layer is kept if it is needed again within `reuse` elements, which forward and backward pass both use up; the
    # backward pass lets go of it, and gathers ahead only what it has not yet passed.
    whole = trace.parameters
    left = max(0.0, whole - whole * moment.gradients / max(1, trace.trained))
    kept = min(whole, setting.reuse / 2, left)
    ahead = _largest_layer(trace).all + min(setting.prefetch, left)
    return min(float(whole), max(kept, ahead, trace.no_larger_than(setting.persist)[0]))


def _gathered_by_fsdp(setting: Setting, trace: Trace, moment: Moment) -> float:
    layer, size = _largest_layer(trace), setting.compute_bytes
    packed = _FOUR_BITS if setting.packed else size

    def whole(group: Parameters) -> float:
        return size * (group.all - group.packed) + packed * group.packed

    layers = len(trace.layers) if setting.gathers_all else 1 + max(1, setting.prefetch)
    gathered = min(layers * whole(layer), sum(map(whole, trace.layers))) + whole(trace.rest)
    return gathered + ((_FP32 + size) * layer.trained if moment.gradients else 0.0)


def _largest_layer(trace: Trace) -> Parameters:
    return max(trace.layers, key=lambda layer: layer.all, default=trace.rest)


def host_of(
    setting: Setting, trace: Trace, need: Need, gpu_bytes: float | None
) -> Mapping[str, Memory]:
    """Return the need by stage: `loading`, `training`, `saving`; on a GPU of so many bytes, where that is known."""
    device, host = _kept(setting, trace)
    held = host if setting.gpu else device.plus(host)
    start = Memory(overhead=need.host.overhead)
    read = trace.parameters - (
        trace.trained if trace.trained < trace.parameters else 0
    )  # adapters are in no file
    files = Memory(files=float(setting.file_bytes * read))
    return {
        "loading": start.plus(_loading(setting, trace, gpu_bytes))
        .times(setting.on_pod)
        .plus(files),
        "training": need.host.times(setting.on_pod),
        "saving": start.plus(held).times(setting.on_pod).plus(_saving(setting, trace)),
    }


def _loading(setting: Setting, trace: Trace, gpu_bytes: float | None) -> Memory:
    technique = setting.technique
    # Weights that are held in the format of their files stay pages of these; the others are turned into new tensors.
    turned = 0
    if setting.weight_bytes != setting.file_bytes:
        turned += trace.trained * setting.weight_bytes
    if setting.frozen_bytes != setting.file_bytes:
        turned += (
            trace.parameters - trace.trained - trace.packed * setting.packed
        ) * setting.frozen_bytes
    share = turned / trace.parameters
    if technique is Technique.FSDP:
        if setting.packed:  # each rank packs the whole model here, and then cuts it up
            scales = trace.packed * (_PACKED - _FOUR_BITS)
            return Memory(parameters=_weights(setting, trace) + scales)
        group = max(_largest_layer(trace).all, trace.rest.all)
        shards = (
            0.0
            if setting.gpu and not setting.offload
            else _weights(setting, trace) / setting.shards
        )
        return Memory(parameters=shards, communication=share * group)
    if technique.zero_stage == 3:
        offloads = setting.gpu and "parameters" not in setting.offload
        shards = 0.0 if offloads else _weights(setting, trace) / setting.shards
        whole = 0.0 if setting.gpu else float(setting.weight_bytes * trace.largest)
        return Memory(parameters=shards, communication=whole)
    if setting.gpu:
        return Memory(
            parameters=share * trace.largest,
            communication=_flattened_here(setting, trace, gpu_bytes),
        )
    flat = float(setting.weight_bytes * trace.trained) if technique.zero_stage else 0.0
    return Memory(parameters=float(turned), communication=flat)


def _flattened_here(setting: Setting, trace: Trace, gpu_bytes: float | None) -> float:
    # ZeRO-1 and 2 copy the trained weights into one tensor: on the GPU where both fit there, else here, beside a copy.
    if not setting.technique.zero_stage or gpu_bytes is None:
        return 0.0
    flat = float(setting.weight_bytes * trace.trained)
    room = gpu_bytes - _CONTEXT_BYTES - _weights(setting, trace)
    return 0.0 if room >= flat else 2 * flat


def _saving(setting: Setting, trace: Trace) -> Memory:
    """Return what rank 0 gathers of the others', or brings from its GPU, before it writes it."""
    technique = setting.technique
    if not setting.gpu and technique is not Technique.FSDP and technique.zero_stage < 3:
        return Memory()
    saved = trace.trained if trace.trained < trace.parameters else trace.parameters
    layer = max(_largest_layer(trace).all, trace.rest.largest)
    return Memory(
        communication=min(
            setting.weight_bytes * saved, SAVED_AT_ONCE + setting.weight_bytes * layer
        )
    )
