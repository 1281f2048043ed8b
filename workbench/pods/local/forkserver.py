"""The keeper's side of the fork server of a cluster's local pods."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from workbench.base import entries
from workbench.base.allocator import preloaded
from workbench.base.child import start
from workbench.base.files.private import runtime_folder
from workbench.base.process import boot_id, peer, world
from workbench.base.versions import installed_versions
from workbench.base.wire import listen, short_path
from workbench.pods.guest.process import private

_BACKLOG = 128  # agents that wait for the imports
_REACH_S = (
    5.0  # for the process that imports to take a connection, before the pods import for themselves
)
_LOOK_S = 0.02
_MESSAGE_BYTES = 1 << 20
_LONGEST_PATH = 4096
_LIMITS = ("limits", "oom_score_adj")  # a fork can tighten its own, and not always loosen them


class ForkServer:
    """`workbench.worker.forkserver`, for pods whose sessions have the same environment but for their marks.

    Clusters of one user that would import the same share one process that has: the first starts it, and it ends by
    itself once none has been there for ten seconds.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], mark: str, package: str
    ) -> None:
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
            try:
                self._line = self._reach_importer(shared, mark, log)
            except OSError:
                self.socket.unlink(missing_ok=True)
                raise
            socket.send_fds(
                self._line, [json.dumps(request).encode()], [log.fileno(), listener.fileno()]
            )

    def _reach_importer(self, shared: Mapping[str, str], mark: str, log: BinaryIO) -> socket.socket:
        """Connect to the importer, or start it first; an OSError says that it has no folder or does not answer."""
        path = runtime_folder() / _importer_name(shared)
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        line.settimeout(_REACH_S)
        try:
            with _alone(
                path.with_suffix(".lock")
            ):  # of several keepers that start at once, one starts the importer
                if not _connect(line, path):
                    with listen(path, socket.SOCK_SEQPACKET, _BACKLOG) as listener:
                        self._start_importer(
                            listener, {**preloaded(), **shared, mark: _LONGEST_PATH * "-"}, log
                        )
                    if not _connect(line, path):
                        raise ConnectionRefusedError(
                            f"nothing listens at {path}, where the imports were started"
                        )
            if peer(line)[1] != os.geteuid():
                raise PermissionError(f"another user listens at {path}")
        except BaseException:
            line.close()
            raise
        line.settimeout(None)
        return line

    def _start_importer(
        self, listener: socket.socket, env: Mapping[str, str], log: BinaryIO
    ) -> None:
        number, nothing = listener.fileno(), subprocess.DEVNULL
        words = ("-m", entries.FORK_SERVER, str(number))
        self._started.append(
            start(*words, env=env, stdin=nothing, stdout=log, stderr=log, pass_fds=[number])
        )

    def end(self) -> None:
        """Have the cluster's own end, and with the agents what it has forked. Idempotent."""
        self._line.close()
        for process in self._started:
            process.wait()  # it has gone on as a fork
        self.socket.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock meanwhile. Raises TimeoutError where another process does not give it back within seconds."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _REACH_S
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held {path} for {_REACH_S:g} s")
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(handle)


def _connect(line: socket.socket, path: Path) -> bool:
    """Connect to a socket; False where nothing listens. Raises TimeoutError where it takes no more connections."""
    deadline = time.monotonic() + _REACH_S
    while time.monotonic() < deadline:
        try:
            with short_path(path) as name:
                line.connect(name)
            return True
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # as many wait there as the system lets wait
            time.sleep(_LOOK_S)
    raise TimeoutError(
        f"the process that imports for local pods took no connection in {_REACH_S:g} s"
    )


def _importer_name(shared: Mapping[str, str]) -> str:
    """Name the socket of the process that imported as these pods would, on this machine as it runs now."""
    limits = [
        os.getpriority(os.PRIO_PROCESS, 0),
        *(Path("/proc/self", name).read_text() for name in _LIMITS),
    ]
    alike = [dict(shared), world(), limits, sys.executable, installed_versions(), boot_id()]
    key = hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()
    return f"importer-{key[:32]}.sock"
