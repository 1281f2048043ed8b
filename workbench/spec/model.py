"""Which model a job names: the built-in one, a folder, or an id of the model hub. Loads nothing."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from workbench.errors import ConfigError

__all__ = ["TINY_T5", "ModelKind", "model_kind"]

TINY_T5 = "tiny-t5"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelKind(StrEnum):
    """Where a model comes from."""

    BUILTIN = "builtin"
    FOLDER = "folder"
    HUB = "hub"


def model_kind(model: str) -> ModelKind:
    """Tell where the model that a job names comes from.

    Args:
        model: The `model` of a job. A folder that exists wins over a hub id of the same name.

    Raises:
        ConfigError: When it is neither the built-in model, a model folder, nor a possible hub id.

    Example:
        >>> print(model_kind("tiny-t5"), model_kind("google/flan-t5-small"))
        builtin hub
    """
    if model == TINY_T5:
        return ModelKind.BUILTIN
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model folder {model!r} holds no config.json; give a folder made by save_pretrained")
        return ModelKind.FOLDER
    if _HUB_ID.fullmatch(model) and not folder.exists():
        return ModelKind.HUB
    raise ConfigError(
        f"model {model!r} is no folder on this machine and no hub id; allowed: '{TINY_T5}', "
        "a folder made by save_pretrained, or a hub id such as 't5-small' or 'google/flan-t5-small'"
    )
