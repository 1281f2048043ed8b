"""The program of a pod on a platform's worker: run the guardian until the pod or its lease ends.

The worker reads its configuration from a private file, in a folder shared with the keeper.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from workbench.base.child import ended_within
from workbench.base.errors import WorkbenchError
from workbench.base.files.folders import remove_folder
from workbench.base.process import live_descendants
from workbench.pods.bootstrap.guardian import PORT_IN_USE, WorkerConfig
from workbench.pods.bootstrap.machine import check_free, free_port
from workbench.pods.bootstrap.pod_main import Stop, can_be_set, stop
from workbench.pods.bootstrap.process import LocalWorker, left_out, session_environment

_LOOK_S = 1.0
_END_S = 5.0  # beside the time for a checkpoint that the guardian leaves to ranks
_PORTS_TRIED = 5  # another process may take a port between the look and the daemon's start


class PlatformWorker:
    """The pod on a worker of a platform. A subclass knows the platform."""

    environment: Mapping[str, str] = {}
    """More variables of the pod's sessions."""

    def address(self, config: WorkerConfig) -> str:
        """Return the worker's address."""
        raise NotImplementedError

    def leaving(self) -> str:
        """Return why the platform will end the worker soon, or an empty string.

        The pod then ends, and its ranks get time for a checkpoint.
        """
        return ""

    def run(self, path: Path) -> int:
        """Run the pod's guardian until the pod ends or is no longer wanted; return the exit code.

        Args:
            path: File of the configuration.
        """
        signal.signal(signal.SIGTERM, stop)
        config = WorkerConfig.from_line(path.read_bytes())
        root = Path(config.root)
        try:
            root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for _ in range(_PORTS_TRIED):
                code = self._hold(_completed(config, self.address(config), self.environment))
                if code != PORT_IN_USE:
                    break
                remove_folder(str(root))
            return code
        except Stop:
            return 0
        except (WorkbenchError, OSError) as error:
            _say(config, str(error))
            return 1
        finally:
            remove_folder(str(root))
            if not list(root.parent.glob("pod-*")):
                remove_folder(str(root.parent))

    def _hold(self, config: WorkerConfig) -> int:
        worker = LocalWorker.start(config).process
        assert worker.stdin is not None
        try:
            return self._guard(worker, config)
        finally:
            worker.terminate()
            ended_within(worker, config.leave_s + _END_S)
            worker.kill()
            worker.stdin.close()

    def _guard(self, worker: subprocess.Popen[bytes], config: WorkerConfig) -> int:
        deadline = time.monotonic() + config.timeout_s + config.lease_s
        while worker.poll() is None:
            if why := self.leaving():
                _say(config, f"{why}; this pod ends")
                return 0
            # The daemon, and a child of its for each login.
            if len(live_descendants(worker.pid)) > 1:
                deadline = time.monotonic() + config.lease_s
            elif time.monotonic() > deadline:
                _say(config, f"nobody was logged in for {config.lease_s:.0f} s; this pod ends")
                return 0
            time.sleep(_LOOK_S)
        return worker.returncode


def _completed(config: WorkerConfig, address: str, environment: Mapping[str, str]) -> WorkerConfig:
    try:
        check_free([address], config.port)
        port = config.port
    except WorkbenchError:  # the platform's own sshd may be there
        port = free_port([address])
    if words := left_out(environment):
        _say(config, words)
    more = {name: value for name, value in environment.items() if can_be_set(value)}
    whole = {**session_environment(), **more, **config.environment}
    return replace(config, address=address, port=port, environment=whole)


def _say(config: WorkerConfig, line: str) -> None:
    with Path(config.log).open("a") as log:
        log.write(f"worker: {line}\n")
