"""A local pod's SSH daemon for a calling user whom OpenSSH's daemon would not let in.

OpenSSH needs a name of the user id in /etc/passwd, and a shell. OpenShift gives neither. Only
commands run, only for the cluster's key. A process per connection ends with the connection, and
leaves the commands alone, as with OpenSSH.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import paramiko

from workbench.base.messages.lines import from_line
from workbench.pods.ssh.identity import check_key_line

_SHELL = "/bin/sh"
_PIECE = 1 << 16
_BACKLOG = 100
_LOGIN_S = 30  # as LoginGraceTime of the other daemons


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Configuration of the daemon, read from stdin: a session's proxy may hold a password."""

    folder: str
    """Folder with the private key `host_key`."""
    address: str
    port: int
    public_key: str
    """The key that may log in."""
    allowed_from: str
    user: str
    environment: Mapping[str, str]


class _Session(paramiko.ServerInterface):  # type: ignore[misc]
    """A connection, with the login and the commands."""

    def __init__(self, config: ServerConfig) -> None:
        self._key = check_key_line(config.public_key)
        self._environment = {
            "HOME": os.environ.get("HOME") or "/",
            "USER": config.user,
            "LOGNAME": config.user,
            "SHELL": _SHELL,
            **config.environment,
        }

    def get_allowed_auths(self, _user: str) -> str:
        return "publickey"

    def check_auth_publickey(self, user: str, key: paramiko.PKey) -> int:
        is_ours = f"{key.get_name()} {key.get_base64()}" == self._key
        _log(f"{'Accepted' if is_ours else 'Refused'} publickey for {user}")
        return int(paramiko.AUTH_SUCCESSFUL if is_ours else paramiko.AUTH_FAILED)

    def check_channel_request(self, kind: str, _number: int) -> int:
        signal.alarm(0)  # the login is done
        refused = paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        return int(paramiko.OPEN_SUCCEEDED if kind == "session" else refused)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        process = subprocess.Popen(
            [_SHELL, "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=self._environment["HOME"],
            env=self._environment,
            start_new_session=True,
        )
        threading.Thread(target=_carry, args=[channel, process], daemon=True).start()
        return True


def main() -> None:
    """Accept connections until a signal ends the process."""
    config = ServerConfig(**from_line(sys.stdin.buffer.readline()))
    key = paramiko.Ed25519Key.from_private_key_file(f"{config.folder}/host_key")
    network = ipaddress.ip_network(config.allowed_from, strict=False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects ended connections
    with socket.create_server((config.address, config.port), backlog=_BACKLOG) as listener:
        _log(f"Server listening on {config.address} port {config.port}.")
        while True:
            wire, peer = listener.accept()
            with wire:
                is_allowed = ipaddress.ip_address(peer[0]) in network
                if is_allowed and os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.alarm(_LOGIN_S)
                    listener.close()
                    _serve(wire, key, config)


def _serve(wire: socket.socket, key: paramiko.PKey, config: ServerConfig) -> None:
    """Serve a connection to the end, and end the process."""
    code = 1
    try:
        transport = paramiko.Transport(wire)
        transport.add_server_key(key)
        transport.start_server(server=_Session(config))
        transport.join()
        code = 0
    finally:
        os._exit(code)


def _carry(channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
    """Carry the streams of a command, and its exit code. A signal has none."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    threading.Thread(target=_feed, args=[channel, process.stdin], daemon=True).start()
    drains = []
    for stream, send in (
        (process.stdout, channel.sendall),
        (process.stderr, channel.sendall_stderr),
    ):
        drains.append(threading.Thread(target=_drain, args=[stream, send], daemon=True))
        drains[-1].start()
    code = process.wait()
    with suppress(OSError):
        if code >= 0:
            channel.send_exit_status(code)
    for drain in drains:
        drain.join()
    channel.close()


def _feed(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    with suppress(OSError), stdin:
        while data := channel.recv(_PIECE):
            view = memoryview(data)
            while view:
                view = view[stdin.write(view) :]


def _drain(stream: IO[bytes], send: Callable[[bytes], None]) -> None:
    with suppress(OSError), stream:
        while data := stream.read(_PIECE):
            send(data)


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
