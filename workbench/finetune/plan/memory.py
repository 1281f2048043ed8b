"""How much memory a rank needs at the highest moment of a training step, and a pod from loading to saving. Pure.

Who holds weights, gradients and optimizer states how long is read in the code of torch 2.13 and DeepSpeed 0.19.8 and
held to measured steps by tests/finetune/plan/test_measured.py. A model is read from pages of its files, which the ranks of a
pod share and the kernel can take back. Each rank turns them into its own format a tensor at a time (FSDP a layer),
under ZeRO-3 rank 0 alone reads. Rank 0 writes what it gathers as soon as it is `SAVED_AT_ONCE`. Each technique adds
its own share (`finetune/techniques`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.techniques.sizes import CONTEXT_BYTES, Memory, Moment, Setting, Trace

# Not counted but taken as given, as `CONTEXT_BYTES` is: what a process with torch, transformers and DeepSpeed imported
# holds. On CPUs 0.35 to 0.40 GiB were seen of ranks that were forked, 0.44 to 0.49 of other ranks (torch 2.13, on
# 2026-11-24); CUDA's libraries come on top of that, and were not measured.
_PROCESS_BYTES = 0.8 * 2**30
_CPU_PROCESS_BYTES = 0.42 * 2**30


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
    moments.append(technique_of(setting.technique).update(setting, trace))
    device = max((pair[0] for pair in moments), key=lambda memory: memory.total)
    host = max((pair[1] for pair in moments), key=lambda memory: memory.total)
    if not setting.gpu:  # all of it is in the pod's memory: the highest moment is that of the sum
        both = max((d.plus(h) for d, h in moments), key=lambda memory: memory.total)
        return Need(gpu=None, host=replace(both, overhead=_CPU_PROCESS_BYTES))
    return Need(
        gpu=replace(device, overhead=CONTEXT_BYTES), host=replace(host, overhead=_PROCESS_BYTES)
    )


def _at(setting: Setting, trace: Trace, moment: Moment, rows: int) -> tuple[Memory, Memory]:
    technique = technique_of(setting.technique)
    device, host = technique.kept(setting, trace)
    logits = max(0.0, moment.logits + rows * moment.logits_row)
    held = moment.held(rows)
    if setting.packed:  # a layer's weights are unpacked one matrix at a time
        held += trace.largest_packed * setting.compute_bytes
    gradients, communication = technique.backward(setting, trace, moment)
    moving = Memory(
        activations=max(0.0, held - logits),
        logits=logits,
        gradients=gradients,
        communication=communication,
    )
    return device.plus(moving), host


def host_of(
    setting: Setting, trace: Trace, need: Need, gpu_bytes: float | None
) -> Mapping[str, Memory]:
    """Return the need by stage: `loading`, `training`, `saving`; on a GPU of so many bytes, where that is known."""
    technique = technique_of(setting.technique)
    device, host = technique.kept(setting, trace)
    held = host if setting.gpu else device.plus(host)
    start = Memory(overhead=need.host.overhead)
    read = trace.parameters - (
        trace.trained if trace.trained < trace.parameters else 0
    )  # adapters are in no file
    files = Memory(files=float(setting.file_bytes * read))
    return {
        "loading": start.plus(technique.loading(setting, trace, gpu_bytes))
        .times(setting.on_pod)
        .plus(files),
        "training": need.host.times(setting.on_pod),
        "saving": start.plus(held).times(setting.on_pod).plus(technique.saving(setting, trace)),
    }
