"""What `worker/probe/examine.py` prints on a pod, read: one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError


class DiskSpace(BaseModel):
    free_gib: float
    total_gib: float


class GpuMemory(BaseModel):
    index: int
    used_gib: float
    total_gib: float


class CompileLock(BaseModel):
    """A lock file of an op that is compiled when it is first used."""

    path: str
    age_s: float
    busy: bool


class PodFacts(BaseModel):
    """What a pod tells of itself; what a pod of an older version does not know is left at its default."""

    time_s: float
    """The pod's clock, in seconds since the epoch."""
    interface: str = ""
    versions: Mapping[str, str] = {}
    gpus: Sequence[GpuMemory] = ()
    gpu_gib: float | None = None
    memory_gib: float | None = None
    """Memory that is free on its machine, whatever the pod's own limit."""
    memory_limit_gib: float | None = None
    """The limit of its cgroup, or all that the machine has, whichever is less."""
    disk: DiskSpace | None = None
    shm: DiskSpace | None = None
    locks: Sequence[CompileLock] = ()


def find_facts(output: str) -> PodFacts | None:
    """Find the facts in what a command printed; a login shell may print words of its own before them."""
    for line in reversed(output.splitlines()):
        try:
            return PodFacts.model_validate_json(line)
        except ValidationError:
            continue
    return None
