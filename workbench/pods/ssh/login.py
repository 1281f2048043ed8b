"""Commands through a foreign login shell: any shell, maybe with output from start-up files.

A command travels as one line of plain letters that sh, bash, dash, ksh, zsh, fish, tcsh and csh
read alike. A random marker on standard output precedes the command's own output.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import shlex
import time
from collections.abc import Sequence

from workbench.base.errors import RemoteError
from workbench.base.words import plain

# In single quotes: no line break, no quote of that kind, no `!` and no backslash, since csh and
# fish give these a meaning inside quotes.
_START = (
    'unset PYTHONHOME; base64 </dev/null && echo {marker} && eval "$(printf %s "$@" | base64 -d)"'
)
_LETTERS = 900  # of a word; an old csh takes few more. Divides by four: no word begins with `=`
_MOST_BYTES = 64 << 20
_SHOWN = 300
_OURS = re.compile(r"(?:[A-Za-z0-9+/=]{60,}\s*)+")  # words of a command, quoted by a shell
_NO_SH = re.compile(r"\b(?:sh|base64)\b")


class NoCommand(RemoteError):
    """The login ended before the start of the command."""


class Opening:
    """The output of a login before the command's own: dropped up to the marker, and quotable."""

    def __init__(self, marker: bytes = b"") -> None:
        """`marker`: as in `marked`. Empty: all output is the command's."""
        self.is_over = not marker
        self.took_s = 0.0
        """Seconds until the marker came."""
        self._began_s = time.monotonic()
        self._marker = marker
        self._words = bytearray()
        self._tail = b""
        self._count = 0

    def strip(self, data: bytes) -> bytes:
        """Take the next output and return the command's part."""
        if self.is_over:
            return data
        before, found, own = (self._tail + data).partition(self._marker)
        fresh = before[len(self._tail) :]
        self._words += fresh[: 2 * _SHOWN - len(self._words)]
        self._count += len(data)
        self.is_over = bool(found)
        self.took_s = time.monotonic() - self._began_s
        self._tail = b"" if found else before[1 - len(self._marker) :]
        if not found and self._count > _MOST_BYTES:
            raise ConnectionError(f"the login prints without end: {self.words!r}")
        return own

    @property
    def words(self) -> str:
        """The beginning of the login's own output, for an error."""
        return plain(self._words.decode(errors="replace"))[:_SHOWN]


def marked(argv: Sequence[str]) -> tuple[list[str], bytes]:
    """Return words for any login shell to run a command, and the marker before the output."""
    marker = f"@workbench-{secrets.token_hex(8)}"
    data = base64.b64encode(to_bytes(f"exec {shlex.join(argv)}")).decode()
    words = [data[at : at + _LETTERS] for at in range(0, len(data), _LETTERS)]
    start = _START.format(marker=marker)
    return ["sh", "-c", start, "sh", *words], f"{marker}\n".encode()


def line_of(words: Sequence[str]) -> str:
    """Return the line for a login shell that becomes the command.

    A shell that stays may print at its end, by a trap of a start-up file.
    """
    return f"exec {shlex.join(words)}"


def why_no_command(host: str, exit_code: int | None, said: str) -> str:
    """Describe a login that ended without starting the command, with the next step."""
    words = plain(_OURS.sub("…", said))[-_SHOWN:]
    return (
        f"the login on {host} runs no commands: it ended with exit code {exit_code} and printed"
        f" {repr(words) if words else 'nothing'}."
        f" {_cause(exit_code, words)} `ssh HOST echo works` must print works"
    )


def to_bytes(command: str) -> bytes:
    """Return a command as bytes: file names keep their bytes, under any locale."""
    try:
        return os.fsencode(command)
    except UnicodeEncodeError:  # of a locale such as ISO-8859-1, which lacks it
        return command.encode("utf-8", "surrogateescape")


def _cause(exit_code: int | None, said: str) -> str:
    if exit_code in (126, 127) and _NO_SH.search(said):
        return "Its start-up files leave no sh or no base64 in PATH: let them add to PATH."
    if exit_code in (0, 127):
        return (
            "Its start-up files (~/.bashrc, ~/.zshenv, ~/.cshrc) exit or start another shell:"
            " let them do so only with a terminal. Or its key, or the host's sshd, allows one"
            " command only."
        )
    if "not available" in said:
        return "The account has the shell nologin: give it a shell, or name another user."
    return (
        "The account's shell may be nologin or false, its key may allow one command only, or"
        " its start-up files exit."
    )
