"""What of a job decides how much memory its ranks need and how much they send, as numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigError
from workbench.base.json_values import part
from workbench.jobs.adapters import Fsdp, LocalSgd, Lora
from workbench.jobs.choices import Communication, Optimizer, Peft, Precision, Shard, Technique
from workbench.jobs.deepspeed.files import load
from workbench.jobs.evaluation import evaluates
from workbench.jobs.finetune import FineTune
from workbench.jobs.refusals import check_ranks

# DeepSpeed's own defaults: https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training
_BUCKET, _PREFETCH, _PERSIST, _REUSE, _SUB_GROUP = (
    500_000_000,
    50_000_000,
    100_000,
    1_000_000_000,
    1_000_000_000,
)
# Bytes that an optimizer keeps for an element: two FP32 numbers, or two bytes with an FP32 scale for each block of 256
# (https://arxiv.org/abs/2110.02861, section 2.1).
_STATES = {
    Optimizer.ADAMW: 8.0,
    Optimizer.SGD: 0.0,
    Optimizer.ADAMW_8BIT: 2 * (1 + 4 / 256),
    Optimizer.PAGED_ADAMW: 8.0,
    Optimizer.PAGED_ADAMW_8BIT: 2 * (1 + 4 / 256),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a technique trains, in the numbers that its memory and its speed depend on."""

    technique: Technique
    ranks: int
    shards: int
    """Ranks that the state is cut over; fewer where replicas stand on other pods."""
    on_pod: int
    spread: bool = False
    """Whether its one rank spreads the layers over the GPUs of the pod."""
    gpu: bool
    arithmetic: str
    """Which of the trace's steps it is."""
    weight_bytes: int
    """Bytes of a trained weight that is held."""
    frozen_bytes: int = 4
    """Bytes of a weight that is not trained."""
    file_bytes: float = 4
    """Bytes of a weight in the model's files."""
    compute_bytes: int
    """Bytes of a weight that is computed with, where it is gathered for that."""
    packed: bool
    state_bytes: float
    """Bytes that the optimizer keeps for a trained element."""
    outer_bytes: float = 0.0
    """The same of the outer step of local SGD: the weights of the last synchronisation, and a momentum."""
    paged: bool
    """Whether these move to the host when the GPU is short."""
    update_bytes: float
    """Bytes that an update which is not fused makes for an element beside the states."""
    accumulates: bool
    """Whether gradients live through more than one micro-batch."""
    bucket: int
    """Elements of a communication bucket."""
    buckets: int
    prefetch: int
    """Elements, or layers under FSDP, that are gathered ahead."""
    persist: int
    """Elements up to which ZeRO-3 keeps a parameter whole."""
    reuse: int
    """Elements within which ZeRO-3 keeps a parameter that is needed again."""
    sub_group: int
    """Elements that ZeRO-3 updates at once."""
    offload: tuple[str, ...]
    """What is kept on the host beside a GPU: `optimizer`, `parameters`."""
    gathers_all: bool
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


def setting_of(
    job: FineTune, *, pods: int, gpus: int, model: Mapping[str, object] | None = None
) -> Setting:
    """Work out a job's setting; `model` is the configuration of its model, which says the format of the files."""
    technique, precision = Technique(job.technique), job.number_format
    on_pod = max(1, gpus) if technique is not Technique.SINGLE else 1
    ranks = on_pod * pods if technique is not Technique.SINGLE else 1
    check_ranks(technique, ranks)
    fsdp = Fsdp.from_dict(job.fsdp)
    config: Mapping[str, Any] = load(job)[0] if technique.uses_deepspeed else {}
    zero = config.get("zero_optimization", {})
    ahead = (
        0 if part(zero, "offload_param").get("device") == "nvme" else _PREFETCH
    )  # as `resolve` fills it in
    half = precision in (Precision.BF16, Precision.FP16)
    shards = 1 if technique.replicates else ranks
    # That of FSDP, and on CPUs DeepSpeed's own.
    own = not gpus and bool("optimizer" in config or zero.get("offload_optimizer"))
    local = LocalSgd.from_dict(job.local_sgd)
    anchors = 8.0 if local.outer_momentum else 4.0
    saved = str((model or {}).get("dtype") or (model or {}).get("torch_dtype")).removeprefix(
        "torch."
    )
    unfused = job.optimizer == Optimizer.ADAMW and (technique is Technique.FSDP or own)
    return Setting(
        technique=technique,
        ranks=ranks,
        shards=(fsdp.group or on_pod)
        if technique is Technique.FSDP and fsdp.shard == Shard.HYBRID
        else shards,
        on_pod=on_pod,
        spread=job.device_map is not None and gpus > 1,
        gpu=gpus > 0,
        arithmetic=arithmetic_of(job),
        weight_bytes=2 if half and technique.uses_deepspeed else 4,
        frozen_bytes=2 if half and (technique.uses_deepspeed or job.peft != Peft.NONE) else 4,
        file_bytes=2 if saved in ("bfloat16", "float16") else 4,
        compute_bytes=2 if half and (not technique.replicates or job.peft == Peft.QLORA) else 4,
        packed=job.peft == Peft.QLORA,
        state_bytes=_STATES[Optimizer(job.optimizer)],
        outer_bytes=anchors if technique is Technique.LOCAL_SGD else 0.0,
        paged=job.optimizer.startswith("paged"),
        update_bytes=(4.0 if gpus and not fsdp.offload else 8.0) if unfused else 0.0,
        accumulates=job.gradient_accumulation_steps > 1,
        bucket=_number(zero, "reduce_bucket_size", _BUCKET),
        buckets=2 if zero.get("overlap_comm") and technique.zero_stage < 3 else 1,
        prefetch=fsdp.prefetch if not zero else _number(zero, "stage3_prefetch_bucket_size", ahead),
        persist=_number(zero, "stage3_param_persistence_threshold", _PERSIST),
        # After an evaluation, the one before the first step too, it keeps none: seen of DeepSpeed 0.19.8, not read.
        reuse=0 if evaluates(job) else _number(zero, "stage3_max_reuse_distance", _REUSE),
        sub_group=_number(zero, "sub_group_size", _SUB_GROUP),
        offload=("optimizer", "parameters")
        if fsdp.offload and gpus
        else tuple(
            name
            for name, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param"))
            if part(zero, key).get("device", "none") != "none"
        ),
        swap_buffers=_on_disk(zero, "offload_optimizer", "buffer_count", 4),
        weight_buffers=_on_disk(zero, "offload_param", "buffer_count", 5)
        * _on_disk(zero, "offload_param", "buffer_size", 100_000_000),
        weights_kept=_on_disk(zero, "offload_param", "max_in_cpu", 1_000_000_000),
        gathers_all=technique is Technique.FSDP and fsdp.shard == Shard.GRADS,
        reduce_bytes=_reduce_bytes(job, config, half=half),
        sync_steps=local.sync_steps,
    )


