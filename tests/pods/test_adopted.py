"""A killed keeper is replaced wherever pods come from: its run loses nothing; nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.cmlplace import CMLPlace
from tests.fakes.kubeplace import KubernetesPlace
from tests.fakes.slurmplace import SlurmPlace
from tests.fakes.sshhosts import HostsPlace
from tests.pods.conftest import PLACES, Platform, on_pods
from tests.support.poll import until
from tests.support.takeover import counting, exact, kill_keeper, printed
from workbench import Cluster, PodSpec, Run
from workbench.pods.cml.pods import IDS
from workbench.pods.notes import read_note
from workbench.pods.pod import LaunchContext, Pod
from workbench.rundir.paths import ClusterPaths

pytestmark = [pytest.mark.slow, pytest.mark.long]
LINES = 100


@pytest.fixture(
    params=[kind for kind in PLACES if kind != "local"]
)  # those are tried in tests/faults
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Platform]:
    with PLACES[request.param](tmp_path / "place") as made:
        yield made


def test_another_keeper_goes_on_there_and_leaves_nothing(place: Platform, tmp_path: Path) -> None:
    options = {"count": 2, "warm": False, "path": tmp_path / "cluster", "lease_s": 60.0}
    with Cluster(place.backend(), PodSpec(), **options) as cluster:  # type: ignore[arg-type]
        run, end = counting_until_told(cluster, tmp_path / "adopted")
        kill_keeper(cluster)
        adopted, pods = Run.load(run.path), cluster.pods
        log = ClusterPaths(cluster.path).keeper_log
        until(lambda: "taking over from a keeper that died" in log.read_text())
        end.touch()
        adopted.wait(300, progress=False).raise_for_status()
        exact(run, LINES)
        assert log.read_text().count("taking over from a keeper that died") == 1
        # The launcher finds the pods where they are now;
        # mpirun is refused where they cannot connect back.
        launcher = "pdsh" if any(pod.ssh_address for pod in cluster.pods) else "openmpi"
        again = counting(cluster, "--lines", "3", pods=2, launcher=launcher)
        again.wait(300, progress=False).raise_for_status()
        exact(again, 3)
        attached = Cluster.attach(cluster.path)
        assert {pod.phase for pod in attached.pods} == {"Running"}
        assert attached.runs[0].result.raise_for_status().left_processes == 0
        # On Kubernetes the first pod owns the others.
        numbers = {KubernetesPlace: [1, 0], HostsPlace: [1]}.get(type(place), [0])
        lost = [losing(place, attached, number, tmp_path / f"lost-{number}") for number in numbers]
    assert on_pods([*pods, *lost]) == []
    if place.owns_daemons:  # nobody can tidy up a host that is gone
        assert place.left(LaunchContext(cluster_id="", directory=cluster.path, public_key="")) == []


def counting_until_told(cluster: Cluster, end: Path, **more: object) -> tuple[Run, Path]:
    """Start a run whose ranks print lines and wait for a file; return in the middle of the lines.

    The lines that follow have no keeper, or no pod, to be printed to.
    """
    run = counting(cluster, "--lines", f"{LINES}", "--until", str(end), pods=2, **more)
    until(
        lambda: all(" line 20" in printed(run, rank) for rank in (0, 1)),
        why=lambda: run.message,
    )
    return run, end


def losing(place: Platform, cluster: Cluster, number: int, end: Path) -> Pod:
    """Have a run lose a pod and continue with another, or without; return the lost pod."""
    run, _ = counting_until_told(cluster, end, restarts=1)
    pod = cluster.pods[number]
    lose(place, pod, cluster.path)
    until(
        lambda: any(event.kind == "restarted" for event in run.events()),
        why=lambda: run.message,
    )
    end.touch()
    result = run.wait(300, progress=False).raise_for_status()
    (restart,) = result.restarts
    ranks = 2 if place.owns_daemons else 1  # there is no other host in the place of one
    # On Kubernetes the others go with the first pod, or a moment later.
    all_go = (
        ["pod-0 and pod-1 were lost"] if isinstance(place, KubernetesPlace) and number == 0 else []
    )
    assert restart.what in [f"{pod.name} was lost", *all_go]
    assert (restart.pods, restart.ranks, restart.step) == (ranks, ranks, None)
    assert (restart.lost_step or 0) >= 20
    assert restart.why
    assert result.message == f"all ranks finished; {restart}"
    assert [host.pod for host in result.hosts] == [f"pod-{rank}" for rank in range(ranks)]
    for rank in range(ranks):
        log = printed(run, rank)
        assert log.count(f"rank {rank} line 20\n") == 2
        assert f"rank {rank} line {LINES - 1}\n" in log
        assert "\0" not in log
    if ranks == 2:
        after = counting(cluster, "--lines", "3", pods=2)
        after.wait(300, progress=False).raise_for_status()
        exact(after, 3)
    return pod


def lose(place: Platform, pod: Pod, folder: Path) -> None:
    match place:
        case KubernetesPlace():
            place.do(place.kubelet.delete(pod.name))
        case CMLPlace():
            place.api.stop_workers(read_note(folder, IDS)[pod.name])
        case SlurmPlace():
            place.end_step(pod.name)
        case HostsPlace():
            place.hosts[int(pod.name.removeprefix("pod-"))].die()
            for process in on_pods([pod]):
                process.send(signal.SIGKILL)
