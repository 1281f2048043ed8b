"""Claims about kernels: optimizers, attention, and the loss."""

from __future__ import annotations

from functools import partial

from workbench.verify.claims.jobs import AMPERE, llama
from workbench.verify.claims.techniques import follows, on_device
from workbench.verify.outcome import Broken, Cannot
from workbench.verify.ranks.kernels import flash_in_torch, fused_adamw, lean_loss
from workbench.verify.row import Row
from workbench.verify.turn import Turn, at_most, curve, difference

SUBJECT = "kernels"


def _fused_adamw(turn: Turn) -> str:
    (figures,) = turn.call(fused_adamw, pods=1)[:1]
    off = at_most("off the plain loop by", figures["off"], 1e-4)
    return f"{off}, {1e3 * figures['fused_s']:.2g} ms a step, plain {1e3 * figures['plain_s']:.2g}"


def _sdpa(turn: Turn) -> str:
    run = turn.train(llama(turn, "ddp", attn_implementation="sdpa"))
    return follows(run, turn.train(llama(turn, "ddp", attn_implementation="eager")))


def _flash_in_torch(turn: Turn) -> str:
    if turn.has_gpus and turn.first.capability < AMPERE:
        raise Cannot("torch's flash kernel needs a GPU of the Ampere generation or later")
    (figures,) = turn.call(flash_in_torch, pods=1)[:1]
    return at_most("bf16 off fp32 by", figures["off"], 0.03)


def _flash_attention(turn: Turn) -> str:
    turn.need_gpus()
    turn.need_package("flash_attn", "flash-attn")
    if turn.first.capability < AMPERE:
        raise Cannot("flash-attn needs a GPU of the Ampere generation or later")
    how = {"precision": "bf16"}
    run = turn.train(llama(turn, "ddp", attn_implementation="flash_attention_2", **how))
    plain = turn.train(llama(turn, "ddp", attn_implementation="sdpa", **how))
    off = difference(curve(run, "loss"), curve(plain, "loss"))
    return at_most("loss off sdpa by", off, 0.03)


def _lean_loss(turn: Turn) -> str:
    # On a GPU pieces are larger, and a piece must not hold all tokens.
    size = (256, 32_000, 2048) if turn.has_gpus else (64, 8_000, 128)
    (figures,) = turn.call(lean_loss, *size, pods=1)[:1]
    if not figures["in_pieces"]:
        raise Broken("the loss needed whole scores")
    words = [
        at_most("loss off by", figures["loss_off"], 1e-5),
        at_most("gradients by", figures["gradient_off"], 1e-3),
    ]
    if turn.has_gpus:
        ratio = figures["lean_mib"] / figures["whole_mib"]
        words.append(at_most("peak memory relative to whole scores", ratio, 1.0))
    return ", ".join(words)


def _liger(turn: Turn) -> str:
    turn.need_gpus("Liger's kernels are written in Triton")
    turn.need_package("liger_kernel", "liger-kernel")
    run = turn.train(llama(turn, "ddp", training={"use_liger_kernel": True}))
    return follows(run, turn.train(llama(turn, "ddp")))


def _optimizer(name: str, turn: Turn) -> str:
    turn.need_gpus()
    turn.need_package("bitsandbytes", "bitsandbytes")
    run = turn.train(llama(turn, "ddp", optimizer=name))
    off = difference(curve(run, "loss"), curve(turn.train(llama(turn, "ddp")), "loss"))
    return at_most("loss off adamw by", off, 0.05)


def _own_optimizer(name: str, turn: Turn) -> str:
    run = turn.train(llama(turn, "zero2", optimizer=name))
    on_device(turn, run)
    return follows(run, turn.train(llama(turn, "single", optimizer=name)))


ROWS = (
    Row(
        name="fused-adamw",
        subject=SUBJECT,
        claim="torch's fused AdamW updates like the plain loop",
        check=_fused_adamw,
    ),
    *(
        Row(
            name=name,
            subject=SUBJECT,
            claim=f"optimizer {name} follows adamw",
            check=partial(_optimizer, name),
        )
        for name in ("adamw-8bit", "paged-adamw", "paged-adamw-8bit")
    ),
    *(
        Row(
            name=f"{name}-zero2",
            subject=SUBJECT,
            claim=f"optimizer {name} under zero2 follows single",
            check=partial(_own_optimizer, name),
        )
        for name in ("lion", "muon")
    ),
    Row(
        name="sdpa",
        subject=SUBJECT,
        claim="sdpa follows eager attention",
        check=_sdpa,
    ),
    Row(
        name="flash-in-torch",
        subject=SUBJECT,
        claim="torch's own flash kernel agrees with fp32",
        check=_flash_in_torch,
    ),
    Row(
        name="flash-attention-2",
        subject=SUBJECT,
        claim="flash_attention_2 follows sdpa",
        check=_flash_attention,
    ),
    Row(
        name="lean-loss",
        subject=SUBJECT,
        claim="the loss in pieces equals the loss of whole scores",
        check=_lean_loss,
    ),
    Row(
        name="liger",
        subject=SUBJECT,
        claim="Liger's kernels follow the model's own",
        check=_liger,
    ),
)
