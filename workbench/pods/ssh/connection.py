"""A connection to a pod: the keeper's way. Many commands share it.

Small files travel on it, too. A file is written beside its place, checked, then renamed. A program
on the pod receives the file, since SFTP reports a full disk too late.

`DirectLine` is a login of the package's own. `MasterLine` is a host of the user's, where OpenSSH's
client has logged in.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import paramiko

from workbench.base.errors import ConfigError, RemoteError
from workbench.base.files import write_bytes
from workbench.base.files.disk import full_disk_named
from workbench.base.json_values import as_int, as_str
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk.transfer import LARGE, far_end_answer, far_end_argv
from workbench.pods.ssh.channel import Completed, Lingers, RemoteStream, complete
from workbench.pods.ssh.child import MasterLine
from workbench.pods.ssh.direct import SESSIONS, DirectLine, few_sessions, where
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.login import marked

_STEP_S = 30.0
_FILE_S = 60.0  # how long a small file may take, beside the time for its bytes
_SLOWEST_PER_S = 20_000  # bytes
_KILLED_AT_MOST = 3
_DONE = {"take": "written", "holds": "read", "size": "read"}
_SESSIONS_S = 40.0
_READS_S = 5.0
_REFUSED = "Session open refused"


class SSHConnection:
    """A connection to a pod. Several threads may use it at once."""

    def __init__(self, pod: Pod, identity: Identity, timeout_s: float | None = None) -> None:
        """`timeout_s`: limit of each step. Default: 30 s, or what the pod's option allows."""
        limit_s = max(_STEP_S, pod.connect_timeout_s) if timeout_s is None else timeout_s
        line = MasterLine if pod.control else DirectLine
        self.pod = pod
        self._line: MasterLine | DirectLine = line(pod, identity, limit_s)
        self._login_s = 0.0  # of the last command: start-up files may be slow

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"SSHConnection({self.pod.name}, {where(self.pod)}, {state})"

    def __enter__(self) -> SSHConnection:
        return self.open()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def timeout_s(self) -> float:
        return self._line.timeout_s

    @timeout_s.setter
    def timeout_s(self, limit_s: float) -> None:
        self._line.timeout_s = limit_s

    @property
    def is_open(self) -> bool:
        return self._line.is_open

    def open(self) -> SSHConnection:
        """Connect, check the host key, log in. Does nothing if the connection stands."""
        if not self.is_open:
            self.close()
            self._line.open()
        return self

    def close(self) -> None:
        """Close the connection; remote commands are not killed. Idempotent."""
        self._line.close()

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        """Run a command to its end.

        The time of a slow login, once known, is added to the limit.
        """
        stream = self.stream(argv)
        try:
            done = complete(stream, stdin, time.monotonic() + timeout_s + self._login_s)
            if done.exit_code == -1 and _REFUSED in done.stderr:
                raise few_sessions(self.pod, _REFUSED)
            if not stream.answer.has_started:
                raise stream.no_command()
            self._login_s = done.login_s
            return done
        except Lingers:
            raise RemoteError(
                f"the login {self.pod.login} runs a command and then does not end. A background"
                " program of its start-up files holds the connection: start the program with"
                " </dev/null >/dev/null 2>&1",
                host=self.pod.address,
            ) from None
        except TimeoutError:
            raise stream.error(f"did not end within {timeout_s:g} s and was left running") from None
        except (OSError, paramiko.SSHException) as error:
            raise stream.error(f"broke off: {error}") from error
        finally:
            stream.close()

    def stream(self, argv: Sequence[str]) -> RemoteStream:
        """Start a command and return its stdin and stdout; words of `argv` arrive as they are."""
        command = shlex.join(argv)
        if "\0" in command:
            raise ConfigError(f"a NUL byte cannot stand in a command: {command[:80]!r}")
        words, marker = marked(argv)
        channel = self._line.start(words)
        return RemoteStream(channel, self.pod.address, command, marker, self.pod.login)

    def check_sessions(self) -> None:
        """Refuse a host whose daemon allows fewer sessions at a time than a run needs."""
        opened: list[RemoteStream] = []
        try:
            for _ in range(SESSIONS):
                opened.append(self.stream(["cat"]))
            began_s = time.monotonic()
            for stream in opened:
                # A login that runs no command is named by the first command.
                while not stream.answer.has_started and stream.exit_code is None:
                    if stream.channel.has_output():
                        stream.answer.strip(stream.channel.output())
                    if stream.channel.at_end:
                        stream.wait(1.0)
                        break
                    took_s = time.monotonic() - began_s
                    if took_s > _READS_S:  # a start-up file may read
                        stream.channel.end_input()
                    if took_s > _SESSIONS_S:
                        raise RemoteError(
                            f"the login {self.pod.login} started no command in {_SESSIONS_S:g} s"
                            f" and printed {stream.answer.words!r}: look in the start-up files for"
                            " a waiting command",
                            host=self.pod.address,
                        )
                    stream.channel.await_output(0.25)
                if _REFUSED in stream.stderr:
                    raise few_sessions(self.pod, _REFUSED)
        except OSError as error:
            raise RemoteError(
                f"the first commands of the connection fail: {error}",
                host=self.pod.address,
            ) from error
        finally:
            for stream in opened:
                stream.close()

    def size(self, remote: str | PurePosixPath) -> int:
        answer = self._ask_far_end(["size", str(remote)])
        return as_int(answer.get("size")) or 0

    def put_bytes(self, data: bytes, remote: str | PurePosixPath) -> None:
        """Send a small file (0600), replacing what is there; missing folders are made (0700)."""
        digest = hashlib.sha256(data).hexdigest()
        words = ["take", str(remote), str(len(data)), digest]
        answer = self._ask_far_end(words, data)
        if answer.get("whole") is not True:
            raise RemoteError(
                f"{remote} arrived cut or damaged on {self.pod.address}; submit again",
                host=self.pod.address,
            )

    def stamp_of(self, remote: str | PurePosixPath, digest: str, stamp: str = "") -> str:
        """Return the stamp of a file with the given SHA-256, else empty.

        A file with a known stamp is not read.
        """
        words = ["holds", str(remote), digest, stamp]
        answer = self._ask_far_end(words)
        return as_str(answer.get("stamp"))

    def get(self, remote: str | PurePosixPath, local: Path) -> bool:
        """Fetch a small file, replacing what is there; missing folders are made.

        Return False for a file of `LARGE` bytes or more, which is not fetched.
        """
        data = self._read(remote)
        if data is None:
            return False
        with full_disk_named(local.parent, len(data)):
            local.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes(local, data)
        return True

    def _read(self, remote: str | PurePosixPath) -> bytes | None:
        stream = self.stream(far_end_argv(self.pod.python or "python3", "send", str(remote), "0"))
        come = bytearray()
        header = b""
        size = 0
        try:
            # A small file comes in one command: header, content and digest.
            while piece := stream.read(_FILE_S):
                come += piece
                if not header and b"\n" in come:
                    header = bytes(come.partition(b"\n")[0])
                    facts = far_end_answer(header, self.pod.name, self.pod.address)
                    size = as_int(facts.get("size")) or 0
                    # A large file takes the way that continues after a break.
                    if size >= LARGE:
                        stream.channel.close()  # a trap of the login is cut
                        return None
                if len(come) > 2 * LARGE:
                    raise ValueError(f"more than {2 * LARGE} bytes came")
        except (OSError, ValueError) as error:
            raise stream.error(f"broke off: {error}") from error
        finally:
            stream.close()
        if not come:
            raise stream.error("ended without an answer")
        # The content ends at the size of the header; the digest follows.
        rest = come[len(header) + 1 :]
        end = far_end_answer(bytes(rest[size:]), self.pod.name, self.pod.address)
        data = bytes(rest[:size])
        if end.get("sha256") != hashlib.sha256(data).hexdigest():
            raise RemoteError(
                f"cannot read {remote} on {self.pod.address}: the file arrived cut or damaged",
                host=self.pod.address,
            )
        return data

    def _ask_far_end(self, words: Sequence[str], data: bytes = b"") -> dict[str, Any]:
        argv = far_end_argv(self.pod.python or "python3", *words)
        timeout_s = _FILE_S + len(data) / _SLOWEST_PER_S
        for _ in range(_KILLED_AT_MOST):  # killing it kills no run: the command can be repeated
            done = self.run(argv, data, timeout_s=timeout_s)
            killed = done.exit_code < 0
            if not killed:
                break
        if not done.stdout.strip():
            verb, remote, *_ = words
            what = f"{remote} on {self.pod.name} cannot be {_DONE[verb]}"
            how = "was killed" if killed else f"ended with {done.exit_code}"
            stderr = done.stderr[-500:]
            why = ("" if killed else stderr.strip()) or f"{argv[0]} {how} there"
            raise RemoteError(
                f"{what}: {why}",
                host=self.pod.address,
                exit_code=done.exit_code,
                stderr=stderr,
            )
        return far_end_answer(done.stdout, self.pod.name, self.pod.address)
