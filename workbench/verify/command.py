"""Carry out `workbench verify`: try the rows one after another, and make the table."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workbench.base.errors import ConfigError, RunFailed
from workbench.base.files import is_folder
from workbench.base.table import Grid, text_table
from workbench.base.words import duration, pluralize, strip_controls
from workbench.verify.figures import Cannot
from workbench.verify.pods import Pods
from workbench.verify.row import Row

if TYPE_CHECKING:
    from workbench import Cluster

Verdict = Literal["held", "failed", "cannot be tried here"]
_VERDICTS: tuple[Verdict, ...] = ("held", "failed", "cannot be tried here")
_HELD, _FAILED, _CANNOT = _VERDICTS
_WIDTH = 44
_SHORT_S = 0.1  # a row that only looked, or found the run of another row
_LEAST_S = 5.0
_LONGEST = 2000  # letters of a reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    name: str
    subject: str
    claim: str
    verdict: Verdict
    detail: str
    """Figures of a claim that held, or the reason."""
    ran_on: str = ""
    """Devices and ranks of the row. Empty: nothing ran."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    where: str
    """Pods and devices in a line."""
    versions: Mapping[str, str]
    began_s: float
    """Time of the beginning, in seconds since 1970."""
    took_s: float
    folder: str
    """Folder with the clusters and their runs."""
    rows: Sequence[Outcome]

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """Number of rows by verdict."""
        counts = Counter(row.verdict for row in self.rows)
        return {verdict: counts[verdict] for verdict in _VERDICTS}

    @property
    def text(self) -> str:
        cells = []
        for row in self.rows:
            took = duration(row.seconds) if row.seconds >= _SHORT_S else ""
            cells.append((row.name, row.claim, row.verdict, row.detail, row.ran_on, took))
        columns = ("name", "claim", "outcome", "figures, or reason", "ran on", "time")
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began_s))
        held, failed, cannot = self.counts.values()
        return (
            f"{text_table(Grid(columns=columns, rows=cells, right=('time',)), _WIDTH)}\n\n"
            f"{pluralize(held, 'claim')} held, {failed} failed, {cannot} cannot be tried here; "
            f"{duration(self.took_s)}\n"
            f"{self.where}; {versions}; {when}\n"
            f"runs and logs: {self.folder}"
        )

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "counts": self.counts}


def list_text(rows: Sequence[Row]) -> str:
    """Return the names, subjects and claims of rows as a table."""
    cells = [(row.name, row.subject, row.claim, f"{row.limit_s:.0f} s") for row in rows]
    columns = ("name", "subject", "claim", "limit")
    return text_table(Grid(columns=columns, rows=cells, right=("limit",)), _WIDTH)


def verify(
    rows: Sequence[Row], folder: Path, *, cluster: Cluster | None = None, minutes: float
) -> Report:
    """Try rows on pods of this machine, or on the user's own pods, and return the report.

    Args:
        rows: The rows, in order.
        folder: Folder for clusters, runs and logs, new or empty.
        cluster: The user's own cluster, not started. Default: local pods, on the GPUs of this
            machine or on its CPUs.
        minutes: Time limit of all rows.

    Raises:
        ConfigError: The folder is not empty, the time is not above 0, or the pods are refused.
    """
    if not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes is {minutes:g}; allowed: a number above 0")
    began_s = time.time()
    folder = folder.absolute()
    if is_folder(folder) and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; choose a new folder for the runs")
    pods = Pods(folder, cluster)
    # Clusters print their progress, and standard output is for the table.
    with contextlib.redirect_stdout(sys.stderr), contextlib.closing(pods):
        where = _where(pods)
        _progress(where)
        outcomes = try_rows(rows, pods, 60 * minutes)
        versions = dict(pods.first.versions or {})
    return Report(
        where=where,
        versions=versions,
        began_s=began_s,
        took_s=time.time() - began_s,
        folder=str(folder),
        rows=outcomes,
    )


def try_rows(rows: Sequence[Row], pods: Pods, limit_s: float) -> list[Outcome]:
    """Try all rows, and return an outcome for every row. A failing row never ends the others."""
    deadline_s = time.monotonic() + limit_s
    outcomes = []
    for number, row in enumerate(rows, start=1):
        began_s = time.monotonic()
        left_s = deadline_s - began_s
        # A row gets its own limit, or the rest of the whole time.
        pods.begin_row(min(row.limit_s, left_s))
        if left_s < _LEAST_S:
            verdict, detail = _CANNOT, f"no time left of {limit_s / 60:.3g} minutes"
        else:
            _progress(f"[{number}/{len(rows)}] {row.name} …")
            verdict, detail = _try(row, pods, left_s)
        outcome = Outcome(
            name=row.name,
            subject=row.subject,
            claim=row.claim,
            verdict=verdict,
            detail=strip_controls(detail)[:_LONGEST] or "no figure",
            ran_on=pods.ran_on,
            seconds=time.monotonic() - began_s,
        )
        outcomes.append(outcome)
        _progress(
            f"[{number}/{len(rows)}] {row.name}: {verdict} "
            f"({outcome.seconds:.1f} s) {outcome.detail.splitlines()[0]}"
        )
    return outcomes


def _try(row: Row, pods: Pods, left_s: float) -> tuple[Verdict, str]:
    try:
        return _HELD, row.check(pods)
    except Cannot as error:
        return _CANNOT, str(error)
    except TimeoutError as error:
        if left_s >= row.limit_s:
            return _FAILED, str(error)
        few = f"only {left_s:.0f} s were left for the row, which may take {row.limit_s:.0f}"
        return _CANNOT, few
    except RunFailed as error:
        # The run's logs have the traceback.
        lines = str(error).splitlines()
        return _FAILED, f"{lines[0]}\n{lines[-1]}"
    except (Exception, SystemExit) as error:  # row boundary: any error is the outcome of the row
        return _FAILED, f"{type(error).__name__}: {error}"


def _progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _where(pods: Pods) -> str:
    devices = "GPU" if pods.has_gpus else "CPU"
    kind = pods.main.spec.backend.get("kind")
    return (
        f"{pluralize(len(pods.main.pods), 'pod')} of place {kind}, "
        f"{pluralize(pods.ranks, 'rank')} on {devices}: {pods.first.name}"
    )
