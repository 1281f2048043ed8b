"""Base class of the techniques without DeepSpeed: torch's own optimizer on FP32 weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from workbench.finetune.techniques.sizes import (
    FP32,
    Memory,
    Moment,
    Setting,
    Trace,
    gathered_to_save,
    scales_of,
    states_of,
    turned_of,
    weights_of,
)
from workbench.finetune.techniques.technique import Technique


class Plain(Technique, shared=True):
    """Every rank holds everything."""

    spreads: ClassVar[tuple[str, ...]] = ()
    copies_gradients: ClassVar[bool] = False
    """Whether gradients are copied into buckets, which stay as large as all gradients."""

    def snapshot(self, trainer: Any, *, rank: int) -> dict[str, object] | None:
        from workbench.finetune.techniques.on_pods import plain_state

        if self.one_part(trainer) and rank:
            return None
        return plain_state.capture(trainer)

    def restore(self, trainer: Any, state: Any) -> None:
        from workbench.finetune.techniques.on_pods import plain_state

        plain_state.put_back(trainer, state)

    def resharded(self, trainer: Any, states: Sequence[Any], *, rank: int, ranks: int) -> Any:
        del trainer, ranks
        return None if rank else states[0]

    def one_part(self, trainer: Any) -> bool:
        return self.replicates and not self.apart and trainer.tensor is None

    def kept(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        states = states_of(setting, trace) / setting.shards
        device = Memory(
            parameters=scales_of(setting, trace) + weights_of(setting, trace),
            optimizer=setting.outer_bytes * trace.trained,
        )
        # Paged states move to the host when the GPU is short.
        if setting.paged and setting.gpu:
            return device, Memory(optimizer=states)
        return device.plus(Memory(optimizer=states)), Memory()

    def backward(self, setting: Setting, trace: Trace, moment: Moment) -> tuple[float, float]:
        arrived = min(moment.gradients, trace.trained)
        held = trace.trained if setting.accumulates else arrived
        copied = float(FP32 * trace.trained) if self.copies_gradients else 0.0
        return FP32 * held, copied

    def update(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        device, host = self.kept(setting, trace)
        # Fused AdamW and SGD without momentum need no memory. An outer step is not fused.
        outer = FP32 if setting.outer_bytes else 0.0
        makes = max(setting.update_bytes, outer)
        shard = trace.trained / setting.shards
        at_once = shard
        # On a host the optimizer updates one tensor after another.
        apart = not setting.gpu or (setting.updates_apart and not outer)
        if apart or "optimizer" in setting.offload:
            at_once = min(trace.largest, trace.trained) / setting.shards
        if setting.offload:
            return device, host.plus(Memory(optimizer=makes * at_once))
        work = Memory(gradients=FP32 * shard, optimizer=makes * at_once)
        if self.copies_gradients:
            work = replace(work, communication=FP32 * trace.trained)
        return device.plus(work), host

    def loading(self, setting: Setting, trace: Trace, gpu_bytes: float | None) -> Memory:
        del gpu_bytes
        turned = turned_of(setting, trace)
        if setting.gpu:  # a tensor at a time
            return Memory(parameters=turned / trace.parameters * trace.largest)
        return Memory(parameters=float(turned))

    def saving(self, setting: Setting, trace: Trace) -> Memory:
        if not setting.gpu:
            return Memory()
        return gathered_to_save(setting, trace)
