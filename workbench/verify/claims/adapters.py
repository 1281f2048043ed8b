"""Claims about adapters beside weights in 4 bits."""

from __future__ import annotations

from functools import partial

from workbench.verify.claims.jobs import llama
from workbench.verify.claims.techniques import on_device
from workbench.verify.figures import Broken, Cannot, at_most, curve, difference, engine
from workbench.verify.pods import Pods
from workbench.verify.row import Row

_OFF = 0.03


def _qlora(technique: str, pods: Pods) -> str:
    pods.need_package("bitsandbytes", "bitsandbytes")
    # `ddp` is compared with a single rank, the others too: the batch is the same.
    precision = "bf16" if pods.has_gpus and pods.first.bf16 else "fp32"
    how = {"peft": "qlora", "precision": precision}
    run = pods.train(llama(pods, technique, **how))
    on_device(pods, run)
    if not engine(run)["packed"]:
        raise Broken("no weight is in 4 bits")
    reference = pods.train(llama(pods, "single", **how))
    off = difference(curve(run, "loss"), curve(reference, "loss"))
    return f"4 bits, {precision}, {at_most('loss off single by', off, _OFF)}"


def _lora(pods: Pods) -> str:
    if pods.has_gpus and not pods.first.bf16:
        raise Cannot("the GPU has no bf16")
    run = pods.train(llama(pods, "ddp", peft="lora", precision="bf16"))
    on_device(pods, run)
    whole = pods.train(llama(pods, "ddp", peft="lora"))
    return at_most("loss off fp32 by", difference(curve(run, "loss"), curve(whole, "loss")), _OFF)


ROWS = (
    Row("adapters", "lora-bf16", "LoRA in bf16 follows fp32", _lora, 180.0),
    *(
        Row(
            "adapters",
            f"qlora-{technique}",
            f"qlora under {technique} follows single",
            partial(_qlora, technique),
            180.0,
        )
        for technique in ("ddp", "zero2", "fsdp")
    ),
)
