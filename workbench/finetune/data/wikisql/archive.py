"""Unpack an untrusted `.tar.bz2`. A refused archive leaves no file.

Python's `filter="data"` has had several bypasses. `tarfile` therefore only reads names, sizes and
bytes.
"""

from __future__ import annotations

import bz2
import shutil
import tarfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import IO, cast

from workbench.base.errors import ConfigError

MAX_MEMBERS = 1000
"""Largest number of members of an archive. WikiSQL's release has about a dozen."""
MAX_BYTES = 2 * 2**30
"""Largest decompressed size in bytes. WikiSQL's release has some 300 MB."""


def unpack(archive: Path, folder: Path, wanted: Collection[str]) -> dict[str, Path]:
    folder.mkdir(mode=0o700)
    try:
        return _unpack(archive, folder, wanted)
    except ConfigError:
        shutil.rmtree(folder)
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        shutil.rmtree(folder)
        raise ConfigError(
            f"{archive} is not a whole .tar.bz2 archive: {error}; download the archive again"
        ) from error
    except BaseException:
        shutil.rmtree(folder)
        raise


_MAX_HEADER_BYTES = 64 * 2**10
_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, *_LONG_NAMES)


class _Member(tarfile.TarInfo):
    """Header that is checked before `tarfile` reads the announced bytes into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in _EXTENDED and member.size > _MAX_HEADER_BYTES):
            raise ConfigError(
                f"the archive is refused: a header {member.name!r} has {member.size} bytes"
            )
        return member


class _Capped:
    """Stream that raises ConfigError after more than `MAX_BYTES`."""

    def __init__(self, stream: IO[bytes], archive: Path):
        self._stream = stream
        self._archive = archive
        self._left = MAX_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ConfigError(
                f"{self._archive} is refused: decompressed, the archive has more than {MAX_BYTES} "
                "bytes"
            )
        return data


def _unpack(archive: Path, folder: Path, wanted: Collection[str]) -> dict[str, Path]:
    written: dict[str, Path] = {}
    with bz2.open(archive) as plain:
        capped = cast("IO[bytes]", _Capped(cast("IO[bytes]", plain), archive))
        # "r|" reads forward only, so no header can send the reader back.
        with tarfile.open(fileobj=capped, mode="r|", tarinfo=_Member) as members:
            for number, member in enumerate(members, start=1):
                if number > MAX_MEMBERS:
                    raise ConfigError(f"{archive} is refused: more than {MAX_MEMBERS} members")
                _check(member, archive)
                name = PurePosixPath(member.name).name
                if not member.isreg() or name not in wanted:
                    continue
                if name in written:
                    raise ConfigError(
                        f"{archive} has {name!r} twice, the second time as {member.name!r}"
                    )
                written[name] = _write(members, member, folder / name)
    return written


def _check(member: tarfile.TarInfo, archive: Path) -> None:
    path = PurePosixPath(member.name)
    refused = f"{archive} is refused: the member {member.name!r}"
    is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
    if not is_plain or member.sparse is not None:
        raise ConfigError(f"{refused} is not a plain file or folder")
    leads_out = path.is_absolute() or ".." in path.parts
    if leads_out or "\\" in member.name or "\0" in member.name:
        raise ConfigError(f"{refused} leads out of its folder")
    if not 0 <= member.size <= MAX_BYTES:
        raise ConfigError(f"{refused} has {member.size} bytes")


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> Path:
    source = members.extractfile(member)
    assert source is not None, "a regular file has a reader"
    with source, target.open("xb") as out:
        shutil.copyfileobj(source, out)
    if target.stat().st_size != member.size:
        raise ConfigError(
            f"{member.name!r} is cut off: {target.stat().st_size} of {member.size} bytes"
        )
    return target
