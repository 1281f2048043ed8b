"""A command on a pod over paramiko, with the streams and exit codes of `ssh`.

OpenSSH's client ends at once where the calling user's id has no name, as in a pod of OpenShift.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.pods.pod import Pod
from workbench.pods.ssh.channel import RemoteStream
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity

_PIECE = 1 << 20
_FAILED = 255  # as ssh ends where it does not reach the host


def main(argv: Sequence[str]) -> int:
    """Run a command on a pod: the identity's folder, the pod, the words of the command."""
    folder, pod, *words = argv
    try:
        with SSHConnection(Pod.from_dict(json.loads(pod)), Identity(Path(folder))) as ssh:
            stream = ssh.stream(words)
            threading.Thread(target=_send, args=[stream], daemon=True).start()
            while data := stream.read(None):
                _write(1, data)
            code = stream.wait(_FAILED)
            _write(2, stream.stderr.encode())
            return _FAILED if code is None or code < 0 else code
    except BrokenPipeError:
        return _FAILED
    except WorkbenchError as error:
        _write(2, f"{error}\n".encode())
        return _FAILED


def _send(stream: RemoteStream) -> None:
    """Carry the input of the process to the command, up to the end."""
    with contextlib.suppress(OSError):  # the command has ended; its exit code says why
        while data := os.read(0, _PIECE):
            stream.write(data)
        stream.channel.end_input()


def _write(number: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(number, view)
        view = view[written:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
