"""The pods of a verification, and the runs of a row on these pods."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.base.errors import WorkbenchError
from workbench.base.files.private import cluster_folder
from workbench.base.machine.seats import gpus_here
from workbench.base.words import pluralize
from workbench.verify.figures import Cannot

if TYPE_CHECKING:
    from workbench import Cluster, FineTune, Function, Run
    from workbench.results import FineTuneRun

logger = logging.getLogger(__name__)
_FACTS_S = 120.0
_KEY = "identity"  # of a cluster, in the user's private folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that a rank found on the pod."""

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


class Pods:
    """Clusters, started on demand, and the runs of the row."""

    def __init__(self, folder: Path, cluster: Cluster | None = None) -> None:
        """Take the user's own cluster, not started, or pods of this machine."""
        self.folder = folder
        self._given = cluster
        self._clusters: list[Cluster] = []
        self._runs: dict[str, FineTuneRun] = {}
        self.begin_row(_FACTS_S)

    def begin_row(self, limit_s: float) -> None:
        """Start the clock of a row: all waits end after `limit_s` seconds."""
        self._deadline_s = time.monotonic() + limit_s
        self._ran_on: dict[str, set[int]] = {}

    def close(self) -> None:
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

        if self._given is not None:
            return self.started(self._given)
        count, gpus = layout(len(gpus_here(None)))
        path = self.folder / "main"
        return self.started(Cluster(LocalPods(), PodSpec(gpus=gpus), count=count, path=path))

    @cached_property
    def crowded(self) -> Cluster:
        """A cluster whose first pod has two ranks or more."""
        from workbench import Cluster, PodSpec, SSHPods

        if any(pod.slots > 1 for pod in self.main.pods):
            return self.main
        if not self.main.spec.is_local:
            raise Cannot("every pod has one rank; ask for two GPUs per pod, or hosts with slots=2")
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
        return self.started(Cluster(place, PodSpec(cpus=1), path=self.folder / "crowded"))

    @cached_property
    def without_gpus(self) -> Cluster:
        """A local pod for computing on the CPU."""
        from workbench import Cluster, LocalPods, PodSpec

        return self.started(Cluster(LocalPods(), PodSpec(cpus=2), path=self.folder / "cpu"))

    def started(self, cluster: Cluster) -> Cluster:
        """Start a cluster, to be closed at the end of the verification."""
        # Before the start: an interrupt of a start in a queue keeps the request.
        self._clusters.append(cluster)
        cluster.start()
        return cluster

    @cached_property
    def facts(self) -> Sequence[Facts]:
        """Facts of every rank of the main cluster."""
        from workbench.verify.ranks.facts import facts_of_rank

        answers = self.main.run(facts_of_rank, timeout_s=_FACTS_S, progress=False)
        return [Facts.read(json.loads(str(each))) for each in answers]

    @property
    def first(self) -> Facts:
        """Facts of the first rank."""
        return self.facts[0]

    @property
    def ranks(self) -> int:
        """Number of ranks on all pods of the main cluster."""
        return len(self.facts)

    @property
    def has_gpus(self) -> bool:
        return all(each.device == "cuda" for each in self.facts)

    def need_gpus(self, why: str = "") -> None:
        """Raise Cannot without GPUs. `why` completes the reason."""
        if not self.has_gpus:
            raise Cannot(f"no CUDA device on the pods{why and f'; {why}'}")

    def need_ranks(self, count: int) -> None:
        if self.ranks < count:
            only = "one GPU only" if self.has_gpus else "one rank only"
            raise Cannot(f"{only}, and the claim needs {count} ranks")

    def need_package(self, module: str, package: str) -> None:
        if module not in self.first.packages:
            raise Cannot(f"package {package} is missing on the pods")

    def need_compiler(self) -> None:
        """Raise Cannot if DeepSpeed would compile its host AdamW and has no compiler."""
        if self.has_gpus and not self.first.compiler:
            raise Cannot("the pods have no C++ compiler, and DeepSpeed compiles its host AdamW")

    def call(
        self,
        function: Callable[..., object],
        *args: object,
        pods: int | None = None,
        cluster: Cluster | None = None,
    ) -> list[Any]:
        """Call a function on every rank, and return the values in the order of ranks."""
        from workbench import Function

        run = self.submit(Function(function, args), pods=pods, cluster=cluster)
        self.wait(run)
        returned: list[Any] = run.returned
        self.note(len(returned), cluster)
        return returned

    def train(
        self, job: FineTune, *, pods: int | None = None, cluster: Cluster | None = None
    ) -> FineTuneRun:
        """Train, and return the successful run. An equal job of an earlier row is not repeated."""
        where = str((cluster or self.main).path)
        key = json.dumps([job.to_dict(), pods, where], sort_keys=True, default=str)
        if key not in self._runs:
            run: FineTuneRun = self.submit(job, pods=pods, cluster=cluster)
            self.wait(run)
            self._runs[key] = run
        self.note(self._runs[key].result.world_size, cluster)
        return self._runs[key]

    def submit(
        self, job: FineTune | Function, *, pods: int | None = None, cluster: Cluster | None = None
    ) -> Any:
        if time.monotonic() >= self._deadline_s:
            raise TimeoutError("the row is over its limit")
        return (cluster or self.main).submit(job, pods=pods)

    def wait(self, run: Run, *, must_succeed: bool = True) -> Any:
        """Wait for the end of a run, at most until the row's limit, and return the result."""
        try:
            result = run.wait(max(0.0, self._deadline_s - time.monotonic()), progress=False)
        except TimeoutError:
            run.cancel()
            raise TimeoutError(f"{run.id} was not done in time; see {run.paths.logs}") from None
        return result.raise_for_status() if must_succeed else result

    def note(self, ranks: int, cluster: Cluster | None = None) -> None:
        """Note device and ranks for the table."""
        # Every other cluster of pods with GPUs is on the same machine.
        on_gpus = self.has_gpus and (cluster in (None, self.main) or cluster.spec.pods.gpus > 0)
        device = self.first.name if on_gpus else "CPU"
        self._ran_on.setdefault(device, set()).add(ranks)

    @property
    def ran_on(self) -> str:
        """Ranks and devices of the row's runs, in words."""
        parts = []
        for device, counts in self._ran_on.items():
            *some, most = sorted(counts)
            ranks = ", ".join([*(str(count) for count in some), pluralize(most, "rank")])
            parts.append(f"{ranks} on {device}")
        return "; ".join(parts)


def layout(gpus: int) -> tuple[int, int]:
    """Return the number of local pods, and the GPUs of a pod.

    Example:
        >>> layout(0), layout(1), layout(2), layout(8)
        ((2, 0), (1, 1), (2, 1), (2, 4))
    """
    if gpus < 2:
        return (1, 1) if gpus else (2, 0)
    return 2, gpus // 2
