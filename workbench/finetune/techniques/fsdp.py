"""Technique `fsdp`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.base.errors import ConfigError
from workbench.finetune.options.adapters import Fsdp as Options
from workbench.finetune.options.choices import BITSANDBYTES
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.plain import Plain
from workbench.finetune.techniques.sizes import (
    FOUR_BITS,
    FP32,
    Memory,
    Moment,
    Parameters,
    Setting,
    Trace,
    gathered_to_save,
    pinned_one_by_one,
    scales_of,
    states_of,
    turned_of,
    weights_of,
)
from workbench.finetune.techniques.step_hooks import TechniquePoints
from workbench.finetune.techniques.technique import UPDATE, Parts


class ShardedPoints(TechniquePoints):
    """Hooks of FSDP: `fully_shard` has placed the shards, so no library may move them."""

    moves_model = False

    def __init__(self, job: FineTuneOptions) -> None:
        self._scales = job.precision == "fp16"
        self._reduces_once = Options.from_dict(job.fsdp).reduce == "step"

    def begin_micro_batch(self, model: Any, *, last: bool) -> None:
        if self._reduces_once:
            model.set_requires_gradient_sync(last)

    def scaler(self, device: Any) -> Any:
        from workbench.finetune.techniques.on_pods.sharding import ShardScaler

        if not self._scales:
            return None
        return ShardScaler(device.type)

    def wrap(self, accelerator: Any, model: Any, **_options: Any) -> Any:
        del accelerator  # it would refuse the shards, or wrap them in DDP
        return model

    def clip(self, trainer: Any, _model: Any) -> Any:
        from workbench.finetune.techniques.on_pods.sharding import clip_gradients

        if trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.unscale_(trainer.optimizer.optimizer)
        return clip_gradients(trainer.model, trainer.args.max_grad_norm)


class FSDP(Plain):
    """torch's sharding (`fully_shard`) of parameters, gradients and optimizer states, by layer."""

    name = "fsdp"
    engine = "fsdp"
    words = "FSDP"
    options = "fsdp"
    spreads = ("trained", *UPDATE)
    autocasts = False
    places_weights = True
    gathers_packed = True
    scales_on_cpus = True
    no_muon = "shards them"
    preference = 40
    recipe = False

    def refuse(self, job: FineTuneOptions) -> None:
        options = Options.from_dict(job.fsdp)
        if options.group is not None and options.shard != "hybrid":
            raise ConfigError(
                f"fsdp group is for shard 'hybrid', and shard is '{options.shard}'; drop one"
            )
        if options.layer_parameters is not None and options.layers:
            raise ConfigError(
                "fsdp layers and layer_parameters both say what is sharded by itself; give one"
            )
        if job.optimizer in BITSANDBYTES:
            raise ConfigError(
                f"optimizer '{job.optimizer}' does not know sharded "
                "tensors; use 'adamw' with 'fsdp', or 'zero2'"
            )
        if options.reduce == "step" and job.gradient_accumulation_steps == 1:
            raise ConfigError(
                "fsdp reduce 'step' is for several micro-batches in a step, and "
                "gradient_accumulation_steps is 1; drop one"
            )
        super().refuse(job)

    def refuse_on_pods(self, job: FineTuneOptions, *, gpus: int, on_pod: int) -> None:
        options = Options.from_dict(job.fsdp)
        if on_pod < 2 and options.shard == "hybrid" and options.group is None:
            raise ConfigError(
                "fsdp shard 'hybrid' shards within each pod, and a pod without "
                "several GPUs has one slot; use 'full' or 'grads', or give a group"
            )
        super().refuse_on_pods(job, gpus=gpus, on_pod=on_pod)

    def refuse_ranks(self, job: FineTuneOptions, ranks: int) -> None:
        group = Options.from_dict(job.fsdp).group
        if group is not None and (group < 2 or ranks % group):
            raise ConfigError(
                f"fsdp group is {group}, and {ranks} ranks cannot be put into groups of as many"
            )

    def shards(self, job: FineTuneOptions, *, ranks: int, on_pod: int) -> int:
        """Return the ranks that share a weight.

        A group or a pod's ranks for `hybrid`, else all ranks.
        """
        options = Options.from_dict(job.fsdp)
        if options.shard == "hybrid":
            return options.group or on_pod
        return ranks

    def wrap(self, model: Any, job: FineTuneOptions, *, gpus: int, parts: Parts) -> None:
        from workbench.finetune.techniques.on_pods.sharding import shard_model

        shard_model(model, job, gpus=gpus, parts=parts)

    def training_options(self, job: FineTuneOptions, options: Mapping[str, Any]) -> dict[str, Any]:
        optimizer = str(options["optim"])
        # The fused update used twice as much memory in a measured run on CPUs.
        if options["use_cpu"] or Options.from_dict(job.fsdp).offload:
            optimizer = optimizer.removesuffix("_fused")
        return {
            **options,
            "optim": optimizer,
            # The layers are gathered in the half format; autocast would convert a second time.
            "bf16": False,
            "fp16": False,
            # `wrap` has compiled the layers.
            "torch_compile": False,
            "torch_compile_backend": None,
            "torch_compile_mode": None,
        }

    def points(self, job: FineTuneOptions) -> TechniquePoints:
        return ShardedPoints(job)

    def runs(self, trainer: Any) -> bool:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        weights = trainer.model.parameters()
        if not isinstance(trainer.model, FSDPModule):
            return False
        return any(isinstance(weight, DTensor) for weight in weights)

    def resharded(self, trainer: Any, states: Sequence[Any], *, rank: int, ranks: int) -> Any:
        from workbench.finetune.techniques.on_pods.plain_state import cut_anew

        del rank, ranks  # each weight knows its place among the ranks
        return cut_anew(trainer, states)

    def setting(self, plain: Setting, job: FineTuneOptions, config: Mapping[str, Any]) -> Setting:
        del config
        options = Options.from_dict(job.fsdp)
        half = job.number_format in ("bf16", "fp16")
        # Gradients are sent in the format of the arithmetic, unless summed in FP32.
        reduce_bytes = 2 if half and not options.reduce_in_fp32 else 4
        if job.communication:
            reduce_bytes = 4 if job.communication == "fp32" else 2
        update_bytes = plain.update_bytes
        # On the host the update is not fused.
        if job.optimizer == "adamw" and (options.offload or not plain.gpu):
            update_bytes = 8.0
        return replace(
            plain,
            compute_bytes=2 if half else 4,
            update_bytes=update_bytes,
            prefetch=options.prefetch,
            offload=("optimizer", "parameters") if options.offload and plain.gpu else (),
            gathers_all=options.shard == "grads",
            reduce_bytes=reduce_bytes,
            reduces_once=options.reduce == "step",
        )

    def kept(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        weights = weights_of(setting, trace) / setting.shards
        states = states_of(setting, trace) / setting.shards
        scales = Memory(parameters=scales_of(setting, trace))  # which stay whole
        if setting.offload:
            gradients = FP32 * trace.trained / setting.shards
            if not setting.packed:
                # `CPUOffloadPolicy(pin_memory=True)` page-locks every shard, and torch every
                # gradient that it copies to the host without waiting (_fsdp_collectives.py).
                size = setting.weight_bytes
                if trace.trained < trace.parameters:
                    size = setting.frozen_bytes
                weights = pinned_one_by_one(trace, size=size, shards=setting.shards)
                if trace.trained == trace.parameters:
                    gradients = weights
            return scales, Memory(parameters=weights, optimizer=states, gradients=gradients)
        shards = Memory(parameters=weights, optimizer=states)
        return scales.plus(shards), Memory()

    def backward(self, setting: Setting, trace: Trace, moment: Moment) -> tuple[float, float]:
        gathered = _gathered(setting, trace, moment)
        # Every rank adds up the whole gradients of the micro-batches.
        if setting.reduces_once:
            gathered += float(setting.reduce_bytes * trace.trained)
        if setting.offload:
            return 0.0, gathered
        whole, _ = super().backward(setting, trace, moment)
        # `gathered` counts the gradients that are still whole.
        if not setting.accumulates:
            whole -= FP32 * _unreduced(trace, moment)
        return max(0.0, whole) / setting.shards, gathered

    def entering(self, setting: Setting, trace: Trace) -> float:
        """Return the bytes of the embeddings and the output layer, gathered as the first group.

        `foreach_all_gather` of torch 2.13 gathers a group into one buffer. The weights are copied
        from the buffer, and the buffer is freed when the next group has arrived
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `wait_for_unshard`).
        """
        rest = _whole(setting, trace.rest)
        return 2 * rest + _whole(setting, trace.largest_layer)

    def loading(self, setting: Setting, trace: Trace, gpu_bytes: float | None) -> Memory:
        del gpu_bytes
        weights = weights_of(setting, trace)
        # Each rank packs the whole model on the host, and then shards it.
        if setting.packed:
            return Memory(parameters=weights + scales_of(setting, trace))
        # Layers are converted one after another.
        group = max(trace.largest_layer.all, trace.rest.all)
        share = turned_of(setting, trace) / trace.parameters
        on_gpu = setting.gpu and not setting.offload
        shards = 0.0 if on_gpu else weights / setting.shards
        return Memory(parameters=shards, communication=share * group)

    def saving(self, setting: Setting, trace: Trace) -> Memory:
        return gathered_to_save(setting, trace)


def _whole(setting: Setting, group: Parameters) -> float:
    """Return the bytes of a gathered group."""
    size = setting.compute_bytes
    packed = FOUR_BITS if setting.packed else size
    return size * (group.all - group.packed) + packed * group.packed


def _gathered(setting: Setting, trace: Trace, moment: Moment) -> float:
    """Return the bytes of whole layers at a moment of a step, and of temporary copies."""
    layer = trace.largest_layer
    layers = len(trace.layers) if setting.gathers_all else 1 + max(1, setting.prefetch)
    every_layer = sum(_whole(setting, each) for each in trace.layers)
    gathered = min(layers * _whole(setting, layer), every_layer) + _whole(setting, trace.rest)
    if not moment.gradients:
        return gathered
    gathered += (FP32 + setting.compute_bytes) * layer.trained
    # Gradients of the rest stay whole until the end of the backward pass.
    unreduced = setting.compute_bytes * _unreduced(trace, moment)
    if moment.gradients < trace.trained:
        return gathered + unreduced
    # Then they are copied into one buffer, beside the weights (`foreach_reduce`).
    copied = setting.reduce_bytes * trace.rest.trained
    return max(gathered, _whole(setting, trace.rest) + unreduced + copied)


def _unreduced(trace: Trace, moment: Moment) -> int:
    """Return the elements of the rest's gradients that exist, whole, at a moment of a step."""
    rest = trace.rest
    if not rest.trained or not moment.gradients:
        return 0
    if moment.gradients >= trace.trained:
        return rest.trained
    # The output layer's gradient arrives first. If the embeddings are the same weight, the trace
    # counts the unfinished gradient.
    return 0 if trace.is_tied else min(int(moment.gradients), rest.largest)
