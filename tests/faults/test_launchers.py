"""A launcher that is killed in the middle is no success; a stopped run takes no other with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from workbench import Cluster, Script
from workbench.rundir.state import RunState

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
long = pytest.mark.long


@pytest.mark.parametrize(
    ("launcher", "victim"),
    [
        ("pdsh", "pdsh"),
        pytest.param("pdsh", "deepspeed", marks=long),
        pytest.param("openmpi", "mpirun", marks=long),
    ],
)
def test_a_killed_launcher_is_no_success(world: World, launcher: str, victim: str) -> None:
    """Rows 46 and 13. DeepSpeed's runner exits with 0 when its pdsh is killed."""
    run = world.beating(launcher=launcher, pods=2)  # each pod's launcher imports DeepSpeed
    target = next(p.pid for p in world.of(run) if p.runs(victim))
    killed = time.monotonic()
    os.kill(target, signal.SIGKILL)
    result = world.ended(run)
    world.measured(
        "46/13", f"kill -9 {victim} ({launcher}) -> result", time.monotonic() - killed, 10
    )
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert (result.error.kind, result.error.rank, result.error.host) == ("launcher", None, "")
    assert launcher in result.error.message
    for rank in range(2):
        assert "line 3" in run.logs(rank, "stdout", tail=None)


def test_stopping_one_run_leaves_all_others_alone(
    world: World, shared_pods: Cluster, tmp_path: Path
) -> None:
    """Row 47. DeepSpeed stops with `pkill -f`, which hits each process with its words."""
    end = tmp_path / "end"
    kept = world.submit("beat.py", "--until", str(end), cluster=shared_pods, launcher="pdsh")
    stopped = world.submit("beat.py", "--until", str(end), launcher="pdsh", pods=2)
    world.beats(kept, 2)
    world.beats(stopped, 2)
    words = [p.argv for p in world.of(stopped) if p.argv]
    decoy = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", *(w for a in words for w in a)]
    )
    try:
        asked = time.monotonic()
        stopped.cancel()
        assert stopped.wait(300, progress=False).state is RunState.CANCELLED
        world.measured("47", "cancel (pdsh) -> result", time.monotonic() - asked, 5)
        time.sleep(1)  # a pkill that comes late
        assert decoy.poll() is None
    finally:
        decoy.kill()
        decoy.wait(300)
        world.ended(stopped)
        state = kept.state
        end.touch()  # in any case: other tests use the shared pods
    assert state is RunState.RUNNING
    result = world.ended(kept)
    result.raise_for_status()
    for rank in range(2):
        lines = kept.logs(rank, "stdout", tail=None).splitlines()
        assert lines == [f"rank {rank} line {n}" for n in range(len(lines))]


def test_a_hostfile_that_was_changed_while_a_run_waited_starts_nothing(
    world: World, tmp_path: Path
) -> None:
    """Row 45: reordered, removed, and with a line that a launcher would take for ssh's option."""
    end, canary = tmp_path / "end", tmp_path / "canary"

    def reorder(path: Path) -> None:
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))

    def inject(path: Path) -> None:
        path.write_text(f"-oProxyCommand=touch${{IFS}}{canary} slots=1\n{path.read_text()}")

    first = world.beating("--until", str(end), pods=1)
    changes = {
        reorder: "was changed",
        Path.unlink: "cannot be read: No such file",
        inject: "was changed",
    }
    waiting = [
        (world.submit("beat.py", "--lines", "1", launcher=launcher), change)
        for launcher in ("ssh", "pdsh", "openmpi")
        for change in changes
    ]
    for run, change in waiting:
        change(run.paths.hostfile)
    untouched = world.submit("beat.py", "--lines", "1")
    end.touch()
    world.ended(first).raise_for_status()
    for run, change in waiting:
        result = world.ended(run)
        assert result.state is RunState.FAILED
        assert result.error is not None
        assert f"the hostfile {run.paths.hostfile} {changes[change]}" in result.error.message
        assert "submit the job again" in result.error.message
        assert not run.paths.launcher_log.exists()
        assert not list(run.paths.logs.glob("rank-*"))
    assert not canary.exists()
    world.ended(untouched).raise_for_status()


BLOCKS_THE_NEXT = """
import os, signal
from pathlib import Path

Path("kept.txt").write_text("of the first attempt")
Path(os.environ["WORKBENCH_RUN_DIR"], "attempt-1").write_text("no folder")
os.kill(os.getpid(), signal.SIGKILL)
"""


@long
def test_files_of_an_attempt_come_back_when_the_next_one_cannot_be_prepared(
    world: World, tmp_path: Path
) -> None:
    script = tmp_path / "blocks.py"
    script.write_text(BLOCKS_THE_NEXT)
    run = world.cluster.submit(Script(str(script), restarts=1), pods=1)
    result = world.ended(run)
    assert result.state is RunState.FAILED
    assert "File exists" in result.message
    assert len(result.restarts) == 0, "a restart counts once its pods are prepared"
    assert (run.path / "outputs" / "kept.txt").read_text() == "of the first attempt"
