"""Upload a folder of files. An interrupted upload is known and can be repeated.

The object `.uploading` lists the names of the files. It is written first and removed last.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from workbench.base.errors import ConfigError, RunError
from workbench.base.files import records
from workbench.base.json_values import as_list, try_record
from workbench.base.words import short_list
from workbench.rundir.stores.address import is_safe_name
from workbench.rundir.stores.store import Copy, Store

MARK = ".uploading"
"""Name of the object in a folder whose upload has not ended."""
_MOST_BYTES = 16 << 20


def prepare_folder(store: Store) -> Sequence[str]:
    """Check the rights. The folder must be new, empty, or of an interrupted upload.

    Return the names of an interrupted upload.

    Raises:
        ConfigError: The store refuses, or the folder has other objects.
    """
    try:
        store.probe()
        there = store.list("deep").objects
        listed = store.read(MARK, _MOST_BYTES)
    except RunError as error:
        raise ConfigError(str(error)) from error
    names = [address.removeprefix(f"{store.address}/") for address in there]
    ours = {MARK, *_names_in(listed)}
    others = [name for name in names if name not in ours or listed is None]
    if others:
        raise ConfigError(
            f"{store.address} is not empty ({short_list(sorted(others))}); name a new folder for "
            "the model"
        )
    return sorted(set(names) - {MARK})


def put_folder(
    store: Store, folder: Path, *, last: Collection[str], unfinished: Sequence[str] = ()
) -> None:
    """Upload the files of a folder; those in `last` come last.

    `unfinished` are names that an interrupted upload left.
    """
    names = [path.relative_to(folder).as_posix() for path in records.files_below(folder)]
    names.sort(key=lambda name: name in last)
    store.write(MARK, json.dumps([*names, *unfinished]))
    store.remove([store.at(name) for name in unfinished])
    copies = []
    for name in names:
        path = folder / name
        size = path.lstat().st_size
        copies.append(Copy(path=path, within=folder, address=store.at(name), bytes=size))
    store.put(copies)
    store.remove([store.at(MARK)])


def _names_in(listed: str | None) -> set[str]:
    raw = as_list(try_record(listed or "[]"))
    return {name for name in raw if isinstance(name, str) and is_safe_name(name)}
