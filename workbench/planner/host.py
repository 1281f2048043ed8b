"""What a pod's own memory needs while a model is loaded, trained and saved, all ranks of the pod together. Pure.

A model is read from pages of its files, which the ranks of a pod share and the kernel can take back. Each rank turns
them into its own format a tensor at a time (FSDP a layer), under ZeRO-3 rank 0 alone reads. Rank 0 writes what it
gathers as soon as it is `SAVED_AT_ONCE`. Read in the code of worker/model/ and in DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.jobs.choices import Technique
from workbench.planner.memory import CONTEXT_BYTES, PACKED, SAVED_AT_ONCE, Memory, Need, kept, largest_layer
from workbench.planner.setting import Setting
from workbench.planner.tracing import Trace


def host_of(setting: Setting, trace: Trace, need: Need, gpu_bytes: float | None) -> Mapping[str, Memory]:
    """Return the need by stage: `loading`, `training`, `saving`; on a GPU of so many bytes, where that is known."""
    between = kept(setting, trace)
    held = between[1] if setting.gpu else between[0].plus(between[1])
    start = Memory(overhead=need.host.overhead)
    return {
        "loading": start.plus(_loading(setting, trace, gpu_bytes)).times(setting.on_pod).plus(_files(setting, trace)),
        "training": need.host.times(setting.on_pod),
        "saving": start.plus(held).times(setting.on_pod).plus(_saving(setting, trace)),
    }


def highest(stages: Mapping[str, Memory]) -> Memory:
    return max(stages.values(), key=lambda memory: memory.total)


def _files(setting: Setting, trace: Trace) -> Memory:
    read = trace.parameters - (trace.trained if trace.trained < trace.parameters else 0)  # adapters are in no file
    return Memory(files=float(setting.file_bytes * read))


def _loading(setting: Setting, trace: Trace, gpu_bytes: float | None) -> Memory:
    technique, size = setting.technique, setting.weight_bytes
    turned = 0.0 if size == setting.file_bytes else float(size)
    if technique is Technique.FSDP:
        if setting.packed:  # each rank packs the whole model here, and then cuts it up
            return Memory(parameters=size * (trace.parameters - trace.packed) + PACKED * trace.packed)
        group = max(largest_layer(trace).all, trace.rest.all)
        shards = 0.0 if setting.gpu and not setting.offload else size * trace.parameters / setting.shards
        return Memory(parameters=shards, communication=turned * group)
    if technique.zero_stage == 3:
        offloads = setting.gpu and "parameters" not in setting.offload
        shards = 0.0 if offloads else size * trace.parameters / setting.shards
        return Memory(parameters=shards, communication=0.0 if setting.gpu else float(size * trace.largest))
    if setting.gpu:
        return Memory(parameters=turned * trace.largest, communication=_flattened_here(setting, trace, gpu_bytes))
    flat = float(size * trace.trained) if technique.zero_stage else 0.0
    return Memory(parameters=turned * trace.parameters, communication=flat)


def _flattened_here(setting: Setting, trace: Trace, gpu_bytes: float | None) -> float:
    # ZeRO-1 and 2 copy the trained weights into one tensor: on the GPU where both fit there, else here, beside a copy.
    if not setting.technique.zero_stage or gpu_bytes is None:
        return 0.0
    flat = float(setting.weight_bytes * trace.trained)
    room = gpu_bytes - CONTEXT_BYTES - setting.weight_bytes * trace.parameters
    return 0.0 if room >= flat else 2 * flat


def _saving(setting: Setting, trace: Trace) -> Memory:
    """Return what rank 0 gathers of the others', or brings from its GPU, before it writes it."""
    technique = setting.technique
    if not setting.gpu and technique is not Technique.FSDP and technique.zero_stage < 3:
        return Memory()
    saved = trace.trained if trace.trained < trace.parameters else trace.parameters
    layer = max(largest_layer(trace).all, trace.rest.largest)
    return Memory(communication=min(setting.weight_bytes * saved, SAVED_AT_ONCE + setting.weight_bytes * layer))
