"""The memory of processes, as Linux's `/proc` shows it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory(pid: int) -> tuple[int, int]:
    """Return a process's resident memory now and at its highest, in bytes; zeros once it has gone."""
    now = peak = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        now = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
        status = Path(f"/proc/{pid}/status").read_bytes()
        at = status.find(b"VmHWM:")
        peak = int(status[at:].split(None, 2)[1]) * 1024 if at >= 0 else now
    return now, max(now, peak)


def family_memory(sizes: Mapping[int, int]) -> int:
    """Return the resident bytes of several processes, by pid; what a fork and its parent share counts once."""
    if len(sizes) < 2:
        return sum(sizes.values())
    shares = {pid: _share(pid) for pid in sizes}
    return max(*sizes.values(), sum(size if (share := shares[pid]) is None else share for pid, size in sizes.items()))


def _share(pid: int) -> int | None:
    """Return a process's pages, each divided by how many processes have it (PSS); None where that cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
        return int(text[text.index(b"\nPss:") :].split(None, 2)[1]) * 1024
    return None
