"""Hosts that share neither folders nor Python's path with the notebook: every launcher starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.sshhosts import HostsPlace
from workbench.client.cluster import Cluster
from workbench.jobs.script import Script
from workbench.pods.pod import LaunchContext
from workbench.pods.pod_spec import PodSpec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts take root")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsPlace]:
    with HostsPlace(tmp_path_factory.mktemp("apart") / "place") as made:
        yield made


@pytest.fixture(scope="module")
def cluster(place: HostsPlace) -> Iterator[Cluster]:
    path = place.folder.parent / "cluster"
    with Cluster(place.backend(), PodSpec(), count=2, path=path, warm=False) as made:
        yield made
    assert place.left(LaunchContext(cluster_id="", directory=path, public_key="")) == []


@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "openmpi"])
def test_every_launcher_starts_ranks_there(cluster: Cluster, tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "who.py"
    script.write_text(
        "import os, sys\n"
        "print('rank', os.environ['RANK'], "
        f"os.path.exists({str(cluster.path / 'identity')!r}), sys.executable)\n"
    )
    run = cluster.submit(Script(path=str(script), launcher=launcher))
    result = run.wait(300, progress=False)
    assert result.error is None, f"{result.error}\n{run.paths.launcher_log.read_text()}"
    there = str(Path(cluster.pods[0].python))
    assert there != sys.executable
    assert [run.logs(rank) for rank in range(2)] == [
        f"rank {rank} False {there}" for rank in range(2)
    ]
