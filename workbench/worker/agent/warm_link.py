"""The agent's end of the line to the warm server: start it, ask it for ranks, notice when it cannot.

Nothing waits here: requests made while the server still imports are kept, and whoever cannot be served warm is
handed back, to be started cold. The other end is `workbench.worker.warm`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from workbench.base import entries
from workbench.base.process import POD_MARK, die_with_parent, look_up

__all__ = ["WarmLink"]

_log = logging.getLogger(__name__)

_IMPORT_S = 300.0
_FORK_S = 30.0
_MESSAGE_BYTES = 1 << 20
# Read once, when a library is imported: a rank that sets one of these to something else must import for itself.
_READ_AT_IMPORT = (
    "LD_", "PYTHON", "HF_HOME", "HF_ENDPOINT", "HF_HUB_", "HF_DATASETS_", "TRANSFORMERS_", "XDG_CACHE_HOME",
    "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "DS_ACCELERATOR", "TORCH_LOGS", "TORCH_CPP_",
)  # fmt: skip

# What the keeper asks of every job anyway.
_QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


class WarmLink:
    """The warm server as the agent sees it. `state` is off, starting, ready or failed."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self.state = "off"
        self.socket: socket.socket | None = None
        self.pid: int | None = None
        self._env: dict[str, str] = {}
        self._queue: dict[int, bytes] = {}
        self._asked: dict[int, float] = {}
        self._deadline = 0.0
        self._why = "it ended by itself"

    def start(self, root: Path) -> None:
        """Start the server as a child of the agent, with this process's own output for its log."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        self._env = {**_QUIET, **os.environ, POD_MARK: str(root)}
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for signum in (signal.SIGTERM, signal.SIGCHLD):
                    signal.signal(signum, signal.SIG_DFL)
                os.setsid()
                die_with_parent(agent)
                os.set_inheritable(theirs.fileno(), True)
                argv = [sys.executable, "-m", entries.WARM_SERVER, str(theirs.fileno())]
                os.execve(sys.executable, argv, self._env)
            finally:
                os._exit(127)
        theirs.close()
        self.socket, self.pid, self.state = ours, pid, "starting"
        self._deadline = time.monotonic() + _IMPORT_S

    def serves(self, env: Mapping[str, str]) -> bool:
        """Whether a rank with these variables of the job can be forked, now or when the imports are done."""
        if self.state not in ("starting", "ready"):
            return False
        late = [name for name in env if name.startswith(_READ_AT_IMPORT) and self._env.get(name) != env[name]]
        late = [name for name in late if name != "PYTHONUNBUFFERED"]
        if late:
            _log.info("a rank sets what imports read (%s): it is started cold", ", ".join(late))
        return not late

    def fork(self, token: int, request: Mapping[str, object]) -> None:
        """Ask for a rank. The answer comes through `receive`, under the same token."""
        self._queue[token] = json.dumps({"token": token, **request}).encode()
        self._flush()

    def cancel(self, token: int) -> bool:
        """Take back a request that has not been sent; tell whether that was so."""
        return self._queue.pop(token, None) is not None

    def receive(self) -> tuple[dict[int, int], list[int]]:
        """Read what the server has said since."""
        forked: dict[int, int] = {}
        refused: list[int] = []
        while self.socket is not None:
            try:
                data = self.socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                # Every copy of the other end is closed: no rank that was forked can be unheard of.
                refused += self._close()
                break
            message = json.loads(data)
            if "pid" in message:
                forked[message["token"]] = message["pid"]
                self._asked.pop(message["token"], None)
            elif "token" in message:
                _log.warning("warm server: %s", message["error"])
                self._asked.pop(message["token"], None)
                refused.append(message["token"])
            elif message["state"] == "ready":
                _log.info("warm server: ready after %.1f s", message["took_s"])
                self.state = "ready"
        self._flush()
        return forked, refused

    def tick(self) -> None:
        """End a server that has hung: it then counts as failed."""
        now = time.monotonic()
        late = [token for token, asked in self._asked.items() if now > asked + _FORK_S]
        if self.pid is not None and (late or (self.state == "starting" and now > self._deadline)):
            self.kill(f"no answer in time while {self.state}")

    def kill(self, why: str) -> None:
        """End the server, if there is one. Idempotent; ranks it has forked go on."""
        self._why = why
        if self.pid is not None and (process := look_up(self.pid)) is not None:
            process.send(signal.SIGKILL)

    def reaped(self, status: int) -> None:
        """Take note that the server's process is gone; its last words may still be on the line."""
        _log.info("warm server: ended with %s", os.waitstatus_to_exitcode(status))
        self.pid = None

    def _flush(self) -> None:
        while self.state == "ready" and self._queue and self.socket is not None:
            token, data = next(iter(self._queue.items()))
            try:
                self.socket.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                self.kill(f"it cannot be asked: {error}")
                return
            del self._queue[token]
            self._asked[token] = time.monotonic()

    def _close(self) -> list[int]:
        _log.info("warm server: gone while %s (%s)", self.state, self._why)
        self.state = "failed"
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        lost = [*self._queue, *self._asked]
        self._queue.clear()
        self._asked.clear()
        return lost
