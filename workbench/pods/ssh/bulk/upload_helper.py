"""The pod's side of an upload: `python -IS -c` of this text, over SSH; standard library only.

Standard input names the links of an object store, one for each part of the file PATH. The links
have all rights that an upload needs.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator

_PIECE = 1 << 20
_STORE_S = 60.0  # for each piece
_TOLD_S = 1.0  # between two lines about the bytes that have gone
_SILENCE_S = 300  # then the alarm ends this: an sshd whose peer is gone may not notice for hours
_TRIES = 3


def main(path: str) -> int:
    """Send a file; report an error in a line `{"error": WORDS}`."""
    try:
        return _upload(path)
    except OSError as error:
        _say(error=f"{error.strerror or error} ({path})")
        return 1


def _upload(path: str) -> int:
    asked = json.loads(sys.stdin.readline())
    size = os.stat(path).st_size  # noqa: PTH116
    digest = hashlib.sha256()
    tags: list[str] = []
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        while len(tags) < len(asked["links"]):
            begin = len(tags) * asked["part_bytes"]
            count = min(asked["part_bytes"], size - begin)
            # A store that takes no first part is out of reach. A later part is tried again.
            for left in reversed(range(_TRIES if tags else 1)):
                of_part = digest.copy()
                file.seek(begin)
                request = urllib.request.Request(
                    asked["links"][len(tags)],
                    data=_part(file, count, size, of_part),
                    headers={
                        "Content-Length": str(count),
                        "Content-Type": "application/octet-stream",
                    },
                    method="PUT",
                )
                try:
                    with urllib.request.urlopen(request, timeout=_STORE_S) as answer:
                        tags.append(answer.headers["ETag"])
                    break
                except (OSError, http.client.HTTPException) as error:
                    if not left:
                        # Without the link, which is a right.
                        why = getattr(error, "reason", error)
                        raise OSError(f"the store took no part from here: {why}") from None
                    time.sleep(_TOLD_S)
            digest = of_part
    _say(sha256=digest.hexdigest(), tags=tags)
    return 0


def _part(file: io.FileIO, count: int, size: int, digest: hashlib._Hash) -> Iterator[bytes]:
    """Yield the next bytes of a file, and tell how far the file has gone."""
    told = time.monotonic()
    while count:
        signal.alarm(_SILENCE_S)
        piece = file.read(min(count, _PIECE))
        if not piece:
            return  # it became shorter
        digest.update(piece)
        yield piece
        count -= len(piece)
        if time.monotonic() > told + _TOLD_S:
            told = time.monotonic()
            _say(done=file.tell(), size=size)


def _say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
