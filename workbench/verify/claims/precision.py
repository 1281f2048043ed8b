"""Claims about number formats."""

from __future__ import annotations

from functools import partial

from workbench.verify.claims.jobs import AMPERE, STEPS, llama, tiny
from workbench.verify.claims.techniques import on_device
from workbench.verify.outcome import Broken, Cannot
from workbench.verify.row import Row
from workbench.verify.turn import Turn, at_most, curve, difference, engine

SUBJECT = "precision"
_HALF_OFF = 0.05


def _bf16(technique: str, turn: Turn) -> str:
    if turn.has_gpus and not turn.first.bf16:
        raise Cannot("the GPU has no bf16")
    return _half(turn, technique, "bf16", "bfloat16")


def _fp16(technique: str, turn: Turn) -> str:
    if technique != "fsdp":
        turn.need_gpus("on CPUs only fsdp computes in fp16")
    return _half(turn, technique, "fp16", "float16")


def _half(turn: Turn, technique: str, precision: str, dtype: str) -> str:
    # In fp16 the first steps may be skipped, until the scale of the loss fits.
    steps = {"max_steps": 2 * STEPS} if precision == "fp16" else {}
    whole = turn.train(llama(turn, technique, **steps))
    run = turn.train(llama(turn, technique, precision=precision, **steps))
    on_device(turn, run)
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


def _tf32(turn: Turn) -> str:
    turn.need_gpus()
    if turn.first.capability < AMPERE:
        raise Cannot("TF32 needs a GPU of the Ampere generation or later")
    # A run whose products are not in TF32 fails after its first step.
    run = turn.train(tiny(turn, "ddp", precision="tf32"))
    off = difference(curve(run, "loss"), curve(turn.train(tiny(turn, "ddp")), "loss"))
    return at_most("loss off fp32 by", off, _HALF_OFF)


def _as_on_cpu(turn: Turn) -> str:
    turn.need_gpus()
    if not turn.bench.is_local:
        raise Cannot("the pods are not on this machine, so no pod computes on its CPU")
    on_gpu = turn.train(llama(turn, "single"))
    on_cpu = turn.train(llama(turn, "single"), cluster=turn.bench.without_gpus)
    off = difference(curve(on_gpu, "loss"), curve(on_cpu, "loss"))
    return at_most("loss off the CPU's by", off, 0.01)


ROWS = (
    *(
        Row(
            name=f"bf16-{technique}",
            subject=SUBJECT,
            claim=f"bf16 under {technique} follows fp32",
            check=partial(_bf16, technique),
        )
        for technique in ("ddp", "zero3", "fsdp")
    ),
    *(
        Row(
            name=f"fp16-{technique}",
            subject=SUBJECT,
            claim=f"fp16 under {technique} scales the loss",
            check=partial(_fp16, technique),
        )
        for technique in ("ddp", "zero2", "fsdp")
    ),
    Row(
        name="tf32",
        subject=SUBJECT,
        claim="tf32 follows fp32",
        check=_tf32,
    ),
    Row(
        name="gpu-as-cpu",
        subject=SUBJECT,
        claim="a GPU has the losses of a CPU in fp32",
        check=_as_on_cpu,
        limit_s=180.0,
    ),
)
