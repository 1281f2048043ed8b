"""Wheels made in a test: an installation needs no index and no network."""

from __future__ import annotations

import hashlib
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path


def wheel(
    folder: Path, name: str, number: str, *, needs: Sequence[str] = (), text: str = ""
) -> Path:
    """Make the wheel of a package with one module, which says its version."""
    info = f"{name}-{number}.dist-info"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        f"{name}.py": text or f"NUMBER = {number!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {path: hashlib.sha256(text.encode()).digest() for path, text in files.items()}
    sums = {
        path: urlsafe_b64encode(digest).rstrip(b"=").decode() for path, digest in hashes.items()
    }
    lines = [f"{path},sha256={sums[path]},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    made = folder / f"{name}-{number}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return made
