from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import paramiko
import pytest

from tests.pods.conftest import Launched
from tests.support.poll import until
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError, PodError, PodTimeout, RemoteError
from workbench.pods.pod import Pod
from workbench.pods.ssh.channel import Channel, RemoteStream, _short, complete
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(300)
        yield made


@pytest.fixture
def stranger(identity: Identity, listener: socket.socket) -> Pod:
    """A pod whose address is the test's own listener."""
    port = listener.getsockname()[1]
    pod = Pod(
        name="pod-2", address="127.0.0.1", ssh_port=port, user="me", host_key=identity.public_key
    )
    identity.pin([pod])
    return pod


def test_a_program_in_the_arguments_of_a_command_is_not_in_its_error() -> None:
    line = '/usr/bin/python3 -IS -c \'"""Read a file.\n\nimport os\n\' send'
    assert _short(line) == repr('/usr/bin/python3 -IS -c \'"""Read a file. …')
    assert _short("df -k") == "'df -k'"
    assert len(_short("x" * 5000)) < 110


def test_refused(identity: Identity, stranger: Pod, listener: socket.socket) -> None:
    listener.close()
    with pytest.raises(
        PodError, match=f"pod-2: 127.0.0.1:{stranger.ssh_port} refused the connection"
    ):
        SSHConnection(stranger, identity).open()


def test_accepts_and_never_answers(identity: Identity, stranger: Pod) -> None:
    with pytest.raises(
        PodTimeout,
        match=sentence("no SSH banner from {} ({}) in {} s", "pod-2 (127.0.0.1", "in 3 s"),
    ):
        # The whole handshake has twice the time: a busy machine does not delay one past the other.
        SSHConnection(stranger, identity, timeout_s=3.0).open()


@pytest.mark.parametrize(
    "words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", os.urandom(300)]
)
def test_speaks_something_else(
    identity: Identity, stranger: Pod, listener: socket.socket, words: bytes
) -> None:
    def speak() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(words)

    thread = threading.Thread(target=speak)
    thread.start()
    with pytest.raises(PodError, match="pod-2"):
        SSHConnection(stranger, identity, timeout_s=2.0).open()
    thread.join(300)


