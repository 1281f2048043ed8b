"""Claims about number formats."""

from __future__ import annotations

from functools import partial

from workbench.verify.claims.jobs import AMPERE, STEPS, llama, tiny
from workbench.verify.claims.techniques import on_device
from workbench.verify.figures import Broken, Cannot, at_most, curve, difference, engine
from workbench.verify.pods import Pods
from workbench.verify.row import Row

_HALF_OFF = 0.05


def _bf16(technique: str, pods: Pods) -> str:
    if pods.has_gpus and not pods.first.bf16:
        raise Cannot("the GPU has no bf16")
    return _half(pods, technique, "bf16", "bfloat16")


def _fp16(technique: str, pods: Pods) -> str:
    if technique != "fsdp":
        pods.need_gpus("on CPUs only fsdp computes in fp16")
    return _half(pods, technique, "fp16", "float16")


def _half(pods: Pods, technique: str, precision: str, dtype: str) -> str:
    # In fp16 the first steps may be skipped, until the scale of the loss fits.
    steps = {"max_steps": 2 * STEPS} if precision == "fp16" else {}
    whole = pods.train(llama(pods, technique, **steps))
    run = pods.train(llama(pods, technique, precision=precision, **steps))
    on_device(pods, run)
    # A run whose linear layers compute in another format, or whose loss is not scaled in fp16,
    # fails after its first step.
    arithmetic = engine(run)["arithmetic"]
    if arithmetic != dtype:
        raise Broken(f"linear layers computed in {arithmetic}, not {dtype}")
    first = difference(curve(run, "loss")[:1], curve(whole, "loss")[:1])
    before, after = run.result.first_eval_loss, run.result.eval_loss
    if before is None or after is None or not after < before:
        raise Broken(f"the evaluation loss went from {before} to {after}")
    return (
        f"{at_most('first loss off fp32 by', first, _HALF_OFF)}, "
        f"evaluation from {before:.3g} to {after:.3g} (fp32 {whole.result.eval_loss:.3g})"
    )


def _tf32(pods: Pods) -> str:
    pods.need_gpus()
    if pods.first.capability < AMPERE:
        raise Cannot("TF32 needs a GPU of the Ampere generation or later")
    # A run whose products are not in TF32 fails after its first step.
    run = pods.train(tiny(pods, "ddp", precision="tf32"))
    off = difference(curve(run, "loss"), curve(pods.train(tiny(pods, "ddp")), "loss"))
    return at_most("loss off fp32 by", off, _HALF_OFF)


def _as_on_cpu(pods: Pods) -> str:
    pods.need_gpus()
    if not pods.main.spec.is_local:
        raise Cannot("the pods are not on this machine, so no pod computes on its CPU")
    on_gpu = pods.train(llama(pods, "single"))
    on_cpu = pods.train(llama(pods, "single"), cluster=pods.without_gpus)
    off = difference(curve(on_gpu, "loss"), curve(on_cpu, "loss"))
    return at_most("loss off the CPU's by", off, 0.01)


ROWS = (
    *(
        Row(
            "precision",
            f"bf16-{technique}",
            f"bf16 under {technique} follows fp32",
            partial(_bf16, technique),
        )
        for technique in ("ddp", "zero3", "fsdp")
    ),
    *(
        Row(
            "precision",
            f"fp16-{technique}",
            f"fp16 under {technique} scales the loss",
            partial(_fp16, technique),
        )
        for technique in ("ddp", "zero2", "fsdp")
    ),
    Row("precision", "tf32", "tf32 follows fp32", _tf32),
    Row("precision", "gpu-as-cpu", "a GPU has the losses of a CPU in fp32", _as_on_cpu, 180.0),
)
