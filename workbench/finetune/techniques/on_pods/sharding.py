"""torch's own sharding (`fully_shard`, FSDP2) of a model over the ranks of a launcher.

Only pods import this module, because the module loads torch.

Do not ask the Trainer for FSDP: accelerate 1.15 silently uses plain DDP on CPUs. By default,
gradients are sharded after every micro-batch, as under ZeRO-2 and 3: accumulation costs more
traffic, but no rank holds whole gradients.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from workbench.base.errors import ConfigError
from workbench.finetune.options.adapters import Fsdp
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.technique import Parts

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_M_MMAP_THRESHOLD = -3  # of malloc.h


def shard_model(model: Any, job: FineTuneOptions, *, gpus: int, parts: Parts) -> None:
    """Shard a model in place: every part separately, and the rest as one more group.

    Args:
        model: A model in any number formats.
        job: The model's job.
        gpus: GPUs of a pod; 0 for CPUs.
        parts: Finds the parts of a model to shard separately.
    """
    options = Fsdp.from_dict(job.fsdp)
    layers = parts(model, options)
    if not gpus:
        _return_what_is_freed()
    offload = OffloadPolicy()
    if options.offload:
        offload = CPUOffloadPolicy(pin_memory=gpus > 0)
    how: dict[str, Any] = {
        "mesh": _mesh(options, "cuda" if gpus else "cpu"),
        "mp_policy": _policy(job, options),
        "offload_policy": offload,
    }
    keep = options.shard == "grads"
    compiler: dict[str, Any] = {
        name: job.training[f"torch_compile_{name}"]
        for name in ("backend", "mode")
        if f"torch_compile_{name}" in job.training
    }
    frozen = _HALF.get(job.frozen_format, torch.float32)
    # Shard inner layers before their outer layers.
    for layer in reversed(layers):
        _to_format(layer, trained=torch.float32, frozen=frozen)
        # The hooks that gather a layer's weights stay outside of the compiled code.
        if job.torch_compile:
            layer.forward = torch.compile(layer.forward, **compiler)
        fully_shard(layer, reshard_after_forward=not keep, **how)
    # The rest (embeddings, output layer, last norms) is used at both ends of a forward pass, so the
    # rest stays gathered.
    _to_format(model, trained=torch.float32, frozen=frozen)
    fully_shard(model, reshard_after_forward=False, **how)
    if gpus:
        _scales_to_gpu(model)
    if model.can_generate():
        register_fsdp_forward_method(model, "generate")
    _prefetch(layers, options.prefetch)


def _scales_to_gpu(model: Any) -> None:
    # The scales of weights in 4 bits are no parameters.
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        if state is not None:
            state.to(torch.device("cuda", torch.cuda.current_device()))


def _return_what_is_freed() -> None:
    # glibc keeps freed tensors of up to 32 MiB, and gathered layers fragment its heap. Two ranks of
    # a Llama with 53 million parameters took 1.3 GiB each; with this call 0.9 GiB.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _to_format(module: nn.Module, *, trained: torch.dtype, frozen: torch.dtype) -> None:
    """Convert weights to the formats of their storage."""
    # Convert one layer at a time: weights read from a file are its pages, shared by all ranks of a
    # pod.
    for parameter in module.parameters():
        # In 4 bits, with any declared format.
        packed = hasattr(parameter, "quant_state")
        sharded = isinstance(parameter, DTensor)
        if parameter.is_floating_point() and not packed and not sharded:
            dtype = trained if parameter.requires_grad else frozen
            parameter.data = parameter.data.to(dtype)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()


def clip_gradients(model: Any, limit: float) -> torch.Tensor:
    """Clip a sharded model's gradients and return their norm.

    DTensor's own way is slow at first.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    shards = [gradient.to_local() for gradient in gradients]
    mesh = gradients[0].device_mesh
    # The host holds the shards of an offload.
    squared = get_total_norm(shards).square().to(mesh.device_type)
    dist.all_reduce(squared, group=mesh.get_group("shard"))
    norm = squared.sqrt().to(shards[0].device)
    # The same formula as torch's clip_grad_norm_.
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(shards, factor)
    return norm


class ShardScaler(torch.amp.GradScaler):
    """Scale the loss for fp16. Ranks share the result of the overflow check on their shards."""

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        del allow_fp16  # shards are in FP32
        shards = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter.grad, DTensor):
                    shards.append(parameter.grad.to_local())
        # With an offload the shards are on the host.
        overflow = found_inf.to(shards[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            shards, overflow, inv_scale.to(overflow.device)
        )
        overflow = overflow.to(found_inf.device)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        return {overflow.device: overflow}


def _on_pod() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _mesh(options: Fsdp, device: str) -> DeviceMesh:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if options.shard != "hybrid":
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    group = options.group
    if group is not None:
        sizes = (world // group, group)
        return init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))
    on_pod = _on_pod()
    total = torch.tensor([on_pod], dtype=torch.int64, device=device)
    if world > 1:
        dist.all_reduce(total)
    uneven = int(total.item()) != on_pod * world
    if uneven:
        raise ConfigError(
            "fsdp shard 'hybrid' shards within each pod, and these pods have unequal numbers of "
            "slots; use 'full' or 'grads', or give a group"
        )
    # The launchers number the ranks pod by pod.
    sizes = (world // on_pod, on_pod)
    return init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))


def _policy(job: FineTuneOptions, options: Fsdp) -> MixedPrecisionPolicy:
    half = _HALF.get(job.number_format)
    sent = torch.float32 if half is None or options.reduce_in_fp32 else half
    if job.communication:
        sent = torch.bfloat16 if job.communication == "bf16" else torch.float32
    return MixedPrecisionPolicy(param_dtype=half, reduce_dtype=sent)


def _prefetch(layers: Sequence[nn.Module], ahead: int) -> None:
    # Modules are registered in the order of the forward pass, the encoder's before the decoder's.
    if not ahead:
        return
    sharded: list[FSDPModule] = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for number, layer in enumerate(sharded):
        later = sharded[number + 1 : number + 1 + ahead]
        layer.set_modules_to_forward_prefetch(later)
        earlier = sharded[max(0, number - ahead) : number]
        earlier.reverse()
        layer.set_modules_to_backward_prefetch(earlier)