class Undecided(paramiko.ServerInterface):
    """A server that answers no login before the test ends."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def check_auth_publickey(self, *_login: object) -> int:
        self.over.wait(300)
        return paramiko.AUTH_FAILED


def test_a_login_that_is_not_answered_in_time_is_no_refusal(
    identity: Identity, stranger: Pod, listener: socket.socket
) -> None:
    servers, undecided = [], Undecided()

    def serve() -> None:
        connection, _ = listener.accept()
        servers.append(paramiko.Transport(connection))
        servers[0].add_server_key(paramiko.PKey.from_path(identity.key))
        servers[0].start_server(server=undecided)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(
        PodTimeout, match=sentence("({}): no answer to the login in {} s", 8, "pod-2 (127.0.0.1")
    ):
        # The handshake has the same limit, and takes its time on a busy machine.
        SSHConnection(stranger, identity, timeout_s=8.0).open()
    undecided.over.set()
    thread.join(300)
    servers[0].close()


def test_a_handshake_that_does_not_end_is_a_time_out(
    identity: Identity, stranger: Pod, listener: socket.socket
) -> None:
    def speak() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            while connection.recv(4096):
                pass

    thread = threading.Thread(target=speak)
    thread.start()
    with pytest.raises(
        PodTimeout, match=sentence("({}) did not complete the SSH handshake in {} s", "pod-2")
    ):
        SSHConnection(stranger, identity, timeout_s=1.0).open()
    thread.join(300)


def test_the_option_of_a_slow_line_holds_for_every_step(identity: Identity, stranger: Pod) -> None:
    slow = replace(stranger, connect_timeout_s=60.0)
    assert SSHConnection(slow, identity).timeout_s == 60
    assert SSHConnection(stranger, identity).timeout_s == 30


def test_no_route_and_no_name(identity: Identity) -> None:
    pods = [
        Pod(name="pod-0", address="nothing.invalid", user="me", host_key=identity.public_key),
        Pod(name="pod-1", address="240.0.0.1", user="me", host_key=identity.public_key),
    ]
    identity.pin(pods)
    for pod in pods:
        with pytest.raises(PodError, match=pod.name):
            SSHConnection(pod, identity, timeout_s=1.0).open()


def test_a_key_that_others_may_read(launched: Launched) -> None:
    launched.identity.key.chmod(0o644)
    with pytest.raises(ConfigError, match=f"key file {launched.identity.key} has mode 0644"):
        launched.connect().open()


def test_another_user(launched: Launched) -> None:
    with pytest.raises(
        PodError,
        match=sentence("permission denied (publickey) for {}@{} ({}), key file", "nobody-such@"),
    ):
        SSHConnection(replace(launched.pods[0], user="nobody-such"), launched.identity).open()


def test_exit_codes_and_streams(launched: Launched) -> None:
    with launched.connect() as connection:
        done = connection.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
        assert (done.exit_code, done.stdout, done.stderr) == (7, "out\n", "err\n")
        assert connection.run(["sh", "-c", "kill -9 $$"]).exit_code == -1
        assert connection.run(["printf", r"\377a"]).stdout == "\\xffa"
        assert connection.run(["cat"], stdin=b"x" * 3_000_000).stdout == "x" * 3_000_000
        assert connection.run(["no-such-command"]).exit_code == 127


def test_what_arrives_just_before_the_end_is_read() -> None:
    """The last bytes and the end come between a look at the streams and a look at the end."""

    class AllAtOnce:
        looks = 0
        waiting = b"err"
        written = b"@m\nout@m end 7\n"
        is_lost = False

        @property
        def at_end(self) -> bool:
            return self.looks > 1

        @property
        def exit_code(self) -> int | None:
            self.looks += 1
            return 7 if self.looks > 1 else None

        def errors(self) -> bytes:
            if self.looks < 2:
                return b""
            data, self.waiting = self.waiting, b""
            return data

        def has_output(self) -> bool:
            return self.looks > 1 and bool(self.written)

        def output(self) -> bytes:
            data, self.written = self.written, b""
            return data

        def end_input(self) -> None:
            pass

        def await_output(self, _limit_s: float) -> None:
            pass

    stream = RemoteStream(cast("Channel", AllAtOnce()), "pod-0", "a command", b"@m", "pod-0")
    done = complete(stream, b"", time.monotonic() + 5)
    assert (done.exit_code, done.stdout, done.stderr) == (7, "out", "err")


def test_a_full_stderr_does_not_block(launched: Launched) -> None:
    with launched.connect() as connection:
        done = connection.run(["sh", "-c", "head -c 5000000 /dev/zero >&2; echo done"])
        assert (done.stdout, len(done.stderr)) == ("done\n", 5_000_000)
        stream = connection.stream(
            ["sh", "-c", "head -c 5000000 /dev/zero >&2; echo done; cat; exit 4"]
        )
        assert stream.read(300) == b"done\n"
        stream.write(b"one\n")
        assert stream.read(300) == b"one\n"
        with pytest.raises(TimeoutError, match=sentence("on {} wrote nothing in time")):
            stream.read(0.2)
        stream.write(b"two")
        stream.channel.end_input()
        assert (stream.read(300), stream.read(300)) == (b"two", b"")
        assert stream.wait(300) == 4
        assert len(stream.stderr) == 65_536


def test_a_command_with_a_deadline(launched: Launched) -> None:
    with launched.connect() as connection:
        with pytest.raises(
            RemoteError, match=r"'sleep 3600' on .* did not end within 0.5 s"
        ) as caught:
            connection.run(["sleep", "3600"], timeout_s=0.5)
        assert (caught.value.host, caught.value.command) == (launched.pods[0].address, "sleep 3600")


def test_a_child_that_holds_the_output_is_not_waited_for(launched: Launched) -> None:
    with launched.connect() as connection:
        assert connection.run(["sh", "-c", "sleep 3600 & echo started"]).stdout == "started\n"


def test_a_lost_connection_is_an_error_and_no_result(launched: Launched, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def stop_it() -> None:
        until(begun.exists)
        launched.backend.stop()

    with launched.connect() as connection:
        threading.Thread(target=stop_it).start()
        with pytest.raises(RemoteError, match=sentence("the connection was lost")):
            connection.run(["sh", "-c", f"touch '{begun}'; sleep 3600"], timeout_s=3600)
        with pytest.raises(RemoteError, match="is closed"):
            connection.run(["true"])
        assert not connection.is_open
    assert "closed" in repr(connection)


def test_opening_again_after_a_close(launched: Launched) -> None:
    connection = launched.connect()
    for _ in range(2):
        connection.open()
        connection.open()
        connection.put_bytes(b"x", f"{launched.pods[0].root}/x")
        connection.close()
        connection.close()


def test_threads_share_a_connection(launched: Launched) -> None:
    with launched.connect() as connection:
        results: list[str] = []
        threads = [
            threading.Thread(
                target=lambda i=i: results.append(connection.run(["echo", str(i)]).stdout)
            )
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # each is bounded by itself
    assert sorted(results) == [f"{i}\n" for i in range(8)]


def test_errors_of_files_name_host_and_file(launched: Launched, tmp_path: Path) -> None:
    root = launched.pods[0].root
    with launched.connect() as connection:
        with pytest.raises(RemoteError, match=rf"pod-0 .* says: No such file .*\({root}/none\)"):
            connection.get(f"{root}/none", tmp_path / "none")
        connection.put_bytes(b"", f"{root}/file")
        with pytest.raises(RemoteError, match=r"pod-0 .* says: (Not a directory|File exists)"):
            connection.put_bytes(b"", f"{root}/file/below")


def test_no_nul_in_a_command(launched: Launched) -> None:
    with launched.connect() as connection, pytest.raises(ConfigError, match="NUL"):
        connection.run(["echo", "a\0b"])
