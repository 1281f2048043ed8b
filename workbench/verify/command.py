"""Carry out `workbench verify`: start the pods, try the rows, and make the report."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.files import gate
from workbench.base.words import counted
from workbench.verify.bench import Bench
from workbench.verify.report import Report
from workbench.verify.row import Row
from workbench.verify.runner import run_rows

if TYPE_CHECKING:
    from workbench import Cluster

MINUTES = 20.0


def verify(
    rows: Sequence[Row],
    *,
    make: Callable[[Path], Cluster] | None = None,
    minutes: float = MINUTES,
    out: Path | None = None,
) -> Report:
    """Try rows on pods of this machine, or on the user's own pods, and return the report.

    Args:
        rows: The rows, in order.
        make: Returns the user's own cluster in a folder, not started. Default: local pods, on the
            GPUs of this machine or on its CPUs.
        minutes: Time limit of all rows.
        out: Folder for clusters, runs and logs, new or empty. Default: a new folder below `runs`.

    Raises:
        ConfigError: The folder is not empty, the time is not above 0, or the pods are refused.
    """
    if not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes is {minutes:g}; allowed: a number above 0")
    began_s = time.time()
    folder = (out or Path("runs") / time.strftime("verify-%Y%m%d-%H%M%S")).absolute()
    if not gate.is_empty(folder):
        raise ConfigError(f"{folder} is not empty; choose a new folder for the runs")
    # Clusters print their progress, and standard output is for the table.
    with contextlib.redirect_stdout(sys.stderr), Bench(folder, make) as bench:
        where = _where(bench)
        progress(where)
        outcomes = run_rows(rows, bench, limit_s=60 * minutes, progress=progress)
        return Report(
            outcomes=outcomes,
            where=where,
            versions=dict(bench.first.versions or {}),
            began_s=began_s,
            took_s=time.time() - began_s,
            folder=str(folder),
        )


def progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _where(bench: Bench) -> str:
    devices = "GPU" if bench.has_gpus else "CPU"
    kind = bench.main.spec.backend.get("kind")
    return (
        f"{counted(len(bench.main.pods), 'pod')} of place {kind}, "
        f"{counted(len(bench.facts), 'rank')} on {devices}: {bench.first.name}"
    )
