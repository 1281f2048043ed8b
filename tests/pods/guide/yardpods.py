"""A place of another package, written by the guide "A place" of docs/extending.md.

Its pods are SSH daemons of this machine, in a folder of the cluster's directory.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import PrivateAttr

from workbench.base.errors import BackendError, ConfigError, PodError
from workbench.base.process import POD_MARK
from workbench.pods.bootstrap.guardian import WorkerConfig, taken_over
from workbench.pods.bootstrap.machine import free_port, loopback_addresses
from workbench.pods.bootstrap.process import LocalWorker, session_environment, sweep, tail_of
from workbench.pods.place import CoreBinding, Place
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.rendezvous.listener import Rendezvous

_STOP_S = 4.0


class YardPods(Place):
    """Pods in a yard of this machine."""

    label: ClassVar[str] = "YardPods"
    kind: ClassVar[str] = "yard"
    on_this_machine: ClassVar[bool] = True
    core_binding: ClassVar[CoreBinding] = "never"

    folder: str = "yard"
    """Folder of the pods inside the cluster's directory. Default `yard`."""

    _workers: dict[str, LocalWorker] = PrivateAttr(default_factory=dict)
    _pods: dict[str, Pod] = PrivateAttr(default_factory=dict)
    _logs: dict[str, Path] = PrivateAttr(default_factory=dict)
    _stopped: bool = False
    _starting: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def launch(self, spec: PodSpec, count: int, context: LaunchContext) -> Sequence[Pod]:
        if self._workers:
            raise BackendError("these pods are launched already; stop them first")
        self._stopped = False
        yard = context.directory.absolute() / self.folder
        yard.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = [f"pod-{number}" for number in range(count)]
        addresses = loopback_addresses(count)
        port = free_port(addresses)
        try:
            with Rendezvous(names) as rendezvous:
                for name, address in zip(names, addresses, strict=True):
                    root = str(yard / name)
                    config = WorkerConfig(
                        name=name,
                        address=address,
                        port=port,
                        slots=spec.slots,
                        root=root,
                        log=f"{root}.log",
                        public_key=context.public_key,
                        environment={**session_environment(), POD_MARK: root},
                        lease_s=context.lease_s,
                        timeout_s=context.timeout_s,
                        rendezvous=(rendezvous.host, rendezvous.port),
                        token=rendezvous.token.hex(),
                    )
                    self._start(config)
                came = rendezvous.wait(
                    context.timeout_s,
                    watch=self._check,
                    report=context.report,
                    arrived=context.arrived,
                )
            self._check()
        except BaseException:
            self._end()
            raise
        self._pods = {pod.name: pod for pod in came}
        return came

    def adopt(self, pods: Sequence[Pod], spec: PodSpec, context: LaunchContext, /) -> Sequence[Pod]:
        self._stopped = False
        for pod in pods:
            taken_over(Path(pod.root))
            self._workers[pod.name] = LocalWorker.adopted(Path(pod.root))
            self._logs[pod.name] = self._workers[pod.name].log
        self._pods = {pod.name: pod for pod in pods}
        return self.refresh()

    def refresh(self) -> Sequence[Pod]:
        for name, worker in list(self._workers.items()):
            if worker.process.poll() is not None and name in self._pods:
                gone = replace(self._pods[name], phase=Phase.FAILED, message=worker.exit_message())
                self._pods[name] = gone
        return list(self._pods.values())

    def logs(self, name: str, tail: int = 50) -> str:
        if name not in self._logs:
            raise ConfigError(f"no pod {name!r} was launched in this yard")
        return tail_of(self._logs[name], tail)

    def stop(self) -> None:
        with self._starting:
            self._stopped = True
        self._end()

    def remove_left(self, directory: Path) -> None:
        yard = directory.absolute() / self.folder
        roots = [root for root in yard.glob("pod-*") if root.is_dir()]
        self._workers = {root.name: LocalWorker.adopted(root) for root in roots}
        self._end()

    def _start(self, config: WorkerConfig) -> None:
        with self._starting:
            self._check()
            self._logs[config.name] = Path(config.log)
            self._workers[config.name] = LocalWorker.start(config)

    def _check(self) -> None:
        if self._stopped:
            raise PodError("the yard was closed before all of its pods had come")
        for worker in self._workers.values():
            if worker.process.poll() is not None:
                raise PodError(worker.exit_message())

    def _end(self) -> None:
        workers = list(self._workers.values())
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_STOP_S)
            worker.process.kill()
            worker.process.wait()
            if worker.process.stdin is not None:
                worker.process.stdin.close()
        sweep([worker.root for worker in workers])
        for worker in workers:
            shutil.rmtree(worker.root, ignore_errors=True)
        self._workers, self._pods = {}, {}
