"""The package's own SSH daemon for local pods: one key, from one network, commands alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paramiko
import pytest

from tests.support.poll import until
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.bootstrap.sshd import Daemon
from workbench.pods.ssh.identity import Identity

pytestmark = pytest.mark.slow
ADDRESS = "127.0.0.1"


@contextmanager
def serving(folder: Path, allowed_from: str) -> Iterator[tuple[int, Path]]:
    """Start a daemon for a key, and yield its port and the file of the key."""
    own = Identity.create(folder / "own")
    port = free_port([ADDRESS])
    daemon = Daemon(
        folder=folder / "sshd",
        address=ADDRESS,
        port=port,
        user="anyone",
        public_key=own.public_key,
        environment={"OF_THE_POD": "yes"},
        allowed_from=allowed_from,
    )
    process = daemon.start_own(lambda: None)
    try:
        until(lambda: is_open(port))
        yield port, own.key
    finally:
        process.kill()
        process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ADDRESS, port)) == 0


def login(port: int, key: Path) -> paramiko.Transport:
    transport = paramiko.Transport((ADDRESS, port))
    try:
        transport.start_client(timeout=300)
        transport.auth_publickey("anyone", paramiko.Ed25519Key.from_private_key_file(str(key)))
    except BaseException:
        transport.close()
        raise
    return transport


def test_commands_run_for_the_one_key_alone(tmp_path: Path) -> None:
    other = Identity.create(tmp_path / "other")
    with serving(tmp_path, "127.0.0.0/8") as (port, key):
        with pytest.raises(paramiko.AuthenticationException):
            login(port, other.key)
        stranger = paramiko.Transport((ADDRESS, port))
        stranger.start_client(timeout=300)
        with pytest.raises(paramiko.BadAuthenticationType):
            stranger.auth_password("anyone", "")
        transport = login(port, key)
        channel = transport.open_session()
        channel.exec_command("echo $OF_THE_POD; exit 3")
        assert (channel.recv(9), channel.recv_exit_status()) == (b"yes\n", 3)
        for asked in ("get_pty", "invoke_shell"):
            with pytest.raises(paramiko.SSHException):
                getattr(transport.open_session(), asked)()
        with pytest.raises(paramiko.SSHException):
            transport.open_session().invoke_subsystem("sftp")
        with pytest.raises(paramiko.ChannelException):
            transport.open_channel("direct-tcpip", (ADDRESS, port), (ADDRESS, 0))
        with pytest.raises(paramiko.SSHException):
            transport.request_port_forward(ADDRESS, 0)
        for each in (stranger, transport):
            each.close()


def test_no_other_network_is_let_in(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "10.0.0.0/8") as (port, key),
        pytest.raises((paramiko.SSHException, OSError, EOFError)),
    ):
        login(port, key)
