"""Reduce a job to the numbers that decide its memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import Facts, check, deepspeed_json
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.adapters import Lora
from workbench.finetune.options.choices import OWN_OPTIMIZERS
from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.techniques.sizes import Setting

# Bytes an optimizer keeps per element: two FP32 numbers, or two bytes plus an FP32 scale per block
# of 256 elements (https://arxiv.org/abs/2110.02861, section 2.1).
STATES = {
    "adamw": 8.0,
    "sgd": 0.0,
    "lion": 4.0,
    "muon": 8.0,
    "adamw-8bit": 2 * (1 + 4 / 256),
    "paged-adamw": 8.0,
    "paged-adamw-8bit": 2 * (1 + 4 / 256),
}

# Muon keeps an FP32 number per element of a matrix.
_MATRIX_STATES = {"muon": 4.0}
# Temporary bytes per element of the tensor that is updated: an FP32 number, and for Muon three
# matrices in bf16.
_UPDATES = {"lion": 4.0, "muon": 10.0}


def setting_of(
    job: FineTune,
    *,
    pods: int,
    gpus: int,
    ranks: int = 0,
    model: Mapping[str, object] | None = None,
) -> Setting:
    """Return a job's setting.

    `ranks` counts the ranks of a pod without GPUs; 0 means 1. `model` is the configuration with
    the format of the files.
    """
    technique = technique_of(job.technique)
    on_pod = 1 if technique.alone else gpus or ranks or 1
    every_rank = technique.ranks_of(pods, on_pod)
    given = deepspeed_json(job)
    config = given[0] if given else {}
    on_each = max(1, gpus)
    facts = Facts(config=model, gpus=gpus, on_pod=on_each, ranks=every_rank, deepspeed=given)
    check(job, facts)
    half = job.number_format in ("bf16", "fp16")
    model = model or {}
    file_format = model.get("dtype") or model.get("torch_dtype")
    read = str(file_format).removeprefix("torch.")
    file_bytes = 2 if read in ("bfloat16", "float16") else 4
    saved_bytes = 2 if half and (file_bytes == 2 or technique.half_weights) else 4
    # Start with a rank that holds everything. The technique then changes its own numbers.
    optimizer = job.optimizer
    plain = Setting(
        technique=technique.name,
        ranks=every_rank,
        shards=technique.shards(job, ranks=every_rank // job.tensor_parallel, on_pod=on_pod),
        sharers=job.tensor_parallel,
        on_pod=on_pod,
        spread=job.device_map is not None and gpus > 1,
        gpu=gpus > 0,
        arithmetic=arithmetic_of(job),
        frozen_bytes=2 if half and job.peft != "none" else 4,
        file_bytes=file_bytes,
        saved_bytes=saved_bytes,
        compute_bytes=2 if half and job.peft == "qlora" else 4,
        packed=job.peft == "qlora",
        state_bytes=STATES[optimizer],
        matrix_state_bytes=_MATRIX_STATES.get(optimizer),
        update_bytes=_UPDATES.get(optimizer, 0.0),
        updates_apart=optimizer in OWN_OPTIMIZERS,
        paged=job.optimizer.startswith("paged"),
        accumulates=job.gradient_accumulation_steps > 1,
        copies_saved=job.async_save,
    )
    return technique.setting(method_of(job.method).setting(plain, job, model), job, config)


def arithmetic_of(job: FineTune) -> str:
    """Return the name of the number formats of a job's step, as in the trace."""
    precision = job.number_format
    if precision not in ("bf16", "fp16"):
        return "fp32"
    autocasts = technique_of(job.technique).autocasts
    return f"autocast-{precision}" if autocasts else str(precision)


def request_of(
    job: FineTune,
    config: Mapping[str, object],
    arithmetic: Sequence[str],
    *,
    gpus: int,
    lengths: tuple[int, int] | None,
) -> dict[str, object]:
    source, target = lengths or method_of(job.method).learns_at_once(job)
    shape = dict(config)
    for name in ("dtype", "torch_dtype"):
        shape.pop(name, None)
    lora = None
    if job.peft != "none":
        lora = Lora.from_dict(job.lora).to_dict()
        lora.pop("resume_from", None)
    # A rank has its part of a row, and as many elements of the heads in the attention.
    source = -(-source // job.sequence_parallel)
    target = -(-target // job.sequence_parallel)
    request: dict[str, object] = {
        "config": shape,
        "source": -(-source // 8) * 8,  # the trainer pads to a multiple of 8
        "target": -(-target // 8) * 8,
        "arithmetic": sorted(set(arithmetic)),
        "checkpointing": job.gradient_checkpointing,
    }
    if job.checkpoint_layers:
        request["checkpoint_layers"] = list(job.checkpoint_layers)
    if job.checkpoint_policy:
        request["checkpoint_policy"] = job.checkpoint_policy
    request["lora"] = lora
    request["gpu"] = gpus > 0
    if method_of(job.method).scores:
        request["scores"] = True
    if job.router_aux_loss_coef is not None:
        request["router_aux_loss_coef"] = job.router_aux_loss_coef
    if job.device_map and gpus > 1:
        request["spread"] = _spread(job, gpus)
    return request


def _spread(job: FineTune, gpus: int) -> dict[str, object]:
    limits = {gpu: int(gib * 2**30) for gpu, gib in job.max_memory.items()}
    if not limits:
        limits = {str(gpu): 1 << 60 for gpu in range(gpus)}
    return {
        "limits": limits,
        "packed": job.peft == "qlora",
        "format": str(job.frozen_format),
    }
