"""Read the pinned packages of a `uv.lock`, as `uv export` writes them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import read_given
from workbench.base.json_values import Json, as_list, as_str, get_object

_PYPI = "https://pypi.org/simple"
_EXPORT = (
    "export",
    "--frozen",
    "--offline",
    "--no-default-groups",
    "--no-emit-project",
    "--no-header",
    "--no-annotate",
    "--quiet",
    "--color=never",
)
_LIMIT_S = 120
# Python reads a key of 50,000 parts in half a minute.
_LONG_KEY = re.compile(r"(?<![\w.-])(?:[\w-]+[ \t]*\.[ \t]*){100}")
_BY_HAND = "uv export --no-emit-project > requirements.txt"


def export_lock(path: Path) -> str:
    """Return the packages of a lock as the text of a requirements.txt, without optional groups.

    The lines have hashes unless a package comes from a repository: pip checks all or none.

    Raises:
        ConfigError: uv is not installed, or cannot read the lock.
    """
    lines = _exported(path)
    if any(" @ " in line for line in lines):
        lines = _exported(path, "--no-hashes")
    return "\n".join([*_indexes(path), *lines])


def _exported(path: Path, *options: str) -> list[str]:
    command = [_find_uv(path), *_EXPORT, *options, "--project", str(path.parent)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"uv cannot read {path}: {error}. Export: {_BY_HAND}") from error
    if done.returncode:
        words = " ".join(done.stderr.split())[:600]
        raise ConfigError(
            f"uv cannot read {path}: {words}. The pyproject.toml of the lock belongs beside the "
            "lock; uv lock writes the lock again"
        )
    return done.stdout.splitlines()


def _find_uv(path: Path) -> str:
    found = shutil.which("uv") or shutil.which(Path(sys.executable).with_name("uv"))
    if found is None:
        raise ConfigError(
            f"{path} is read by uv, and this machine has no uv. Install uv: pip install uv; or "
            f"export the packages where uv is: {_BY_HAND}"
        )
    return found


def read_toml(content: str, where: str) -> dict[str, Json]:
    """Read a stranger's TOML in a time linear in the length."""
    if _LONG_KEY.search(content.replace('"', "").replace("'", "")):
        raise ConfigError(f"{where} has a key of more than 100 parts; shorten the key")
    try:
        return tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error


def _indexes(path: Path) -> list[str]:
    """Return an option of pip for each index of the lock except PyPI, which pip knows."""
    lock = read_toml(read_given(path), str(path))
    found: dict[str, None] = {}
    for package in as_list(lock.get("package")):
        if not isinstance(package, dict):
            continue
        registry = as_str(get_object(package, "source").get("registry"))
        if not registry or registry.rstrip("/") == _PYPI:
            continue
        if "://" not in registry or registry.startswith("file:"):
            raise ConfigError(
                f"{path}: {as_str(package.get('name'))} comes from the folder {registry} of this "
                "machine, which is not on the pods. Put the package into the script's folder, or "
                "lock a published version"
            )
        found[registry] = None
    return [f"--extra-index-url {registry}" for registry in found]
