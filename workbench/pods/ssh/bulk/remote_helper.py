"""The pod's side of a file transfer: `python -IS -c` of this text, over SSH; standard library only.

`send PATH OFFSET` writes a line of JSON, the bytes from the offset on, and a line with the SHA-256
of the whole file. With names after it, `send` does the same for files of the folder PATH, joined.
`receive PATH PART` reports the size of a part, takes the rest, and renames the file if the SHA-256
agrees. `take PATH SIZE SHA256` receives a small file. `holds PATH SHA256 STAMP` checks a file.
`size PATH` reports the size of a file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator

_PIECE = 1 << 20
_WRITER_S = 10.0  # for another that writes the same part
_SILENCE_S = 300  # then the alarm ends this: an sshd whose peer is gone may not notice for hours


def main(argv: list[str]) -> int:
    """Carry out a command; report errors of the disk in a line `{"error": WORDS}`."""
    verb, path, *rest = argv
    verbs: dict[str, Callable[..., int]] = {
        "send": _send,
        "receive": _receive,
        "take": _take,
        "holds": _holds,
        "size": _size,
    }
    try:
        return verbs[verb](path, *rest)
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _say_full(path, int(rest[0]) if verb == "take" else None)
        else:
            _say(error=f"{error.strerror or error} ({error.filename or path})")
        return 1


def _send(path: str, begin: str, *names: str) -> int:
    files = [os.path.join(path, name) for name in names] or [path]  # noqa: PTH118
    sizes = [_size_of(file) for file in files]
    size = sum(sizes)
    done = 0
    digest = hashlib.sha256()
    offset = int(begin) if int(begin) <= size else 0
    pieces = _pieces(files, sizes, offset)
    # The bytes that the other side has already.
    while done < offset:
        piece = next(pieces, b"")
        if not piece:
            break
        digest.update(piece)
        done += len(piece)
    _say(size=size, offset=offset, prefix=digest.hexdigest())
    for piece in pieces:
        digest.update(piece)
        signal.alarm(_SILENCE_S)
        _write(1, piece)
        done += len(piece)
    _say(sha256=digest.hexdigest())
    return 1 if done < size else 0


def _size_of(path: str) -> int:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # pathlib takes longer to import than to do this
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{path} is not a regular file")
        return facts.st_size


def _pieces(files: list[str], sizes: list[int], cut: int) -> Iterator[bytes]:
    """Yield the content of joined files in pieces; no piece crosses the byte `cut`."""
    at = 0
    for path, left in zip(files, sizes, strict=True):
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            while left:
                limit = min(left, _PIECE)
                if cut > at:
                    limit = min(limit, cut - at)
                piece = file.read(limit)
                if not piece:
                    break
                yield piece
                at += len(piece)
                left -= len(piece)
        if left:
            return  # it became shorter


def _receive(path: str, shared: str) -> int:
    _make_folder(path)
    part, file = _own_part(shared)
    spoilt = part != shared
    try:
        return _fill(path, part, file, shared)
    except OSError:
        spoilt = True  # the room is needed
        raise
    finally:
        if spoilt and os.path.lexists(part):
            os.unlink(part)  # noqa: PTH108


def _fill(path: str, part: str, file: int, shared: str) -> int:
    digest = hashlib.sha256()
    have = os.fstat(file).st_size
    _read(file, have, digest)
    _say(have=have, prefix=digest.hexdigest())
    source = open(0, "rb", closefd=False)  # noqa: SIM115
    asked = json.loads(source.readline() or "{}")
    if asked.get("offset") == 0:
        digest = hashlib.sha256()
    if not asked:
        return 1
    offset = asked["offset"]
    os.ftruncate(file, offset)
    os.lseek(file, offset, os.SEEK_SET)
    left = asked["size"] - offset
    if shutil.disk_usage(os.path.dirname(part)).free < left:  # noqa: PTH120
        _say_full(path, left)
        return 1
    while left:
        signal.alarm(_SILENCE_S)
        piece = source.read1(min(left, _PIECE))
        if not piece:
            return 1  # the line broke; the part stays for the next try
        digest.update(piece)
        _write(file, piece)
        left -= len(piece)
    end = json.loads(source.readline() or "{}")
    wanted = end.get("sha256")
    mine = digest.hexdigest()
    if wanted == mine and os.fstat(file).st_size == asked["size"]:
        # A network's file system may say only at a close that its disk is full.
        os.close(os.dup(file))
        os.replace(part, path)  # noqa: PTH105
        if part != shared:
            _remove_unlocked(shared)
    elif wanted:
        os.unlink(part)  # noqa: PTH108
    _say(sha256=mine)
    return 0


def _own_part(part: str) -> tuple[str, int]:
    """Open a part for exclusive writing, or a copy of a part that another writer keeps locked."""
    # The other writer may be the far end of a broken line. The end of its TCP connection releases
    # the lock, and TCP delivers that end late: up to as long again as the network was away.
    until = time.monotonic() + _WRITER_S
    while True:
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_ino == os.stat(part).st_ino:  # noqa: PTH116
                return part, file
        except BlockingIOError:
            if time.monotonic() > until:
                return _copy_of(file, part)
            time.sleep(0.1)
        except FileNotFoundError:
            pass  # its writer has just given it its name
        os.close(file)


def _copy_of(shared: int, part: str) -> tuple[str, int]:
    """Copy the bytes of another writer's part: the sender compares them before it resumes."""
    own = f"{part}.{os.getpid()}-{time.time_ns()}"
    copy = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            piece = os.read(shared, _PIECE)
            if not piece:
                break
            _write(copy, piece)
    except OSError:  # without room for two parts, the rest decides whether the file has room
        os.ftruncate(copy, 0)
    os.lseek(copy, 0, os.SEEK_SET)
    os.close(shared)
    return own, copy


