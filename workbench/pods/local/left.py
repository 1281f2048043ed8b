"""What is left of local pods on this machine when whoever started them has died: found again, or swept away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from workbench.base import entries
from workbench.base.process import POD_MARK, Process, end_all, process_table, with_mark
from workbench.pods.guest.guardian import WorkerConfig
from workbench.pods.guest.process import AdoptedProcess, LocalWorker


def adopted_worker(root: Path) -> LocalWorker:
    """Return the worker of a pod that another keeper started, by the folder of the pod."""
    config = WorkerConfig(
        name=root.name,
        address="",
        port=0,
        slots=0,
        root=str(root),
        log=str(root.with_name(f"{root.name}.log")),
        public_key="",
        environment={},
        lease_s=0.0,
        timeout_s=0.0,
        rendezvous=("", 0),
        token="",
    )
    return LocalWorker(config, AdoptedProcess.of(root), time.monotonic())


def unsettled_guardians(folder: Path) -> list[Process]:
    """Return the guardians that were started there, also those that have made no folder of their pod yet."""
    guardians = []
    for process in process_table().values():
        with contextlib.suppress(OSError):
            proc = Path(f"/proc/{process.pid}")
            if (proc / "cwd").readlink() == folder.resolve():
                guardians += [process] if entries.GUARDIAN.encode() in (proc / "cmdline").read_bytes() else []
    return [process for process in guardians if not process.zombie]


def sweep(roots: Sequence[str]) -> None:
    """Kill what a worker that was killed itself has left of its pod."""
    if roots:
        end_all(lambda: with_mark(POD_MARK, roots), grace_s=0.0)
