"""A kind of job that the package does not know: every rank counts, ten numbers a second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from workbench.base.errors import ConfigError
from workbench.base.record import Count, Environment, Positive, Size, Unit
from workbench.jobs.job import Job, NewRun, PodStore, PodView, Prepared, Program, Rules, Stop

_PROGRAM = """\
import os, pathlib, time
words = pathlib.Path(os.environ["COUNT_WORDS"]).read_text().split()
for number in range(int(words[1])):
    print(words[0], number, flush=True)
    time.sleep(0.1)
out = pathlib.Path(os.environ["WORKBENCH_RUN_DIR"]) / "out" / "files"
out.mkdir(parents=True, exist_ok=True)
if os.environ["RANK"] == "0":
    (out / "last.txt").write_text(str(number))
"""


class Counting(Job):
    """Count on every rank."""

    kind: ClassVar[str] = "count"

    upto: Size = 5
    """Numbers to count."""
    say: str = "n"
    """What is printed before each number."""
    launcher: str = "ssh"
    """One of `Launcher`."""
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank."""
    restarts: Count = 0
    """Number of restarts after a loss."""
    stall_timeout_s: Annotated[Positive | None, Unit("seconds")] = None
    """Seconds of standstill after which the run fails."""

    @property
    def rules(self) -> Rules:
        return Rules(stop=Stop(by="signal", grace_s=5.0))

    def prepare(self, run: NewRun) -> Prepared:
        if run.ranks > 8:
            raise ConfigError(f"count runs on at most 8 ranks, and {run.ranks} are asked for")
        (run.root / "inputs" / "count.txt").write_text(f"{self.say} {self.upto}")
        return Prepared(job=self, origin={"data": f"{self.say}-{self.upto}"})

    def files_for(self, pod: PodStore, root: Path, gpus: int) -> Mapping[str, str]:
        return {"count.txt": (root / "inputs" / "count.txt").read_text()}

    def program_on(self, pod: PodView) -> Program:
        return Program(argv=["-c", _PROGRAM], forced={"COUNT_WORDS": "count.txt"})

    def in_users_files(self, traceback: str, run_id: str) -> str:
        return traceback.replace('File "<string>"', 'File "counting"')
