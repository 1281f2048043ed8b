"""The manifest of a rank's part of a checkpoint, written last: torch, as safetensors, loads flipped bits in silence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from workbench.base.files import read_json, write_json
from workbench.base.package import file_digest
from workbench.rundir.tolerant import Whole

NAME = "manifest.json"


def write_manifest(folder: Path, **facts: object) -> int:
    files = {path.name: path for path in sorted(folder.iterdir()) if path.name != NAME}
    listed = {name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for name, path in files.items()}
    write_json(folder / NAME, {**facts, "files": listed})
    return sum(path.stat().st_size for path in files.values())


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """Read the manifest of a part; empty where there is none that can be read."""
    manifest = read_json(folder / NAME)
    try:
        _FILES.validate_python(manifest.get("files"))
    except ValidationError:
        return {}
    return manifest


def problem_of(folder: Path) -> str:
    """Compare a part with its manifest; every byte is read."""
    manifest = read_manifest(folder)
    if not manifest:
        return f"{folder.name} has no manifest that can be read"
    for name, entry in manifest["files"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            return f"{folder.name}/{name} is missing"
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"{folder.name}/{name} has {size} bytes and was written with {entry['bytes']}"
        if file_digest(path) != entry["sha256"]:
            return f"the checksum of {folder.name}/{name} is wrong"
    return ""


@dataclass
class _FileEntry:
    bytes: Whole
    sha256: str


def _plain(name: str) -> str:
    if name in ("", ".", "..", NAME) or "/" in name:
        raise ValueError(f"{name!r} is not the plain name of a file")
    return name


_FILES = TypeAdapter(dict[Annotated[str, AfterValidator(_plain)], _FileEntry])
