"""The folder around all paths of an agent.

Checks the paths in a request. A script of a submitted job runs as the user, and is not
bounded here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import ConfigError

_LONGEST_PATH = 4096  # Linux


class Bounds:
    """The folder in which the server was started."""

    def __init__(self, root: Path):
        self.root = root.resolve()

    def path(self, named: str, what: str) -> Path:
        """Return the absolute path without links.

        Raises:
            ConfigError: The path leads out of the folder.
        """
        path = (self.root / os.path.expanduser(named)).resolve()  # noqa: PTH111  # "~5" is a name
        if not path.is_relative_to(self.root):
            raise ConfigError(
                f"{what} {named!r} is outside of {self.root}. Name a path in this folder, or start "
                "`workbench mcp` in a folder above"
            )
        return path

    def check(self, values: Mapping[str, object]) -> None:
        """Refuse a job with the path of a file or folder outside.

        Raises:
            ConfigError: The message has option and path.
        """
        for option, value in values.items():
            try:
                self._check_value(option, value)
            except ConfigError as error:
                error.name_option(values)
                raise

    def _check_value(self, option: str, value: object) -> None:
        match value:
            case str() if _may_be_path(value):
                self.path(value, option)
            case Mapping():
                for name, part in value.items():
                    self._check_value(f"{option}.{name}", part)
            case [*parts]:
                for part in parts:
                    self._check_value(option, part)


def _may_be_path(text: str) -> bool:
    """Return whether a text may name a file here. A prompt such as `/no_think` does not."""
    if "\n" in text or "\0" in text or "://" in text or len(text) > _LONGEST_PATH:
        return False
    path = Path(text)
    return not path.is_absolute() or Path(*path.parts[:2]).exists()
