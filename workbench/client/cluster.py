"""`Cluster`, the user's first object: a handle to pods and runs, which the keeper process owns."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from workbench.base.display_protocol import LiveDisplayable, follow
from workbench.base.errors import (
    ConfigError,
    RunError,
    Unreadable,
    check_type,
    shortened,
    suggests,
)
from workbench.base.files import (
    check_working_directory,
    is_missing,
    is_there,
    read_text,
    records,
    user_path,
)
from workbench.base.files.folders import weakness
from workbench.base.process import LEASE_S
from workbench.client.lifecycle import (
    await_keeper,
    await_ready,
    await_successor,
    close_cluster,
    is_left,
    occupied,
    spawn,
    waits_in_queue,
)
from workbench.client.run import Detached, Run
from workbench.client.submission import Submission
from workbench.client.takeover import stored_spec, take_over
from workbench.keeper.spawn import Leash
from workbench.pods.backends import CLASSES, backend_from_dict, check_registered
from workbench.pods.hostfile import Hostfile
from workbench.pods.place import Place
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import registered
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status, no_keeper, settled_status, silence_of

if TYPE_CHECKING:
    from workbench.pods.doctor.examination import Diagnosis


class Cluster(LiveDisplayable, Submission):
    """The pods of an experiment.

    Use the cluster as a context, or call `start` and `close`. Leaving the context ends the current
    run and stops the pods. If the kernel dies, the keeper lets the run finish and stops idle pods.
    `Cluster.attach` returns the cluster of a directory in another notebook or a new kernel.

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
        start_timeout_s: float | Literal["auto"] | None = "auto",
        warm: bool = True,
        shared: bool | str | None = None,
    ):
        """Describe a cluster without starting it.

        Args:
            backend: Place of the pods.
            spec: Resources per pod. Default: one core.
            count: Number of pods.
            idle_timeout_s: Pods stop after this many seconds without a run or a request from a
                notebook; None: never.
            path: The cluster's directory, new or empty. Default: `runs/cluster-<time>-<id>` in the
                current folder.
            lease_s: Seconds that ranks outlive a silent keeper.
            start_timeout_s: Seconds to wait for the pods; None: no limit. Default `auto`: no limit
                on Slurm and on Kubernetes with `queue`, 120 elsewhere.
            warm: Whether each pod keeps a process with torch imported, so that a `FineTune` starts
                at once. The process needs 0.5 GiB, most of it shared by local pods.
            shared: Whether pods check if they see this machine's folders; see `ClusterSpec.shared`.

        Raises:
            ConfigError: A value is not allowed.
        """
        if not isinstance(backend, Place):
            raise _no_place(backend)
        if not isinstance(spec, PodSpec | None):
            raise ConfigError(
                f"Cluster spec is {shortened(spec)}, and no PodSpec. A number of pods has a name: "
                f"write Cluster({type(backend).__name__}(), count={shortened(spec)})"
            )
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
        """Specification of the cluster; read only."""
        name = f"cluster-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._closed = False
        self._held = False
        self._attached = False
        root = user_path(path or Path("runs") / name)
        if not root.is_absolute():
            check_working_directory()
        self._paths = ClusterPaths(root.absolute())

    @classmethod
    def from_spec(cls, spec: ClusterSpec, path: str | Path | None = None) -> Self:
        """Create a cluster from a `SPEC.json` without starting it.

        Raises:
            ConfigError: The backend is unknown or refuses its options.
        """
        check_type("Cluster.from_spec", spec, ClusterSpec, "the specification of a cluster")
        cluster = cls(backend_from_dict(spec.backend), spec.pods, count=spec.count, path=path)
        cluster.spec = spec
        return cluster

    @classmethod
    def attach(cls, path: str | Path) -> Self:
        """Return the cluster of a directory, also one from another process.

        If its keeper died, a new keeper continues the runs with this process's environment
        variables. Leaving the cluster as a context neither ends its runs nor stops its pods;
        `close` does.

        The directory may also be the run directory of a script from `run.sbatch()`. The cluster
        then shows the job, and has the run in `runs`. `close` ends the Slurm job. The cluster takes
        no jobs.

        Raises:
            ConfigError: Other users may change the directory.
            RunError: No cluster runs there, and its keeper cannot be replaced. The message has the
                reason.
        """
        check_type("Cluster.attach", path, (str, PathLike), "the path of the cluster's directory")
        root = user_path(path).absolute()
        why = weakness(root)
        if why:  # the socket and ssh configuration there will be trusted
            raise ConfigError(why)
        if no_keeper(RunPaths(root)):
            run = RunSpec.load(RunPaths(root).spec, of_run=True)
            cluster = cls.from_spec(run.cluster, path=root)
            cluster._held = cluster._attached = True
            return cluster
        if is_there(RunPaths(root).info):
            raise RunError(
                f"{root} is the directory of a run, and not of a cluster. Follow the run with"
                f" Run.load({str(root)!r}), or with `workbench attach {root}`"
            )
        status = settled_status(root)
        if not (status.alive or status.phase == "lost"):
            raise RunError(
                f"no cluster runs in {root}: it is {status.phase}; "
                "start one with Cluster(…, path=…)"
            )
        registered(root)
        cluster = cls.from_spec(stored_spec(root), path=root)
        if not status.alive:
            cluster._succeed()
        cluster._held = cluster._attached = True
        return cluster

    def _succeed(self) -> None:
        take_over(self.path, self.spec)
        with follow(self) as draw:
            await_successor(self._paths, self.spec, draw)

    def start(self, *, wait: bool = True) -> Self:
        """Start the keeper and wait until every pod is reachable. A closed cluster starts again.

        A ready cluster of this notebook is returned at once.

        If the pods still wait, also under another process's `start`, wait for these pods. On Slurm
        and on Kubernetes with `queue`, an interrupt or the end of this process ends only the
        waiting: the request for pods stays until `close`. Elsewhere, and in a `with` block that
        starts the cluster, both end the start.

        Args:
            wait: Whether to wait for the pods. With False, return at once: the keeper waits for
                the pods, also after the end of this process. `submit` queues runs meanwhile.

        Raises:
            ConfigError: The directory has other content or a live cluster, or the place cannot meet
                the specification.
            BackendError: The platform refused.
            PodError: A pod died during the start, or (`PodTimeout`) did not start in time.
            Detached: An interrupt came, and the request for pods stays.
        """
        self._refuse_without_keeper()
        return self._start(stays=self.spec.has_queue or not wait, wait=wait)

    def _start(self, *, stays: bool, wait: bool = True) -> Self:
        """Start the cluster, or wait for its pods. `stays`: an interrupt keeps the request."""
        self._closed = False
        if is_left(self._paths, self.spec):
            self._succeed()
            self._held = True
            return self
        if self._held and self.phase == "ready":
            return self
        if (self._held and self.phase == "starting") or waits_in_queue(self._paths, self.spec):
            self._held = True
            if wait:
                self._await_pods(None, stays=True)
            return self
        # While the pods stop, a second interrupt only ends the waiting.
        with Leash() as leash:
            keeper = spawn(self._paths, self.spec.resolved(), leash)
            self._held = True
            if stays:
                leash.drop()
            if wait:
                self._await_pods(keeper, stays=stays)
            else:
                await_keeper(self._paths, keeper)
            if not stays:
                leash.drop()
        return self

    def _await_pods(self, keeper: subprocess.Popen[bytes] | None, *, stays: bool) -> None:
        """Wait for the pods. Close the cluster after an error or, unless it stays, an interrupt."""
        try:
            with follow(self) as draw:
                await_ready(self._paths, self.spec, keeper, draw, lambda: self._closed)
        except KeyboardInterrupt:
            if not stays:
                close_cluster(self._paths, self.spec)
                raise
            raise Detached(
                f"Stopped waiting; the request for pods stays ({self.message}). Wait again with"
                f" start(), submit runs, or end the request with close(). From another notebook:"
                f" Cluster.attach({str(self.path)!r})"
            ) from None
        except BaseException:
            close_cluster(self._paths, self.spec)
            raise

    def __enter__(self) -> Self:
        return self if self._batch_run is not None else self._start(stays=False)

    def __exit__(self, *_exc: object) -> None:
        if not self._attached:
            self.close()

    @property
    def phase(self) -> str:
        """Phase: starting, ready, closing, closed, failed, or `lost` if the keeper died.

        `unknown` if the state cannot be read now; the keeper may still run.
        """
        if (run := self._batch_run) is not None:
            ended = "closed" if run.state.is_terminal else "ready"
            return "lost" if run.state is RunState.LOST else ended
        return "lost" if self._is_gone else cluster_status(self.path).phase

    @property
    def message(self) -> str:
        """One line about the phase, for people."""
        if (run := self._batch_run) is not None:
            return run.message
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
        """The pods at the keeper's last look, in rank order."""
        if self._batch_run is not None:
            return ()
        return cluster_status(self.path).pods

    @property
    def hostfile(self) -> Hostfile:
        """The hostfile of all pods; prints as the file.

        Raises:
            RunError: The cluster has not started, or has no keeper.
        """
        self._refuse_without_keeper()
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
        if (run := self._batch_run) is not None:
            return [run]
        try:
            folders = records.folders_in(self._paths.runs)
        except OSError as error:
            raise RunError(f"{self._paths.runs} cannot be listed: {error.strerror}") from error
        infos = [folder / "run.json" for folder in folders if (folder / "run.json").is_file()]
        infos.sort(key=lambda path: path.stat().st_mtime)
        return [Run.load(path.parent) for path in infos]

    def doctor(self, *, bandwidth: bool = True) -> Diagnosis:
        """Examine every pod from outside and report problems with their remedies. Changes nothing.

        Args:
            bandwidth: Whether to measure the all-reduce between the pods too, which takes seconds.
                Skipped while a run uses the pods.

        Raises:
            RunError: There are no pods, or the keeper does not answer.
        """
        from workbench.client.checkup import diagnose

        self._refuse_without_keeper()
        return diagnose(self._paths, list(self.pods), self.spec, bandwidth=bandwidth)

    def close(self) -> None:
        """Stop the current run and all pods, remove the key, and wait for the end. Idempotent.

        Does nothing if this object neither started the cluster nor attached to it. The Slurm job of
        a run without a keeper is asked to end, and `close` does not wait.

        Raises:
            PodError: A process remains 40 s after the keeper's last message.
            BackendError: The platform did not remove the resources left by the keeper.
            RunError: The run without a keeper has no job in this machine's Slurm.
        """
        self._closed = True
        if (run := self._batch_run) is not None:
            run.cancel()
        elif self._held:
            close_cluster(self._paths, self.spec)

    @property
    def _batch_run(self) -> Run | None:
        """The run of a script from `run.sbatch()`, if this is its directory."""
        return Run.load(self.path) if no_keeper(RunPaths(self.path)) else None

    def _check_ready(self) -> None:
        self._refuse_without_keeper()
        status = cluster_status(self.path)
        if self._held and status.phase == "lost":
            self._succeed()
        # A new keeper knows the pods of the dead keeper from the beginning.
        elif self._held and status.phase == "starting" and status.pods:
            await_successor(self._paths, self.spec, lambda *_: None)
        # The keeper queues runs while the pods wait.
        if self.phase != "ready" and not (self._held and self.phase == "starting"):
            raise RunError(f"the cluster is {self.phase}: {self.message or 'call start() first'}")
        if not self._held:
            raise RunError(f"this cluster is not started: {occupied(self.path)}")

    def __dir__(self) -> list[str]:
        """Return what an editor completes."""
        return [name for name in super().__dir__() if name != "submit_prepared"]

    def __repr__(self) -> str:
        return (
            f"Cluster({self.phase}, {self.spec.count} "
            f"{self.spec.backend.get('kind')} pods, {self.path})"
        )


def _no_place(value: object) -> ConfigError:
    """Return the refusal of what is no place, with the call that was meant."""
    kind = value.casefold() if isinstance(value, str) else ""
    name = value.__name__ if isinstance(value, type) else CLASSES.get(kind, "LocalPods")
    options = "['user@host']" if name == "SSHPods" else ""
    return ConfigError(
        f"Cluster backend is {shortened(value)}, and no place. Write Cluster({name}({options}))"
    )
