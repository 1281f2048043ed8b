"""A child process, read and written in large pieces, with a limit on silence.

A nameless file takes its stderr.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence

from workbench.base.child import close_input, ended_within
from workbench.base.messages.lines import widen
from workbench.pods.ssh.login import NoCommand, Output, why_no_command

_PIPE_BYTES = 1 << 20  # what a process may ask for on Linux without privileges
_SILENCE_S = 60.0  # of a far side that hangs; ssh itself gives a silent network up after 12 s
_HASHED_S = 600.0  # until the first word: the far side may read what it has of a large file
_LONGEST_LINE = 1 << 20
_END_S = 10.0
_CUT_S = 1.0
_WORDS = 400
_SIGNALS = 128  # exit codes above are of ssh itself, or of a command that a signal ended


class Broken(Exception):  # none of the tree's: it never leaves this room
    """The process ended or fell silent before it was to."""


class Pipe:
    """A running command. Leaving the context kills the command after a moment."""

    def __init__(self, argv: Sequence[str], marker: bytes, host: str, login: str) -> None:
        """`marker`: as in `marked`, for a command on `host`. `login`: as `Pod.login`."""
        self._answer = Output(marker)
        self._host = host
        self._login = login
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed on the way out
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        for end in (self._in, self._out):
            widen(end, _PIPE_BYTES)
        os.set_blocking(self._in, False)
        self._spare = b""

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_exc: object) -> None:
        process = self._process
        assert process.stdout is not None
        close_input(process)
        # A trap of the login is not cut.
        ended_within(process, _END_S if failure is None else _CUT_S)
        process.kill()
        process.wait()
        process.stdout.close()
        self._errors.close()

    def readline(self) -> bytes:
        """Return a line without its end; raise Broken for an overlong or endless line."""
        deadline = time.monotonic() + _HASHED_S
        while b"\n" not in self._spare:
            if len(self._spare) > _LONGEST_LINE:
                raise Broken(f"it sent a line of more than {_LONGEST_LINE:,} bytes")
            left_s = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._out], [], [], left_s)
            if not ready:
                raise Broken(f"no whole line came for {_HASHED_S:.0f} s")
            try:
                self._spare += self._receive(_SILENCE_S)
            except ConnectionError as error:
                raise Broken(str(error)) from error
        line, _, self._spare = self._spare.partition(b"\n")
        return line

    def read(self, most: int) -> bytes:
        """Return what has come, at least a byte."""
        while not self._spare:
            self._spare = self._receive(_SILENCE_S, most)
        data = self._spare[:most]
        self._spare = self._spare[most:]
        return data

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            _, ready, _ = select.select([], [self._in], [], _SILENCE_S)
            if not ready:
                raise Broken(f"it took nothing for {_SILENCE_S:.0f} s")
            try:
                written = os.write(self._in, view)
                view = view[written:]
            except BrokenPipeError:
                raise self._ended() from None

    def _receive(self, limit_s: float, most: int = _PIPE_BYTES) -> bytes:
        ready, _, _ = select.select([self._out], [], [], limit_s)
        if not ready:
            raise Broken(f"nothing came for {limit_s:.0f} s")
        data = os.read(self._out, most)
        own = self._answer.strip(data)
        if not data or (self._answer.exit_code is not None and not own):
            raise self._ended()
        return own

    def _ended(self) -> Broken:
        ended_within(self._process, _END_S)  # its streams close before
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace").strip()
        if not self._answer.has_started and 0 <= code <= _SIGNALS:
            words = why_no_command(self._login, code, errors or self._answer.words)
            raise NoCommand(words, host=self._host, exit_code=code, stderr=errors)
        why = errors[-_WORDS:] or f"it ended with {code}"
        return Broken(f"the line broke: {why}")
