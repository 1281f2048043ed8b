"""Files of tokenized rows, kept on a pod or in a shared folder for later runs.

A file's name is a digest of everything that the tokens depend on, so no file is ever outdated.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from workbench.agent.rank import collectives as ranks
from workbench.base.child import HOME
from workbench.base.files.records import facts_of
from workbench.finetune.data.training.tokens import FORMAT, TokenRows
from workbench.rundir.events import emit

MOST_BYTES = 20 << 30
"""Largest size of a pod's token files together."""
_SHARE = 4  # the files take at most a quarter of the free disk


def token_key(parts: Mapping[str, object]) -> str:
    """Return the name of the token file with these parts."""
    # A pod has the package under a name with the digest of its content.
    code = {"format": FORMAT, "package": Path(HOME).name, "order": sys.byteorder}
    text = json.dumps({**code, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def kept_rows(
    folder: Path | None,
    parts: Callable[[], Mapping[str, object]],
    make: Callable[[], TokenRows],
    *,
    shared: bool = False,
) -> TokenRows:
    """Return tokenized rows, from the pod's files if every pod has a file. Collective.

    Args:
        folder: Folder of the pod's token files; None makes the rows without looking.
        parts: Function that returns all facts behind the tokens. Only rank 0 calls the function.
        make: Function to make the rows on all ranks together.
        shared: Whether all pods have the same folder, so that a single rank writes the file.
    """
    if folder is None:
        return make()
    own = token_key(parts()).encode() if ranks.rank() == 0 else None
    path = folder / ranks.broadcast_bytes(own).decode()
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    # A digest of a large file takes seconds: one rank of a pod is enough.
    found = TokenRows.read(path, verified=not leads)
    # Ranks make rows together, so all ranks must make rows if a pod has no file.
    all_have = ranks.sums([float(found is not None)])[0] == ranks.world_size()
    rows = found if found is not None and all_have else make()
    writes = ranks.rank() == 0 if shared else leads
    if writes:
        # The run does not need the file: a full disk or another user's folder must not end the run.
        try:
            if rows is not found:
                _keep(rows, path)
            elif os.access(path, os.W_OK):  # else another user's file
                os.utime(path)  # the oldest file is removed first
        except OSError as error:
            emit("note", message=f"the tokens of the rows are not kept for later runs: {error}")
    return rows


def _keep(rows: TokenRows, path: Path) -> None:
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = []
    for other in folder.iterdir():
        # Pods that share the folder may remove the same file.
        seen = facts_of(other)
        if seen is not None:
            files.append((seen.st_mtime, seen.st_size, other))
    used = sum(size for _, size, _ in files)
    most = min(MOST_BYTES, used + shutil.disk_usage(folder).free // _SHARE)
    if rows.bytes > most:
        return
    for _, size, other in sorted(files):
        if used + rows.bytes <= most:
            break
        other.unlink(missing_ok=True)
        used -= size
    rows.copy_to(path)
