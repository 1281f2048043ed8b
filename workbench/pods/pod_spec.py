"""`PodSpec`: what one worker needs."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from workbench.base.record import Count, Environment, Positive, Record, Unit

__all__ = ["PodSpec"]


class PodSpec(Record):
    """What one worker needs. All pods of a cluster are alike."""

    label: ClassVar[str] = "pods"

    cpus: Annotated[Positive, Unit("cores")] = 1
    """Processor cores; ranks of the pod share this many threads. Default 1."""
    memory_gib: Annotated[Positive, Unit("GiB")] | None = None
    """Memory in GiB; None leaves it to the place. Default None."""
    gpus: Count = 0
    """GPUs; each becomes one slot. Without any, the pod has one slot. Default 0."""
    image: str | None = None
    """Container image, where the place runs containers. Default None: the place's own."""
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank, as in a job's `env`. Default none."""

    @property
    def slots(self) -> int:
        """Return the number of ranks a pod carries: its GPUs, or 1."""
        return max(1, self.gpus)
