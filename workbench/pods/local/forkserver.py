"""The keeper's side of the fork server of a cluster's local pods."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from workbench.base import entries
from workbench.base.allocator import preloaded
from workbench.base.child import start
from workbench.base.process import peer, world
from workbench.base.versions import installed_versions
from workbench.base.wire import listen
from workbench.pods.guest.process import private

_BACKLOG = 128  # agents that wait for the imports
_MESSAGE_BYTES = 1 << 20
_LONGEST_PATH = 4096
_LIMITS = ("limits", "oom_score_adj")  # a fork can tighten its own, and not always loosen them


class ForkServer:
    """`workbench.worker.forkserver`, for pods whose sessions have the same environment but for their marks.

    Clusters of one user that would import the same share one process that has: the first starts it, and it ends by
    itself once none has been there for ten seconds.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], mark: str, package: str) -> None:
        # The forks write the folder of their pod over this name: it must not be shorter than any of those.
        self.name = str(folder / "fork-server")
        self.socket = folder / "fork-server.sock"
        self._started: list[subprocess.Popen[bytes]] = []
        home = pwd.getpwuid(os.geteuid()).pw_dir  # as sshd sets it
        shared = {**environment, "HOME": home, "PYTHONPATH": package}
        request = {"python": sys.executable, "name": self.name}
        with (  # from now on: an agent may be there before the process that answers it
            listen(self.socket, socket.SOCK_SEQPACKET, _BACKLOG) as listener,
            open(folder / "fork-server.log", "ab", opener=private) as log,
        ):
            self._line = self._reach_importer(shared, mark, log)
            if peer(self._line)[1] == os.geteuid():  # anybody may take a name
                socket.send_fds(self._line, [json.dumps(request).encode()], [log.fileno(), listener.fileno()])

    def _reach_importer(self, shared: Mapping[str, str], mark: str, log: BinaryIO) -> socket.socket:
        """Connect to the process that has imported, or will have; start it where there is none."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        name = _importer_name(shared)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                line.connect(name)
                return line
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(name)
                except OSError:  # another keeper is about to listen there
                    time.sleep(0.01)
                    continue
                listener.listen(_BACKLOG)
                self._start_importer(listener, {**preloaded(), **shared, mark: _LONGEST_PATH * "-"}, log)

    def _start_importer(self, listener: socket.socket, env: Mapping[str, str], log: BinaryIO) -> None:
        number, nothing = listener.fileno(), subprocess.DEVNULL
        words = ("-m", entries.FORK_SERVER, str(number))
        self._started.append(start(*words, env=env, stdin=nothing, stdout=log, stderr=log, pass_fds=[number]))

    def end(self) -> None:
        """Have the cluster's own end, and with the agents what it has forked. Idempotent."""
        self._line.close()
        for process in self._started:
            process.wait()  # it has gone on as a fork
        self.socket.unlink(missing_ok=True)


def _importer_name(shared: Mapping[str, str]) -> str:
    """Name the process that imported as these pods would: an abstract socket, which leaves no file behind."""
    limits = [os.getpriority(os.PRIO_PROCESS, 0), *(Path("/proc/self", name).read_text() for name in _LIMITS)]
    alike = [dict(shared), world(), limits, sys.executable, installed_versions()]
    key = hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()
    return f"\0workbench-importer-{key}"
