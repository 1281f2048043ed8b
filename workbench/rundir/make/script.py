"""A script's folder as it travels: what `.workbenchignore` and some defaults leave of it, as one zip.

The file has gitignore's syntax and lies in the script's own folder; those further below mean nothing. What a job
writes into the folder on a pod is not looked at here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pathspec import GitIgnoreSpec

from workbench.base.errors import ConfigError
from workbench.base.package import zip_files

__all__ = ["DEFAULTS", "IGNORE_FILE", "check_script", "files_of", "script_files", "zip_script"]

IGNORE_FILE = ".workbenchignore"
"""The name of the ignore file."""
DEFAULTS = (
    *(".git", "__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/", "*.ipynb_checkpoints", "runs/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".tox/"),
)
"""What never travels unless the ignore file takes it back (`!runs/`): its lines come after these."""
_LARGEST = 200 << 20  # bytes of a script's folder; more is data, or the wrong folder
_NAMED = 5


def check_script(script: Path) -> None:
    """Look at a script and its folder before anything starts."""
    if not script.is_file():
        raise ConfigError(f"the script {script} does not exist")
    folder = script.parent
    files = script_files(folder)
    if script not in files:
        raise ConfigError(
            f"{folder / IGNORE_FILE} leaves out {script.name}, the script itself; add a line !{script.name}"
        )
    sizes = {path: path.stat().st_size for path in files}
    if (whole := sum(sizes.values())) > _LARGEST:
        largest = sorted(files, key=lambda path: -sizes[path])[:_NAMED]
        named = ", ".join(f"{path.relative_to(folder)} ({sizes[path] / 2**20:.1f} MiB)" for path in largest)
        raise ConfigError(
            f"the script's folder {folder} holds {whole / 2**20:.0f} MiB, which would all travel to the pods (at most "
            f"{_LARGEST >> 20} MiB). The largest: {named}. Name what the script does not need in "
            f"{folder / IGNORE_FILE}, one pattern a line as in a .gitignore; or move the script into a folder of its "
            "own and give data by path or hub id"
        )


def script_files(folder: Path) -> list[Path]:
    """Return the files of a script's folder that travel, sorted."""
    return sorted(_walk(folder, _spec_of(folder / IGNORE_FILE)))


def files_of(folder: Path) -> list[Path]:
    """Return the files of any other folder that travels, sorted: all but the defaults; an ignore file means nothing."""
    return sorted(_walk(folder, GitIgnoreSpec.from_lines(DEFAULTS)))


def zip_script(script: Path) -> bytes:
    """Zip the folder of a script; the same files give the same bytes."""
    check_script(script)
    return zip_files(script.parent, script_files(script.parent))


def _walk(folder: Path, ignored: GitIgnoreSpec) -> Iterator[Path]:
    # As git does it, nothing below an ignored folder is looked at, so nothing there can be taken back.
    for place, folders, names in os.walk(folder):
        here = Path(place)
        relative = here.relative_to(folder)
        folders[:] = [name for name in folders if not ignored.match_file(f"{(relative / name).as_posix()}/")]
        for name in names:
            if (here / name).is_file() and not ignored.match_file((relative / name).as_posix()):
                yield here / name


def _spec_of(path: Path) -> GitIgnoreSpec:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError as error:  # what pathspec raises is one
            raise ConfigError(f"{path}, line {number}: {line!r} is not a pattern of a .gitignore: {error}") from error
    return GitIgnoreSpec.from_lines([*DEFAULTS, *lines])
