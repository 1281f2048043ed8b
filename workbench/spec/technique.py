"""The closed sets a job chooses from: technique, precision, launcher, optimizer."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Launcher", "Optimizer", "Precision", "Technique"]


class Technique(StrEnum):
    """How the training state is spread over the ranks."""

    SINGLE = "single"
    """One rank on the first pod, no DeepSpeed: the yardstick of all others."""
    ZERO1 = "zero1"
    """DeepSpeed ZeRO stage 1: optimizer states sharded."""
    ZERO3 = "zero3"
    """DeepSpeed ZeRO stage 3: parameters, gradients and optimizer states sharded."""
    ZERO3_OFFLOAD = "zero3-offload"
    """ZeRO stage 3 with optimizer states and parameters kept in host memory."""

    @property
    def uses_deepspeed(self) -> bool:
        """Tell whether a DeepSpeed engine runs it."""
        return self is not Technique.SINGLE

    @property
    def zero_stage(self) -> int:
        """Give the ZeRO stage, 0 where there is none."""
        return {Technique.SINGLE: 0, Technique.ZERO1: 1}.get(self, 3)


class Precision(StrEnum):
    """The number format of the training arithmetic."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"


class Launcher(StrEnum):
    """How ranks start."""

    SSH = "ssh"
    """The agents, over SSH: the default and the fastest."""
    PDSH = "pdsh"
    """DeepSpeed's own command line through pdsh."""
    OPENMPI = "openmpi"
    """DeepSpeed's own command line through mpirun."""


class Optimizer(StrEnum):
    """The update rule."""

    ADAMW = "adamw"
    SGD = "sgd"
