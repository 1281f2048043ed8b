"""The table of a verification as text and as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.base.table import Grid, text_table
from workbench.base.words import counted, duration
from workbench.verify.outcome import Outcome, Verdict
from workbench.verify.row import Row

_WIDTH = 44
_SHORT_S = 0.1  # a row that only looked, or found the run of another row


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    outcomes: Sequence[Outcome]
    where: str
    """Pods and devices in a line."""
    versions: Mapping[str, str]
    began_s: float
    """Time of the beginning, in seconds since 1970."""
    took_s: float
    folder: str
    """Folder with the clusters and their runs."""

    @property
    def ok(self) -> bool:
        """Whether no claim failed."""
        return all(outcome.verdict is not Verdict.FAILED for outcome in self.outcomes)

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """Number of rows by verdict."""
        counts = Counter(outcome.verdict for outcome in self.outcomes)
        return {verdict: counts[verdict] for verdict in Verdict}

    @property
    def text(self) -> str:
        rows = []
        for outcome in self.outcomes:
            rows.append(
                (
                    outcome.name,
                    outcome.claim,
                    str(outcome.verdict),
                    outcome.detail,
                    outcome.ran_on,
                    duration(outcome.seconds) if outcome.seconds >= _SHORT_S else "",
                )
            )
        columns = ("name", "claim", "outcome", "figures, or reason", "ran on", "time")
        grid = Grid(columns=columns, rows=rows, right=("time",))
        return "\n".join([text_table(grid, _WIDTH), "", self.summary])

    @property
    def summary(self) -> str:
        counts = self.counts
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began_s))
        return "\n".join(
            [
                f"{counted(counts[Verdict.HELD], 'claim')} held, {counts[Verdict.FAILED]} failed, "
                f"{counts[Verdict.CANNOT]} cannot be tried here; {duration(self.took_s)}",
                f"{self.where}; {versions}; {when}",
                f"runs and logs: {self.folder}",
            ]
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "where": self.where,
            "versions": dict(self.versions),
            "began_s": self.began_s,
            "took_s": self.took_s,
            "folder": self.folder,
            "counts": {str(verdict): count for verdict, count in self.counts.items()},
            "rows": [outcome.to_dict() for outcome in self.outcomes],
        }


def list_text(rows: Sequence[Row]) -> str:
    """Return the names, subjects and claims of rows as a table."""
    cells = [(row.name, row.subject, row.claim, f"{row.limit_s:.0f} s") for row in rows]
    columns = ("name", "subject", "claim", "limit")
    return text_table(Grid(columns=columns, rows=cells, right=("limit",)), _WIDTH)
