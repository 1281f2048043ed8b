"""Commands on a host over the standing connection: `ssh` children of the process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from workbench.base.child import ended_within
from workbench.base.errors import PodError, RemoteError
from workbench.pods.pod import Pod
from workbench.pods.ssh.channel import Channel
from workbench.pods.ssh.identity import Identity, gone
from workbench.pods.ssh.openssh import ssh_argv

_READ_BYTES = 65_536
_SSH_FAILED = 255
_STEP_S = 0.05


class MasterLine:
    """The standing connection to a host, held by the keeper's place (`ssh.master`)."""

    def __init__(self, pod: Pod, identity: Identity, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pod = pod
        self._identity = identity
        self._wanted = False
        self._channels: list[ChildChannel] = []
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._wanted and stands(Path(self._pod.control))

    def open(self) -> None:
        """Check that the connection stands. The owner opens a broken connection again."""
        if not stands(Path(self._pod.control)):
            raise PodError(gone(self._pod.address))
        self._wanted = True

    def close(self) -> None:
        self._wanted = False
        with self._lock:
            channels = self._channels
            self._channels = []
        for channel in channels:
            channel.close()

    def start(self, words: Sequence[str]) -> Channel:
        if not self.is_open:
            raise RemoteError(
                f"the connection to {self._pod.name} ({self._pod.address}) is closed",
                host=self._pod.address,
            )
        channel = ChildChannel(ssh_argv(self._pod, self._identity, words), self)
        with self._lock:
            self._channels = [each for each in self._channels if not each.is_closed]
            self._channels.append(channel)
        return channel


class ChildChannel:
    """The streams of an `ssh` child as a `Channel`. One thread may read while another writes."""

    def __init__(self, argv: list[str], line: MasterLine) -> None:
        self._line = line
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,  # an interrupt is meant for the notebook
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._in, self._out, self._err = (
            self._process.stdin,
            self._process.stdout,
            self._process.stderr,
        )
        for stream in (self._in, self._out, self._err):
            os.set_blocking(stream.fileno(), False)
        self._lock = threading.Lock()  # no number of a closed stream is used
        self._out_ended = False
        self._err_ended = False
        self.is_closed = False

    @property
    def at_end(self) -> bool:
        return self._out_ended or self.is_closed

    @property
    def exit_code(self) -> int | None:
        code = self._process.poll()
        # OpenSSH ends with 255 for a lost connection and for a command that a signal ended.
        return -1 if code is not None and (code < 0 or code == _SSH_FAILED) else code

    @property
    def is_lost(self) -> bool:
        return not self._line.is_open

    def has_output(self) -> bool:
        return not self.at_end and self._is_ready(self._out.fileno(), select.POLLIN)

    def output(self) -> bytes:
        data, self._out_ended = self._take(self._out.fileno(), self._out_ended)
        return data

    def errors(self) -> bytes:
        come = bytearray()
        while not self._err_ended:
            data, self._err_ended = self._take(self._err.fileno(), self._err_ended)
            come += data
            if not data:
                break
        return bytes(come)

    def takes_input(self) -> bool:
        return not self._in.closed and self._is_ready(self._in.fileno(), select.POLLOUT)

    def send(self, data: bytes) -> int:
        with self._lock:
            if self._in.closed:
                raise BrokenPipeError("its input is closed")
            with contextlib.suppress(BlockingIOError):
                return os.write(self._in.fileno(), data)
            return 0

    def send_all(self, data: bytes) -> None:
        deadline = time.monotonic() + self._line.timeout_s
        view = memoryview(data)
        while view:
            sent = self.send(bytes(view[:_READ_BYTES]))
            view = view[sent:]
            if sent:
                deadline = time.monotonic() + self._line.timeout_s
            elif time.monotonic() > deadline:
                raise TimeoutError(f"it took nothing for {self._line.timeout_s:g} s")
            else:
                select.select([], [self._in], [], 1.0)

    def end_input(self) -> None:
        with self._lock:
            self._in.close()

    def await_output(self, limit_s: float) -> None:
        poll = select.poll()
        numbers = self.descriptors()
        for number in numbers:
            poll.register(number, select.POLLIN)
        # A child without open streams is about to end.
        poll.poll(1000 * max(0.0, limit_s if numbers else min(limit_s, _STEP_S)))

    def descriptors(self) -> Sequence[int]:
        with self._lock:
            if self.is_closed:
                return []
            ended = {self._out: self._out_ended, self._err: self._err_ended}
            return [stream.fileno() for stream, has_ended in ended.items() if not has_ended]

    def await_end(self, limit_s: float) -> None:
        ended_within(self._process, limit_s)

    def close(self) -> None:
        """End the child; the command sees the end of its input and is not killed. Idempotent."""
        self._process.kill()
        self._process.wait()
        with self._lock:
            self.is_closed = True
            for stream in (self._in, self._out, self._err):
                stream.close()

    def _take(self, number: int, has_ended: bool) -> tuple[bytes, bool]:
        with self._lock:
            if has_ended or self.is_closed:
                return b"", True
            try:
                data = os.read(number, _READ_BYTES)
            except BlockingIOError:
                return b"", False
        return data, not data

    def _is_ready(self, number: int, event: int) -> bool:
        poll = select.poll()
        poll.register(number, event)
        return bool(poll.poll(0))


def stands(control: Path) -> bool:
    """Return whether a connection listens at a control socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(control))
        except OSError:
            return False
    return True
