"""Small stand-ins for platforms that cannot be had here, speaking their documented interfaces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.poll import until
from workbench.base.process import find


class WorkersV1:
    """`cml.workers_v1` by its documentation; a worker is a process on a loopback address.

    https://docs.cloudera.com/machine-learning/cloud/distributed-computing/topics/ml-workers-api.html
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Begin; `folder`: the platform's notes of its workers, which outlive the session."""
        self.folder = folder
        self.workers: dict[int, dict[str, Any]] = {}
        self.processes: dict[int, subprocess.Popen[bytes] | _Engine] = {}
        self.calls: list[tuple[str, object]] = []
        self.failing: set[int] = set()
        """Ids of workers that never start."""
        self.mute: set[int] = set()
        """Ids of workers that start and run other code than was asked for."""
        self.tells_addresses = True
        self.quota = 100

    def launch_workers(  # noqa: PLR0913 - the real interface takes as many
        self,
        n: int,
        cpu: float,
        memory: float,
        nvidia_gpu: int = 0,
        kernel: str = "python3",
        script: str = "",
        code: str = "",
        accelerator_label_id: int | None = None,
        resource_profile_id: int | None = None,
        resource_group_id: int | None = None,
        env: dict[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        self.calls.append(
            ("launch_workers", {"n": n, "cpu": cpu, "memory": memory, "nvidia_gpu": nvidia_gpu})
        )
        if len(self.processes) + n > self.quota:
            raise RuntimeError("403: cpu quota exceeded for user ada")
        return [self._launch(code, env or {}) for _ in range(n)]

    def list_workers(self) -> list[dict[str, Any]]:
        self._recall()
        for number, process in self.processes.items():
            if process.poll() is not None and self.workers[number]["status"] == "running":
                self.workers[number]["status"] = (
                    "succeeded" if process.returncode == 0 else "failed"
                )
        return [dict(worker) for worker in self.workers.values()]

    def await_workers(
        self, ids: Sequence[int], wait_for_completion: bool = True, timeout_seconds: int = 60
    ) -> dict[str, list[dict[str, Any]]]:
        assert not wait_for_completion, "such a wait would last as long as the pods do"
        assert timeout_seconds > 0, "0 is for ever"
        time.sleep(0.2)
        chosen = [self.workers[number] for number in ids]
        return {
            "workers": [worker for worker in chosen if worker["status"] == "running"],
            "failures": [worker for worker in chosen if worker["status"] != "running"],
        }

    def stop_workers(self, *worker_id: int) -> list[dict[str, Any]]:
        assert worker_id, "without ids every worker of the project would stop"
        self._recall()
        self.calls.append(("stop_workers", worker_id))
        processes = [self.processes[number] for number in worker_id if number in self.processes]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_end_engine, processes))
        for number in worker_id:
            self.workers[number]["status"] = "stopped"
        return [self.workers[number] for number in worker_id]

    def _launch(self, code: str, env: dict[str, str]) -> dict[str, Any]:
        self._recall()
        number = 101 + len(self.workers)
        address = f"127.0.0.{2 + len(self.workers) % 200}"
        told = address if self.tells_addresses else None
        worker = {
            "id": number,
            "app_url": f"https://w{number}.example",
            "ip_address": told,
            "status": "running",
        }
        self.workers[number] = worker
        if number in self.failing:
            worker["status"] = "failed"
            worker["reason"] = "ImagePullBackOff"
            return {"id": number, "app_url": worker["app_url"]}
        self.processes[number] = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)" if number in self.mute else code],
            env={**os.environ, **env, "CDSW_IP_ADDRESS": address, "CDSW_MASTER_IP": "127.0.0.1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self.folder is not None:
            noted = {**worker, "pid": self.processes[number].pid}
            (self.folder / f"worker-{number}.json").write_text(json.dumps(noted))
        return {"id": number, "app_url": worker["app_url"]}

    def _recall(self) -> None:
        """Know the workers that another process asked for."""
        for file in sorted(self.folder.glob("worker-*.json")) if self.folder is not None else ():
            noted = json.loads(file.read_text())
            if noted["id"] not in self.workers:
                self.processes[noted["id"]] = _Engine(noted.pop("pid"))
                self.workers[noted["id"]] = noted


class _Engine:
    """The engine of a worker that another process asked for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = find(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and not (self._process and self._process.is_alive()):
            self.returncode = -signal.SIGKILL  # nobody is left who could say
        return self.returncode

    def wait(self, within_s: float) -> None:
        until(lambda: self.poll() is not None, within_s)


def _end_engine(engine: subprocess.Popen[bytes] | _Engine) -> None:
    """End a worker's engine and all that it started, as the end of its container would."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGTERM)
    while _group_lives(engine.pid):
        engine.poll()
        if time.monotonic() > deadline:
            os.killpg(engine.pid, signal.SIGKILL)
        time.sleep(0.02)
    engine.wait(300)


def _group_lives(group: int) -> bool:
    """Tell whether a process of the group still runs; a dead one may wait a while to be reaped."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[2]) == group and words[0] not in "ZX":
                return True
    return False


def install_cml(folder: Path) -> None:
    """Write a package `cml` that is the fake, for this process and its children (`PYTHONPATH`)."""
    package = folder / "cml"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    names = ("launch_workers", "list_workers", "await_workers", "stop_workers")
    head = ["from pathlib import Path", "", "from tests.fakes.cmlworkers import WorkersV1", ""]
    lines = [
        *head,
        "FAKE = WorkersV1(Path(__file__).parent)",
        *(f"{n} = FAKE.{n}" for n in names),
        "",
    ]
    (package / "workers_v1.py").write_text("\n".join(lines))
