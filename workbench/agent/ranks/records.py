"""Reason for a rank's end: from the rank's record, else from exit status and stderr."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.base.clock import now_s
from workbench.base.errors import DiskFull
from workbench.base.files import open_record, records, write_bytes, write_json
from workbench.base.files.folders import remove_file
from workbench.base.messages.lines import from_line
from workbench.base.process import boot_id

_log = logging.getLogger(__name__)
DONE = "done.json"
"""File in the rank's folder: the rank has finished all requested work."""
LEAVE_LISTENS = "leave-listens"
"""File in the rank's folder: the rank looks for `LEAVE_ASKED` after every step."""
LEAVE_ASKED = "leave-asked"
"""File in the rank's folder: the pod is ending, and the rank may write a checkpoint."""

_RESERVE = ".reserve"
_RESERVE_BYTES = 16 << 10
_ATTEMPT = "attempt.json"
_RECORD_BYTES = 64 * 1024
_MESSAGE_CHARS = 4000
_TAIL_LINES = 20

# torch puts "[rank1]: " before every line of an uncaught exception. Others colour their lines.
_PREFIX = re.compile(r"^\[rank\d+\]:\s?|\x1b\[[\d;]*[A-Za-z]")
# A half-drawn bar may precede the text on its line. The inner tracebacks of a group have a margin.
_HEAD = re.compile(
    r"^(?!\s+\|).*?((?:  \+ Exception Group )?Traceback \(most recent call last\):)$"
)
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# A traceback after one of these lines did not end the process.
_HARMLESS = ("Exception ignored", "Exception in thread", "--- Logging error ---")
# Tracebacks of finalizers and of logging, which often come after the cause.
_BESIDE = re.compile(
    r"^(?:Exception ignored|--- Logging error ---).*\n{1,2}Traceback .*\n(?:[ \t].*\n)*.*\n?"
    r"(?:Call stack:\n(?:[ \t].*\n)*Message: .*\nArguments: .*\n?)?",
    re.MULTILINE,
)
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*)|:)?$")
# Lines of a log, of a bar and of a warning, unless a word of theirs names an error.
_NOISE = re.compile(
    r"^\W{0,3}(\w{1,20}:?)? ?\d{4}-\d\d-\d\d|^\W{0,3}(\w{3} [ \d]\d )?\d\d:\d\d:\d\d"  # a time
    r"|\b(DEBUG|INFO|WARN|WARNING)\b|Warning: |warnings\.warn\("
    r"|\b(?i:info|warning) ?(:|#\d)|\blevel\W{1,3}(?i:debug|info|warn)"  # perl, OpenMP, JSON
    r"|^(wandb|huggingface/tokenizers): "
    r"|\d%\|"  # tqdm
)
# Lines that the interpreter, faulthandler or glog (W1128 10:11:12) add below the cause.
_BELOW = re.compile(
    r"^(Current thread|Thread) 0x|^Python runtime state: |^Extension modules: "
    r'|^  (File "|<no Python frame>|\.\.\.$)|^Exception ignored |^\W{0,3}[DIW]\d{4}[ :]'
)
_OF_A_CAUSE = re.compile(
    r"errors?\b|\b(fatal|fail(ed|ure)?|exceptions?|cannot|can't|not found|no such|denied|refused"
    r"|invalid|abort(ed)?|critical|killed|panic)\b",
    re.IGNORECASE,
)
_UNFINISHED = "terminate called without an active exception"
_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError): ")
# Messages of gloo, NCCL, torch's store and MPI about another rank. Gloo names its peer `[address]`.
_OF_A_RANK = re.compile(
    r"closed by (remote )?peer (\[\S+\]:|\S+<)\d+|(read|write|connect) (error|timeout) \["
    r"|socket (unexpectedly )?closed \[|application timeout caused pair closure"
    r"|gloo connectfullmesh failed|timed out waiting \d+ ?ms for (send|recv) operation"
    r"|reached monitoredbarrier, but|to pass monitoredbarrier"
    r"|remote process exit(ed|ing)|ncclremoteerror|watchdog caught collective operation timeout"
    r"|failed to (recv, got|send, sent) 0 bytes|did the remote server shutdown or crash"
    r"|wait timeout after \d+ ?ms, keys:|timed out after \d+ seconds waiting for clients"
    r"|the client socket has timed out after|the connection to the c10d store has failed"
    r"|lost communication with a remote daemon|mpi_err_proc_failed",
    re.IGNORECASE,
)
# Messages of any socket, also to a hub or a tracker. They count in a message of a rank's library,
_OF_A_SOCKET = re.compile(
    r"connection (refused|reset|closed|aborted)|(closed|reset) by peer|broken pipe"
    r"|socket timeout|timed out waiting",
    re.IGNORECASE,
)
_LIBRARY = re.compile(
    r"\bgloo\b|\bnccl\b|tcpstore|c10d|socketimpl|btl_tcp|processgroup(gloo|nccl)", re.IGNORECASE
)
# or as the whole message: torch's store reports a lost rank as "Broken pipe". A hub's client names
# the hub.
_ALONE = re.compile(
    r"(\[errno \d+\] )?(broken pipe|connection (reset|closed) by peer|socket timeout)\.?",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    kind: str
    """Class of the exception, or "signal", or "exit"."""
    message: str
    traceback: str = ""
    """Traceback as Python printed it, or the last lines of stderr."""


def failure_from(
    stderr: str, exit_code: int, *, oom_hint: str = "", exit_text: str | None = None
) -> Failure:
    """Return the failure of a rank without a record, read from the end of its stderr.

    `exit_text` is the text that the rank gave to `sys.exit`. None: unknown.
    """
    rest = _BESIDE.sub("", "\n".join(map(_clean, stderr.split("\n"))))
    # Python ends with 1 where `SystemExit` has a text. Other codes come with no line of their own.
    words = " ".join((exit_text or "").split())[:_MESSAGE_CHARS]
    words = words or _last_words(rest, any_line=exit_code == 1 and exit_text is None)
    last = last_traceback(rest) or (None if words else last_traceback(stderr))
    if exit_code < 0:
        return _from_signal(-exit_code, last, stderr, oom_hint)
    if exit_code == 0:
        return Failure(kind="exit", message="ended early with 0", traceback=_last_lines(stderr))
    if last is not None:
        return last
    message = f"exit code {exit_code}"
    if words:
        message += f": {words}"
    return Failure(kind="exit", message=message, traceback=_last_lines(stderr))


def last_traceback(text: str) -> Failure | None:
    r"""Find the traceback that ended a Python program in its stderr.

    Example:
        >>> text = "x\nTraceback (most recent call last):\n  File ...\nValueError: bad\n"
        >>> last_traceback(text).message
        'bad'
    """
    lines = [_clean(line) for line in text.splitlines()]
    heads = [i for i, line in enumerate(lines) if _HEAD.match(line)]
    if not heads:
        return _syntax_error(lines)
    serious = [i for i in heads if not _is_harmless(lines, i)]
    first = last = (serious or heads)[-1]
    while (earlier := _chained_to(lines, heads, first)) is not None:
        first = earlier
    bare = [line.removeprefix("  | ") for line in lines]  # the margin of an exception group
    # The exception is the first line without an indent below the frames.
    at = last + 1
    while at < len(bare) and (not bare[at] or bare[at].startswith((" ", "\t"))):
        at += 1
    if at == len(bare):
        return None
    match = _EXCEPTION.match(bare[at])
    if match is None:
        return None
    end = _end_of_message(lines, at)
    message = (match[2] or "").strip()
    if not message:
        message = " ".join(lines[at + 1 : end]).strip()
    lines[first] = _HEAD.sub(r"\1", lines[first])
    block = "\n".join(lines[first:end])
    return Failure(
        kind=match[1].rpartition(".")[2],
        message=message[:_MESSAGE_CHARS],
        traceback=block[-_RECORD_BYTES:],
    )


def signal_name(signum: int) -> str:
    """Return a signal's name, `SIGKILL`; real-time ones as `signal 40`."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def read_record(path: Path) -> dict[str, object] | None:
    """Read a rank's record, or return None for a missing or unreadable record."""
    try:
        # A pipe in place of the record would hold the agent.
        with open_record(path) as file:
            record: dict[str, object] = from_line(file.read(4 * _RECORD_BYTES))
    except (OSError, ValueError):
        return None
    return record


def done_record(rank: int) -> dict[str, object]:
    """Return the content of `DONE`: the rank, and the start of the machine."""
    return {"rank": rank, "boot": boot_id()}


def is_done(folder: Path) -> bool:
    """Whether the record of a rank says that its work is done, and that its files are whole.

    After a restart of the machine, other files of the rank may be empty: the power may have gone.
    """
    record = read_record(folder / DONE)
    return record is not None and record.get("boot") == boot_id()


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Write a rank's record with the time atomically. On a full disk, use the reserved room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {**record, "time_s": now_s()}
    try:
        write_json(path, dated)
    except DiskFull:
        (path.parent / _RESERVE).unlink(missing_ok=True)
        write_json(path, dated)


def keep_room(folder: Path) -> None:
    """Reserve room on the disk for a rank's record, if there is any."""
    try:
        write_bytes(folder / _RESERVE, bytes(_RESERVE_BYTES))
    except OSError as error:
        _log.warning("no room is reserved for the record of a rank: %s", error)


def keep_attempt(folder: Path, attempt: int, restart: int) -> None:
    """Keep the attempt of a run's ranks for an agent that takes over. Raises nothing."""
    path = folder / _ATTEMPT
    try:
        write_json(path, {"attempt": attempt, "restart": restart})
    except OSError:
        # No number is better than the number of an earlier attempt.
        remove_file(path)


def read_attempt(folder: Path) -> tuple[int, int]:
    """Return the attempt of a run's ranks and the number of restarts before.

    Attempt 0: unknown. The number of restarts is then that of the last folder of logs.
    """
    kept = read_record(folder / _ATTEMPT) or {}
    attempt = kept.get("attempt")
    restart = kept.get("restart")
    if isinstance(attempt, int) and isinstance(restart, int):
        return attempt, restart
    folders = records.try_folders(folder, "attempt-*")
    numbers = [path.name.removeprefix("attempt-") for path in folders]
    return 0, max((int(number) for number in numbers if number.isdecimal()), default=0)


def _from_signal(signum: int, last: Failure | None, stderr: str, oom_hint: str) -> Failure:
    message = f"killed by {signal_name(signum)}"
    if signum == signal.SIGKILL and oom_hint:
        message += f"; {oom_hint}"
    if signum == signal.SIGABRT and _UNFINISHED in stderr:
        message += (
            "; often a process group that is open at the exit: wait for its work, and end the "
            "script with torch.distributed.destroy_process_group()"
        )
    if signum == signal.SIGBUS:
        message += (
            "; often shared memory that is too small: "
            f"/dev/shm has {_free_mib('/dev/shm')} MiB free"
        )
    text = last.traceback if last else _last_lines(stderr)
    return Failure(kind="signal", message=message, traceback=text)


def _free_mib(path: str) -> int:
    try:
        stat = os.statvfs(path)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize // 2**20


def _clean(line: str) -> str:
    # A half-drawn bar precedes the text and ends in \r.
    _, _, text = line.rpartition("\r")
    return _PREFIX.sub("", text).rstrip()


def _last_words(stderr: str, *, any_line: bool) -> str:
    """Return the last line that names an error, or with `any_line` is no log, bar or warning."""
    lines = ["", *stderr.splitlines()]
    for above, line in reversed([*itertools.pairwise(lines)]):
        cleaned = _clean(line)[:_MESSAGE_CHARS]
        # Python shows the source of a warning below the warning.
        is_source = cleaned.startswith(" ") and "Warning: " in above
        if is_source or _BELOW.search(cleaned):
            continue
        is_words = any_line and cleaned.strip() and not _NOISE.search(cleaned)
        if is_words or _OF_A_CAUSE.search(cleaned):
            return cleaned
    return ""


def _last_lines(text: str) -> str:
    # A final newline leaves an empty last part.
    last = text.split("\n")[-_TAIL_LINES - 1 :]
    cleaned = "\n".join(_clean(line) for line in last)
    return cleaned.strip()[-_RECORD_BYTES:]


def _is_harmless(lines: list[str], head: int) -> bool:
    for line in reversed(lines[:head]):
        if line:
            return line.startswith(_HARMLESS)
    return False


def _chained_to(lines: list[str], heads: list[int], head: int) -> int | None:
    before = [i for i in range(head) if lines[i]]
    if not before or lines[before[-1]] not in _CHAIN:
        return None
    earlier = [i for i in heads if i < before[-1]]
    return earlier[-1] if earlier else None


def _end_of_message(lines: list[str], at: int) -> int:
    most = min(len(lines), at + _TAIL_LINES)
    end = at + 1
    while end < most and lines[end] and not _HEAD.match(lines[end]):
        end += 1
    return end


def _syntax_error(lines: list[str]) -> Failure | None:
    # Python prints no "Traceback" line for a script that does not compile.
    for at in range(len(lines) - 1, -1, -1):
        if _SYNTAX.match(lines[at]):
            kind, _, message = lines[at].partition(": ")
            first = max(0, at - 4)
            text = "\n".join(lines[first : at + 1])
            return Failure(kind=kind, message=message, traceback=text)
    return None


def only_lost_its_peer(text: str) -> bool:
    """Whether an error's message only reports a lost rank: an echo, never the first cause."""
    if _OF_A_RANK.search(text) or _ALONE.fullmatch(text.strip()):
        return True
    return bool(_OF_A_SOCKET.search(text) and _LIBRARY.search(text))
