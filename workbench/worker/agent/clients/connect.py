"""Bridge this program's stdin and stdout to the agent's socket: what the keeper starts over SSH."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workbench.worker.agent.clients.client import connect

_RELAY = "workbench.worker.agent.clients.relay"


def bridge(root: Path) -> int:
    """Connect, and become the relay; return an exit code where there is no agent."""
    try:
        agent = connect(root)
    except OSError as error:
        sys.stderr.write(f"no agent serves {root}: {error}\n")
        return 1
    agent.settimeout(None)
    agent.set_inheritable(True)
    loader: Any = getattr(find_spec(_RELAY), "loader", None)  # of a folder or of a zip
    return os.execv(sys.executable, [sys.executable, "-ISc", loader.get_source(_RELAY), str(agent.fileno()), str(root)])
