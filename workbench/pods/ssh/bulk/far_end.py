"""The pod's end of a large file's way: `python -IS -c` of this file's text, over SSH; standard library only.

`send PATH OFFSET` writes a line of JSON, the bytes from there on, and a line with the SHA-256 of the whole file.
`receive PATH PART` says how much of a part is there, takes the rest, and gives the file its name only when the sender's
SHA-256 is that of what was written. Nothing is kept in memory but one piece. `transfer.py` is the other end.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import sys

__all__ = ["main"]

_PIECE = 1 << 20
_SILENCE_S = 300  # then the alarm ends this: an sshd whose peer is gone may not notice for hours


def main(argv: list[str]) -> int:
    """Do what is asked; what the disk refuses is said in a line `{"error": …}`."""
    verb, path, rest = argv
    try:
        return _send(path, int(rest)) if verb == "send" else _receive(path, rest)
    except BrokenPipeError:
        return 1
    except OSError as error:
        _say(error=f"{error.strerror or error} ({path})")
        return 1


def _send(path: str, offset: int) -> int:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # pathlib takes longer to import than to do this
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{path} is not a regular file")
        size = facts.st_size
        offset = offset if offset <= size else 0
        digest = hashlib.sha256()
        _read(file.fileno(), offset, digest)
        _say(size=size, offset=offset, prefix=digest.hexdigest())
        left = size - offset
        while left and (piece := file.read(min(left, _PIECE))):
            digest.update(piece)
            signal.alarm(_SILENCE_S)
            _write(1, piece)
            left -= len(piece)
    _say(sha256=digest.hexdigest())
    return 1 if left else 0


def _receive(path: str, part: str) -> int:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
    file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
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
    os.ftruncate(file, asked["offset"])
    os.lseek(file, asked["offset"], os.SEEK_SET)
    left = asked["size"] - asked["offset"]
    if (free := shutil.disk_usage(os.path.dirname(part)).free) < left:  # noqa: PTH120
        raise OSError(f"the disk is full: {left >> 20} MiB are needed, {free >> 20} MiB are free")
    while left:
        signal.alarm(_SILENCE_S)
        piece = source.read1(min(left, _PIECE))
        if not piece:
            return 1  # the line broke; the part stays for the next try
        digest.update(piece)
        _write(file, piece)
        left -= len(piece)
    wanted = json.loads(source.readline() or "{}").get("sha256")
    mine = digest.hexdigest()
    if wanted == mine:
        os.replace(part, path)  # noqa: PTH105
    elif wanted:
        os.unlink(part)  # noqa: PTH108
    _say(sha256=mine)
    return 0


def _read(file: int, count: int, digest: hashlib._Hash) -> None:
    while count and (piece := os.read(file, min(count, _PIECE))):
        digest.update(piece)
        count -= len(piece)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _say(**facts: object) -> None:
    _write(1, json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
