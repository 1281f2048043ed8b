"""Fetch files of a folder on a pod: many small files in one stream, large files singly.

The stream carries no names. It is split here by the sizes in the list of files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workbench.base.errors import RemoteError
from workbench.base.files import open_record, records, write_bytes
from workbench.base.files.disk import full_disk_named
from workbench.base.files.gate import pinned_folder
from workbench.keeper.link.agent import AgentLink
from workbench.pods.ssh.bulk.transfer import LARGE

# Attempts to fetch a small file whose checksum differs.
_TRIES = 3
# On loopback a single file takes 4 ms, and a separate connection 250 ms. Elsewhere both take five
# round trips.
_FEWEST = 24
# Size limit of a batch. A batch is briefly on the local disk twice.
_MOST_BYTES = 64 << 20
# Length limit of the names in a command. The system allows 128 KiB, a quote becomes five letters,
# and three letters travel as four.
_MOST_LETTERS = 16_000


@dataclass(frozen=True, slots=True)
class OutputFile:
    name: str
    """Name of the file relative to its folder."""
    size: int
    digest: str
    """SHA-256 of the file. Empty for a large file, as the hash is computed during the transfer."""


Arrival = tuple[OutputFile, Path]
"""File on a pod, and its local path."""


def fetch_files(
    link: AgentLink, folder: PurePosixPath, files: Sequence[Arrival], pile: Path
) -> Iterator[tuple[OutputFile, str]]:
    """Fetch and verify files of a folder; yield every file once in place.

    `pile` is the temporary file of a stream. An interrupted transfer leaves it behind.
    """
    small: list[Arrival] = []
    alone: list[Arrival] = []
    for arrival in files:
        if _is_small(arrival[0]):
            small.append(arrival)
        else:
            alone.append(arrival)
    for batch in _batches(small):
        late = list(batch)
        if len(batch) >= _FEWEST:
            late = yield from _fetch_together(link, folder, batch, pile)
        alone = late + alone
    for file, target in alone:
        digest = _fetch_one(link, folder / file.name, target, file.digest, pile.parent)
        yield file, digest


def _is_small(file: OutputFile) -> bool:
    return bool(file.digest) and file.size < LARGE


def _batches(files: Iterable[Arrival]) -> Iterator[Sequence[Arrival]]:
    batch: list[Arrival] = []
    size = 0
    letters = 0
    for file, target in files:
        own_letters = len(file.name.encode()) + 1
        size += file.size
        letters += own_letters
        is_full = size > _MOST_BYTES or letters > _MOST_LETTERS
        if batch and is_full:
            yield batch
            batch = []
            size = file.size
            letters = own_letters
        batch.append((file, target))
    yield batch


def _fetch_together(
    link: AgentLink, folder: PurePosixPath, batch: Sequence[Arrival], pile: Path
) -> Generator[tuple[OutputFile, str], None, list[Arrival]]:
    """Fetch small files in one stream and return the files with a wrong checksum."""
    others: list[Arrival] = []
    names = [file.name for file, _ in batch]
    link.get_many(str(folder), names, pile)
    with open_record(pile) as source:
        for file, target in batch:
            data = source.read(file.size)
            if hashlib.sha256(data).hexdigest() == file.digest:
                _put(data, target, pile.parent)
                yield file, file.digest
            else:
                others.append((file, target))
    pile.unlink(missing_ok=True)
    return others


def _put(data: bytes, target: Path, root: Path) -> None:
    with (
        full_disk_named(target.parent, len(data)),
        pinned_folder(target.parent, root, make=True) as folder,
    ):
        write_bytes(folder / target.name, data)


def _fetch_one(
    link: AgentLink, source: PurePosixPath, target: Path, digest: str, root: Path
) -> str:
    """Fetch a file, compare with `digest` unless empty, and return its SHA-256."""
    with pinned_folder(target.parent, root, make=True) as folder:
        if not digest:
            return link.get(str(source), folder / target.name)
        part = folder / f".{target.name}.part"
        for _ in range(_TRIES):
            link.get(str(source), part)
            if records.sha256_of(part) == digest:
                part.replace(folder / target.name)
                return digest
        part.unlink(missing_ok=True)
    raise RemoteError(
        f"{source.name} was copied from {link.pod.name} {_TRIES} times with a wrong checksum; look "
        "for a failing disk or memory on either side, and run again",
        host=link.pod.address,
    )
