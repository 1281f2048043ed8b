"""Fingerprint of the rows of a fine-tuning run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.files import read_json, records
from workbench.base.package import fingerprint
from workbench.rundir.paths import RunPaths


def origin(root: Path) -> Mapping[str, object]:
    """Return the fingerprint of a run's rows, or of the hub dataset; empty if both are unknown."""
    paths = RunPaths(root)
    digests = {}
    for name in ("train.jsonl", "eval.jsonl"):
        path = paths.inputs / name
        if path.is_file():
            digests[name] = records.sha256_of(path)
    known = digests or read_json(paths.job).get("hub")
    if not known:
        return {"data": ""}
    return {"data": fingerprint(known)}
