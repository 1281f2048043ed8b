"""Start a cluster's keeper as a process of its own. What the keeper does is in `keeper.py`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from workbench.base import child, entries, errors
from workbench.base.errors import BackendError, ConfigError, PodError, PodTimeout, WorkbenchError
from workbench.base.files import write_json
from workbench.base.process import process_start_time
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec

__all__ = ["spawn_keeper", "start_error"]


def spawn_keeper(paths: ClusterPaths, spec: ClusterSpec) -> subprocess.Popen[bytes]:
    """Start the keeper in a session of its own, so that no signal meant for the notebook reaches it."""
    write_json(paths.state, {"phase": "starting", "message": "starting the keeper"})
    with paths.keeper_log.open("ab") as log:
        keeper = child.start("-m", entries.KEEPER, str(paths.root), stdin=subprocess.PIPE, stdout=log, stderr=log)
    assert keeper.stdin is not None
    with keeper.stdin:
        process = {"pid": keeper.pid, "start_time": process_start_time(keeper.pid)}
        write_json(paths.state, {"phase": "starting", "message": "starting the keeper", **process})
        keeper.stdin.write(json.dumps(spec.to_dict()).encode())
    return keeper


def start_error(state: Mapping[str, object], log: Path) -> WorkbenchError:
    """Make the error that ended the keeper's start, as it was raised there."""
    kind = getattr(errors, str(state.get("error")), PodError)
    message = str(state.get("message"))
    if kind is ConfigError:
        return ConfigError(message)
    message += f"\nThe keeper's log is {log}"
    return kind(message) if kind in (BackendError, PodTimeout) else PodError(message)
