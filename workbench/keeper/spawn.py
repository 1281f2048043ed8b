"""Start a cluster's keeper as a process of its own. What the keeper does is in `keeper.py`."""

from __future__ import annotations

import io
import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from workbench.base import child, entries, errors
from workbench.base.errors import BackendError, ConfigError, PodError, PodTimeout, WorkbenchError
from workbench.base.files import write_json
from workbench.base.process import boot_id, process_start_time
from workbench.base.wire import to_line
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec

STAY = b"stay\n"
"""Follows the spec on the keeper's standard input once its start is over."""


class Leash(io.FileIO):
    """What ties a keeper to its start: closed before `drop`, also by an interrupt or a death, it ends the keeper."""

    def __init__(self) -> None:
        self.far_end, near_end = os.pipe()
        super().__init__(near_end, "wb")

    def drop(self) -> None:
        with suppress(BrokenPipeError):  # it has ended
            self.write(STAY)


def spawn_keeper(paths: ClusterPaths, spec: ClusterSpec, leash: Leash) -> subprocess.Popen[bytes]:
    """Start the keeper in a session of its own, so that no signal meant for the notebook reaches it."""
    write_json(paths.state, {"phase": "starting", "message": "starting the keeper"})
    with paths.keeper_log.open("ab") as log, os.fdopen(leash.far_end, "rb") as stdin:
        keeper = child.start("-m", entries.KEEPER, str(paths.root), stdin=stdin, stdout=log, stderr=log)
    process: dict[str, object] = {"pid": keeper.pid, "start_time": process_start_time(keeper.pid)}
    process |= {"boot": boot_id(), "host": socket.gethostname()}
    write_json(paths.state, {"phase": "starting", "message": "starting the keeper", **process})
    with suppress(BrokenPipeError):  # it has ended; whoever waits for it says how
        leash.write(to_line(spec.to_dict()))
    return keeper


def spawn_successor(paths: ClusterPaths, spec: ClusterSpec) -> subprocess.Popen[bytes]:
    """Start a keeper that takes over from one that died; it ends at once with `lock.TAKEN` where another has."""
    with Leash() as leash, paths.keeper_log.open("ab") as log, os.fdopen(leash.far_end, "rb") as stdin:
        words = ("-m", entries.KEEPER, str(paths.root), "--takes-over")
        keeper = child.start(*words, stdin=stdin, stdout=log, stderr=log)
        with suppress(BrokenPipeError):
            leash.write(to_line(spec.to_dict()))
        leash.drop()
    return keeper


def start_error(state: Mapping[str, object], log: Path) -> WorkbenchError:
    """Make the error that ended the keeper's start, as it was raised there."""
    kind = getattr(errors, str(state.get("error")), PodError)
    message = str(state.get("message"))
    if kind is ConfigError:
        return ConfigError(message)
    message += f"\nThe keeper's log is {log}"
    return kind(message) if kind in (BackendError, PodTimeout) else PodError(message)