def _remove_unlocked(part: str) -> None:
    """Remove the part of a writer that has ended meanwhile."""
    try:
        file = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(part)  # noqa: PTH108
    except (BlockingIOError, FileNotFoundError):
        pass  # the writer is alive, or has given its part the name of the file
    finally:
        os.close(file)


def _take(path: str, size: str, wanted: str) -> int:
    _make_folder(path)
    folder, name = os.path.split(path)
    if shutil.disk_usage(folder).free < int(size):
        _say_full(path, int(size))
        return 1
    part = f"{folder}/.{name}.{os.getpid()}-{time.time_ns()}.part"
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        digest = hashlib.sha256()
        left = int(size)
        signal.alarm(_SILENCE_S)
        while left:
            piece = os.read(0, min(left, _PIECE))
            if not piece:
                break
            digest.update(piece)
            _write(file, piece)
            left -= len(piece)
        written = os.fstat(file).st_size
        whole = written == int(size) and digest.hexdigest() == wanted
        os.close(file)
        if whole:
            os.replace(part, path)  # noqa: PTH105
        _say(whole=whole)
    finally:
        if os.path.lexists(part):
            os.unlink(part)  # noqa: PTH108
    return 0


def _holds(path: str, wanted: str, stamp: str) -> int:
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        _say(stamp="")
        return 0
    facts = os.fstat(file)
    mine = f"{facts.st_size}-{facts.st_ino}-{facts.st_mtime_ns}-{facts.st_ctime_ns}"
    if mine != stamp:
        digest = hashlib.sha256()
        _read(file, facts.st_size, digest)
        is_wanted = stat.S_ISREG(facts.st_mode) and digest.hexdigest() == wanted
        if not is_wanted:
            mine = ""
    _say(stamp=mine)
    return 0


def _size(path: str) -> int:
    _say(size=os.stat(path).st_size)  # noqa: PTH116
    return 0


def _make_folder(path: str) -> None:
    umask = os.umask(0o077)  # makedirs gives its mode to the last folder alone
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    os.umask(umask)


def _say_full(path: str, needed: int | None) -> None:
    folder = os.path.dirname(path)  # noqa: PTH120
    while not os.path.isdir(folder):  # noqa: PTH112
        folder = os.path.dirname(folder)  # noqa: PTH120
    free = shutil.disk_usage(folder).free
    _say(full={"folder": folder, "needed": needed, "free": free})


def _read(file: int, count: int, digest: hashlib._Hash) -> None:
    while count:
        piece = os.read(file, min(count, _PIECE))
        if not piece:
            return
        digest.update(piece)
        count -= len(piece)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(file, view)
        view = view[written:]


def _say(**facts: object) -> None:
    line = json.dumps(facts) + "\n"
    _write(1, line.encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
