"""The clusters of a verification: started when a row needs one, and closed at the end."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workbench.base.errors import WorkbenchError
from workbench.base.files.private import cluster_folder
from workbench.base.machine.seats import gpus_here
from workbench.verify.outcome import Cannot

if TYPE_CHECKING:
    from workbench import Cluster, FineTune, Run
    from workbench.results import FineTuneRun

logger = logging.getLogger(__name__)
_FACTS_S = 120.0
_KEY = "identity"  # of a cluster, in the user's private folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a rank found on its pod."""

    device: str
    """`cuda` or `cpu`."""
    name: str
    """Name of the GPU or of the processor."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of the GPU. (0, 0): no GPU."""
    bf16: bool = False
    """Whether the GPU computes bf16 itself."""
    packages: Sequence[str] = ()
    """Installed packages among those that some rows need."""
    compiler: bool = False
    """Whether the pod has a C++ compiler."""
    nvcc: bool = False
    """Whether the pod has NVIDIA's compiler."""
    versions: Mapping[str, str] | None = None
    """Versions of torch, CUDA and NCCL."""

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Facts:
        return cls(**{**raw, "capability": tuple(raw["capability"])})


class Bench:
    """The pods of a verification. Runs of the same job are done once."""

    def __init__(self, folder: Path, make: Callable[[Path], Cluster] | None = None) -> None:
        """Make a bench in a new folder; `make` returns the user's own cluster in a folder."""
        self.folder = folder
        self._make = make
        self._clusters: list[Cluster] = []
        self._runs: dict[str, FineTuneRun] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close all clusters. Log a cluster that cannot be closed, and keep the table."""
        for cluster in reversed(self._clusters):
            try:
                cluster.close()
            except WorkbenchError:
                logger.exception("%s was not closed", cluster.path)

    @cached_property
    def main(self) -> Cluster:
        """The pods of most rows: the user's own, or pods of this machine."""
        from workbench import Cluster, LocalPods, PodSpec

        path = self.folder / "main"
        if self._make is not None:
            return self.started(self._make(path))
        pods, gpus = layout(len(gpus_here(None)))
        return self.started(Cluster(LocalPods(), PodSpec(gpus=gpus), count=pods, path=path))

    @cached_property
    def crowded(self) -> Cluster:
        """A cluster whose first pod has two ranks or more."""
        from workbench import Cluster, PodSpec, SSHPods

        if any(pod.slots > 1 for pod in self.main.pods):
            return self.main
        if not self.is_local:
            raise Cannot("every pod has one rank; ask for two GPUs per pod, or hosts with slots=2")
        path = self.folder / "crowded"
        if self.main.spec.pods.gpus:
            raise Cannot("a GPU takes one rank of NCCL, and every pod has one GPU; use 4 GPUs")
        # Without a GPU, only existing hosts have several ranks: the first pod is such a host.
        pod = self.main.pods[0]
        known = cluster_folder(self.main.path) / _KEY
        host = {"address": pod.address, "port": pod.ssh_port, "user": pod.user, "slots": 2}
        place = SSHPods(
            hosts=[host],
            key=str(known / "id_ed25519"),
            known_hosts=str(known / "known_hosts"),
            python=sys.executable,
            root=str(self.folder / "host"),
        )
        return self.started(Cluster(place, PodSpec(cpus=1), path=path))

    @cached_property
    def without_gpus(self) -> Cluster:
        """A pod of this machine that computes on the CPU."""
        from workbench import Cluster, LocalPods, PodSpec

        return self.started(Cluster(LocalPods(), PodSpec(cpus=2), path=self.folder / "cpu"))

    @property
    def is_local(self) -> bool:
        return self.main.spec.is_local

    def started(self, cluster: Cluster) -> Cluster:
        """Start a cluster, to be closed at the end of the verification."""
        cluster.start()
        self._clusters.append(cluster)
        return cluster

    @cached_property
    def facts(self) -> Sequence[Facts]:
        """Facts of every rank of the main cluster."""
        from workbench.verify.ranks.facts import facts_of_rank

        told = self.main.run(facts_of_rank, timeout_s=_FACTS_S, progress=False)
        return [Facts.read(json.loads(str(each))) for each in told]

    @property
    def first(self) -> Facts:
        return self.facts[0]

    @property
    def has_gpus(self) -> bool:
        return all(each.device == "cuda" for each in self.facts)

    def known_run(self, job: FineTune, pods: int | None) -> FineTuneRun | None:
        """Return the finished run of an equal job on the main cluster."""
        return self._runs.get(_key_of(job, pods))

    def keep_run(self, job: FineTune, pods: int | None, run: FineTuneRun) -> None:
        self._runs[_key_of(job, pods)] = run


def cancel(run: Run) -> None:
    """Cancel a run; a run that has ended meanwhile stays as it is."""
    with suppress(WorkbenchError):
        run.cancel()


def layout(gpus: int) -> tuple[int, int]:
    """Return the number of local pods, and the GPUs of a pod.

    Example:
        >>> layout(0), layout(1), layout(2), layout(8)
        ((2, 0), (1, 1), (2, 1), (2, 4))
    """
    if gpus < 2:
        return (1, 1) if gpus else (2, 0)
    return 2, gpus // 2


def _key_of(job: FineTune, pods: int | None) -> str:
    return json.dumps([job.to_dict(), pods], sort_keys=True, default=str)
