"""Row 4: a run that stands still says who holds it up and where all are, and ends if asked."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.poll import until
from tests.support.rankpids import pids_of, rank_folder
from tests.support.sentences import says
from workbench import Cluster, FineTune, Run, Script
from workbench.base.files import read_json
from workbench.rundir.events import read_events
from workbench.rundir.figures.flight import communication
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow

ASLEEP = """
import os, time
import torch.distributed as dist

def compute():
    until = time.process_time() + 11
    while time.process_time() < until:
        pass

def dawdle():
    time.sleep(600)

dist.init_process_group("gloo")
dist.barrier()
print("together", flush=True)
if os.environ["RANK"] == "1":
    compute()
    dawdle()
dist.barrier()
"""


def hint(run: Run) -> str:
    return str(read_json(run.paths.state).get("hint", ""))


def rank_of(world: World, run: Run, rank: int) -> int:
    """The pid of a rank: the oldest process that has its number."""
    return min(p.pid for p in world.of(run) if p.environ.get("RANK") == str(rank))


def test_a_stopped_rank_is_named_at_once_and_a_script_that_runs_says_so(world: World) -> None:
    run = world.beating()
    assert (run.state, run.message) == (RunState.RUNNING, "running")
    pid = rank_of(world, run, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        told_s = until(
            lambda: "rank 1 on pod-1 is stopped by a signal" in hint(run), 60, why=lambda: hint(run)
        )
        world.measured("4", "a stopped rank is named after", told_s, 5)
        stacks = run.paths.stacks.read_text()
        assert (
            "rank 0 on pod-0\n" in stacks
            and "beat.py" in stacks
            and "rank 1 on pod-1\nstopped by a signal" in stacks
        )
        assert run.state is RunState.RUNNING
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not hint(run), 60, why=lambda: hint(run))
    run.cancel()
    assert world.ended(run).state is RunState.CANCELLED


@pytest.mark.long
def test_a_script_is_ended_where_its_rank_sleeps_and_not_while_it_computes(
    world: World, tmp_path: Path
) -> None:
    script = tmp_path / "asleep.py"
    script.write_text(ASLEEP)
    run = world.cluster.submit(Script(path=str(script), stall_timeout_s=10), pods=2)
    error = world.ended(run).error
    assert error is not None
    assert (error.kind, error.rank, error.pod) == ("stall", 1, "pod-1"), error
    assert (
        "no output and no CPU for" in error.message
        and "rank 1 on pod-1 is at asleep.py:11 in dawdle" in error.message
    )
    assert "stall_timeout_s=10" in error.message and "in dawdle" in error.traceback
    stacks = run.paths.stacks.read_text()
    assert (
        all(f"rank {rank} on pod-{rank}\n" in stacks for rank in range(2)) and "barrier" in stacks
    )


@pytest.mark.long
def test_a_fine_tuning_whose_rank_is_stopped_is_ended_with_its_last_step(
    world: World, cluster: Cluster
) -> None:
    rows = {"kind": "wikisql-mini", "train_rows": 60, "eval_rows": 2}
    options = {"max_steps": 5000, "predict_rows": 0, "stall_timeout_s": 45}
    job = FineTune(dataset=rows, technique="ddp", **options)
    run = cluster.submit(job)
    until(lambda: any(e.kind == "step" for e in read_events(run.paths.events)), 120)
    (pid,) = pids_of(rank_folder(cluster.pods[1], run, 1))
    os.kill(pid, signal.SIGSTOP)
    error = world.ended(run).error
    assert error is not None
    assert (error.kind, error.rank, error.pod) == ("stall", 1, "pod-1"), error
    assert (
        error.message.startswith("the last step was ")
        and "rank 1 on pod-1 is stopped by a signal" in error.message
    )
    (waits,) = communication(run.paths)
    assert waits.startswith("collective ") and "gloo:" in waits and waits.endswith("rank 0 waits")
    assert waits in error.message


@pytest.mark.long
def test_a_stall_before_the_first_step_is_ended_too(world: World, tmp_path: Path) -> None:
    """A rank never reaches the process group: the others wait for it before any step."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('RANK') == '1':\n    time.sleep(600)\n"
    )
    job = Script(
        path=str(Path(__file__).parent.parent / "scripts" / "ring.py"),
        env={"PYTHONPATH": str(tmp_path)},
        stall_timeout_s=10,
    )
    run = world.cluster.submit(job, pods=2)
    error = world.ended(run).error
    assert error is not None
    assert (error.kind, error.rank) == ("stall", 1), error
    assert "rank 1 on pod-1 is at sitecustomize.py:3 in <module>" in error.message, error


@pytest.mark.long
def test_a_stopped_launcher_is_told_before_any_rank_starts(world: World) -> None:
    run = world.submit("beat.py", launcher="pdsh", stall_timeout_s=5)
    keeper = Path("/proc", str(cluster_status(world.cluster.path).pid), "task")
    runner: list[int] = []

    def started() -> bool:
        with suppress(OSError):  # of a thread or a child that ends
            children = [
                int(pid)
                for task in keeper.iterdir()
                for pid in (task / "children").read_text().split()
            ]
            runner[:] = [
                pid for pid in children if run.id in Path("/proc", str(pid), "cmdline").read_text()
            ]
        return bool(runner)

    until(started, 60, every_s=0.002, why=lambda: hint(run))  # at once, or it has started its pdsh
    os.kill(runner[0], signal.SIGSTOP)
    error = world.ended(run).error
    assert error is not None
    assert (error.kind, error.rank) == ("stall", None), error
    assert says(error.message, "no rank has started", "pdsh")
