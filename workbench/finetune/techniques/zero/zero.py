"""Base class of the stages of DeepSpeed's ZeRO. Stages 1 and 2 are similar.

Stage 3 is different.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.base.errors import ConfigError
from workbench.base.json_values import get_object
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.sizes import (
    CONTEXT_BYTES,
    FP32,
    Memory,
    Moment,
    Setting,
    Trace,
    gathered_to_save,
    pinned_bytes,
    scales_of,
    states_of,
    turned_of,
    weights_of,
)
from workbench.finetune.techniques.step_hooks import TechniquePoints
from workbench.finetune.techniques.technique import UPDATE, Technique
from workbench.finetune.techniques.zero.numbers import number_of
from workbench.finetune.techniques.zero.nvme.config import (
    OPTIMIZER,
    WEIGHTS,
    buffers_of,
    check_disks,
    prefetch_of,
)

if TYPE_CHECKING:
    from workbench.finetune.techniques.zero.state import ZeroState

PREFETCH = 50_000_000
"""Elements that stage 3 gathers ahead by default."""
_OFFLOADS = (OPTIMIZER, WEIGHTS)
_ON_HOST = ("optimizer", "parameters")


def is_offloaded(zero: Mapping[str, object], key: str) -> bool:
    """Return whether a section of `zero_optimization` offloads."""
    return get_object(zero, key).get("device") not in (None, "none")


class ZeroPoints(TechniquePoints):
    """Hooks of DeepSpeed: the engine clips gradients in its own step."""

    def clip(self, _trainer: Any, _model: Any) -> Any:
        return None

    def norm(self, trainer: Any, _model: Any, _clipped: Any) -> Any:
        # The library and accelerate would wait for the norm on the engine's device.
        return trainer.deepspeed.get_global_grad_norm()


class Zero(Technique, shared=True):
    """Stages 1 and 2: weights are whole, the update is spread over the ranks."""

    # Under stage 1, too, DeepSpeed reduces the averaged gradients to the rank's own part.
    spreads: ClassVar[tuple[str, ...]] = UPDATE
    autocasts: ClassVar[bool] = False
    half_weights: ClassVar[bool] = True
    may_offload: ClassVar[int] = 1
    """Allowed offload of the name: 0 none, 1 optimizer states, 2 parameters as well."""

    def refuse_config(self, config: Mapping[str, object], source: str) -> None:
        zero = get_object(config, "zero_optimization")
        stage = zero.get("stage", 0)
        if stage == 0:
            found = "stage is 0" if "stage" in zero else "has no stage"
            raise ConfigError(
                f"{source}: zero_optimization {found}, and FineTune runs DeepSpeed with stage 1, 2 "
                f"or 3. Write \"stage\": {self.zero_stage} for technique '{self.name}', or drop "
                "deepspeed and use technique 'ddp'"
            )
        if stage != self.zero_stage:
            raise ConfigError(
                f"{source}: zero_optimization.stage is {stage!r}, and technique "
                f"'{self.name}' is stage {self.zero_stage}; change one of them"
            )
        for old in ("cpu_offload", "cpu_offload_param"):
            if zero.get(old):
                raise ConfigError(
                    f"{source}: zero_optimization.{old} is "
                    "deprecated; use offload_optimizer, offload_param"
                )
        if self.offloads and not is_offloaded(zero, "offload_optimizer"):
            raise ConfigError(
                f"{source}: technique '{self.name}' needs zero_optimization.offload_optimizer "
                "with a device; add it, or choose technique 'zero3'"
            )
        wrong = [key for key in _OFFLOADS[self.may_offload :] if is_offloaded(zero, key)]
        if wrong:
            what = "optimizer states alone" if self.may_offload else "nothing"
            raise ConfigError(
                f"{source}: zero_optimization.{wrong[0]} is set, and technique '{self.name}' "
                f"offloads {what}; choose technique 'zero3-offload', or remove it"
            )
        check_disks(config, source)

    def is_of(self, zero: Mapping[str, object]) -> bool:
        return zero.get("stage", 0) == self.zero_stage

    def points(self, job: FineTuneOptions) -> TechniquePoints:
        del job
        return ZeroPoints()

    def runs(self, trainer: Any) -> bool:
        optimizer: Any = getattr(getattr(trainer, "deepspeed", None), "optimizer", None)
        if not hasattr(optimizer, "single_partition_of_fp32_groups"):
            return False
        return bool(optimizer.partition_gradients) == (self.zero_stage == 2)

    def part_of(self, engine: Any) -> ZeroState:
        """Return the rank's part of a training state."""
        from workbench.finetune.techniques.zero.state import ZeroState

        return ZeroState(engine)

    def snapshot(self, trainer: Any, *, rank: int) -> dict[str, object] | None:
        del rank
        return self.part_of(trainer.model_wrapped).capture()

    def restore(self, trainer: Any, state: Any) -> None:
        self.part_of(trainer.model_wrapped).put_back(state)

    def resharded(self, trainer: Any, states: Sequence[Any], *, rank: int, ranks: int) -> Any:
        return self.part_of(trainer.model_wrapped).cut_anew(states, rank=rank, ranks=ranks)

    def setting(self, plain: Setting, job: FineTuneOptions, config: Mapping[str, Any]) -> Setting:
        zero = config.get("zero_optimization", {})
        half = job.number_format in ("bf16", "fp16")
        # On CPUs DeepSpeed's own AdamW, not fused, updates if the JSON has an optimizer or an
        # offload.
        own = not plain.gpu and bool("optimizer" in config or zero.get("offload_optimizer"))
        offload = []
        pinned = []
        for name, key in zip(_ON_HOST, _OFFLOADS, strict=True):
            section = get_object(zero, key)
            if section.get("device", "none") == "none":
                continue
            offload.append(name)
            # Without a GPU nothing is page-locked.
            if section.get("pin_memory") and plain.gpu:
                pinned.append(name)
        prefetch = plain.prefetch
        if zero:
            # The same default as in the filled configuration.
            ahead = prefetch_of(zero, PREFETCH)
            prefetch = number_of(zero, "stage3_prefetch_bucket_size", ahead)
        weight_bytes = 2 if half else 4
        # A rank's part is one tensor for Lion and Muon. Muon's matrices in bf16 are small.
        update_bytes = min(plain.update_bytes, 4.0)
        if own and job.optimizer == "adamw":
            update_bytes = 8.0
        return replace(
            plain,
            weight_bytes=weight_bytes,
            frozen_bytes=weight_bytes,
            compute_bytes=weight_bytes,
            update_bytes=update_bytes,
            bucket=number_of(zero, "reduce_bucket_size", plain.bucket),
            buckets=2 if zero.get("overlap_comm") and self.zero_stage < 3 else 1,
            prefetch=prefetch,
            persist=number_of(zero, "stage3_param_persistence_threshold", plain.persist),
            live=number_of(zero, "stage3_max_live_parameters", plain.live),
            reuse=number_of(zero, "stage3_max_reuse_distance", plain.reuse),
            sub_group=number_of(zero, "sub_group_size", plain.sub_group),
            offload=tuple(offload),
            pinned=tuple(pinned),
            **buffers_of(zero),
        )

    def kept(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        shard = trace.trained / setting.shards
        master = FP32 * trace.trained / setting.shards
        states = states_of(setting, trace) / setting.shards
        device = Memory(parameters=scales_of(setting, trace) + weights_of(setting, trace))
        if "optimizer" in setting.offload:
            # Gradients are kept there in FP32. The rest:
            # `param_buffer_of_bit16_for_cpu_offload_groups`, `temp_grad_buffer_for_cpu_` and
            # `_gpu_`. DeepSpeed page-locks all but the states (stage_1_and_2.py).
            taken = pinned_bytes if "optimizer" in setting.pinned else float
            largest = float(setting.weight_bytes * trace.largest)
            host = Memory(
                optimizer=taken(master) + states + taken(setting.weight_bytes * shard),
                gradients=taken(FP32 * shard),
                communication=taken(largest),
            )
            return device.plus(Memory(communication=largest)), host
        return states_kept(
            setting,
            device,
            master=master,
            states=states,
            gradients=0.0,
        )

    def backward(self, setting: Setting, trace: Trace, moment: Moment) -> tuple[float, float]:
        arrived = min(moment.gradients, trace.trained)
        size = setting.weight_bytes
        bucket = min(setting.bucket, trace.trained)
        # A GPU allocates its buckets whole; on a CPU only written pages count. Gradients to reduce
        # are copied together.
        buckets = setting.bucket * setting.buckets
        written = 0.0
        if not setting.gpu:
            written = min(buckets, arrived)
        elif arrived:
            written = buckets
        if arrived >= bucket:
            written += bucket
        return self.gradients_kept(setting, trace, arrived), float(size * written)

    def gradients_kept(self, setting: Setting, trace: Trace, arrived: float) -> float:
        """Return the bytes of gradients that a rank keeps until the update."""
        if "optimizer" in setting.offload:
            return 0.0
        if arrived > setting.bucket or setting.accumulates:
            return setting.weight_bytes * trace.trained / setting.shards
        return 0.0

    def update(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        """Return the memory of a rank's update of its part, with an FP32 copy of its gradients."""
        device, host = self.kept(setting, trace)
        shard = trace.trained / setting.shards
        work = Memory(gradients=FP32 * shard, optimizer=setting.update_bytes * shard)
        # The gradients are already in FP32 on the host.
        if "optimizer" in setting.offload:
            return device, host.plus(replace(work, gradients=0.0))
        gradients = (FP32 + setting.weight_bytes) * shard
        return device.plus(replace(work, gradients=gradients)), host

    def loading(self, setting: Setting, trace: Trace, gpu_bytes: float | None) -> Memory:
        turned = turned_of(setting, trace)
        flat = float(setting.weight_bytes * trace.trained)
        if not setting.gpu:
            return Memory(parameters=float(turned), communication=flat)
        # Trained weights are copied into one tensor: on the GPU if both fit there, else on the
        # host, beside a copy.
        here = 0.0
        if gpu_bytes is not None:
            room = gpu_bytes - CONTEXT_BYTES - weights_of(setting, trace)
            if room < flat:
                here = 2 * flat
        parameters = turned / trace.parameters * trace.largest
        return Memory(parameters=parameters, communication=here)

    def saving(self, setting: Setting, trace: Trace) -> Memory:
        if not setting.gpu:
            return Memory()
        return gathered_to_save(setting, trace)


def states_kept(
    setting: Setting,
    device: Memory,
    *,
    master: float,
    states: float,
    gradients: float,
) -> tuple[Memory, Memory]:
    """Add master weights, states and gradients to the weights; paged states move to the host."""
    if setting.paged and setting.gpu:
        mine = Memory(optimizer=master, gradients=gradients)
        return device.plus(mine), Memory(optimizer=states)
    return device.plus(Memory(optimizer=master + states, gradients=gradients)), Memory()
