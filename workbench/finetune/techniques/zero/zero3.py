"""Technique `zero3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench.base.errors import ConfigError
from workbench.base.json_values import get_object
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.sizes import (
    BEGIN,
    FP32,
    Memory,
    Moment,
    Setting,
    Trace,
    gathered_to_save,
    pinned_bytes,
    pinned_one_by_one,
    scales_of,
    states_of,
    weights_of,
)
from workbench.finetune.techniques.technique import UPDATE, Parts
from workbench.finetune.techniques.zero.nvme import config as nvme
from workbench.finetune.techniques.zero.nvme import memory
from workbench.finetune.techniques.zero.zero import Zero, is_offloaded, states_kept

if TYPE_CHECKING:
    from workbench.finetune.techniques.zero.state import ZeroState


class Zero3(Zero):
    """DeepSpeed ZeRO stage 3: parameters, gradients and optimizer states sharded."""

    name = "zero3"
    engine = "deepspeed-zero3"
    words = "ZeRO stage 3"
    config = "zero3.json"
    zero_stage = 3
    spreads = ("trained", *UPDATE)
    places_weights = True
    reads_whole = True
    may_offload = 0
    no_muon = "shards them"
    preference = 50

    def refuse(self, job: FineTuneOptions) -> None:
        if job.peft == "qlora":
            raise ConfigError(
                f"peft 'qlora' with technique '{self.name}' would shard weights of 4 bits; "
                "use 'fsdp', which can, 'zero2' or 'ddp' (4-bit weights are small), or peft 'lora'"
            )
        super().refuse(job)

    def refuse_config(self, config: Mapping[str, object], source: str) -> None:
        super().refuse_config(config, source)
        zero = get_object(config, "zero_optimization")
        if zero.get("stage3_gather_16bit_weights_on_model_save") is False:
            raise ConfigError(
                f"{source}: zero_optimization.stage3_gather_16bit_weights_on_model_save "
                "is false; it must be true for the trained model to be saved whole"
            )

    def fill_config(self, config: dict[str, Any]) -> None:
        zero = config["zero_optimization"]
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        nvme.fill(zero)

    def is_of(self, zero: Mapping[str, object]) -> bool:
        offloaded = is_offloaded(zero, "offload_optimizer")
        return super().is_of(zero) and offloaded == self.offloads

    def runs(self, trainer: Any) -> bool:
        optimizer = getattr(getattr(trainer, "deepspeed", None), "optimizer", None)
        return hasattr(optimizer, "fp32_partitioned_groups_flat")

    def config_of_run(self, config: dict[str, Any] | None, run: str) -> dict[str, Any] | None:
        from workbench.finetune.techniques.zero.nvme import folders

        return folders.own_folders(config, run)

    def prepare_pod(self, config: Mapping[str, Any] | None) -> None:
        from workbench.finetune.techniques.zero.nvme import folders

        folders.prepare_folders(config)

    def wrap(self, model: Any, job: FineTuneOptions, *, gpus: int, parts: Parts) -> None:
        from deepspeed.utils import set_z3_leaf_module

        super().wrap(model, job, gpus=gpus, parts=parts)
        for module in model.modules():
            # Ranks call the experts of their own tokens. A layer's experts are gathered together,
            # or ranks would wait for each other. Stacked experts are one module anyway.
            apart = any(next(child.parameters(), None) is not None for child in module.children())
            if apart and "Expert" in type(module).__name__:
                set_z3_leaf_module(module, True)

    def clean_pod(self, config: Mapping[str, Any] | None) -> None:
        from workbench.finetune.techniques.zero.nvme import folders

        folders.remove_folders(config)

    def tensors_in_files(self, trainer: Any) -> dict[int, Any]:
        from workbench.finetune.techniques.zero.nvme.state import files_of

        return files_of(trainer.deepspeed.optimizer)

    def part_of(self, engine: Any) -> ZeroState:
        from workbench.finetune.techniques.zero.state import Stage3State

        return Stage3State(engine)

    def kept(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        master = FP32 * trace.trained / setting.shards
        states = states_of(setting, trace) / setting.shards
        gradients = setting.weight_bytes * trace.trained / setting.shards
        bucket = float(setting.bucket * setting.weight_bytes)
        device = Memory(parameters=scales_of(setting, trace), communication=bucket)
        host = Memory()
        # Weights: on the device, on the host, or on a disk with buffers.
        if "parameters" in setting.offload:
            host = host.plus(Memory(parameters=_weights_on_host(setting, trace)))
        else:
            weights = weights_of(setting, trace) / setting.shards
            device = device.plus(Memory(parameters=weights))
        # Optimizer states: on a disk, on the host, or on the device.
        through = memory.optimizer_in_memory(setting, trace)
        if through is not None:
            return device, host.plus(Memory(optimizer=through, gradients=gradients))
        if "optimizer" in setting.offload:
            # Gradients are kept there in FP32, beside gradients in the weights' own format
            # (stage3.py: `subgroup_gradient_buffer`, `grad_partitions_flat_buffer`).
            both = gradients + FP32 * trace.trained / setting.shards
            if "optimizer" in setting.pinned:
                both = pinned_bytes(gradients) + _pinned_sub_groups(setting, trace)
            return device, host.plus(Memory(optimizer=master + states, gradients=both))
        mine, theirs = states_kept(
            setting,
            device,
            master=master,
            states=states,
            gradients=gradients,
        )
        return mine, host.plus(theirs)

    def backward(self, setting: Setting, trace: Trace, moment: Moment) -> tuple[float, float]:
        arrived = min(moment.gradients, trace.trained)
        bucket = min(setting.bucket, trace.trained)
        # A full bucket is copied, split and reduced to parts.
        reduced = bucket if arrived >= bucket else 0
        return 0.0, setting.weight_bytes * (_gathered(setting, trace, moment) + 3 * reduced)

    def entering(self, setting: Setting, trace: Trace) -> float:
        return setting.weight_bytes * _gathered(setting, trace, BEGIN)

    def arriving(self, setting: Setting, trace: Trace) -> float:
        """Return the bytes of the buffer that the output layer is copied from.

        `AllGatherCoalescedHandle` of DeepSpeed 0.19.8 frees the buffer after the copy. A single
        rank needs no buffer since DeepSpeed 0.9.2; the sum is then too large by the buffer.
        """
        is_kept = trace.is_tied and trace.parameters <= setting.live
        if is_kept or not setting.prefetch:
            return 0.0
        return float(setting.weight_bytes * trace.largest)

    def update(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        """Return the memory of a rank during the update of a sub-group of its part."""
        device, host = self.kept(setting, trace)
        at_once = min(trace.trained / setting.shards, setting.sub_group)
        work = Memory(gradients=FP32 * at_once, optimizer=setting.update_bytes * at_once)
        small = trace.no_larger_than(setting.persist)
        whole = Memory(communication=float(setting.weight_bytes * small))
        device = device.plus(whole)
        if "optimizer" not in setting.offload:
            return device.plus(work), host
        on_host = work.optimizer
        if not setting.gpu:
            on_host += work.gradients
        return device, host.plus(Memory(optimizer=on_host))

    def loading(self, setting: Setting, trace: Trace, gpu_bytes: float | None) -> Memory:
        del gpu_bytes
        on_gpu = setting.gpu and "parameters" not in setting.offload
        shards = 0.0
        if not on_gpu:
            shards = weights_of(setting, trace) / setting.shards
        whole = 0.0
        if not setting.gpu:
            whole = float(setting.weight_bytes * trace.largest)
        return Memory(parameters=shards, communication=whole)

    def saving(self, setting: Setting, trace: Trace) -> Memory:
        return gathered_to_save(setting, trace)


def _weights_on_host(setting: Setting, trace: Trace) -> float:
    """Return the bytes of a rank's weights on the host."""
    # DeepSpeed 0.19.8 page-locks every weight's part separately if the JSON has `pin_memory`
    # (partition_parameters.py, `_partition_param`). It then copies the trained ones into one
    # page-locked tensor in any case (stage3.py, `_create_param_groups_fp16_flat_cpu_memory`). torch
    # keeps the memory of the first copies.
    if setting.weight_buffers or not setting.gpu:
        return memory.weights_in_memory(setting, trace)
    trained = setting.weight_bytes * trace.trained / setting.shards
    together = pinned_bytes(trained)
    if "parameters" in setting.pinned:
        each = pinned_one_by_one(trace, size=setting.weight_bytes, shards=setting.shards)
        return each + together
    return weights_of(setting, trace) / setting.shards - trained + together