def setting_from(data: Mapping[str, Any]) -> Setting:
    """Read the JSON form of a setting, which `dataclasses.asdict` gives."""
    return Setting(
        **{**data, "technique": Technique(data["technique"]), "offload": tuple(data["offload"])}
    )


def arithmetic_of(job: FineTune) -> str:
    """Name the number formats of a job's step, as the trace does."""
    precision = job.number_format
    if precision not in (Precision.BF16, Precision.FP16):
        return "fp32"
    plain = Technique(job.technique).replicates
    # DeepSpeed and FSDP turn the weights themselves; else the Trainer computes under autocast.
    return f"autocast-{precision}" if plain else str(precision)


def request_of(
    job: FineTune,
    config: Mapping[str, object],
    arithmetic: Sequence[str],
    *,
    gpus: int,
    lengths: tuple[int, int] | None,
) -> dict[str, object]:
    source, target = lengths or (job.max_source_length, job.max_target_length)
    lora = Lora.from_dict(job.lora)
    return {
        "config": {
            name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")
        },
        "source": -(-source // 8) * 8,  # as the trainer pads
        "target": -(-target // 8) * 8,
        "arithmetic": sorted(set(arithmetic)),
        "checkpointing": job.gradient_checkpointing,
        **({"checkpoint_layers": list(job.checkpoint_layers)} if job.checkpoint_layers else {}),
        "lora": None
        if job.peft == Peft.NONE
        else {name: value for name, value in lora.to_dict().items() if name != "resume_from"},
        "gpu": gpus > 0,
        **(
            {}
            if job.router_aux_loss_coef is None
            else {"router_aux_loss_coef": job.router_aux_loss_coef}
        ),
        **({"spread": _spread(job, gpus)} if job.device_map and gpus > 1 else {}),
    }


def _spread(job: FineTune, gpus: int) -> dict[str, object]:
    limits = {gpu: int(gib * 2**30) for gpu, gib in job.max_memory.items()}
    return {
        "limits": limits or dict.fromkeys(map(str, range(gpus)), 1 << 60),
        "packed": job.peft == Peft.QLORA,
        "format": str(job.frozen_format),
    }


def _reduce_bytes(job: FineTune, config: Mapping[str, Any], *, half: bool) -> int:
    technique = Technique(job.technique)
    if technique is not Technique.LOCAL_SGD and (
        asked := config.get("communication_data_type") or job.communication
    ):
        return 4 if asked == Communication.FP32 else 2
    shrinks = technique.uses_deepspeed or (
        technique is Technique.FSDP and not Fsdp.from_dict(job.fsdp).reduce_in_fp32
    )
    return 2 if half and shrinks else 4


def _on_disk(zero: Mapping[str, Any], key: str, name: str, default: int) -> int:
    offload = part(zero, key)
    return _number(offload, name, default) if offload.get("device") == "nvme" else 0


def _number(zero: Mapping[str, Any], key: str, default: int) -> int:
    match zero.get(key, default):
        case "auto":
            return 1_000_000  # the Trainer puts a small number there
        case str():
            return default
        case int() | float() as value:
            return int(value)
        case value:
            raise ConfigError(
                f"deepspeed zero_optimization.{key} is {value!r}; it must be a number"
            )
