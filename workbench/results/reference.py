"""Figures that others published, to stand beside one's own rows: the records.

Nothing here was measured by this project. A figure that could not be found in a text is None, and stays None.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Published"]


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
    duration_s: float | None = None
    """Seconds of training, as published."""
    peak_memory_gib: float | None = None
    """GiB of GPU memory per pod, as published."""
    speed_up: float | None = None
    """Over one pod, as published or worked out from the published times; None where neither is known."""
    efficiency: float | None = None
    """`speed_up` over the number of pods, or as published, 0 to 1."""
    note: str = ""
    """What is worth knowing of this one row, in words; caveats of the whole table stand beneath it."""
