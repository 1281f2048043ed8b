"""`Cluster`, the user's first object: a window on pods and runs that the keeper, a process of its own, owns."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from workbench.base.errors import ConfigError, RunError, Unreadable, suggests
from workbench.base.files import check_working_directory, is_missing, read_text
from workbench.base.files.folders import weakness
from workbench.base.process import LEASE_S
from workbench.base.shown import ShownLive, follow
from workbench.client.lifecycle import (
    await_ready,
    await_successor,
    close_cluster,
    is_left,
    occupied,
    spawn,
)
from workbench.client.run import Run
from workbench.client.submission import Submission
from workbench.client.takeover import not_its_keeper, stored_spec, take_over
from workbench.keeper.spawn import Leash
from workbench.pods.backends import backend_from_dict, check_registered
from workbench.pods.hostfile import Hostfile
from workbench.pods.place import Place
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.status import cluster_status, settled_status, silence_of

if TYPE_CHECKING:
    from workbench.pods.doctor.examination import Diagnosis


class Cluster(ShownLive, Submission):
    """The pods of one experiment.

    Use it as a context, or call `start` and `close`. Leaving the context ends a run that is still going and stops
    the pods; a kernel that dies leaves them to the keeper, which lets the run finish and stops the pods when idle.
    `Cluster.attach` gives another notebook, or a new kernel, the cluster that runs in a directory.

    Example:
        with Cluster(LocalPods(), PodSpec(cpus=1), count=3) as cluster:
            result = cluster.submit(FineTune(technique="zero1", max_steps=50)).wait()
    """

    @suggests("Cluster")
    def __init__(
        self,
        backend: Place,
        spec: PodSpec | None = None,
        *,
        count: int = 1,
        idle_timeout_s: float | None = 600.0,
        path: str | Path | None = None,
        lease_s: float = LEASE_S,
        start_timeout_s: float = 120.0,
        warm: bool = True,
        shared: bool | str | None = None,
    ):
        """Describe a cluster; nothing starts yet.

        Args:
            backend: Where the pods come from.
            spec: What each pod needs. Default: one core.
            count: Number of pods.
            idle_timeout_s: Seconds without a run or a word from a notebook after which the pods stop; None: never.
            path: The cluster's directory, new or empty. Default: `runs/cluster-<time>-<id>` in the current folder.
            lease_s: Seconds that ranks outlive a keeper that fell silent.
            start_timeout_s: Seconds until pods that have not come are given up.
            warm: Whether each pod keeps a process with torch imported (0.5 GiB, which local pods share for the most
                part), so that a `FineTune` starts at once.
            shared: Whether pods are asked if they see this machine's folders; see `ClusterSpec.shared`.

        Raises:
            ConfigError: A value that cannot be.
        """
        check_registered(backend)
        self.spec = ClusterSpec(
            backend=backend.to_dict(),
            pods=spec or PodSpec(),
            count=count,
            idle_timeout_s=idle_timeout_s,
            lease_s=lease_s,
            start_timeout_s=start_timeout_s,
            warm=warm,
            shared=shared,
        )
        """What it is asked to be; read only."""
        name = f"cluster-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._closed = False
        self._held = False
        self._attached = False
        root = Path(path or Path("runs") / name).expanduser()
        if not root.is_absolute():
            check_working_directory()
        self._paths = ClusterPaths(root.absolute())

    @classmethod
    def from_spec(cls, spec: ClusterSpec, path: str | Path | None = None) -> Self:
        """Make the cluster that a `SPEC.json` asks for; nothing starts yet.

        Raises:
            ConfigError: The backend is unknown or refuses its options.
        """
        cluster = cls(backend_from_dict(spec.backend), spec.pods, count=spec.count, path=path)
        cluster.spec = spec
        return cluster

    @classmethod
    def attach(cls, path: str | Path) -> Self:
        """Return the cluster that runs in a directory, whoever started it.

        Where its keeper died, another one takes over and goes on with the runs; it has the variables that are set here.
        Leaving it as a context neither ends its runs nor stops its pods; `close` does.

        Raises:
            ConfigError: Others may change that directory.
            RunError: No cluster runs there, and its keeper cannot be replaced; the message says why.
        """
        root = Path(path).expanduser().absolute()
        if why := weakness(root):  # its socket and its ssh configuration would be believed
            raise ConfigError(why)
        status = settled_status(root)
        if not (status.alive or status.phase == "lost"):
            raise RunError(
                f"no cluster runs in {root}: it is {status.phase}; start one with Cluster(…, path=…)"
            )
        if why := not_its_keeper(root, status):
            raise RunError(why)
        cluster = cls.from_spec(stored_spec(root), path=root)
        if not status.alive:
            cluster._succeed()
        cluster._held = cluster._attached = True
        return cluster

    def _succeed(self) -> None:
        take_over(self.path, self.spec)
        with follow(self) as draw:
            await_successor(self._paths, self.spec, draw)

    def start(self) -> Self:
        """Start the keeper and wait until every pod can be reached; a cluster that was closed starts again.

        Raises:
            ConfigError: The directory holds something else or a live cluster, or the place cannot give what is asked.
            BackendError: The platform refused.
            PodError: A pod died on the way or did not come in time; `PodTimeout` for the latter.
        """
        self._closed = False
        if is_left(self._paths, self.spec):
            self._succeed()
            self._held = True
            return self
        with (
            Leash() as leash
        ):  # another interrupt, while the pods go, only ends the waiting for that
            keeper = spawn(self._paths, self.spec.resolved(), leash)
            self._held = True
            with follow(self) as draw:
                await_ready(self._paths, self.spec, keeper, draw, lambda: self._closed)
            leash.drop()
        return self

    def __enter__(self) -> Self:
        return self if self._held and self.phase == "ready" else self.start()

    def __exit__(self, *_exc: object) -> None:
        if not self._attached:
            self.close()

    @property
    def phase(self) -> str:
        """Where the cluster is in its life: starting, ready, closing, closed, failed; `lost` if its keeper died.

        `unknown` where the state cannot be read at this moment, though there may well be a keeper.
        """
        return "lost" if self._is_gone else cluster_status(self.path).phase

    @property
    def message(self) -> str:
        """One line on the phase, for people."""
        if self._is_gone:
            return f"{self.path} is gone or damaged; close() ends what still runs of the cluster"
        status = cluster_status(self.path)
        return "; ".join(filter(None, [status.message, silence_of(self.path, status)]))

    @property
    def _is_gone(self) -> bool:
        if not self._held:
            return False
        try:
            return is_missing(self._paths.state) and not cluster_status(self.path).alive
        except Unreadable:
            return False

    @property
    def pods(self) -> Sequence[Pod]:
        """The pods as the keeper last saw them, in rank order."""
        return cluster_status(self.path).pods

    @property
    def hostfile(self) -> Hostfile:
        """The hostfile of all pods; prints as the file.

        Raises:
            RunError: The cluster has not started.
        """
        if not self._paths.hostfile.exists():
            raise RunError(
                f"the cluster is {self.phase}; its hostfile is there once the pods are ready"
            )
        try:
            content = read_text(self._paths.hostfile)
        except OSError as error:
            raise RunError(f"{self._paths.hostfile} cannot be read: {error.strerror}") from error
        return Hostfile.parse(content, source=str(self._paths.hostfile))

    @property
    def runs(self) -> list[Run]:
        """The runs in the cluster's own directory, oldest first."""
        infos = sorted(self._paths.runs.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
        return [Run.load(path.parent) for path in infos]

    def doctor(self, *, bandwidth: bool = True) -> Diagnosis:
        """Look at every pod from outside and say what is wrong there and what mends it; changes nothing.

        Args:
            bandwidth: Whether to measure the all-reduce between the pods too (seconds); not while a run uses them.

        Raises:
            RunError: There are no pods, or the keeper does not answer.
        """
        from workbench.client.checkup import diagnose

        return diagnose(self._paths, list(self.pods), self.spec, bandwidth=bandwidth)

    def close(self) -> None:
        """Stop the run in progress and all pods, and remove the key; returns when nothing is left. Idempotent.

        A cluster that this object has neither started nor attached to is left alone.

        Raises:
            PodError: Something is still there 40 s after the keeper last said what it does.
            BackendError: The platform did not remove what the keeper could not.
        """
        self._closed = True
        if self._held:
            close_cluster(self._paths, self.spec)

    def _check_ready(self) -> None:
        if self.phase != "ready":
            raise RunError(f"the cluster is {self.phase}: {self.message or 'call start() first'}")
        if not self._held:
            raise RunError(f"this cluster is not started: {occupied(self.path)}")

    def __repr__(self) -> str:
        return f"Cluster({self.phase}, {self.spec.count} {self.spec.backend.get('kind')} pods, {self.path})"
