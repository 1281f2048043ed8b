"""The processes of a rank, also of one that was forked from a warm server."""

from __future__ import annotations

import contextlib
from pathlib import Path

from workbench import Run
from workbench.pods.pod import Pod


def rank_folder(pod: Pod, run: Run, rank: int) -> Path:
    """Return the folder of a rank on its pod."""
    return Path(pod.root) / "runs" / run.id / f"rank-{rank}"


def pids_of(rank: Path) -> list[int]:
    """Find a rank by its output's file; a fork of a warm server has the server's environment."""
    pids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            output = (folder / "fd" / "1").readlink()
            # A rank writes through `attempt-N/rank-R.stdout.pipe` beside its folder.
            of_run = output.parent.parent == rank.parent
            if of_run and output.name.startswith(f"{rank.name}.stdout."):
                pids.append(int(folder.name))
    return pids
