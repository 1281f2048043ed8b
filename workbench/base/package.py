"""This package as one zip, and digests of files: what a pod has already, by its SHA-256, need not travel again."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from workbench.base.child import HOME

__all__ = ["file_digest", "package_zip", "zip_contents", "zip_files"]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def package_zip() -> tuple[str, bytes]:
    """Zip this package; the same code gives the same bytes."""
    root = Path(HOME, "workbench")
    data = zip_files(root.parent, sorted(root.rglob("*.py")))
    return f"workbench-{hashlib.sha256(data).hexdigest()[:16]}.zip", data


def zip_files(root: Path, files: Iterable[Path]) -> bytes:
    """Zip files of a folder under their names in it."""
    return zip_contents({path.relative_to(root).as_posix(): path for path in files})


def zip_contents(files: Mapping[str, bytes | Path]) -> bytes:
    """Zip files by the names that they get; the same content gives the same bytes."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            # A fixed time, so that the hash depends on names and content alone.
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            data = content.read_bytes() if isinstance(content, Path) else content
            archive.writestr(info, data, compress_type=zipfile.ZIP_DEFLATED)
    return target.getvalue()
