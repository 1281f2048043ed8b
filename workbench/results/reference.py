"""Figures that others published, to stand beside one's own rows.

Nothing here was measured by this project. A figure that could not be found in a text is None, and stays None; a figure
that was worked out from published ones says how.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAVEATS", "EKS", "PUBLISHED", "WALKTHROUGH", "Published"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One row of a published table. A figure that was not found is None; draw it as `not found`."""

    source: str
    """Who published it, in a few words."""
    model: str
    """What was trained."""
    technique: str
    """As this project calls it: `single`, `zero1`, `zero3-offload`, `fsdp`."""
    pods: int
    """Number of pods, or nodes."""
    device: str
    """What each had, in words: `1 A100-40GB`."""
    global_batch: int | None = None
    """Rows per optimizer step."""
    epochs: int | None = None
    """Passes over the training rows, by the run's own log where one was published."""
    duration_s: float | None = None
    """Seconds of training, as published."""
    samples_per_s: float | None = None
    """Rows a second of all ranks, as the Trainer logged it."""
    memory_gb: float | None = None
    """GPU memory per pod, as published, in whole `GB`; the text does not say whether these are 10^9 bytes or GiB."""
    speed_up: float | None = None
    """Over one pod, worked out from the published seconds; None where they are not known."""
    efficiency: float | None = None
    """`speed_up` over the number of pods, or as published, 0 to 1."""
    out_of_memory: bool = False
    """Whether it was published as having run out of memory."""
    note: str = ""
    """What is worth knowing of this one row, in words; caveats of the whole table are `CAVEATS`."""


WALKTHROUGH = "README of dennislee22/deepspeed-train-CML, January 2024"
EKS = "Scale LLMs with PyTorch 2.0 FSDP on Amazon EKS, part 2 (AWS and Meta)"

CAVEATS = (
    "The table was typed by hand: the rows of t5-small say 5 epochs, their commands and logs say 3.",
    "Memory was read off pictures of a dashboard, in whole GB.",
    "The rows do not do the same work: one pod takes 32 rows a step, two take 64 and three take 96, so three pods take "
    "a third of the optimizer steps.",
    "Every row was run once: there is no spread.",
    "Each pod had one A100-PCIe-40GB, FP32, WikiSQL padded to 96 tokens a side, the padding counted in the loss.",
)
"""What to bear in mind of the walk-through's table; to be drawn next to it."""

_A100 = "1 A100-40GB"


def _walkthrough() -> tuple[Published, ...]:
    small, large = 742.5369, 7465.0
    return (
        Published(
            source=WALKTHROUGH,
            model="t5-small",
            technique="single",
            pods=1,
            device=_A100,
            global_batch=32,
            epochs=3,
            duration_s=small,
            samples_per_s=227.686,
            memory_gb=3,
            speed_up=1.0,
            efficiency=1.0,
            note="published as 5 epochs; its log says 3",
        ),
        Published(
            source=WALKTHROUGH,
            model="t5-small",
            technique="zero1",
            pods=3,
            device=_A100,
            global_batch=96,
            epochs=3,
            duration_s=922.0487,
            samples_per_s=183.358,
            memory_gb=5,
            speed_up=small / 922.0487,
            efficiency=small / 922.0487 / 3,
            note="published as 5 epochs; its log says 3",
        ),
        Published(
            source=WALKTHROUGH,
            model="t5-large",
            technique="single",
            pods=1,
            device=_A100,
            global_batch=32,
            epochs=3,
            duration_s=large,
            memory_gb=15,
            speed_up=1.0,
            efficiency=1.0,
            note="no log was found",
        ),
        Published(
            source=WALKTHROUGH,
            model="t5-large",
            technique="zero1",
            pods=2,
            device=_A100,
            global_batch=64,
            epochs=3,
            memory_gb=15,
            note="published without a duration; its command recomputes activations, the others' do not",
        ),
        Published(
            source=WALKTHROUGH,
            model="t5-large",
            technique="zero1",
            pods=3,
            device=_A100,
            global_batch=96,
            epochs=3,
            duration_s=10530.2773,
            samples_per_s=16.055,
            memory_gb=13,
            speed_up=large / 10530.2773,
            efficiency=large / 10530.2773 / 3,
        ),
        Published(
            source=WALKTHROUGH,
            model="t5-large",
            technique="zero3-offload",
            pods=3,
            device=_A100,
            global_batch=96,
            epochs=3,
            duration_s=11044.5628,
            samples_per_s=15.308,
            memory_gb=9,
            speed_up=large / 11044.5628,
            efficiency=large / 11044.5628 / 3,
        ),
        Published(
            source=WALKTHROUGH,
            model="t5-3b",
            technique="single",
            pods=1,
            device=_A100,
            out_of_memory=True,
            note="its batch was not found",
        ),
        Published(
            source=WALKTHROUGH,
            model="t5-3b",
            technique="zero3-offload",
            pods=3,
            device=_A100,
            global_batch=3,
            memory_gb=21,
            note="published without a duration; its command takes one row a GPU",
        ),
    )


PUBLISHED: tuple[Published, ...] = (
    *_walkthrough(),
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
"""All published rows that this project knows: the walk-through's, then FSDP on EKS."""
