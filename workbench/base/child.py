"""Start this Python again as a child, which finds this very package: the folder, or the zip, it was imported from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOME = str(Path(__file__).absolute().parents[2])
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
"""Variables of every rank: no warnings of forks, no reports to the hub, no output held back."""


def child_environment(**more: str) -> Mapping[str, str]:
    """Return this process's environment with this package first on the import path, and `more` in it."""
    rest = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{HOME}{os.pathsep}{rest}" if rest else HOME, **more}


def start(
    *words: str, cwd: str | Path = "/", env: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Start this Python in a session of its own, out of the notebook's signals, and in `/`, past a user's torch.py."""
    env = child_environment() if env is None else env
    return subprocess.Popen([sys.executable, "-P", *words], cwd=cwd, env=env, start_new_session=True, **streams)
