"""`LocalPods`: pods on this machine. A pod is a real OpenSSH daemon on a separate loopback address.

No root is needed. All processes of the machine share the CPU. `memory_gib` binds if the user may
make a memory cgroup (`can_limit_memory`); `image` has no effect. The pods of a cluster share
one import of torch. Pods with a memory limit or with reserved GPUs do not share the import.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import PrivateAttr

from workbench.base.child import ended_within
from workbench.base.errors import BackendError, ConfigError, PodError, WorkbenchError
from workbench.base.files import records
from workbench.base.files.folders import remove_folder
from workbench.base.files.private import cluster_folder, make_cluster_folder
from workbench.base.machine.limits import cores
from workbench.base.machine.nvml import VISIBLE
from workbench.base.machine.seats import leave_seats
from workbench.base.process import FORK_SERVER_NAME, FORK_SERVER_SOCKET, POD_MARK, end_all
from workbench.base.versions import installed_versions
from workbench.pods.bootstrap import machine
from workbench.pods.bootstrap.guardian import PORT_IN_USE, WorkerConfig, taken_over
from workbench.pods.bootstrap.pod_main import can_be_set
from workbench.pods.bootstrap.process import (
    LocalWorker,
    left_out,
    session_environment,
    sweep,
    tail_of,
    unsettled_guardians,
)
from workbench.pods.bootstrap.sshd import find_sshd, login_user
from workbench.pods.local.forkserver import ForkServer
from workbench.pods.local.seats import seat_pods
from workbench.pods.place import CoreBinding, Place, Port
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.rendezvous.listener import Rendezvous
from workbench.pods.ssh.identity import check_key_line

logger = logging.getLogger(__name__)
_ATTEMPTS = 5
_STOP_S = 4.0
_STORE = "store"  # beside the pods: what they were sent, once for all


class _PortTaken(Exception):
    """Another process took the port between the look and the use."""


class LocalPods(Place):
    """Pods on this machine."""

    label: ClassVar[str] = "LocalPods"
    kind: ClassVar[str] = "local"
    on_this_machine: ClassVar[bool] = True
    core_binding: ClassVar[CoreBinding] = "never"
    takes_seats: ClassVar[bool] = True

    port: Port | None = None
    """The port of all daemons. Default None: a free one is taken at launch."""

    _workers: dict[str, LocalWorker] = PrivateAttr(default_factory=dict)
    _pods: dict[str, Pod] = PrivateAttr(default_factory=dict)
    _roots: list[str] = PrivateAttr(default_factory=list)
    """Folders of pods that have taken GPUs."""
    _logs: dict[str, Path] = PrivateAttr(default_factory=dict)
    _limits: list[machine.MemoryLimit] = PrivateAttr(default_factory=list)
    _kept: dict[str, LocalWorker] = PrivateAttr(default_factory=dict)
    """The other workers, while lost ones are started again."""
    _fork_server: ForkServer | None = None
    _own_daemon: bool = False
    _stopped: bool = False
    _keep_folders: bool = False
    _starting: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def launch(self, spec: PodSpec, count: int, context: LaunchContext) -> list[Pod]:
        """Start the pods and wait until each has reported; see `Place.launch`."""
        if self._workers:
            raise BackendError(
                f"the local pods are launched already ({len(self._workers)}); stop the pods first"
            )
        if count < 1:
            raise ConfigError(f"count is {count!r}; a cluster has at least one pod")
        check_key_line(context.public_key)
        folder = context.directory.absolute() / "pods"
        if not can_be_set(str(folder)):
            raise ConfigError(
                f"the cluster's directory {str(context.directory)!r} has quotes, backslashes or"
                " letters that do not print, and sshd cannot use the path. Give"
                " Cluster(…, path=PATH) another folder"
            )
        for number in range(count):
            root = folder / f"pod-{number}"
            if root.exists():
                raise ConfigError(
                    f"{root} exists; the cluster's directory holds pods already, choose another"
                )
        self._stopped = False
        return self._launch(spec, count, context)

    def _launch(self, spec: PodSpec, count: int, context: LaunchContext) -> list[Pod]:
        self._own_daemon = False
        try:
            login_user()
        except ConfigError as error:  # OpenSSH lets the user in nowhere
            context.report(f"the pods have an SSH daemon of this package: {error}")
            self._own_daemon = True
        else:
            find_sshd()
        loopback = machine.loopback_addresses(count)
        addresses = {f"pod-{number}": address for number, address in enumerate(loopback)}
        if few := spec.few_cores(cores() / count):
            context.report(f"each local pod has {few}")
        if words := left_out():
            context.report(words)
        folder = context.directory / "pods"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            port = self.port
            if port is None:
                port = machine.free_port(loopback)
            else:
                machine.check_free(loopback, port)
            try:
                return self._launch_at(port, addresses, spec, context)
            except _PortTaken:
                context.report(f"port {port} was taken by another process; trying another")
        raise BackendError(f"other processes took {_ATTEMPTS} free ports in a row; launch again")

    def adopt(self, pods: Sequence[Pod], spec: PodSpec, context: LaunchContext, /) -> list[Pod]:
        """Take the pods over.

        Start pods again in the same folders after an end by lease or by a reboot.
        """
        lives = {pod.name: taken_over(Path(pod.root)) for pod in pods}
        self._workers = {pod.name: LocalWorker.adopted(Path(pod.root)) for pod in pods}
        for name, worker in self._workers.items():
            if not lives[name]:
                ended_within(worker.process, _STOP_S)
                worker.process.kill()
        self._pods = {pod.name: pod for pod in pods}
        self._logs = {name: worker.log for name, worker in self._workers.items()}
        all_ended = all(worker.process.poll() is not None for worker in self._workers.values())
        lost = [pod for pod in pods if all_ended or not lives[pod.name]]
        if lost:
            context.report("pods have ended; starting them again in their folders")
            self._launch_again(lost, spec, context)
        return self.refresh()

    def restore(self, lost: Collection[str], spec: PodSpec, context: LaunchContext, /) -> list[Pod]:
        """Start lost pods again in the same folders, at the same addresses; see `Place.restore`."""
        for name, worker in self._workers.items():
            if name in lost:
                worker.process.kill()
                worker.process.wait(_STOP_S)
                if worker.process.stdin is not None:
                    worker.process.stdin.close()
        pods = [pod for pod in self.refresh() if pod.name in lost]
        if len(pods) == len(self._workers) and self._fork_server is not None:
            self._fork_server.end()
        self._launch_again(pods, spec, context)
        return self.refresh()

    def _launch_again(self, lost: Sequence[Pod], spec: PodSpec, context: LaunchContext) -> None:
        workers = self._workers
        pods = self._pods
        sweep([pod.root for pod in lost])
        with self._starting:
            self._check_not_stopped()
            self._kept = workers
            self._workers = {}
            self._keep_folders = True
        try:
            if len(lost) == len(pods):
                self._launch(spec, len(lost), context)
            else:
                # The others hold the port, and the server that shares an import of torch with
                # them has ended.
                addresses = {pod.name: pod.address for pod in lost}
                port = lost[0].ssh_port
                cold = replace(context, warm=False)
                try:
                    self._launch_at(port, addresses, spec, cold)
                except (_PortTaken, WorkbenchError) as error:
                    logger.warning("%s stay lost: %s", ", ".join(addresses), error)
        finally:
            with self._starting:
                self._keep_folders = False
                self._kept = {}
                if not self._stopped:  # else `stop` has ended them all
                    self._workers = {**workers, **self._workers}
                    self._pods = {**pods, **self._pods}

    def refresh(self) -> list[Pod]:
        """Return the pods, failed where their worker has ended."""
        for name, pod in list(self._pods.items()):
            worker = self._workers.get(name)  # none where another thread has just stopped them
            if worker is None or worker.process.poll() is None:
                continue
            if pod.phase is not Phase.FAILED:
                sweep([worker.root])
                message = worker.exit_message()
                self._pods[name] = replace(pod, phase=Phase.FAILED, message=message)
        return list(self._pods.values())

    def logs(self, name: str, tail: int = 50) -> str:
        """Return the last lines of a pod's daemon and worker; also after `stop`."""
        if name not in self._logs:
            raise ConfigError(
                f"no local pod {name!r} was launched; there are: {', '.join(self._logs) or 'none'}"
            )
        return tail_of(self._logs[name], tail)

    def stop(self) -> None:
        """End all processes of the pods, in five seconds at most, and remove the folders.

        The logs stay. Idempotent.
        """
        with self._starting:  # no worker may start unseen beside `_end`
            self._stopped = True
            every = {**self._kept, **self._workers}
            self._kept = {}
            self._keep_folders = False
        self._end(every)

    def remove_left(self, directory: Path) -> None:
        """End all processes of the pods, and remove the folders."""
        folder = directory / "pods"
        end_all(partial(unsettled_guardians, folder), grace_s=_STOP_S)
        workers = {}
        for root in records.folders_in(folder, "pod-*"):
            workers[root.name] = LocalWorker.adopted(root)
        self._workers = workers
        self._end()
        server = folder.absolute() / FORK_SERVER_NAME
        sweep([str(server)])
        _fork_server_address(directory).unlink(missing_ok=True)

    def _end(self, those: Mapping[str, LocalWorker] | None = None) -> None:
        """End workers as `stop` does, without cancelling a launch under way."""
        if those is None:
            those = self._workers
        workers = list(those.values())
        roots = [*{*self._roots, *(worker.root for worker in workers)}]
        fork_server = self._fork_server
        for worker in workers:
            worker.process.terminate()
        deadline = time.monotonic() + _STOP_S
        for worker in workers:
            ended_within(worker.process, max(0.0, deadline - time.monotonic()))
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
            if worker.process.stdin is not None:
                worker.process.stdin.close()
        if fork_server is not None:  # last: the sweep below ends the warm servers that it forked
            fork_server.end()
        # A fork server that another keeper started ends too.
        servers = {str(Path(root).with_name(FORK_SERVER_NAME)) for root in roots}
        sweep([*roots, *servers])
        if not self._keep_folders:
            stores = {str(Path(root).with_name(_STORE)) for root in roots}
            for root in roots:
                leave_seats(Path(root))
            for folder in [*roots, *stores]:
                remove_folder(Path(folder))
        for limit in self._limits:
            limit.remove()
        self._workers = {}
        self._pods = {}
        self._limits = []
        self._fork_server = None

    def _launch_at(
        self,
        port: int,
        addresses: Mapping[str, str],
        spec: PodSpec,
        context: LaunchContext,
    ) -> list[Pod]:
        folder = context.directory.absolute() / "pods"
        own: dict[str, Mapping[str, str]] = {}
        try:
            if spec.gpus:
                own = self._seated(folder, list(addresses), spec, context)
            # Pods of this machine share one import of torch.
            self._start_fork_server(spec, context)
            shared: dict[str, str] = {}
            if self._fork_server is not None:
                shared[FORK_SERVER_SOCKET] = str(self._fork_server.socket)
            with Rendezvous(list(addresses)) as rendezvous:
                for name, address in addresses.items():
                    root = folder / name
                    environment = {**_sessions(), **own.get(name, {}), **shared}
                    environment[POD_MARK] = str(root)
                    config = WorkerConfig(
                        name=name,
                        address=address,
                        port=port,
                        slots=spec.slots,
                        root=str(root),
                        log=str(root.with_name(f"{name}.log")),
                        public_key=context.public_key,
                        environment=environment,
                        own_daemon=self._own_daemon,
                        lease_s=context.lease_s,
                        timeout_s=context.timeout_s,
                        rendezvous=(rendezvous.host, rendezvous.port),
                        token=rendezvous.token.hex(),
                        versions=installed_versions(),
                    )
                    # The memory limit is a control group with a name of its own.
                    group = f"{os.getpid()}-{context.cluster_id}-{name}"
                    self._start_worker(config, group, spec.memory_gib)
                came = rendezvous.wait(
                    context.timeout_s,
                    watch=self._watch,
                    status_of=lambda name: self._workers[name].status(),
                    report=context.report,
                    arrived=context.arrived,
                )
            self._pods = {pod.name: pod for pod in came}
            self._watch()
            return came
        except BaseException:
            self._end()
            raise

    def _seated(
        self, folder: Path, names: Sequence[str], spec: PodSpec, context: LaunchContext
    ) -> dict[str, Mapping[str, str]]:
        """Take GPUs for the pods, and return the variables of each."""
        self._roots = [str(folder / name) for name in names]
        for name in names:
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        roots = [Path(root) for root in self._roots]
        variables = seat_pods(roots, spec, context.cluster_id, context.report)
        return dict(zip(names, variables, strict=True))

    def _start_fork_server(self, spec: PodSpec, context: LaunchContext) -> None:
        """Start the shared import of torch early, if all pods can use the same import."""
        alike = not spec.gpus and (spec.memory_gib is None or not machine.can_limit_memory())
        with self._starting:
            self._check_not_stopped()
            if context.warm and alike:
                folder = context.directory.absolute() / "pods"
                try:
                    # Not in the cluster's directory, which others may share.
                    make_cluster_folder(context.directory)
                    address = _fork_server_address(context.directory)
                    self._fork_server = ForkServer(folder, address, _sessions())
                except OSError as error:  # sharing the imports only saves time and memory
                    logger.warning("each local pod imports torch for itself: %s", error)

    def _start_worker(self, config: WorkerConfig, group: str, memory_gib: float | None) -> None:
        limit = None
        if memory_gib is not None:
            limit = machine.MemoryLimit.make(group, memory_gib)
        if limit is not None:
            self._limits.append(limit)
        with self._starting:
            self._check_not_stopped()
            name = config.name
            self._logs[name] = Path(config.log)
            self._workers[name] = LocalWorker.start(config, limit)

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise PodError("the local pods were stopped before all had reported")

    def _watch(self) -> None:
        self._check_not_stopped()
        for worker in self._workers.values():
            code = worker.process.poll()
            if code == PORT_IN_USE:
                if self.port is None:
                    raise _PortTaken
                machine.check_free([worker.address], self.port)
            if code is not None:
                raise PodError(worker.exit_message())


def _fork_server_address(directory: Path) -> Path:
    """Return the path of the fork server's socket, in the private folder of a cluster."""
    return cluster_folder(directory) / f"{FORK_SERVER_NAME}.sock"


def _sessions() -> dict[str, str]:
    return {**session_environment(), VISIBLE: ""}
