"""Three pods and the means to do them harm; what was measured is printed at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.measured import MEASURED
from tests.support.poll import until
from workbench import Cluster, LocalPods, PodSpec, Run, Script
from workbench.client.result import RunResult
from workbench.pods.pod import Pod
from workbench.rundir.state import RunState

SCRIPTS = Path(__file__).parent.parent / "scripts"
HANG_S = 600.0


@dataclass(frozen=True)
class Process:
    pid: int
    argv: list[str] = field(repr=False)
    environ: dict[str, str] = field(repr=False)

    def runs(self, name: str) -> bool:
        """Tell whether it is the program, or the Python script, of this name."""
        return name in [Path(word).name for word in self.argv[:2]]


@dataclass(frozen=True)
class World:
    """A cluster, and eyes on the machine that it runs on."""

    cluster: Cluster

    def submit(
        self,
        script: str,
        *args: str,
        cluster: Cluster | None = None,
        into: Path | None = None,
        pods: int | None = None,
        **job: Any,
    ) -> Run:
        job_of = Script(path=str(SCRIPTS / script), args=list(args), **job)
        return (cluster or self.cluster).submit(job_of, path=into, pods=pods)

    def beating(self, *args: str, pods: int = 3, **more: Any) -> Run:
        """Start `beat.py` and wait until every rank has printed a line."""
        run = self.submit("beat.py", *args, pods=pods, **more)
        self.beats(run, pods)
        return run

    def beats(self, run: Run, ranks: int = 3) -> None:
        """Wait until every rank of `beat.py` has printed a line."""
        self.until(lambda: all(" line 3" in self.log(run, rank) for rank in range(ranks)), 90)

    @staticmethod
    def blames(result: RunResult, pod: Pod) -> str:
        """See that the result names the pod as the first cause; return its message."""
        assert result.state is RunState.FAILED
        assert result.error is not None
        assert (result.error.kind, result.error.pod, result.error.host) == (
            "pod",
            pod.name,
            pod.address,
        )
        return result.error.message

    @staticmethod
    def log(run: Run, rank: int, stream: str = "stdout") -> str:
        path = run.paths.rank_log(0, rank, stream)
        return path.read_text(errors="replace") if path.exists() else ""

    until = staticmethod(until)

    @staticmethod
    def measured(row: str, what: str, seconds: float, bound_s: float) -> None:
        """Note a latency; only a hang fails the test."""
        MEASURED.append(f"row {row}: {what} {seconds:.2f} s (aim {bound_s:g} s)")
        assert seconds < HANG_S, MEASURED[-1]

    @staticmethod
    def processes() -> list[Process]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                argv = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")[:-1]
                environ = os.fsdecode((folder / "environ").read_bytes()).split("\0")
            except OSError:
                continue
            pairs = (item.partition("=") for item in environ)
            found.append(Process(int(folder.name), argv, {name: value for name, _, value in pairs}))
        return found

    def of(self, run: Run) -> list[Process]:
        """Every process of a run: its ranks and what they started, its launcher and its ssh's."""
        mark = run.id
        return [
            p
            for p in self.processes()
            if p.environ.get("WORKBENCH_RUN") == mark or any(mark in word for word in p.argv)
        ]

    def nothing_left(self, run: Run, limit_s: float = 10) -> None:
        until(
            lambda: not self.of(run),
            limit_s,
            every_s=0.2,
            why=lambda: [(p.pid, p.argv) for p in self.of(run)],
        )

    def ended(self, run: Run, limit_s: float = 300) -> RunResult:
        """Wait for the end and check what every fault must leave: a whole directory, no process."""
        result = run.wait(limit_s, progress=False)
        assert result.left_processes == 0
        self.nothing_left(run)
        for path in (
            run.paths.spec,
            run.paths.info,
            run.paths.state,
            run.paths.result,
            run.paths.events,
        ):
            assert path.exists(), path
        assert not run.paths.reserve.exists()
        assert run.state is result.state
        return result


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("faults") / "cluster"
    hour_s = 3600  # tests of other folders come between those of this one
    with Cluster(
        LocalPods(), PodSpec(cpus=1), count=3, path=path, warm=False, idle_timeout_s=hour_s
    ) as cluster:
        yield World(cluster)
