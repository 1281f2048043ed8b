"""The program of a Cloudera ML worker: run the pod's guardian until the pod or its lease ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.files.folders import remove_folder
from workbench.base.process import live_descendants
from workbench.pods.guest.guardian import PORT_IN_USE, WorkerConfig
from workbench.pods.guest.machine import check_free, free_port
from workbench.pods.guest.pod_main import Stop, stop
from workbench.pods.guest.process import LocalWorker, session_environment

ADDRESS = "CDSW_IP_ADDRESS"

_LOOK_S = 1.0
_END_S = 30.0  # the guardian leaves ranks the time for a checkpoint
_PORTS_TRIED = 5  # another process may take a port between the look and the daemon's start


def main(path: Path) -> int:
    """Run the pod's guardian until the pod ends or is no longer wanted; return the exit code."""
    signal.signal(signal.SIGTERM, stop)
    config = WorkerConfig.from_line(path.read_bytes())
    root = Path(config.root)
    try:
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(_PORTS_TRIED):
            code = _hold(_completed(config))
            if code != PORT_IN_USE:
                break
            remove_folder(str(root))
        return code
    except Stop:
        return 0
    except (WorkbenchError, OSError) as error:
        with Path(config.log).open("a") as log_text:
            log_text.write(f"worker: {error}\n")
        return 1
    finally:
        remove_folder(str(root))
        if not list(root.parent.glob("pod-*")):
            remove_folder(str(root.parent))


def _hold(config: WorkerConfig) -> int:
    worker = LocalWorker.start(config).process
    assert worker.stdin is not None
    try:
        return _guard(worker, config)
    finally:
        worker.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(_END_S)
        worker.kill()
        worker.stdin.close()


def own_address() -> str:
    return os.environ[ADDRESS]


def _completed(config: WorkerConfig) -> WorkerConfig:
    address = own_address()
    try:
        check_free([address], config.port)
        port = config.port
    except WorkbenchError:  # the platform's own sshd may be there
        port = free_port([address])
    environment = {**session_environment(), **config.environment}
    return replace(config, address=address, port=port, environment=environment)


def _guard(worker: subprocess.Popen[bytes], config: WorkerConfig) -> int:
    deadline = time.monotonic() + config.timeout_s + config.lease_s
    while worker.poll() is None:
        if len(live_descendants(worker.pid)) > 1:  # the daemon, and a child of its for each login
            deadline = time.monotonic() + config.lease_s
        elif time.monotonic() > deadline:
            with Path(config.log).open("a") as log:
                log.write(
                    f"worker: nobody was logged in for {config.lease_s:.0f} s; this pod ends\n"
                )
            return 0
        time.sleep(_LOOK_S)
    return worker.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
