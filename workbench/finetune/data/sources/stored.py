"""Copy rows from an object store to local files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from workbench.base.errors import ConfigError, DiskFull, RunError
from workbench.base.files.disk import check_room
from workbench.base.words import short_list
from workbench.rundir.stores.address import (
    PROTOCOLS,
    check_address,
    has_glob,
    is_safe_name,
    local_name,
)
from workbench.rundir.stores.store import Copy, Store

_T = TypeVar("_T")
_ARCHIVE = ".tar.bz2"
_HUB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/"
    r"([\w.-]+(?:/(?!(?:tree|blob|resolve|viewer|discussions)\b)[\w.-]+)?)",
    re.IGNORECASE,
)


def check_rows_address(option: str, text: str) -> str:
    """Return a checked address of rows. The store is not asked."""
    what = f"dataset {option}"
    page = _HUB_PAGE.match(text)
    if page is not None:
        hub = {"kind": "hub", "name": page[1]}
        raise ConfigError(
            f"{what} {text!r} is a page of the Hugging Face hub. Name the dataset: dataset={hub}"
        )
    address = check_address(text, what, globs=True)
    if address.lower().endswith(_ARCHIVE):
        raise ConfigError(
            f"{what} {address!r} is an archive, and archives are read from this machine alone: "
            "download the archive and give its path"
        )
    return address


IsPart = Callable[[str], bool] | None
"""Whether a name belongs to a folder with a whole dataset. None: the folder must be saved whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    objects: Mapping[str, int]
    """Bytes of the objects with the rows, by address."""
    is_folder: bool = False
    """Whether the objects together are a dataset."""
    unread: Sequence[str] = ()
    """Names of the other objects in the folder."""


def check_stored_rows(option: str, text: str, is_part: IsPart) -> None:
    """Raise ConfigError if the store refuses, or if nothing fits an address. Copies nothing."""
    with _opened(option, text) as store:
        _find(store, option, is_part)


class StoredRows:
    """Copies of rows in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.unread: Sequence[str] = ()
        """Names of the objects in the last folder that belong to no dataset."""

    def files(self, option: str, text: str, is_part: IsPart = None) -> list[Path]:
        """Copy the objects of an address. Return their copies, or the folder of a dataset.

        Args:
            option: Name of the option, for messages.
            text: Address of an object, a glob, or a folder.
            is_part: Which files of a folder belong to a dataset.

        Raises:
            ConfigError: The store refuses, or nothing fits the address.
            DiskFull: The disk has no room for the copies.
        """
        with _opened(option, text) as store:
            found = _find(store, option, is_part)
            self.unread = found.unread
            files = self._copied(store, found.objects)
            return [self._folder / local_name(store.address)] if found.is_folder else files

    def _copied(self, store: Store, objects: Mapping[str, int]) -> list[Path]:
        copies = []
        for address, size in sorted(objects.items()):
            name = local_name(address)
            if not is_safe_name(str(name)):
                raise ConfigError(f"the object {address!r} has a name that no file can have")
            path = self._folder / name
            copies.append(Copy(path=path, within=self._folder, address=address, bytes=size))
        check_room(self._folder, sum(copy.bytes for copy in copies))
        for copy in copies:
            copy.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.get(copies)
        return [copy.path for copy in copies]


@contextmanager
def _opened(option: str, text: str) -> Iterator[Store]:
    """Open the store of an address. Raise ConfigError for the store's refusals in the block."""
    try:
        with Store(check_rows_address(option, text)) as store:
            yield store
    except DiskFull:
        raise
    except RunError as error:
        raise ConfigError(f"dataset {option}: {error}") from error


def _find(store: Store, option: str, is_part: IsPart) -> _Found:
    """Find the objects of an address."""
    address = store.address
    if has_glob(address):
        found = store.list("glob")
        if not found.objects:
            raise ConfigError(f"dataset {option}: no object fits {address}")
        return _Found(objects=found.objects)
    found = store.list()
    if found.kind == "file":
        return _Found(objects=found.objects)
    if found.kind == "none":
        raise ConfigError(f"dataset {option}: there is no object {address}")
    names = {each.rpartition("/")[2]: size for each, size in found.objects.items()}
    if "state.json" in names:  # `save_to_disk` of `datasets` wrote the folder
        return _Found(objects=found.objects, is_folder=True)
    wanted = {}
    for name, size in names.items():
        if is_part is not None and is_part(name):
            wanted[f"{address}/{name}"] = size
    if not wanted:
        there = short_list(sorted(names)) if names else "only folders"
        raise ConfigError(
            f"dataset {option}: {address} is a folder without the rows of a dataset, and has "
            f"{there}; name an object, or a glob such as '{address}/*.jsonl'"
        )
    unread = sorted(name for name in names if f"{address}/{name}" not in wanted)
    return _Found(objects=wanted, is_folder=True, unread=unread)


@contextmanager
def stored_rows(folder: Path) -> Iterator[StoredRows]:
    """Yield copies below `folder`, removed at the end. Errors name addresses, not copies."""
    with tempfile.TemporaryDirectory(prefix=".copies-", dir=folder) as copies:
        try:
            yield StoredRows(Path(copies))
        except ConfigError as error:
            message = str(error)
            for protocol in PROTOCOLS:
                message = message.replace(f"{copies}/{protocol}/", f"{protocol}://")
            raise ConfigError(message) from error
