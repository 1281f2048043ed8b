"""`PodSpec`: the resources of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from workbench.base.errors import ConfigError
from workbench.base.record import Allowed, Count, Environment, Positive, Record, Unit


def _requirement(value: str) -> str:
    if (
        not value.strip()
        or value != value.strip()
        or value.startswith("-")
        or not value.isprintable()
    ):
        raise ValueError(value)  # an option of pip's: those are PIP_… in env
    return value


_Requirement = Annotated[str, AfterValidator(_requirement)]


class PodSpec(Record):
    """Resources of a worker. All pods of a cluster are alike."""

    label: ClassVar[str] = "pods"

    cpus: Annotated[Positive, Unit("cores")] = 1
    """Processor cores; ranks of the pod share this many threads. Default 1."""
    memory_gib: Annotated[Positive, Unit("GiB")] | None = None
    """Memory in GiB; None leaves it to the place. Default None."""
    gpus: Count = 0
    """Number of GPUs; every GPU is a slot. A pod without GPUs has `ranks` slots. Default 0."""
    ranks: Count = 0
    """Ranks of a pod without GPUs, which share its cores; 0 means 1. Default 0."""
    image: str | None = None
    """Container image, where the place runs containers. Default None: the place's own."""
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank, as in a job's `env`. Default none."""
    pip: Annotated[
        Sequence[_Requirement], AfterValidator(tuple), Allowed("a list such as ['evaluate>=0.4']")
    ] = ()
    """Packages to install on the pods by pip at the cluster's start: names with versions,
    addresses, or paths on the pod. The packages lie in a folder of the cluster, behind the pod's
    own packages on the import path. The pod's own packages stay unchanged. Default none."""

    @property
    def slots(self) -> int:
        """Return the number of ranks a pod carries: its GPUs, else `ranks`, else 1."""
        return self.gpus or self.ranks or 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpus and self.ranks:
            raise ConfigError(
                f"pods ranks={self.ranks} with gpus={self.gpus}: every GPU carries one rank; "
                "leave ranks out"
            )
        return self
