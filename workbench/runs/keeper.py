"""The keeper: the one detached process per cluster that owns its pods and its runs.

`python -m workbench.runs.keeper CLUSTER_DIR`. It reads `cluster.json`, launches the pods, keeps the agents' leases,
carries out runs one after another, and ends itself and the pods when it is closed or idle. The notebook is only a
window on it: everything that a window shows, the keeper writes to files first.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from workbench.errors import PodError, RunError, WorkbenchError
from workbench.pods.hostfile import Hostfile
from workbench.pods.identity import Identity
from workbench.pods.pod import LaunchContext, Pod, PodBackend
from workbench.pods.registry import backend_from_dict
from workbench.runs.agentlink import AgentLink
from workbench.runs.launch import place_ranks
from workbench.runs.package import package_zip
from workbench.runs.paths import ClusterPaths, RunPaths
from workbench.runs.planning import launch_plan
from workbench.runs.runner import RunContext, Runner
from workbench.runs.specfile import ClusterSpec, RunSpec
from workbench.runs.state import process_start_time, write_json
from workbench.runs.wire import listen, read_request
from workbench.spec.job import Job, job_from_dict
from workbench.spec.technique import Technique

__all__ = ["Keeper", "main"]

logger = logging.getLogger(__name__)
_PING_S = 3.0
_TICK_S = 0.25


class Keeper:
    """Own one cluster from its launch to its end."""

    def __init__(self, paths: ClusterPaths, spec: ClusterSpec):
        """Prepare; `serve` does the work."""
        self._paths = paths
        self._spec = spec
        self._backend: PodBackend = backend_from_dict(spec.backend)
        self._identity: Identity | None = None
        self._links: list[AgentLink] = []
        self._pods: Sequence[Pod] = ()
        self._phase, self._message = "starting", "starting pods"
        self._error: str | None = None
        self._closing = threading.Event()
        self._waiting: queue.Queue[Runner] = queue.Queue()
        self._runners: dict[str, Runner] = {}
        self._running: Runner | None = None
        self._touched = time.monotonic()

    def serve(self) -> None:
        """Launch the pods, answer requests until closed or idle, and leave nothing behind."""
        server = listen(self._paths.socket)
        threading.Thread(target=self._accept, args=(server,), name="requests", daemon=True).start()
        self._say("starting", "starting pods")
        try:
            self._launch()
            self._say("ready", f"{len(self._pods)} pods are ready")
            threading.Thread(target=self._keep_leases, name="leases", daemon=True).start()
            self._work()
            last = ("closed", self._message if self._phase == "closing" else "closed")
        except Exception as error:  # the process's border: the notebook reads why from the state file
            logger.exception("the keeper ends")
            self._error = type(error).__name__
            last = ("failed", str(error) if isinstance(error, WorkbenchError) else f"{self._error}: {error}")
        finally:
            self._tear_down()
        server.close()
        self._paths.socket.unlink(missing_ok=True)
        self._say(*last)

    def close(self, why: str = "closed by a signal") -> None:
        """Ask the keeper to end: the run in progress is cancelled, then the pods go. Returns at once; idempotent."""
        self._say("closing", why)
        self._closing.set()
        if self._running is not None:
            self._running.cancel()

    def _launch(self) -> None:
        self._identity = Identity.create(self._paths.identity)
        context = LaunchContext(
            cluster_id=self._paths.root.name,
            directory=self._paths.root,
            public_key=self._identity.public_key,
            lease_s=self._spec.lease_s,
            timeout_s=self._spec.start_timeout_s,
            report=lambda line: self._say("starting", line),
        )
        self._pods = self._backend.launch(self._spec.pods, self._spec.count, context)
        self._identity.pin(self._pods)
        _check_versions(self._pods)
        self._paths.hostfile.write_text(str(Hostfile.from_pods(self._pods)), encoding="utf-8")
        package = package_zip()
        self._links = [
            AgentLink(pod, self._identity, lease_s=self._spec.lease_s, package=package) for pod in self._pods
        ]
        self._say("starting", "starting agents")
        with ThreadPoolExecutor(max_workers=min(32, len(self._links))) as pool:
            list(pool.map(AgentLink.open, self._links))

    def _work(self) -> None:
        """Carry out runs in order until closed or idle."""
        self._touched = time.monotonic()
        while not self._closing.is_set():
            try:
                self._running = self._waiting.get(timeout=_TICK_S)
            except queue.Empty:
                self._end_when_idle()
                continue
            self._running.run()
            self._running = None
            self._touched = time.monotonic()
        while not self._waiting.empty():  # queued runs end as cancelled, with a result
            runner = self._waiting.get()
            runner.cancel()
            runner.abandon("the cluster was closed before it started")

    def _end_when_idle(self) -> None:
        idle_s = time.monotonic() - self._touched
        limit_s = self._spec.idle_timeout_s
        if limit_s is not None and idle_s >= limit_s:
            self._say("closing", f"closed after {limit_s:.0f} s without a run or a word from a notebook")
            self._closing.set()

    def _keep_leases(self) -> None:
        """Speak to every agent often enough that its lease never ends, and note pods that died."""
        while not self._closing.wait(_PING_S):
            if self._running is not None:
                continue  # the run's own polling renews the leases
            for link in self._links:
                with suppress(WorkbenchError):
                    self._ping(link)
            self._pods = self._backend.refresh()
            if any(pod.phase.is_terminal for pod in self._pods):
                dead = [f"{pod.name}: {pod.message or pod.phase}" for pod in self._pods if pod.phase.is_terminal]
                self._say(self._phase, "; ".join(dead))

    def _ping(self, link: AgentLink) -> None:
        try:
            link.call("ping")
        except WorkbenchError:
            link.open()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(30)
            try:
                answer: dict[str, object] = {"ok": True, **self._do(read_request(connection))}
            except WorkbenchError as error:
                answer = {"ok": False, "error": str(error)}
            except Exception as error:  # a connection's border
                logger.exception("a request")
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            with suppress(OSError):
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def _do(self, request: dict[str, object]) -> dict[str, object]:
        self._touched = time.monotonic()
        match request.get("op"):
            case "status":
                return {"phase": self._phase, "message": self._message}
            case "submit":
                return self._submit(request)
            case "dry":
                return self._runner_for(request).dry()
            case "cancel":
                return self._cancel(str(request.get("run")))
            case "close":
                self.close("closed by the notebook")
                return {}
            case other:
                raise RunError(f"the keeper does not know the request {other!r}")

    def _submit(self, request: dict[str, object]) -> dict[str, object]:
        runner = self._runner_for(request)
        self._runners[str(request["run"])] = runner
        self._waiting.put(runner)
        return {}

    def _runner_for(self, request: dict[str, object]) -> Runner:
        if self._phase != "ready":
            raise RunError(f"the cluster is {self._phase}: {self._message}; start another one")
        job = job_from_dict(request["job"])  # type: ignore[arg-type]
        links = self._take_pods(job, request.get("pods"))
        return self._runner(RunPaths(Path(str(request["path"]))), str(request["run"]), job, links)

    def _take_pods(self, job: Job, wanted: object) -> list[AgentLink]:
        if getattr(job, "technique", None) == Technique.SINGLE:
            wanted = 1
        count = int(str(wanted)) if wanted is not None else len(self._links)
        if not 1 <= count <= len(self._links):
            raise RunError(f"the job asks for {count} pods; the cluster has {len(self._links)}")
        return self._links[:count]

    def _runner(self, paths: RunPaths, run_id: str, job: Job, links: list[AgentLink]) -> Runner:
        assert self._identity is not None
        single = getattr(job, "technique", None) == Technique.SINGLE
        places = place_ranks([link.pod for link in links])[: 1 if single else None]
        paths.hostfile.write_text(str(Hostfile.from_pods([link.pod for link in links])), encoding="utf-8")
        context = RunContext(
            run_id=run_id,
            paths=paths,
            spec=RunSpec(cluster=self._spec, job=job, pods=len(links)),
            links=links,
            places=places,
            plan=partial(launch_plan, run_id, job, links, places, self._identity, paths),
            look=self._backend.refresh,
            lease_s=self._spec.lease_s,
        )
        return Runner(context)

    def _cancel(self, run_id: str) -> dict[str, object]:
        runner = self._runners.get(run_id)
        if runner is None:
            raise RunError(f"this keeper has no run {run_id}")
        runner.cancel()
        return {}

    def _tear_down(self) -> None:
        self._closing.set()
        for link in self._links:
            with suppress(WorkbenchError):
                link.call("shutdown")
            link.close()
        try:
            self._backend.stop()
        except Exception:  # whatever the platform says, the key must go too
            logger.exception("stopping the pods")
        if self._identity is not None:
            self._identity.destroy()

    def _say(self, phase: str, message: str) -> None:
        self._phase, self._message = phase, message
        logger.info("%s: %s", phase, message)
        write_json(
            self._paths.state,
            {
                "phase": phase,
                "message": message,
                "error": self._error,
                "pid": os.getpid(),
                "start_time": process_start_time(os.getpid()),
                "pods": [pod.to_dict() for pod in self._pods],
                "time_s": time.time(),
            },
        )


def _check_versions(pods: Sequence[Pod]) -> None:
    """Refuse pods whose libraries differ: collectives between versions hang or give wrong sums.

    Raises:
        PodError: A table of what differs.
    """
    names = sorted({name for pod in pods for name in pod.versions})
    rows = [(name, [pod.versions.get(name, "none") for pod in pods]) for name in names]
    different = [
        f"{name}: " + ", ".join(f"{p.name} {v}" for p, v in zip(pods, row, strict=True))
        for name, row in rows
        if len(set(row)) > 1
    ]
    if different:
        raise PodError("the pods have different versions; make them equal first:\n" + "\n".join(different))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the keeper of the cluster directory given as the only argument; `cluster.json` comes on standard input."""
    root = Path((argv or sys.argv[1:])[0])
    logging.basicConfig(
        filename=ClusterPaths(root).keeper_log,
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    for chatty in ("paramiko", "workbench.pods.transport"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    spec = ClusterSpec.from_dict(json.loads(sys.stdin.read()))
    keeper = Keeper(ClusterPaths(root), spec)
    signal.signal(signal.SIGTERM, lambda *_: keeper.close())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt meant for the notebook
    keeper.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
