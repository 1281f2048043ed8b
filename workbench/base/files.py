"""Files that are replaced whole: a reader sees the old one or the new one, never half of either."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from workbench.base.disk import full_disk_named

__all__ = ["read_json", "write_bytes", "write_json", "write_text"]


def write_bytes(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = False) -> None:
    """Replace a file atomically. `sync` waits until it would survive a loss of power."""
    with full_disk_named(path.parent, len(data)):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with full_disk_named(path.parent, len(data)), os.fdopen(handle, "wb") as out:
            os.fchmod(out.fileno(), mode)
            out.write(data)
            if sync:
                out.flush()
                os.fsync(out.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, mode: int = 0o600, sync: bool = False) -> None:
    """Replace a text file atomically, in UTF-8."""
    write_bytes(path, text.encode(), mode=mode, sync=sync)


def write_json(path: Path, data: Mapping[str, object], *, mode: int = 0o600, sync: bool = False) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(data, indent=1, default=str) + "\n", mode=mode, sync=sync)


def read_json(path: Path) -> dict[str, object]:
    """Return a JSON object; a missing or broken file is an empty one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
