"""Read what ranks wrote, by offset and with a cap, so that no amount of output slows the agent or fills its memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.worker.agent.message import Message, whole_in

__all__ = ["read_chunks", "size_of"]

Chunk = dict[str, object]


def read_chunks(root: Path, names: Sequence[str], offsets: Message, max_bytes: int) -> dict[str, Chunk]:
    """Read what is new in some files."""
    starts = {name: whole_in(offsets, name, 0) for name in names}
    fresh = {name: start for name, start in starts.items() if size_of(root / name) > start}
    chunks: dict[str, Chunk] = {}
    left = max_bytes
    # The smallest first: whatever they leave of their share is there for the rest.
    for index, name in enumerate(sorted(fresh, key=lambda n: size_of(root / n) - fresh[n])):
        data = _read(root / name, fresh[name], left // (len(fresh) - index))
        left -= len(data)
        if data:
            chunks[name] = {"offset": fresh[name], "data": data.decode("latin-1")}
    return chunks


def size_of(path: Path) -> int:
    """Return a file's size in bytes; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, offset: int, count: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(count) or b""
    except OSError:
        return b""
