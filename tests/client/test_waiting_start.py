"""`start(wait=False)`: runs are queued while the pods start, and end with a start that ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from tests.support.takeover import counting
from workbench import Cluster, KubernetesPods, LocalPods, PodSpec, SlurmPods
from workbench.base.errors import ConfigError, RunError
from workbench.pods.place import Place
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.state import RunState

YEAR_S = 365 * 86400


@pytest.mark.parametrize(
    ("place", "given", "expected"),
    [
        (LocalPods(), "auto", 120),
        (KubernetesPods(image="i"), "auto", 120),
        (KubernetesPods(image="i", queue="team"), "auto", YEAR_S),
        (SlurmPods(), "auto", YEAR_S),
        (SlurmPods(), 600, 600),
        (LocalPods(), None, YEAR_S),
    ],
)
def test_a_start_has_no_limit_where_a_queue_has_the_pods(
    place: Place, given: float | None, expected: float
) -> None:
    spec = ClusterSpec(backend=place.to_dict(), start_timeout_s=given)
    assert spec.start_limit_s == expected
    assert ClusterSpec.from_dict(spec.to_dict()) == spec
    # The other pods of a run do not wait for a replacement for hours.
    assert spec.step_limit_s == (given if isinstance(given, int) else 120)


@pytest.mark.parametrize("given", [0, -1, "soon", True])
def test_a_limit_that_means_nothing_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="a number above 0, 'auto' or None"):
        Cluster(LocalPods(), start_timeout_s=given)  # type: ignore[arg-type]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(LocalPods(), PodSpec(), path=tmp_path / "c", warm=False)
    yield made.start(wait=False)
    made.close()


@pytest.mark.slow
def test_runs_wait_for_the_pods_in_order(cluster: Cluster) -> None:
    first = counting(cluster, "--lines=3")
    second = counting(cluster, "--lines=3")
    assert cluster.start() is cluster
    assert cluster.phase == "ready"
    for run in (first, second):
        run.wait(300, progress=False).raise_for_status()
    assert first.result.ended_s <= second.result.started_s


@pytest.mark.slow
def test_a_close_ends_the_waiting_and_the_runs(cluster: Cluster, tmp_path: Path) -> None:
    runs = [counting(cluster, f"--until={tmp_path / 'never'}") for _ in range(2)]
    runs[1].cancel()
    assert runs[1].wait(300, progress=False).state is RunState.CANCELLED
    cluster.close()
    assert cluster.phase == "closed"
    assert runs[0].state is RunState.CANCELLED


def test_a_cluster_that_was_never_started_takes_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=sentence("call start() first")):
        counting(Cluster(LocalPods(), path=tmp_path / "c"))
