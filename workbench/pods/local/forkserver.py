"""The keeper's side of the fork server of a cluster's local pods."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from workbench.base import entries
from workbench.pods.guest.process import private

_BACKLOG = 128  # agents that wait for the imports


class ForkServer:
    """`workbench.worker.forkserver`, for pods whose sessions have the same environment but for their marks."""

    def __init__(self, folder: Path, environment: Mapping[str, str], mark: str, package: str) -> None:
        # The forks write the folder of their pod over this name: it must not be shorter than any of those.
        self.name = str(folder / "fork-server")
        self.socket = folder / "fork-server.sock"
        home = pwd.getpwuid(os.geteuid()).pw_dir  # as sshd sets it
        with _listening(self.socket) as listener, open(folder / "fork-server.log", "ab", opener=private) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", entries.FORK_SERVER, str(listener.fileno()), self.name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**environment, "HOME": home, "PYTHONPATH": package, mark: self.name},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the notebook
            )

    def end(self) -> None:
        """Have it end, if it has imported already; what it has forked ends with the agents. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self.socket.unlink(missing_ok=True)


def _listening(path: Path) -> socket.socket:
    """Listen from now on: an agent may be there before the process that answers it."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # a Unix socket's address has no room for long paths
    finally:
        os.close(folder)
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    return listener
