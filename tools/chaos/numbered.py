"""One run of numbered lines: submitted, brought to a phase, followed to its end, counted."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.poll import until
from workbench import Cluster, Run, Script
from workbench.client.result import RunResult

END_S = 90.0
_SCRIPT = Path(__file__).parent / "script" / "numbered.py"
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Numbered:
    """The run, and what its ranks themselves say of it."""

    run: Run
    witness: Path
    lines: int
    ranks: int

    def reach(self, phase: str, chance: random.Random) -> None:
        """Wait until the run is in a phase, and a moment longer; also returns at its end."""
        match phase:
            case "starting":
                self._until(lambda: not self.run.message.startswith(("sending", "waiting")))
                time.sleep(chance.uniform(0, 0.1))
            case "running":
                self._until(lambda: all(self.printed(rank) >= 3 for rank in range(self.ranks)))
                time.sleep(chance.uniform(0, 0.8))
            case "ending":
                self._until(lambda: any(self.witness.glob("*.whole")))
                time.sleep(chance.uniform(0, 0.15))
            case _:
                time.sleep(chance.uniform(0, 0.25))

    def _until(self, met: Callable[[], object]) -> None:
        until(lambda: met() or self.run.state.is_terminal, END_S)

    def printed(self, rank: int) -> int:
        """Return how many lines a rank says that it has printed."""
        path = self.witness / f"rank-{rank}.count"
        return int(path.read_text() or 0) if path.exists() else 0

    @property
    def whole(self) -> bool:
        """Whether every rank came to its end."""
        return len(list(self.witness.glob("*.whole"))) == self.ranks

    def end(self, within_s: float = END_S) -> RunResult | None:
        """Wait for the end; None where it does not come, and the run is cancelled."""
        try:
            return self.run.wait(within_s, progress=False)
        except TimeoutError:
            self.run.cancel()
            return None

    def faults_in_lines(self, rank: int) -> tuple[int, int]:
        """Return how many lines of a rank's log are missing or doubled, and missing at its end."""
        path = self.run.paths.rank_log(0, rank, "stdout")
        there = path.read_bytes().decode(errors="replace").split("\n")[:-1] if path.exists() else []
        numbers = [
            int(line.rpartition(" ")[2]) for line in there if line.startswith(f"rank {rank} line ")
        ]
        within = (
            len(set(range(max(numbers, default=-1) + 1)) - set(numbers))
            + len(numbers)
            - len(set(numbers))
        )
        within += len(there) - len(numbers)
        return within, max(0, self.printed(rank) - max(numbers, default=-1) - 1)


def submit(
    cluster: Cluster,
    folder: Path,
    *,
    lines: int = 50,
    pause_s: float = 0.03,
    payload_mib: float = 0.0,
    launcher: str = "ssh",
    path: Path | None = None,
) -> Numbered:
    """Submit a script of its own folder; a payload of random bytes makes the sending last."""
    home = folder / f"script-{next(_NUMBERS)}"
    witness = home.with_name(f"{home.name}-witness")
    for each in (home, witness):
        each.mkdir(parents=True)
    shutil.copy(_SCRIPT, home)
    if payload_mib:
        (home / "payload.bin").write_bytes(os.urandom(int(payload_mib * (1 << 20))))
    words = ["--lines", str(lines), "--pause-s", str(pause_s), "--witness", str(witness)]
    job = Script(path=str(home / _SCRIPT.name), args=words, launcher=launcher)
    return Numbered(cluster.submit(job, path=path), witness, lines, cluster.spec.count)
