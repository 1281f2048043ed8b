"""What cannot be read, or does not answer, is not dead: it is named, and nothing replaces it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.sentences import says
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow


def test_a_deleted_state_of_a_live_cluster_never_reads_as_lost(
    world: World, tmp_path: Path
) -> None:
    run = world.beating("--until", str(tmp_path / "end"))
    state = ClusterPaths(world.cluster.path).state
    state.unlink()
    seen: set[str] = set()

    def exists_again() -> bool:
        seen.update({str(run.state), world.cluster.phase})
        return state.exists()

    world.until(exists_again, every_s=0.01)
    assert seen <= {"running", "unknown", "ready"}, seen
    assert (run.state, world.cluster.phase) == (RunState.RUNNING, "ready")
    (tmp_path / "end").touch()
    world.ended(run).raise_for_status()


@pytest.mark.long
def test_a_stopped_keeper_is_shown_with_what_continues_it(world: World, tmp_path: Path) -> None:
    run = world.beating("--until", str(tmp_path / "end"))
    keeper = cluster_status(world.cluster.path).pid or 0
    os.kill(keeper, signal.SIGSTOP)
    try:
        world.until(lambda: "the keeper does not answer since" in run.message, 120)
        assert f"kill -CONT {keeper} continues the keeper" in run.message
        assert says(world.cluster.message, "the keeper does not answer since")
        assert run.state is RunState.RUNNING
    finally:
        os.kill(keeper, signal.SIGCONT)
    world.until(lambda: "does not answer" not in run.message, 60)
    (tmp_path / "end").touch()
    world.ended(run).raise_for_status()
