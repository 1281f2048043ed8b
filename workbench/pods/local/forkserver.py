"""The keeper's side of the fork server of a cluster's local pods."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from workbench.base import entries
from workbench.base.child import HOME, start
from workbench.base.files import records
from workbench.base.machine.allocator import preloaded
from workbench.base.messages.wire import listen
from workbench.base.process import FORK_SERVER_NAME, POD_MARK

_BACKLOG = 128  # agents that wait for the imports


class ForkServer:
    """`workbench.agent.forkserver`, for pods whose sessions have the same environment."""

    def __init__(
        self,
        folder: Path,
        address: Path,
        environment: Mapping[str, str],
        packages: str = HOME,
    ) -> None:
        """Start the server. Raises OSError.

        Args:
            folder: The pods' folder, for the log. The name of the server lies there too.
            address: Path of the socket, in a folder that only the user can enter.
            environment: Variables of the pods' sessions.
            packages: Folder of this package.
        """
        self.name = str(folder / FORK_SERVER_NAME)
        self.socket = address
        env = {
            **preloaded(),
            **environment,
            "HOME": _home(),
            "PYTHONPATH": packages,
            POD_MARK: self.name,
        }
        with (
            # An agent may ask before the imports are done: it then waits on this socket.
            listen(self.socket, socket.SOCK_SEQPACKET, _BACKLOG) as listener,
            records.open_to_append(folder / f"{FORK_SERVER_NAME}.log") as log,
        ):
            self._process = start(
                "-m",
                entries.FORK_SERVER,
                str(listener.fileno()),
                env=env,
                stdin=subprocess.PIPE,  # its end tells the server that the keeper has ended
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
            )

    def end(self) -> None:
        """End the server; forked warm servers stay as long as the agents. Idempotent."""
        self._process.kill()  # it holds nothing, and its parent may have had SIGTERM ignored
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.socket.unlink(missing_ok=True)


def _home() -> str:
    """Return the home folder as the pods' daemon sets it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return os.environ.get("HOME") or "/"
