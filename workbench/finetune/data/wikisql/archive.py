"""Unpack the wanted files of a `.tar.bz2`. A refused archive leaves no file.

`tarfile` only reads names, sizes and bytes, and no name of the archive becomes a path. The archive
may therefore come from a stranger.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from workbench.base.errors import ConfigError

MAX_BYTES = 2 * 2**30
"""Largest size of the members together. WikiSQL's release has some 300 MB."""


def unpack(archive: Path, folder: Path, wanted: Collection[str]) -> dict[str, Path]:
    """Write the plain files with a wanted name to a new folder. Other members are passed over."""
    folder.mkdir(mode=0o700)
    try:
        return _unpack(archive, folder, wanted)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        shutil.rmtree(folder)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{archive} is not a whole .tar.bz2 archive: {error}; download the archive again"
        ) from error
    except BaseException:
        shutil.rmtree(folder)
        raise


def _unpack(archive: Path, folder: Path, wanted: Collection[str]) -> dict[str, Path]:
    written: dict[str, Path] = {}
    size = 0
    # "r|" reads forward only, so no header can send the reader back.
    with tarfile.open(archive, "r|bz2") as members:
        for member in members:
            size += member.size
            if not 0 <= member.size <= size <= MAX_BYTES:
                raise ConfigError(
                    f"{archive} is refused: decompressed, the archive has more than {MAX_BYTES} "
                    "bytes"
                )
            name = PurePosixPath(member.name).name
            if name not in wanted or not member.isreg():
                continue
            if name in written:
                raise ConfigError(
                    f"{archive} has {name!r} twice, the second time as {member.name!r}"
                )
            source = members.extractfile(member)
            assert source is not None, "a regular file has a reader"
            written[name] = folder / name
            with source, written[name].open("xb") as out:
                shutil.copyfileobj(source, out)
    return written
