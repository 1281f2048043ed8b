"""Figures published by others, not measured by us; derived figures state their derivation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A row of a published table. An unknown figure is None; draw it as `not found`."""

    source: str
    model: str
    technique: str
    """Technique by its name here: `single`, `zero1`, `zero3-offload`, `fsdp`."""
    pods: int
    device: str
    """Hardware of a pod: `1 A100-40GB`."""
    global_batch: int | None = None
    epochs: int | None = None
    """Passes over the training rows, by the run's own log where one was published."""
    duration_s: float | None = None
    samples_per_s: float | None = None
    """Rows a second of all ranks, as the Trainer logged it."""
    memory_gb: float | None = None
    """GPU memory per pod, as published, in whole `GB`; the text does not say whether these are 10^9
    bytes or GiB."""
    speed_up: float | None = None
    """Speed-up over a single pod, from the published seconds; None if unknown."""
    efficiency: float | None = None
    """`speed_up` over the number of pods, or as published, 0 to 1."""
    out_of_memory: bool = False
    command: str = ""
    """Arguments of the training script, as published. Empty: no command was found."""
    note: str = ""
    """Remark on the row; caveats of the whole table are in `CAVEATS`."""


WALKTHROUGH = "README of dennislee22/deepspeed-train-CML, January 2024"
EKS = "Scale LLMs with PyTorch 2.0 FSDP on Amazon EKS, part 2 (AWS and Meta)"

CAVEATS = (
    "The table was typed by hand: the rows of t5-small "
    "say 5 epochs, their commands and logs say 3.",
    "Every run recomputes activations whose command has --gradient_checkpointing, also with "
    "False: t5-small under zero1 alone does not; the command of t5-large on one pod was not found.",
    "Memory was read off pictures of a dashboard, in whole GB.",
    "The rows do not do the same work: one pod takes 32 rows a step, two take "
    "64 and three take 96, so three pods take a third of the optimizer steps.",
    "Every row was run once: there is no spread.",
    "Each pod had one A100-PCIe-40GB, FP32, WikiSQL padded "
    "to 96 tokens a side, the padding counted in the loss.",
)
"""Caveats on the walk-through's table, to be drawn beside the table."""

# Seconds on one pod, from the logs.
_ALONE_S = {
    "t5-small": 742.5369,
    "t5-large": 7465.4684,
}
_BATCH_32 = "--epochs 3 --per_device_train_batch_size 32 --per_device_eval_batch_size 32"
_BATCH_1 = "--epochs 3 --per_device_train_batch_size 1 --per_device_eval_batch_size 1"
# The script has `type=bool`: argparse reads every text but the empty one as True.
_RECOMPUTED = "--gradient_checkpointing False"
_ZERO1 = "--deepspeed dsconfig/zero1profiler.json"
_ZERO3 = "--deepspeed dsconfig/zero3profiler.json"
_FIVE = "published as 5 epochs; its log says 3"


def _walked(
    model: str, technique: str, pods: int, duration_s: float | None = None, **more: object
) -> Published:
    speed_up = None if duration_s is None else _ALONE_S[model] / duration_s
    facts: dict[str, object] = {
        "source": WALKTHROUGH,
        "device": "1 A100-40GB",
        "model": model,
        "technique": technique,
        "pods": pods,
        "duration_s": duration_s,
        "speed_up": speed_up,
        "efficiency": None if speed_up is None else speed_up / pods,
    }
    if model != "t5-3b":  # its table says 3 epochs too, but no such run came to its end
        facts |= {"epochs": 3, "global_batch": 32 * pods}
    return Published(**{**facts, **more})  # type: ignore[arg-type]


PUBLISHED: tuple[Published, ...] = (
    _walked(
        "t5-small",
        "single",
        1,
        742.5369,
        samples_per_s=227.686,
        memory_gb=3,
        command=f"{_BATCH_32} {_RECOMPUTED}",
        note=_FIVE,
    ),
    _walked(
        "t5-small",
        "zero1",
        3,
        922.0487,
        samples_per_s=183.358,
        memory_gb=5,
        command=f"{_BATCH_32} {_ZERO1}",
        note=_FIVE,
    ),
    _walked(
        "t5-large",
        "single",
        1,
        7465.4684,
        samples_per_s=22.646,
        memory_gb=15,
        note="its command was not found",
    ),
    _walked(
        "t5-large",
        "zero1",
        2,
        memory_gb=15,
        command=f"{_BATCH_32} --gradient_checkpointing True {_ZERO1}",
        note="published without a duration",
    ),
    _walked(
        "t5-large",
        "zero1",
        3,
        10530.2773,
        samples_per_s=16.055,
        memory_gb=13,
        command=f"{_BATCH_32} {_RECOMPUTED} {_ZERO1}",
    ),
    _walked(
        "t5-large",
        "zero3-offload",
        3,
        11044.5628,
        samples_per_s=15.308,
        memory_gb=9,
        command=f"{_BATCH_32} {_RECOMPUTED} {_ZERO3}",
    ),
    _walked("t5-3b", "single", 1, out_of_memory=True, note="its command was not found"),
    _walked(
        "t5-3b",
        "zero3-offload",
        3,
        global_batch=3,
        memory_gb=21,
        command=f"{_BATCH_1} {_RECOMPUTED} {_ZERO3}",
        note="published without a duration; its command takes one row a GPU",
    ),
    Published(
        source=EKS,
        model="Llama 2",
        technique="fsdp",
        pods=16,
        device="8 H100-80GB (p5.48xlarge)",
        efficiency=0.87,
        note="scaling efficiency as published; the node count that it is over was not found",
    ),
)
