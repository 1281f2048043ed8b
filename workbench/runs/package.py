"""What travels to pods: this package as one zip, inputs as files, a script's folder as one zip; all named by content.

A name made of the content's SHA-256 means that what is there already need not travel again.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable
from pathlib import Path

from workbench.errors import ConfigError

__all__ = ["file_digest", "files_of", "package_zip", "zip_folder"]

_LARGEST = 200 << 20  # bytes of a script's folder; more is data, or the wrong folder
_IGNORED = {".git", ".venv", "venv", "__pycache__", "node_modules", ".ipynb_checkpoints", "runs"}


def file_digest(path: Path) -> str:
    """Give the SHA-256 of a file as hexadecimal text."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def package_zip() -> tuple[str, bytes]:
    """Zip this package; the same code gives the same bytes.

    Returns:
        The file name `workbench-<hash>.zip` and the content.
    """
    root = Path(__file__).resolve().parent.parent
    data = _zip(root.parent, sorted(root.rglob("*.py")))
    return f"workbench-{hashlib.sha256(data).hexdigest()[:16]}.zip", data


def zip_folder(folder: Path) -> bytes:
    """Zip a script's folder, without version control, environments and caches.

    Raises:
        ConfigError: The folder holds more than 200 MiB.
    """
    files = files_of(folder)
    size = sum(p.stat().st_size for p in files)
    if size > _LARGEST:
        raise ConfigError(
            f"the script's folder {folder} holds {size / 2**20:.0f} MiB, which would all travel to the pods (at most "
            f"{_LARGEST >> 20} MiB); move the script into a folder of its own and give data by path or hub id"
        )
    return _zip(folder, files)


def files_of(folder: Path) -> list[Path]:
    """Give the files of a folder that travel, sorted: all but version control, environments and caches."""
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and not _ignored(p.relative_to(folder))]


def _ignored(relative: Path) -> bool:
    return any(part in _IGNORED for part in relative.parts)


def _zip(root: Path, files: Iterable[Path]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            # A fixed time, so that the hash depends on names and content alone.
            info = zipfile.ZipInfo(path.relative_to(root).as_posix(), date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            archive.writestr(info, path.read_bytes(), compress_type=zipfile.ZIP_DEFLATED)
    return target.getvalue()
