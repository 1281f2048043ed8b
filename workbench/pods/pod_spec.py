"""`PodSpec`: the resources of a worker."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from workbench.base.errors import ConfigError
from workbench.base.machine.nvml import VISIBLE, visible
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


_INTERFACE = re.compile(r"[\w.:@-]{1,15}", re.ASCII)
_NETWORK = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def _names(given: object) -> object:
    return [given] if isinstance(given, str) else given


def _interfaces(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not _INTERFACE.fullmatch(name):
            raise ConfigError(
                f"pods interfaces has {name!r}; an entry must be the whole name of a network"
                " interface, as `ip link` shows it"
            )
    return tuple(dict.fromkeys(names))


CORES_PER_GPU = 8
"""Cores for each GPU where the user gives no number."""
LEAST_CORES_PER_GPU = 2
"""With fewer cores, a rank and its threads of NCCL and of data loading wait for each other."""

_Requirement = Annotated[str, AfterValidator(_requirement)]


class PodSpec(Record):
    """Resources of a worker. All pods of a cluster are alike."""

    label: ClassVar[str] = "pods"

    cpus: Annotated[Positive, Unit("cores")] | None = None
    """Processor cores; ranks of the pod share this many threads. Less than 2 cores for each GPU is
    refused. Default None: 8 cores for each GPU, and 1 core for a pod without GPUs. SSH hosts and
    local pods with GPUs use all cores of the machine."""
    memory_gib: Annotated[Positive, Unit("GiB")] | None = None
    """Memory in GiB; None leaves it to the place. Default None."""
    gpus: Count = 0
    """Number of GPUs; every GPU is a slot. A pod without GPUs has `ranks` slots. Default 0."""
    ranks: Count = 0
    """Ranks of a pod without GPUs, which share its cores; 0 means 1. Default 0."""
    image: str | None = None
    """Container image, where the place runs containers. Default None: the place's own."""
    interfaces: Annotated[
        Sequence[str],
        BeforeValidator(_names),
        AfterValidator(_interfaces),
        Allowed("a name or a list of names, such as ['ib0', 'ib1']"),
    ] = ()
    """Network interfaces of NCCL and gloo on every pod, one name or a list. The names are exact:
    `NCCL_SOCKET_IFNAME` is `=ib0,ib1`. Values of the image or the site are replaced. A pod without
    one of the interfaces is refused at the cluster's start. Default none: the values of the pod,
    else the interface of the pod's address."""
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

    @property
    def cores(self) -> float:
        """Return the cores to ask for: `cpus`, else 8 for each GPU, else 1.

        Example:
            >>> PodSpec(gpus=2).cores, PodSpec().cores, PodSpec(cpus=6, gpus=2).cores
            (16, 1, 6)
        """
        if self.cpus is not None:
            return self.cpus
        return self.gpus * CORES_PER_GPU or 1

    def few_cores(self, cores: float) -> str:
        """Return a warning if a machine has too few cores for the GPUs of a pod, or nothing.

        Example:
            >>> PodSpec(gpus=8).few_cores(12)
            '12 cores for 8 GPUs: a rank needs 2 or more'
            >>> PodSpec(gpus=8).few_cores(16), PodSpec().few_cores(0.5)
            ('', '')
        """
        if cores >= self.gpus * LEAST_CORES_PER_GPU:
            return ""
        return f"{cores:g} cores for {self.gpus} GPUs: a rank needs {LEAST_CORES_PER_GPU} or more"

    @model_validator(mode="after")
    def _check(self) -> Self:
        least = self.gpus * LEAST_CORES_PER_GPU
        if self.cpus is not None and self.cpus < least:
            raise ConfigError(
                f"pods cpus={self.cpus:g} with gpus={self.gpus}: every GPU needs"
                f" {LEAST_CORES_PER_GPU} cores or more. Give cpus={least} or more, or leave cpus"
                f" out for {CORES_PER_GPU} cores per GPU"
            )
        if self.interfaces and (twice := [name for name in _NETWORK if name in self.env]):
            raise ConfigError(
                f"pods interfaces={list(self.interfaces)} and env has {' and '.join(twice)}:"
                " the interfaces are named twice; leave interfaces or the variables out"
            )
        # CUDA reads this list up to its first invalid entry.
        given = self.env.get(VISIBLE)
        if self.gpus and given is not None and not visible(sys.maxsize, given):
            raise ConfigError(
                f"pods gpus={self.gpus}, and {VISIBLE} in env is {given!r}, by which CUDA shows"
                f" no GPU: name {self.gpus} or more without repetition, or leave {VISIBLE} out"
            )
        if self.gpus and self.ranks:
            raise ConfigError(
                f"pods ranks={self.ranks} with gpus={self.gpus}: every GPU carries one rank; "
                "leave ranks out"
            )
        return self
