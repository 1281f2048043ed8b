"""What the keeper of a run has in memory of it: asked where the run's own files are gone, or could not be written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.errors import RunError
from workbench.base.wire import ask
from workbench.client.result import RunResult
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_of, id_of


@dataclass(frozen=True, slots=True)
class RunHome:
    """Where the keeper of a run is, and by which id it knows the run."""

    cluster: Path
    id: str

    @classmethod
    def of(cls, paths: RunPaths) -> RunHome:
        return cls(cluster_of(paths), id_of(paths))

    def outcome(self) -> dict[str, Any] | None:
        """Ask the keeper how the run stands; None where it does not answer."""
        with suppress(RunError):
            return ask(ClusterPaths(self.cluster).socket, {"op": "outcome", "run": self.id}, timeout_s=5.0)
        return None

    def state(self) -> RunState | None:
        outcome = self.outcome()
        return RunState(outcome["state"]) if outcome else None

    def result(self, path: Path) -> RunResult | None:
        """Ask for the result of the run; None where it has none yet, or the keeper does not answer."""
        raw = (self.outcome() or {}).get("result")
        return RunResult.at(path, raw) if raw else None

    def words(self, path: Path) -> str:
        """Return, for people, that the run's directory is gone, and how the run stands."""
        outcome = self.outcome()
        how = f"its keeper says: {outcome['message']}" if outcome else "its keeper does not answer"
        return f"the directory of run {self.id}, {path}, is gone or damaged; {how}"
