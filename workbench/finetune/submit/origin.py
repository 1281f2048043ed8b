"""Fingerprint of the rows of a fine-tuning run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.files import read_json
from workbench.base.package import file_digest, fingerprint
from workbench.rundir.paths import RunPaths


def origin(root: Path) -> Mapping[str, object]:
    """Return the fingerprint of a run's rows, or of the hub dataset; empty if both are unknown."""
    paths = RunPaths(root)
    files = [paths.inputs / name for name in ("train.jsonl", "eval.jsonl")]
    named = {path.name: file_digest(path) for path in files if path.is_file()}
    known = named or read_json(paths.job, within=paths.root).get("hub")
    return {"data": fingerprint(known) if known else ""}