def _pinned_sub_groups(setting: Setting, trace: Trace) -> float:
    """Return the bytes of the page-locked gradients in FP32, a tensor for every sub-group."""
    shard = trace.trained / setting.shards
    full, rest = divmod(shard, setting.sub_group)
    return full * pinned_bytes(FP32 * setting.sub_group) + pinned_bytes(FP32 * rest)


def _gathered(setting: Setting, trace: Trace, moment: Moment) -> float:
    """Return the number of whole elements at a moment of a step, with those in a buffer."""
    # The rules are those of DeepSpeed 0.19.8, `zero/partitioned_param_coordinator.py` and
    # `zero/partition_parameters.py`.
    whole = float(trace.parameters)
    # The backward pass frees layers, and gathers only remaining layers ahead.
    ahead_of = max(0.0, whole - whole * moment.gradients / max(1, trace.trained))
    # Every module that runs starts the gather of `prefetch` more elements, until `live` elements
    # are whole: the gathering runs far ahead. Weights are gathered whole, so the last weight may
    # exceed the limit; the largest is often an embedding or the output layer.
    gathered = min(ahead_of, setting.live + trace.largest) if setting.prefetch else 0.0
    # A layer is kept if its next use is within `reuse` elements. Forward and backward pass share
    # that distance. The weights at work stay whole in any case.
    kept = min(whole, setting.reuse / 2, ahead_of)
    at_work = max(trace.largest_layer.all, trace.rest.largest)
    small = trace.no_larger_than(setting.persist)
    gathered = max(gathered, kept, at_work, small)
    # What the backward pass gathers ahead arrives in a buffer, from which the weights are copied.
    if setting.prefetch and moment.gradients:
        gathered += min(setting.prefetch, max(0.0, ahead_of - gathered))
    return gathered
