"""A command on a pod. Both streams are always drained, since a full stream blocks the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.base.errors import RemoteError
from workbench.pods.ssh.login import NoCommand, Output, why_no_command

_AFTER_EXIT_S = 0.5
_LINGERS_S = 10.0
_TRAPS_S = 2.0
_STDERR_KEPT_BYTES = 65_536
_READ_BYTES = 65_536
_SHOWN_LETTERS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    exit_code: int
    """Exit code; -1 after a signal."""
    stdout: str
    """Bytes that are not UTF-8 as backslash escapes."""
    stderr: str
    login_s: float = 0.0
    """Seconds until the login had started the command."""


class Channel(Protocol):
    """The streams of a running command: paramiko's, or those of an `ssh` child.

    A write without a reader raises OSError. `exit_code` is -1 after a signal or a lost
    connection, and None while the command runs.
    """

    @property
    def at_end(self) -> bool: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def is_lost(self) -> bool:
        """Whether the connection below has ended."""
        ...

    def has_output(self) -> bool: ...
    def output(self) -> bytes: ...
    def errors(self) -> bytes:
        """Return the new output on standard error, if any."""
        ...

    def takes_input(self) -> bool: ...
    def send(self, data: bytes) -> int: ...
    def send_all(self, data: bytes) -> None: ...
    def end_input(self) -> None: ...
    def await_output(self, limit_s: float) -> None: ...
    def descriptors(self) -> Sequence[int]:
        """Return the descriptors that are readable when there is output or an end."""
        ...

    def await_end(self, limit_s: float) -> None: ...
    def close(self) -> None: ...


class RemoteStream:
    """A command on a pod with open stdin and stdout. A thread may read while another writes."""

    def __init__(
        self, channel: Channel, host: str, command: str, marker: bytes, login: str
    ) -> None:
        """`marker`: as in `marked`. `login`: as `Pod.login`."""
        self.host = host
        self.login = login
        self.command = command
        self.channel = channel
        self.answer = Output(marker)
        self._stderr = bytearray()

    def write(self, data: bytes) -> None:
        try:
            self.channel.send_all(data)
        except OSError as error:
            raise ConnectionError(str(self.error(f"cannot be written to: {error}"))) from error

    def read(self, timeout_s: float | None) -> bytes:
        """Return some bytes of stdout, none at the end. TimeoutError: no byte came in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.answer.exit_code is None:
            self._drain_stderr()
            if self.channel.has_output() or self.channel.at_end:
                data = self.channel.output()
                own = self.answer.strip(data)
                if own:
                    return own
                if data:
                    continue
                # Without an exit code the connection was lost.
                if not self.answer.has_started and self.wait(_AFTER_EXIT_S) not in (None, -1):
                    raise ConnectionError(str(self.no_command()))
                return b""
            left_s = 0.25 if deadline is None else min(0.25, deadline - time.monotonic())
            if left_s < 0:
                raise TimeoutError(f"{_short(self.command)} on {self.host} wrote nothing in time")
            self.channel.await_output(left_s)
        return b""

    def descriptors(self) -> Sequence[int]:
        return self.channel.descriptors()

    @property
    def stderr(self) -> str:
        self._drain_stderr()
        return self._stderr.decode(errors="backslashreplace")

    @property
    def exit_code(self) -> int | None:
        """Exit code; -1 after a signal or a lost connection; None while the command runs."""
        if self.answer.exit_code is not None:
            return self.answer.exit_code
        code = self.channel.exit_code
        return -1 if code is not None and self.answer.has_started else code

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end and return the exit code; None if the command still runs."""
        self.channel.await_end(timeout_s)
        return self.exit_code

    def close(self) -> None:
        """End the command's stdin, give the login a moment for its traps, and close the channel.

        The command is not killed. Idempotent.
        """
        if not self.channel.is_lost:
            with contextlib.suppress(OSError):  # the command has ended
                self.channel.end_input()
            self.channel.await_end(_TRAPS_S)
        self.channel.close()

    def _drain_stderr(self) -> None:
        """Take what is there, or a full window would block stdout too (faults.md, 10)."""
        self._keep(self.channel.errors())

    def _keep(self, data: bytes) -> None:
        self._stderr += data
        del self._stderr[:-_STDERR_KEPT_BYTES]

    def error(self, what: str) -> RemoteError:
        """Make an error for a failure of the command, with the tail of its stderr."""
        words = self.stderr.strip()
        text = f"{_short(self.command)} on {self.host} {what}" + (
            f"; it wrote: {words[-500:]}" if words else ""
        )
        if not self.answer.has_started:
            text += f"; the login had not started the command, and printed {self.answer.words!r}"
        elif self.answer.words and self.answer.exit_code is not None:
            text += f"; the login then printed {self.answer.words!r}"
        return RemoteError(
            text, host=self.host, command=self.command, exit_code=self.exit_code, stderr=words
        )

    def no_command(self) -> NoCommand:
        """Make the error for a login without a started command."""
        code = self.exit_code
        return NoCommand(
            why_no_command(self.login, code, self.stderr.strip() or self.answer.words),
            host=self.host,
            command=self.command,
            exit_code=code,
            stderr=self.stderr,
        )


def _short(command: str) -> str:
    """Return a command for a message: of a program in its arguments only the beginning."""
    line = command.partition("\n")[0]
    if line == command and len(line) <= _SHOWN_LETTERS:
        return repr(command)
    return repr(f"{line[:_SHOWN_LETTERS]} …")


class Lingers(TimeoutError):
    """The command has ended, and the login has not."""


def complete(stream: RemoteStream, stdin: bytes, deadline: float) -> Completed:
    """Feed and drain a command until its login ends: a trap of the login is not cut."""
    channel = stream.channel
    pending = memoryview(stdin)
    output = bytearray()
    errors = bytearray()
    exited_s: float | None = None
    ended_s: float | None = None
    if not pending:
        channel.end_input()
    while True:
        # Look at the end before the streams: output that arrives between both looks is then read
        # in this turn or the next.
        has_ended = channel.exit_code is not None and channel.at_end
        errors += channel.errors()
        while channel.has_output():
            output += stream.answer.strip(channel.output())
        if pending and channel.takes_input():
            pending = pending[_send(channel, bytes(pending[:_READ_BYTES])) :]
            if not pending:
                channel.end_input()
            continue
        now = time.monotonic()
        if channel.exit_code is not None:
            exited_s = exited_s or now
        if has_ended or (exited_s is not None and now - exited_s > _AFTER_EXIT_S):
            break
        if ended_s is None and stream.answer.exit_code is not None:
            ended_s = now
            deadline = min(deadline, now + _LINGERS_S)
        if now > deadline:
            stream._keep(bytes(errors))
            raise Lingers if ended_s else TimeoutError
        channel.await_output(0.02 if pending or exited_s else 0.25)
    exit_code = stream.exit_code
    assert exit_code is not None
    stream._keep(bytes(errors))
    if exit_code == -1 and channel.is_lost:
        raise ConnectionError("the connection was lost")
    if not stream.answer.has_started and exit_code != -1:
        raise stream.no_command()
    return Completed(
        exit_code=exit_code,
        stdout=output.decode(errors="backslashreplace"),
        stderr=errors.decode(errors="backslashreplace"),
        login_s=stream.answer.took_s,
    )


def _send(channel: Channel, data: bytes) -> int:
    try:
        return channel.send(data)
    except OSError:
        if channel.is_lost:
            raise
        return len(data)  # the command has ended without reading all of it; its answer says why
