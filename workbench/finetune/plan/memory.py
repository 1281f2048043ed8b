"""Predict the peak memory of a rank in a training step, and of a pod from loading to saving. Pure.

The lifetimes of weights, gradients and optimizer states come from the code of torch 2.13 and
DeepSpeed 0.19.8. tests/finetune/plan/test_measured.py compares them with measured steps. A model
is read from pages of its files; the ranks of a pod share the pages, and the kernel can reclaim
them. Every rank converts the pages into its own format a tensor at a time (FSDP a layer). Under
ZeRO-3 only rank 0 reads. Rank 0 writes gathered weights in pieces of `SAVED_AT_ONCE`. The
techniques add their own shares (`finetune/techniques`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.techniques.sizes import (
    BEGIN,
    CONTEXT_BYTES,
    FP32,
    Memory,
    Moment,
    Setting,
    Trace,
    pinned_bytes,
    states_of,
)

# Memory of a process that has imported torch, transformers and DeepSpeed: not counted, like
# `CONTEXT_BYTES`. On CPUs ranks of tiny models held 0.57 GiB at most, with and without TRL (torch
# 2.13, on 2026-11-28); forked ranks after few steps held 0.35 to 0.40. With CUDA's libraries, ranks
# of a model of a million weights held 1.4 to 1.6 GiB alone, and 1.7 to 2.0 in a process group (an
# H200, torch 2.11, on 2026-11-27).
_PROCESS_BYTES = 1.9 * 2**30
CPU_PROCESS_GIB = 0.57


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    gpu: Memory | None
    """Memory on the rank's GPU. None: the rank computes on the CPU."""
    host: Memory


def need_of(setting: Setting, trace: Trace, rows: int) -> Need:
    trace = trace.cut(setting.sharers)
    passed = Moment(
        base=0.0,
        row=0.0,
        logits=0.0,
        logits_row=0.0,
        gradients=trace.trained,
    )
    sequences = math.ceil(rows * setting.sequences)
    device, host = technique_of(setting.technique).kept(setting, trace)
    pairs = []
    for moment in (*trace.moments[setting.arithmetic], passed):
        pairs.append((device.plus(_at(setting, trace, moment, sequences)), host))
    pairs.append(technique_of(setting.technique).update(setting, trace))
    pairs.append(_entering(setting, trace))
    reference = _reference(setting, trace)
    copied = _copied(setting, trace)
    pairs = [(device.plus(reference), host.plus(copied)) for device, host in pairs]
    # Without a GPU all parts share the pod's memory, so the peak is the highest sum.
    if not setting.gpu:
        both = _highest([device.plus(host) for device, host in pairs])
        process_gib = setting.process_gib or CPU_PROCESS_GIB
        return Need(gpu=None, host=replace(both, overhead=process_gib * 2**30))
    device = _highest([device for device, _ in pairs])
    host = _highest([host for _, host in pairs])
    return Need(
        gpu=replace(device, overhead=CONTEXT_BYTES),
        host=replace(host, overhead=_PROCESS_BYTES),
    )


def _reference(setting: Setting, trace: Trace) -> Memory:
    """Return the weights of the frozen reference, sharded like the weights in training."""
    weights = setting.reference_bytes * (trace.parameters - _adapters(trace))
    spreads = technique_of(setting.technique).spreads
    shards = setting.shards if "trained" in spreads else 1
    return Memory(parameters=weights / shards)


def _copied(setting: Setting, trace: Trace) -> Memory:
    """Return the host memory of a checkpoint that a thread writes: FP32 weights, and states."""
    if not setting.copies_saved:
        return Memory()
    technique = technique_of(setting.technique)
    # Rank 0 alone saves equal parts. The ranks of a pod share the mean.
    is_one_part = technique.replicates and not technique.apart and setting.sharers == 1
    parts = setting.on_pod if is_one_part else setting.shards
    taken = pinned_bytes if setting.gpu else float
    weights = taken(FP32 * trace.trained / parts)
    return Memory(parameters=weights, optimizer=taken(states_of(setting, trace) / parts))


def _adapters(trace: Trace) -> int:
    return trace.trained if trace.trained < trace.parameters else 0


def _highest(memories: Sequence[Memory]) -> Memory:
    return max(memories, key=lambda memory: memory.total)


def _at(setting: Setting, trace: Trace, moment: Moment, rows: int) -> Memory:
    """Return what a moment adds to the memory that is kept throughout a step."""
    technique = technique_of(setting.technique)
    pieces = trace.piece_rows if setting.in_pieces else None
    logits = moment.scored(rows, pieces)
    held = moment.held(rows, pieces)
    if setting.score_bytes is not None:
        held = max(0.0, held - logits)
        # Scores exist at the moments at which they exist in the traced loss.
        if logits:
            tokens = rows * trace.row_tokens
            logits = setting.score_bytes * min(tokens, setting.scored_tokens or tokens)
            held += logits
    if setting.packed:  # a layer's weights are unpacked one matrix at a time
        held += trace.largest_packed * setting.compute_bytes
    gradients, communication = technique.backward(setting, trace, moment)
    # The output layer has arrived before its scores exist.
    if not moment.gradients:
        communication += max(0.0, technique.arriving(setting, trace) - logits)
    return Memory(
        activations=max(0.0, held - logits),
        logits=logits,
        gradients=gradients,
        communication=communication,
    )


def _entering(setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
    """Return the memory at the start of a step, while its first weights are gathered."""
    technique = technique_of(setting.technique)
    device, host = technique.kept(setting, trace)
    gradients, _ = technique.backward(setting, trace, BEGIN)
    entering = Memory(
        gradients=gradients,
        communication=technique.entering(setting, trace),
        # Answers are written before the forward pass.
        activations=setting.cache_bytes,
    )
    return device.plus(entering), host


def host_of(
    setting: Setting,
    trace: Trace,
    need: Need,
    gpu_bytes: float | None,
) -> Mapping[str, Memory]:
    """Return the need per stage (`loading`, `training`, `saving`). `gpu_bytes` None: unknown."""
    technique = technique_of(setting.technique)
    # Every rank loads the whole model, and then cuts it.
    device, host = technique.kept(setting, trace.cut(setting.sharers))
    device = device.plus(_reference(setting, trace))
    held = host if setting.gpu else device.plus(host)
    start = Memory(overhead=need.host.overhead)
    read = trace.parameters
    if trace.trained < trace.parameters:
        # Adapters are not in the model's files.
        read -= trace.trained
    files = Memory(files=float(setting.file_bytes * read))
    loading_rank = start.plus(technique.loading(setting, trace, gpu_bytes))
    saving_rank = start.plus(held)
    return {
        "loading": loading_rank.times(setting.on_pod).plus(files),
        "training": need.host.times(setting.on_pod),
        "saving": saving_rank.times(setting.on_pod).plus(technique.saving(setting, trace)),
    }
