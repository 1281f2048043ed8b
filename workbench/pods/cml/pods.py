"""`CMLPods`: workers of a Cloudera ML session. Each reads its configuration from a private file.

The file lies in the project folder, which the session and all workers share.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr

from workbench.base import entries
from workbench.base.child import HOME, start
from workbench.base.errors import BackendError, ConfigError, PodError
from workbench.base.files import records, write_text
from workbench.base.process import POD_MARK, end_all, process_start_time
from workbench.base.record import Count, Positive, Unit
from workbench.base.words import pluralize
from workbench.pods.bootstrap.guardian import WorkerConfig
from workbench.pods.bootstrap.machine import check_gpus
from workbench.pods.bootstrap.process import tail_of
from workbench.pods.cml.api import WorkersApi, has_ended, own_process, words_of, worker_ids
from workbench.pods.cml.worker import own_address
from workbench.pods.notes import note_of, read_note, write_note
from workbench.pods.place import Place, Port
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.rendezvous.listener import Rendezvous
from workbench.pods.ssh.identity import check_key_line

logger = logging.getLogger(__name__)


IDS = "cml.json"
"""Name of the note on the workers' ids by pod. The process of a session is a pod's id too."""
_END_S = 10.0  # the pod ends its processes within two, and is killed by then
_SET_BY_US = frozenset(("n", "cpu", "memory", "nvidia_gpu", "code", "script", "env"))


def _check_root(root: str) -> str:
    path = PurePosixPath(root)
    if not path.is_absolute() or ".." in path.parts or "$" in root:
        raise ConfigError(
            f"CMLPods root is {root!r}; it must be an absolute path on the workers, without .. and"
            " without variables"
        )
    return root


def _check_arguments(options: Mapping[str, object]) -> Mapping[str, object]:
    taken = sorted(_SET_BY_US & set(options))
    if taken:
        raise ConfigError(
            f"CMLPods options may not hold {', '.join(taken)}; the workbench sets them itself"
        )
    return options


class CMLPods(Place):
    """Workers of the current Cloudera ML session as pods."""

    model_config = ConfigDict(populate_by_name=True)
    label: ClassVar[str] = "CMLPods"
    kind: ClassVar[str] = "cml"

    cpu: Annotated[Positive, Unit("cores")] | None = None
    """Processor cores. Default: what the `PodSpec` says."""
    memory_gib: Annotated[Positive, Unit("GiB")] | None = None
    """Memory in GiB. Default: what the `PodSpec` says, or 8."""
    nvidia_gpu: Count | None = None
    """GPUs. Default: what the `PodSpec` says."""
    port: Port = 2222
    """Port of the workers' SSH daemons. If the port is taken, a free one is used. Default 2222."""
    project: str = "/home/cdsw"
    """The project's folder, which session and workers share."""
    root: Annotated[str, AfterValidator(_check_root)] = "/tmp"
    """Folder on the workers for the pods' own folders. It must not be shared. Default `/tmp`."""
    connect_timeout_s: Annotated[Positive, Unit("s")] = 5
    """Time limit for a new connection to a worker, in seconds. Default 5."""
    session: bool = False
    """Whether the session itself is pod 0, with its own GPUs. One worker less is then launched.
    Default false."""
    arguments: Annotated[Mapping[str, object], AfterValidator(_check_arguments)] = Field(
        default_factory=dict, alias="options"
    )
    """More arguments for `launch_workers`, such as `accelerator_label_id` or
    `resource_profile_id`."""

    _api: WorkersApi = PrivateAttr(default_factory=WorkersApi)
    _ids: dict[str, object] = PrivateAttr(default_factory=dict)
    _pods: list[Pod] = PrivateAttr(default_factory=list)
    _logs: dict[str, Path] = PrivateAttr(default_factory=dict)
    _files: list[Path] = PrivateAttr(default_factory=list)
    _failed: list[str] = PrivateAttr(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _stopped: bool = False
    _starting: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def launch(self, spec: PodSpec, count: int, context: LaunchContext) -> list[Pod]:
        """Launch one worker per pod and wait until all have reported; see `Place.launch`."""
        if self._ids:
            raise BackendError(
                f"the workers are launched already ({len(self._ids)}); stop the workers first"
            )
        if count < 1:
            raise ConfigError(f"count is {count!r}; a cluster has at least one pod")
        # Everything that can be refused is refused before the first worker.
        self._api.find()
        self._check_shared(context.directory)
        check_key_line(context.public_key)
        self._stopped = False
        folder = context.directory / "pods"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.session:
            check_gpus(self._gpus(spec))
        names = [f"pod-{i}" for i in range(count)]
        root = self.root.rstrip("/")
        # Workers of several clusters share the root, so the folder has a name of its own.
        own = f"{root}/workbench-{context.cluster_id}-{secrets.token_hex(8)}"
        try:
            self._pods = self._launch_workers(names, own, spec, context)
            return list(self._pods)
        except BaseException:
            with context.reporting_unstopped():
                self.stop()
            raise

    def _launch_workers(
        self, names: Sequence[str], own: str, spec: PodSpec, context: LaunchContext
    ) -> list[Pod]:
        # The thread of an earlier launch may still report that launch's workers.
        failed: list[str] = []
        self._failed = failed
        with Rendezvous(names, host=own_address()) as rendezvous:
            # Every worker gets a file with its configuration, and reports by the token in the file.
            for name in names:
                log = context.directory.absolute() / "pods" / f"{name}.log"
                root = f"{own}/{name}"
                config = WorkerConfig(
                    name=name,
                    address="",
                    port=self.port,
                    slots=max(1, self._gpus(spec)),
                    root=root,
                    log=str(log),
                    public_key=context.public_key,
                    environment={POD_MARK: root},
                    lease_s=context.lease_s,
                    timeout_s=context.timeout_s,
                    rendezvous=(rendezvous.host, rendezvous.port),
                    token=rendezvous.token.hex(),
                    allowed_from=rendezvous.host,
                )
                self._launch_one(context.directory, config, spec)
            # The own session is a pod without a new worker.
            asked = [name for name in names if not self._is_session(name)]
            workers = pluralize(len(asked), "worker")
            own_pod = "; pod-0 is this session" if asked != list(names) else ""
            context.report(f"asked Cloudera ML for {workers}{own_pod}")
            # The platform's own wait tells failed workers apart from late workers.
            limit_s = context.timeout_s
            awaiting = threading.Thread(target=self._await, args=(limit_s, failed), daemon=True)
            awaiting.start()
            came = rendezvous.wait(
                context.timeout_s,
                watch=self._watch,
                status_of=self._status_of,
                report=context.report,
                arrived=context.arrived,
            )
        self._watch()
        return self._placed(came)

    def restore(self, lost: Collection[str], spec: PodSpec, context: LaunchContext, /) -> list[Pod]:
        """Stop lost workers that still run and launch replacements; see `Place.restore`."""
        names = sorted(lost)
        with context.reporting_unstopped():
            self._end({name: self._ids[name] for name in names})
        own = PurePosixPath(self._pods[0].root).parent
        came = self._launch_workers(names, str(own), spec, context)
        replacements = {pod.name: pod for pod in came}
        self._pods = [replacements.get(pod.name, pod) for pod in self._pods]
        return self.refresh()

    def adopt(self, pods: Sequence[Pod], _spec: PodSpec, context: LaunchContext, /) -> list[Pod]:
        """Take the workers over, by the noted ids."""
        self._api.find()
        noted = self._recall(context.directory)
        if any(pod.name not in noted for pod in pods):
            raise BackendError(
                f"{note_of(context.directory, IDS)} does not hold the ids of all workers;"
                " start another cluster"
            )
        self._pods = list(pods)
        folder = context.directory.absolute() / "pods"
        self._logs = {pod.name: folder / f"{pod.name}.log" for pod in pods}
        return self.refresh()

    def _recall(self, directory: Path) -> set[str]:
        self._ids = read_note(directory, IDS)
        self._files = []
        if self._ids:
            folder = directory / "pods"
            self._files = [note_of(directory, IDS), *records.files_in(folder, "pod-*.json")]
        return set(self._ids)

    def refresh(self) -> list[Pod]:
        """Ask the platform for the workers; a worker that is no longer listed has failed."""
        if self._pods:
            workers = self._api.call("list_workers")
            listed = {str(worker.get("id")): worker for worker in workers}
            # The session itself is no worker.
            own = own_process(self._ids)
            if own:
                status = "running" if own.is_alive() else "exited"
                listed[str(self._ids["pod-0"])] = {"status": status}
            pods = []
            for pod in self._pods:
                worker = listed.get(str(self._ids[pod.name]))
                pods.append(self._seen(pod, worker))
            self._pods = pods
        return list(self._pods)

    def logs(self, name: str, tail: int = 50) -> str:
        """Return the last lines of a worker's pod and its SSH daemon; also after `stop`."""
        if name not in self._logs:
            raise ConfigError(
                f"no worker {name!r} was launched; there are: {', '.join(self._logs) or 'none'}"
            )
        return tail_of(self._logs[name], tail)

    def stop(self) -> None:
        """Stop the workers of `launch` and no others.

        A worker that cannot be stopped ends by its lease.
        """
        with self._starting:
            self._stopped = True
        for file in self._files:
            file.unlink(missing_ok=True)
        ids = self._ids
        self._ids = {}
        self._pods = []
        self._files = []
        self._end(ids)

    def _end(self, ids: Mapping[str, object]) -> None:
        own = own_process(ids)
        if own is not None:
            end_all(lambda: [own] if own.is_alive() else [], grace_s=_END_S)
            if self._process is not None:
                self._process.wait()
        workers = worker_ids(ids)
        if workers:  # without any, stop_workers would stop every worker of the project
            self._api.call("stop_workers", *workers)

    def remove_left(self, directory: Path) -> None:
        """Stop the workers of a dead keeper, by the noted ids."""
        if self._recall(directory):
            self.stop()

    def _gpus(self, spec: PodSpec) -> int:
        if self.nvidia_gpu is None:
            return spec.gpus
        return self.nvidia_gpu

    def _is_session(self, name: str) -> bool:
        """Whether a pod is the session itself instead of a worker."""
        return self.session and name == "pod-0"

    def _check_shared(self, directory: Path) -> None:
        project = Path(self.project).resolve()
        if not directory.resolve().is_relative_to(project):
            raise ConfigError(
                f"the cluster's directory {directory} is not in the project's folder {project}."
                " The workers share only this folder with the session; give Cluster(…, path=…) a"
                " folder inside"
            )

    def _launch_one(self, directory: Path, config: WorkerConfig, spec: PodSpec) -> None:
        """Ask for a single worker, so that every worker has a name of ours."""
        name = config.name
        log = Path(config.log)
        file = log.with_suffix(".json")
        words = ("-m", entries.CML_WORKER, str(file))
        command = [sys.executable, "-P", *words]
        asked = {
            "n": 1,
            "cpu": self.cpu if self.cpu is not None else spec.cores,
            "memory": self.memory_gib or spec.memory_gib or 8.0,
            "nvidia_gpu": self._gpus(spec),
            "code": f"import subprocess\nsubprocess.run({command!r}, check=True)\n",
            "env": {"PYTHONPATH": HOME, "PYTHONSAFEPATH": "1"},
        }
        with self._starting:
            if self._stopped:
                raise PodError("the workers were stopped before all were launched")
            self._files.append(file)
            self._logs[name] = log
            write_text(file, config.to_line().decode())
            if self._is_session(name):
                self._ids[name] = self._start_here(words, log)
            else:
                (worker,) = self._api.call("launch_workers", **asked, **self.arguments)
                self._ids[name] = worker["id"]
            # A later keeper finds the worker by this note.
            note = note_of(directory, IDS)
            if note not in self._files:
                self._files.append(note)
            write_note(directory, IDS, self._ids)

    def _start_here(self, words: Sequence[str], log: Path) -> Mapping[str, int | None]:
        env = {**os.environ, "PYTHONPATH": HOME, "PYTHONSAFEPATH": "1"}
        with records.open_to_append(log) as file:
            process = start(
                *words,
                cwd=Path.cwd(),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._process = process
        return {
            "pid": process.pid,
            "start_time": process_start_time(process.pid),
        }

    def _await(self, timeout_s: float, failed: list[str]) -> None:
        """Add the workers that did not start to `failed`."""
        ids = worker_ids(self._ids)
        if not ids:
            return
        names = {str(worker): name for name, worker in self._ids.items()}
        try:
            answer = self._api.call(
                "await_workers",
                ids,
                wait_for_completion=False,
                timeout_seconds=int(timeout_s),
            )
        except BackendError as error:  # the workers' own reports decide
            logger.warning("%s", error)
            return
        for worker in answer.get("failures", []):
            worker_id = worker.get("id")
            name = names.get(str(worker_id), "a worker")
            reason = words_of(worker)
            failed.append(f"{name} (worker {worker_id}) did not start: {reason}")

    def _watch(self) -> None:
        if self._stopped:
            raise PodError("the workers were stopped before all had reported")
        if self._failed:
            raise PodError("; ".join(self._failed))

    def _status_of(self, name: str) -> str:
        line = tail_of(self._logs[name], 1) or "none"
        who = "this session" if self._is_session(name) else f"worker {self._ids.get(name)}"
        return f"{who}, last log line: {line}"

    def _placed(self, came: Sequence[Pod]) -> list[Pod]:
        """Compare the workers' own addresses with the platform's, where the platform names any."""
        addresses = {}
        for worker in self._api.call("list_workers"):
            worker_id = str(worker.get("id"))
            addresses[worker_id] = str(worker.get("ip_address") or "")
        for pod in came:
            worker_id = str(self._ids[pod.name])
            address = addresses.get(worker_id, "")
            if address not in ("", pod.address):
                raise PodError(
                    f"{pod.name} reports the address {pod.address}, but Cloudera ML lists worker"
                    f" {worker_id} at {address}; nothing was sent to either address"
                )
        limit_s = float(self.connect_timeout_s)
        return [replace(pod, connect_timeout_s=limit_s) for pod in came]

    def _seen(self, pod: Pod, worker: Mapping[str, object] | None) -> Pod:
        if pod.phase.is_terminal:
            return pod
        if worker is None:
            message = "Cloudera ML no longer lists its worker"
            return replace(pod, phase=Phase.FAILED, message=message)
        if has_ended(worker):
            message = f"its worker has ended: {words_of(worker)}"
            return replace(pod, phase=Phase.FAILED, message=message)
        return pod
