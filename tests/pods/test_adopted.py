"""A keeper that is killed is replaced wherever pods come from: its run loses nothing, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from poll import until
from takeover import counting, exact, kill_keeper, printed

from tests.pods.conftest import PLACES, Place, on_pods
from workbench import Cluster, PodSpec, Run
from workbench.pods.pod import LaunchContext
from workbench.rundir.paths import ClusterPaths

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(params=[kind for kind in PLACES if kind != "local"])  # those are tried in tests/faults
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with PLACES[request.param](tmp_path / "place") as made:
        yield made


def test_another_keeper_goes_on_there_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    options = {"count": 2, "warm": False, "path": tmp_path / "cluster"}
    with Cluster(place.backend(), PodSpec(), **options) as cluster:  # type: ignore[arg-type]
        run = counting(cluster, "--lines", "200")
        until(lambda: all(" line 20" in printed(run, rank) for rank in (0, 1)), 120, why=lambda: run.message)
        killed, pods = kill_keeper(cluster), cluster.pods
        Run.load(run.path).wait(120, progress=False).raise_for_status()
        exact(run, 200)
        log = ClusterPaths(cluster.path).keeper_log.read_text()
        assert log.count("taking over from a keeper that died") == 1
        again = counting(cluster, "--lines", "3", launcher="openmpi")  # the launcher finds the pods where they are now
        again.wait(120, progress=False).raise_for_status()
        exact(again, 3)
        assert kill_keeper(cluster) != killed
        attached = Cluster.attach(cluster.path)
        assert {pod.phase for pod in attached.pods} == {"Running"}
        assert attached.runs[0].result.raise_for_status().left_processes == 0
    assert on_pods(pods) == []
    assert place.left(LaunchContext(cluster_id="", directory=cluster.path, public_key="")) == []
