"""Where a run came from: the commit of the user's repository, and fingerprints of its rows and of a script's folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

from workbench.base.files import read_json
from workbench.base.package import file_digest
from workbench.jobs.finetune import Job
from workbench.jobs.script import Script
from workbench.rundir.make.script import left_out, script_files
from workbench.rundir.paths import RunPaths

_GIT_S = 5.0
_LETTERS = 16  # of a fingerprint
_LEFT_OUT = 100  # names kept of what did not travel


def origin_of(job: Job, paths: RunPaths, folder: Path) -> dict[str, object]:
    return {"commit": commit_of(folder), "data": _data(paths), **_script(job)}


def commit_of(folder: Path) -> str:
    """Return the commit that a folder is at, with `+changes` where tracked files differ; empty where git knows none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    # New files do not count: the run directories themselves would be among them.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *words: str) -> str:
    # Looking must not write: it would refresh the index under a git of the user's that is at work. Nor may it run the
    # program that a repository's own configuration names.
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *words],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""


def _data(paths: RunPaths) -> str:
    files = [path for path in (paths.inputs / "train.jsonl", paths.inputs / "eval.jsonl") if path.is_file()]
    named = {path.name: file_digest(path) for path in files} or read_json(paths.job, within=paths.root).get("hub")
    return _fingerprint(named) if named else ""


def _script(job: Job) -> dict[str, object]:
    match job:
        case Script(path=path):
            folder = Path(path).expanduser().parent
            names = {file.relative_to(folder).as_posix(): file_digest(file) for file in script_files(folder)}
            return {"script": _fingerprint(names), "left_out": left_out(folder)[:_LEFT_OUT]}
    return {"script": ""}


def _fingerprint(named: object) -> str:
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:_LETTERS]
