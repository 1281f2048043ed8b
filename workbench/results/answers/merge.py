"""Merging a run's adapters into their base: checked here, done by the process that answers `predict`."""

from __future__ import annotations

from pathlib import Path

from workbench.base.errors import ConfigError, RunError
from workbench.results.answers.server import server_of
from workbench.rundir.paths import RunPaths

__all__ = ["merge"]


def merge(paths: RunPaths, path: str | Path) -> Path:
    """Leave the merged model of a run in a folder that plain `from_pretrained` loads."""
    if (paths.model / "config.json").is_file():
        raise RunError(f"the run in {paths.root} trained no adapters: {paths.model} is already a whole model")
    target = Path(path).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already; name a new folder for the merged model")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {target.parent}: {error.strerror}") from error
    server_of(paths).merge(target)
    return target
