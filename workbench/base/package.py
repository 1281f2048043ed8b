"""The package as a zip, and digests of files: a pod receives only content with a new SHA-256."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import logging
import marshal
import zipfile
from collections.abc import Iterable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from workbench.base.child import HOME
from workbench.base.files import read_bytes, write_bytes
from workbench.base.files.folders import make_private
from workbench.base.files.private import state_folder

logger = logging.getLogger(__name__)
# Modules that programs on pods import at their start: from a zip, every program would compile them.
_COMPILED = (
    "workbench/__init__.py",
    "workbench/agent/",
    "workbench/base/",
    "workbench/finetune/",
    "workbench/handover/",
    "workbench/jobs/",
    "workbench/rundir/",
)
# PEP 552: the hash stands for the source and is not compared.
_NOT_CHECKED = (1).to_bytes(4, "little")
# Version of marshal whose bytes do not depend on the other loaded objects of the process.
_WITHOUT_REFERENCES = 2


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def package_zip() -> tuple[str, bytes]:
    """Zip the package, with byte code for pods with this Python. Equal code yields equal bytes.

    Byte code and compression take a third of the processor time of a cluster's start. The user's
    private folder therefore keeps the zip, and the next start with the same code reads the file.
    """
    root = Path(HOME, "workbench")
    sources = {
        path.relative_to(root.parent).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*.py"))
    }
    name = _name_of_kept(sources)
    try:
        data = read_bytes(_private_folder() / name)
    except OSError:  # the first start with this code
        data = _make_zip(root.parent, sources)
        _keep_zip(name, data)
    return f"workbench-{hashlib.sha256(data).hexdigest()[:16]}.zip", data


def _make_zip(home: Path, sources: Mapping[str, bytes]) -> bytes:
    content = {}
    for name, source in sources.items():
        content[name] = source
        if name.startswith(_COMPILED):
            content[f"{name}c"] = _byte_code(home / name, name, source)
    return zip_contents(content)


def _name_of_kept(sources: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    for name, source in sources.items():
        digest.update(f"{name}\0{len(source)}\0".encode() + source)
    return f"{digest.hexdigest()[:32]}.zip"


def _private_folder() -> Path:
    """Return the folder of the zip. Raises OSError: other users could change the folder."""
    folder = state_folder() / "package"
    make_private(folder.parent)
    make_private(folder)
    return folder


def _keep_zip(name: str, data: bytes) -> None:
    # Without a private folder, or without room, the next start makes the zip again.
    try:
        folder = _private_folder()
        write_bytes(folder / name, data)
        for other in folder.glob("*.zip"):
            if other.name != name:
                other.unlink(missing_ok=True)
    except OSError as error:
        logger.info("the next start zips the package again: %s", error)


def zip_files(root: Path, files: Iterable[Path]) -> bytes:
    return zip_contents({path.relative_to(root).as_posix(): path for path in files})


def zip_contents(files: Mapping[str, bytes | Path]) -> bytes:
    """Zip files under given names; equal content yields equal bytes."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            # A fixed time: the hash depends on names and content alone.
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            data = content.read_bytes() if isinstance(content, Path) else content
            archive.writestr(info, data, compress_type=zipfile.ZIP_DEFLATED)
    return target.getvalue()


def _byte_code(path: Path, name: str, source: bytes) -> bytes:
    # Read from __pycache__ if present.
    code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
    assert code is not None
    data = marshal.dumps(_named(code, name), _WITHOUT_REFERENCES)
    return importlib.util.MAGIC_NUMBER + _NOT_CHECKED + importlib.util.source_hash(source) + data


def _named(code: CodeType, name: str) -> CodeType:
    """Return code with the package's file names in tracebacks, without this machine's folders."""
    parts = (_named(part, name) if isinstance(part, CodeType) else part for part in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(parts))


def fingerprint(named: object) -> str:
    """Return a 16-letter hash of the JSON form of a value."""
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
