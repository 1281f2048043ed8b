"""Where the rows of a fine-tuning run came from, as a fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.files import read_json
from workbench.base.package import file_digest, fingerprint
from workbench.rundir.paths import RunPaths


def origin(root: Path) -> Mapping[str, object]:
    """Return the fingerprint of a prepared run's rows, or of the hub's revision; empty where neither is known."""
    paths = RunPaths(root)
    files = [paths.inputs / name for name in ("train.jsonl", "eval.jsonl")]
    named = {path.name: file_digest(path) for path in files if path.is_file()}
    known = named or read_json(paths.job, within=paths.root).get("hub")
    return {"data": fingerprint(known) if known else ""}
