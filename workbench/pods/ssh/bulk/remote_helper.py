"""The pod's side of a file transfer: `python -IS -c` of this text, over SSH; standard library only.

`send PATH OFFSET` writes a line of JSON, the bytes from the offset on, and a line with the SHA-256
of the whole file. With names after it, `send` does the same for files of the folder PATH, joined.
`receive PATH PART` reports the size of a part, takes the rest, and renames the file if the SHA-256
agrees. `take PATH SIZE SHA256` receives a small file. `holds PATH SHA256 STAMP` checks a file.
`size PATH` reports the size of a file. `offer PATH` sends a file to another pod, and `collect PATH
PART` receives the file there: over TLS, and both ends have the one key that standard input names.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator

TYPE_CHECKING = False  # `typing` takes longer to import than a small file to travel
if TYPE_CHECKING:
    import ssl

_PIECE = 1 << 20
_CONNECT_S = 10.0
_OFFERED_S = 60.0  # until the other pod connects, and for each piece
_TOLD_S = 1.0  # between two lines about the bytes that have come
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
        "offer": _offer,
        "collect": _collect,
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
    return _take_from(path, shared, open(0, "rb", closefd=False), _say)


def _take_from(
    path: str,
    shared: str,
    source: io.BufferedReader,
    answer: Callable[..., None],
    expected: str = "",
) -> int:
    """Take the rest of a part from the side that `answer` tells about the part.

    The file gets its name only with the SHA-256 `expected`, if one is given.
    """
    _make_folder(path)
    part, file = _own_part(shared)
    spoilt = part != shared
    try:
        digest = hashlib.sha256()
        have = os.fstat(file).st_size
        _read(file, have, digest)
        answer(have=have, prefix=digest.hexdigest())
        asked = json.loads(source.readline() or "{}")
        if asked.get("offset") == 0:
            digest = hashlib.sha256()
        if not asked:
            return 1
        offset = asked["offset"]
        size = asked["size"]
        os.ftruncate(file, offset)
        os.lseek(file, offset, os.SEEK_SET)
        if shutil.disk_usage(os.path.dirname(part)).free < size - offset:  # noqa: PTH120
            _say_full(path, size - offset)
            return 1
        if not _fill(file, source, digest, offset, size, tells=bool(expected)):
            return 1  # the line broke; the part stays for the next try
        wanted = json.loads(source.readline() or "{}").get("sha256")
        mine = digest.hexdigest()
        is_whole = wanted == mine and os.fstat(file).st_size == size
        if is_whole and expected in ("", mine):
            # A network's file system may say only at a close that its disk is full.
            os.close(os.dup(file))
            os.replace(part, path)  # noqa: PTH105
            if part != shared:
                _remove_unlocked(shared)
        elif wanted:
            os.unlink(part)  # noqa: PTH108
        _say(sha256=mine)
        return 0
    except OSError as error:
        # The room is needed, unless only the line to another pod broke.
        spoilt = spoilt or not (expected and isinstance(error, ConnectionError | TimeoutError))
        raise
    finally:
        if spoilt and os.path.lexists(part):
            os.unlink(part)  # noqa: PTH108


def _fill(
    file: int,
    source: io.BufferedReader,
    digest: hashlib._Hash,
    done: int,
    size: int,
    *,
    tells: bool,
) -> bool:
    """Write what comes until the file has its size. Return False if the line broke before."""
    told = time.monotonic()
    while done < size:
        signal.alarm(_SILENCE_S)
        piece = source.read1(min(size - done, _PIECE))
        if not piece:
            return False
        digest.update(piece)
        _write(file, piece)
        done += len(piece)
        if tells and time.monotonic() > told + _TOLD_S:
            told = time.monotonic()
            _say(done=done, size=size)
    return True


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


def _offer(path: str) -> int:
    """Send a file to the pod that connects with the key, from its first missing byte on."""
    import socket  # here, as most transfers have no other pod

    asked = json.loads(sys.stdin.readline())
    size = _size_of(path)
    family = socket.AF_INET6 if ":" in asked["address"] else socket.AF_INET
    with socket.create_server((asked["address"], 0), family=family) as listener:
        listener.settimeout(_OFFERED_S)
        _say(port=listener.getsockname()[1])
        taker, _ = listener.accept()
    taker.settimeout(_OFFERED_S)
    with _tls(asked["key"], server=True).wrap_socket(taker, server_side=True) as line:

        def answer(**facts: object) -> None:
            line.sendall(f"{json.dumps(facts)}\n".encode())

        with line.makefile("rb") as words:
            there = json.loads(words.readline() or "{}")
        have = there["have"]
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            _read(file.fileno(), have, digest)
            # The part of another file: begin again.
            if have > size or digest.hexdigest() != there["prefix"]:
                file.seek(0)
                have = 0
                digest = hashlib.sha256()
            answer(offset=have, size=size)
            while piece := file.read(min(size - have, _PIECE)):
                signal.alarm(_SILENCE_S)
                digest.update(piece)
                line.sendall(piece)
                have += len(piece)
        answer(sha256=digest.hexdigest())
    return 0


def _collect(path: str, part: str) -> int:
    """Take a file from the pod that offers the file at an address and port."""
    import socket

    asked = json.loads(sys.stdin.readline())
    where = asked["address"], asked["port"]
    try:
        reached = socket.create_connection(where, timeout=_CONNECT_S)
    except OSError as error:
        raise OSError(f"{error.strerror or error} at {where[0]}, port {where[1]}") from error
    reached.settimeout(_OFFERED_S)
    with _tls(asked["key"], server=False).wrap_socket(reached) as line:

        def answer(**facts: object) -> None:
            line.sendall(f"{json.dumps(facts)}\n".encode())

        with line.makefile("rb") as source:
            return _take_from(path, part, source, answer, asked["sha256"])


def _tls(key: str, *, server: bool) -> ssl.SSLContext:
    """Return the settings of a line whose two ends have one certificate and its key."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate names no host: the key is the proof
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key[key.index("-----BEGIN CERTIFICATE") :])
    # A file in memory: the key is on no disk.
    file = os.memfd_create("key")
    _write(file, key.encode())
    context.load_cert_chain(f"/proc/self/fd/{file}")
    os.close(file)
    return context


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
