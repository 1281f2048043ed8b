"""What goes wrong while a run's inputs travel: outlived where it can be, else blamed on the pod."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from workbench import Cluster, LocalPods, Run, Script
from workbench.base.files import read_json
from workbench.rundir.state import RunState

from .conftest import SCRIPTS
from .test_pods import children_of, daemon, parent_of

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
MIB = 1 << 20


def submit_much(world: World, cluster: Cluster, folder: Path, lines: int = 20) -> Run:
    """Submit a script with so many files that they travel for a while, and wait until they do."""
    folder.mkdir()
    shutil.copy(SCRIPTS / "beat.py", folder)
    (folder / "weights.bin").write_bytes(random.Random(7).randbytes(60 * MIB))
    run = cluster.submit(Script(path=str(folder / "beat.py"), args=["--lines", str(lines)]))
    world.until(lambda: "sending" in run.message, 60)
    return run


@pytest.mark.long
@pytest.mark.parametrize("victim", ["session", "agent"])
def test_a_line_that_breaks_while_inputs_travel_is_outlived(
    world: World, tmp_path: Path, victim: str
) -> None:
    # A look at all processes takes a busy machine longer than the inputs travel.
    pods = [(pod, daemon(world, pod)) for pod in world.cluster.pods[1:]]
    run = submit_much(world, world.cluster, tmp_path / "job")
    for pod, sshd in pods:
        if victim == "agent":
            os.kill(int(str(read_json(Path(pod.root) / "agent.json")["pid"])), signal.SIGKILL)
        else:
            for pid in children_of(sshd):
                os.kill(pid, signal.SIGKILL)
    assert "sending" in run.message, "it was over before the fault"
    world.ended(run, 120).raise_for_status()
    for rank in range(3):
        assert world.log(run, rank) == "".join(f"rank {rank} line {n}\n" for n in range(20))


@pytest.mark.long
def test_a_pod_that_dies_while_inputs_travel_is_named(world: World, tmp_path: Path) -> None:
    with Cluster(LocalPods(), count=2, path=tmp_path / "c", warm=False) as cluster:
        pod = cluster.pods[1]
        worker = parent_of(daemon(world, pod))
        run = submit_much(
            world, cluster, tmp_path / "job", lines=5000
        )  # it ends by the fault, wherever that meets it
        os.kill(worker, signal.SIGKILL)
        assert "sending" in run.message, "it was over before the fault"
        result = run.wait(300, progress=False)
        assert "SIGKILL" in world.blames(result, pod)
        assert list((tmp_path / "c" / "pods" / "store").iterdir()) != []
    assert [path.name for path in (tmp_path / "c" / "pods").iterdir() if path.is_dir()] == [], (
        "with what they shared"
    )


@pytest.mark.long
def test_a_run_is_cancelled_while_a_pod_is_silent_and_inputs_travel(
    world: World, tmp_path: Path
) -> None:
    with Cluster(LocalPods(), count=2, path=tmp_path / "c", warm=False) as cluster:
        sshd = daemon(world, cluster.pods[1])
        run = submit_much(world, cluster, tmp_path / "job")
        os.kill(sshd, signal.SIGSTOP)
        for pid in children_of(sshd):
            os.kill(pid, signal.SIGKILL)
        run.cancel()
        assert run.wait(300, progress=False).state is RunState.CANCELLED
        os.kill(sshd, signal.SIGCONT)
