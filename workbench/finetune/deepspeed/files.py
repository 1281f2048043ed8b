"""Read the DeepSpeed JSON of a job: a user's JSON or the shipped file of the technique."""

from __future__ import annotations

import copy
import importlib.resources
import json
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, read_given, user_path
from workbench.base.json_values import parse_json
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.registry import technique_of


def load(job: FineTuneOptions | str | Path) -> tuple[dict[str, Any], str]:
    """Return a DeepSpeed JSON and its name for messages.

    Args:
        job: Job with a `deepspeed` option or a technique with a shipped file; or a file's path.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    if isinstance(job, str | Path):
        return _load_file(job)
    if not isinstance(job, FineTuneOptions):
        raise ConfigError(
            "a DeepSpeed configuration is read of a FineTune job "
            f"or of a path, and was asked of a {type(job).__name__}"
        )
    if isinstance(job.deepspeed, Mapping):
        return copy.deepcopy(dict(job.deepspeed)), "deepspeed"
    if job.deepspeed is not None:
        return _load_file(job.deepspeed)
    shipped = technique_of(job.technique).config
    config, source = _load_shipped(shipped or f"{job.technique}.json")
    if job.optimizer != "adamw":
        config.pop("optimizer", None)
    return config, source


def _load_file(given: str | Path) -> tuple[dict[str, Any], str]:
    path = user_path(given)
    # `dsconfig/zero1.json` is the shipped file unless the current folder has the file.
    if is_there(path) or path.parent.name != "dsconfig" or path.parent.parent != Path():
        return _parse(_read(path), str(path)), str(path)
    return _load_shipped(path.name)


def _load_shipped(name: str) -> tuple[dict[str, Any], str]:
    return _parse(
        _shipped(name).read_text(encoding="utf-8"), f"dsconfig/{name}"
    ), f"dsconfig/{name}"


def _shipped(name: str) -> Traversable:
    package = importlib.resources.files("workbench")
    # In a checkout, the folder is beside the package, visible to users.
    folders = [place / "dsconfig" for place in (package, getattr(package, "parent", package))]
    there: dict[str, Traversable] = {}
    for folder in reversed(folders):
        if folder.is_dir():
            there |= {file.name: file for file in folder.iterdir()}
    if name not in there:
        shipped = ", ".join(sorted(there)) or "none; install again"
        raise ConfigError(f"dsconfig/{name} is not among the files that are shipped: {shipped}")
    return there[name]


def _read(path: Path) -> str:
    try:
        # Some editors of Windows begin a file with a byte order mark.
        return read_given(path).removeprefix("\ufeff")
    except OSError as error:
        raise ConfigError(
            f"deepspeed file {str(path)!r} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"deepspeed file {str(path)!r} is not UTF-8 text") from error


def _parse(text: str, source: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ConfigError(f"{source}: key '{key}' stands there twice; remove one")
            seen[key] = value
        return seen

    try:
        config = parse_json(text, object_pairs_hook=once)
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source} line {error.lineno} column {error.colno}: {error.msg}; it must be JSON"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{source} cannot be read: {error}; correct it") from error
    match config:
        case dict():
            return config
    raise ConfigError(
        f"{source} holds {type(config).__name__}; a DeepSpeed configuration is an object"
    )
