"""Install a cluster's requested packages into a folder, without changing the pod's own packages."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.agent.packages.settings import NO_PLACES, without_places

_TAIL_LINES = 12


class PackageError(Exception):
    """A package cannot be installed. The message holds pip's last lines."""


def install(folder: Path, requirements: Sequence[str], env: Mapping[str, str]) -> None:
    """Install the requirements into `folder`, once for all simultaneous callers.

    `env` may hold pip's own settings.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            if pins := list(_missing(requirements, env, part / "report.json")):
                _pip(["--no-deps", "--target", str(part), *pins], env)
            (part / "report.json").unlink(missing_ok=True)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _missing(requirements: Sequence[str], env: Mapping[str, str], report: Path) -> Iterator[str]:
    """Yield a pin for each package that the pod lacks; raise if the pod has another version."""
    # With --target alone pip would download all dependencies again, torch too.
    _pip(["--dry-run", "--report", str(report), *requirements], env)
    for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name = item["metadata"]["name"]
        version = item["metadata"]["version"]
        if (own := _own_version(name)) is not None:
            raise PackageError(
                f"{', '.join(requirements)} wants {name} {version}, and the pod has {own} of "
                "its own, which stays: ask for versions that go with it, or for another image"
            )
        yield (
            _direct(name, item["download_info"]) if item.get("is_direct") else f"{name}=={version}"
        )


def _direct(name: str, info: Mapping[str, Any]) -> str:
    vcs = info.get("vcs_info")
    return (
        f"{name} @ {vcs['vcs']}+{info['url']}@{vcs['commit_id']}"
        if vcs
        else f"{name} @ {info['url']}"
    )


def _own_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pip(args: Sequence[str], env: Mapping[str, str]) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        *NO_PLACES,
        "--prefix=",
    ]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, *args],
        env=without_places({**own, **env}),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        output = done.stderr or done.stdout
        lines = [line for line in output.splitlines() if line.strip()]
        tail = "\n".join(lines[-_TAIL_LINES:])
        raise PackageError(re.sub(r"\x1b\[[\d;]*m", "", tail))
