"""Claims about kernels: optimizers, attention, and the loss."""

from __future__ import annotations

from functools import partial

from workbench.verify.claims.jobs import ADA, AMPERE, llama
from workbench.verify.claims.techniques import follows, on_device
from workbench.verify.figures import Broken, Cannot, at_most, curve, difference
from workbench.verify.pods import Pods
from workbench.verify.ranks.kernels import flash_in_torch, fused_adamw, lean_loss
from workbench.verify.row import Row


def _fused_adamw(pods: Pods) -> str:
    (figures,) = pods.call(fused_adamw, pods=1)[:1]
    off = at_most("off the plain loop by", figures["off"], 1e-4)
    return f"{off}, {1e3 * figures['fused_s']:.2g} ms a step, plain {1e3 * figures['plain_s']:.2g}"


def _sdpa(pods: Pods) -> str:
    run = pods.train(llama(pods, "ddp", attn_implementation="sdpa"))
    return follows(run, pods.train(llama(pods, "ddp", attn_implementation="eager")))


def _flash_in_torch(pods: Pods) -> str:
    if pods.has_gpus and pods.first.capability < AMPERE:
        raise Cannot("torch's flash kernel needs a GPU of the Ampere generation or later")
    (figures,) = pods.call(flash_in_torch, pods=1)[:1]
    return at_most("bf16 off fp32 by", figures["off"], 0.03)


def _flash_attention(pods: Pods) -> str:
    pods.need_gpus()
    pods.need_package("flash_attn", "flash-attn")
    if pods.first.capability < AMPERE:
        raise Cannot("flash-attn needs a GPU of the Ampere generation or later")
    how = {"precision": "bf16"}
    run = pods.train(llama(pods, "ddp", attn_implementation="flash_attention_2", **how))
    plain = pods.train(llama(pods, "ddp", attn_implementation="sdpa", **how))
    off = difference(curve(run, "loss"), curve(plain, "loss"))
    return at_most("loss off sdpa by", off, 0.03)


def _flex_attention(pods: Pods) -> str:
    pods.need_gpus("flex attention trains on GPUs")
    how = {"packing": True, "precision": "bf16"}
    run = pods.train(llama(pods, "ddp", attn_implementation="flex_attention", **how))
    plain = pods.train(llama(pods, "ddp", attn_implementation="sdpa", **how))
    off = difference(curve(run, "loss"), curve(plain, "loss"))
    return at_most("loss of packed rows off sdpa by", off, 0.03)


def _lean_loss(pods: Pods) -> str:
    # On a GPU pieces are larger, and a piece must not hold all tokens.
    size = (256, 32_000, 2048) if pods.has_gpus else (64, 8_000, 128)
    (figures,) = pods.call(lean_loss, *size, pods=1)[:1]
    if not figures["in_pieces"]:
        raise Broken("the loss needed whole scores")
    words = [
        at_most("loss off by", figures["loss_off"], 1e-5),
        at_most("gradients by", figures["gradient_off"], 1e-3),
    ]
    if pods.has_gpus:
        ratio = figures["lean_mib"] / figures["whole_mib"]
        words.append(at_most("peak memory relative to whole scores", ratio, 1.0))
    return ", ".join(words)


def _liger(pods: Pods) -> str:
    pods.need_gpus("Liger's kernels are written in Triton")
    pods.need_package("liger_kernel", "liger-kernel")
    run = pods.train(llama(pods, "ddp", training={"use_liger_kernel": True}))
    return follows(run, pods.train(llama(pods, "ddp")))


def _float8(pods: Pods) -> str:
    pods.need_package("torchao", "torchao")
    if pods.has_gpus and pods.first.capability < ADA:
        raise Cannot("FP8 needs a GPU of compute capability 8.9 or later")
    # CPUs emulate FP8 in fp32.
    precision = "bf16" if pods.has_gpus else "fp32"
    words = []
    for technique in ("ddp", "fsdp"):
        run = pods.train(llama(pods, technique, float8=True, precision=precision))
        on_device(pods, run)
        whole = pods.train(llama(pods, technique, precision=precision))
        off = difference(curve(run, "loss"), curve(whole, "loss"))
        words.append(at_most(f"{technique}: loss off {precision} by", off, 0.1))
    return "; ".join(words)


def _optimizer(name: str, pods: Pods) -> str:
    pods.need_gpus()
    pods.need_package("bitsandbytes", "bitsandbytes")
    run = pods.train(llama(pods, "ddp", optimizer=name))
    off = difference(curve(run, "loss"), curve(pods.train(llama(pods, "ddp")), "loss"))
    return at_most("loss off adamw by", off, 0.05)


def _own_optimizer(name: str, pods: Pods) -> str:
    run = pods.train(llama(pods, "zero2", optimizer=name))
    on_device(pods, run)
    return follows(run, pods.train(llama(pods, "single", optimizer=name)))


ROWS = (
    Row("kernels", "fused-adamw", "torch's fused AdamW updates like the plain loop", _fused_adamw),
    *(
        Row("kernels", name, f"optimizer {name} follows adamw", partial(_optimizer, name))
        for name in ("adamw-8bit", "paged-adamw", "paged-adamw-8bit")
    ),
    *(
        Row(
            "kernels",
            f"{name}-zero2",
            f"optimizer {name} under zero2 follows single",
            partial(_own_optimizer, name),
        )
        for name in ("lion", "muon")
    ),
    Row("kernels", "sdpa", "sdpa follows eager attention", _sdpa),
    Row("kernels", "flash-in-torch", "torch's own flash kernel agrees with fp32", _flash_in_torch),
    Row("kernels", "flash-attention-2", "flash_attention_2 follows sdpa", _flash_attention),
    Row("kernels", "flex-attention", "flex_attention follows sdpa", _flex_attention, 180.0),
    Row("kernels", "lean-loss", "the loss in pieces equals the loss of whole scores", _lean_loss),
    Row("kernels", "liger", "Liger's kernels follow the model's own", _liger),
    Row("kernels", "float8", "linear layers in FP8 follow the same job without", _float8),
)
