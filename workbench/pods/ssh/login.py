"""Commands through a foreign login shell: any shell, maybe with output from start-up files.

A command travels as one line of plain letters that sh, bash, dash, ksh, zsh, fish, tcsh and csh
read alike. A random marker on standard output precedes the command's own output, and the marker
with the exit code follows. The login shell stays, so a trap of a start-up file runs.
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
from workbench.base.words import strip_controls

# In single quotes: no line break, no quote of that kind, no `!` and no backslash, since csh and
# fish give these a meaning inside quotes.
# A command that lists processes shows these words, but not the marker's last line.
_START = (
    "unset PYTHONHOME; base64 </dev/null && echo $1"
    ' && { eval "$(shift; printf %s "$@" | base64 -d)"; set $1 $?; echo $1 end $2; exit $2; }'
)
_SIGNALS = range(129, 193)  # what a shell answers for a command that a signal ended
_LETTERS = 900  # of a word; an old csh takes few more. Divides by four: no word begins with `=`
_MOST_BYTES = 64 << 20
_SHOWN = 300
_OURS = re.compile(r"(?:[A-Za-z0-9+/=]{60,}\s*)+")  # words of a command, quoted by a shell
_NO_SH = re.compile(r"\b(?:env|sh|base64)\b")


class NoCommand(RemoteError):
    """The login ended before the start of the command."""


class Output:
    """The output of a login. Keeps the command's part and drops what the login prints itself."""

    def __init__(self, marker: bytes) -> None:
        """`marker`: as in `marked`."""
        self.has_started = False
        """Whether the login has started the command."""
        self.exit_code: int | None = None
        """Exit code of the command; -1 after a signal; None before the end of its output."""
        self.took_s = 0.0
        """Seconds until the command started."""
        self._began_s = time.monotonic()
        self._opening = marker + b"\n"
        self._closing = marker + b" end "
        self._words = bytearray()
        self._tail = b""
        self._count = 0

    def strip(self, data: bytes) -> bytes:
        """Take the next output and return the command's part."""
        data = self._tail + data
        if not self.has_started:
            data = self._after_opening(data)
        if not self.has_started:
            return b""
        own, closing, rest = data.partition(self._closing)
        if closing:
            return self._end(own, closing, rest)
        # A marker may be cut by the end of the data.
        at = data.rfind(self._closing[:1], max(0, len(data) - len(self._closing)))
        cut = at if at >= 0 and self._closing.startswith(data[at:]) else len(data)
        self._tail = data[cut:]
        return data[:cut]

    @property
    def words(self) -> str:
        """The beginning of the login's own output before the command, or after its end."""
        return strip_controls(self._words.decode(errors="replace"))[:_SHOWN]

    def _after_opening(self, data: bytes) -> bytes:
        before, found, rest = data.partition(self._opening)
        fresh = before[len(self._tail) :]
        self._words += fresh[: 2 * _SHOWN - len(self._words)]
        self._count += len(fresh)
        self.has_started = bool(found)
        self.took_s = time.monotonic() - self._began_s
        self._tail = b"" if found else before[1 - len(self._opening) :]
        if not found and self._count > _MOST_BYTES:
            raise ConnectionError(f"the login prints without end: {self.words!r}")
        return rest

    def _end(self, own: bytes, closing: bytes, rest: bytes) -> bytes:
        """Read the exit code behind the marker. The login's words follow."""
        number, whole, after = rest.partition(b"\n")
        if whole:
            code = int(number) if number.isdigit() and len(number) <= 3 else -1
            self.exit_code = -1 if code in _SIGNALS else code
            self._words[:] = after[: 2 * _SHOWN]
        self._tail = (closing + rest)[: 2 * _SHOWN]
        return own


def marked(argv: Sequence[str]) -> tuple[list[str], bytes]:
    """Return words for any login shell to run a command, and the marker around the output.

    By `env`, no alias or function of a start-up file takes the place of `sh`.
    """
    marker = f"@workbench-{secrets.token_hex(8)}"
    data = base64.b64encode(to_bytes(f"(exec {shlex.join(argv)})")).decode()
    words = [data[at : at + _LETTERS] for at in range(0, len(data), _LETTERS)]
    return ["env", "sh", "-c", _START, "sh", marker, *words], marker.encode()


def why_no_command(login: str, exit_code: int | None, said: str) -> str:
    """Describe a login that ended without starting the command, with the next step.

    `login`: as `Pod.login`.
    """
    words = strip_controls(_OURS.sub("…", said))[-_SHOWN:]
    return (
        f"the login {login} runs no commands: it ended with exit code {exit_code} and printed"
        f" {repr(words) if words else 'nothing'}."
        f" {_cause(login, exit_code, words)} `ssh HOST echo works` must print works"
    )


def to_bytes(command: str) -> bytes:
    """Return a command as bytes: file names keep their bytes, under any locale."""
    try:
        return os.fsencode(command)
    except UnicodeEncodeError:  # of a locale such as ISO-8859-1, which lacks it
        return command.encode("utf-8", "surrogateescape")


def _cause(login: str, exit_code: int | None, said: str) -> str:
    if exit_code in (126, 127) and _NO_SH.search(said):
        return "Its start-up files leave no env, sh or base64 in PATH: let them add to PATH."
    if exit_code in (0, 127):
        return (
            "Its start-up files (~/.bashrc, ~/.zshenv, ~/.cshrc) exit, start another shell or"
            " redirect the output: let them do so only with a terminal. Or its key, or the host's"
            " sshd, allows one command only."
        )
    if "not available" in said:
        return "The account has the shell nologin: give it a shell, or name another user."
    account = shlex.quote(login.rpartition("@")[0] or "ACCOUNT")
    return (
        f"The account's shell may be nologin or false (`getent passwd {account}` there shows the"
        " shell), its key may allow one command only, or its start-up files exit."
    )
