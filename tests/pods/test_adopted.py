"""A killed keeper is replaced wherever pods come from: its run loses nothing; nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from poll import until
from takeover import counting, exact, kill_keeper, printed

from tests.fakes.cmlplace import CMLPlace
from tests.fakes.kubeplace import KubernetesPlace
from tests.fakes.slurmplace import SlurmPlace
from tests.fakes.sshhosts import HostsPlace
from tests.pods.conftest import PLACES, Platform, on_pods
from workbench import Cluster, FineTune, PodSpec, Run
from workbench.pods.cml.pods import IDS
from workbench.pods.notes import read_note
from workbench.pods.pod import LaunchContext, Pod
from workbench.rundir.paths import ClusterPaths

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(
    params=[kind for kind in PLACES if kind != "local"]
)  # those are tried in tests/faults
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Platform]:
    with PLACES[request.param](tmp_path / "place") as made:
        yield made


def test_another_keeper_goes_on_there_and_leaves_nothing(place: Platform, tmp_path: Path) -> None:
    count = 2 if place.owns_daemons else 3  # there are no other hosts in the place of those that go
    options = {"count": count, "warm": False, "path": tmp_path / "cluster", "lease_s": 20.0}
    with Cluster(place.backend(), PodSpec(), **options) as cluster:  # type: ignore[arg-type]
        run = counting(cluster, "--lines", "200", pods=2)
        until(
            lambda: all(" line 20" in printed(run, rank) for rank in (0, 1)),
            120,
            why=lambda: run.message,
        )
        killed, pods = kill_keeper(cluster), cluster.pods
        Run.load(run.path).wait(120, progress=False).raise_for_status()
        exact(run, 200)
        log = ClusterPaths(cluster.path).keeper_log.read_text()
        assert log.count("taking over from a keeper that died") == 1
        # The launcher finds the pods where they are now;
        # mpirun is refused where they cannot connect back.
        launcher = "pdsh" if any(pod.ssh_address for pod in cluster.pods) else "openmpi"
        again = counting(cluster, "--lines", "3", pods=2, launcher=launcher)
        again.wait(120, progress=False).raise_for_status()
        exact(again, 3)
        assert kill_keeper(cluster) != killed
        attached = Cluster.attach(cluster.path)
        assert {pod.phase for pod in attached.pods} == {"Running"}
        assert attached.runs[0].result.raise_for_status().left_processes == 0
        lost = [] if place.owns_daemons else [leaving_out(place, attached)]
        lost += losing(place, attached, 1)
        lost += losing(place, attached, 0) if place.owns_daemons else []
    assert on_pods([*pods, *lost]) == []
    if place.owns_daemons:  # nobody can tidy up a host that is gone
        assert place.left(LaunchContext(cluster_id="", directory=cluster.path, public_key="")) == []


def leaving_out(place: Platform, cluster: Cluster) -> Pod:
    """Have a fine-tuning lose a host; the others continue with its curve; return the lost pod."""
    job = FineTune(
        dataset={"kind": "wikisql-mini", "train_rows": 240, "eval_rows": 4},
        technique="fsdp",
        max_steps=100_000,
        per_device_train_batch_size=4,
        predict_rows=0,
        profile_step=0,
        save_steps=20,
        restarts=1,
    )
    run, pod = cluster.submit(job), cluster.pods[2]
    until(lambda: list(run.paths.checkpoints.glob("step-*")), 120, why=lambda: run.message)
    lose(place, pod, cluster.path)
    until(lambda: losses(run)[1:], 180, why=lambda: run.message)
    until(lambda: max(losses(run)[1]) > max(losses(run)[0]))
    run.stop()
    result = run.wait(120, progress=False)
    (restart,) = result.restarts
    assert (restart.what, restart.pods, restart.ranks, restart.batch) == (
        "pod-2 was lost",
        2,
        2,
        None,
    )
    before, after = losses(run)
    again = before.keys() & after.keys()
    assert min(after) == (restart.step or 0) + 1 > 20
    assert {step: after[step] for step in again} == pytest.approx(
        {step: before[step] for step in again}, rel=1e-4
    )
    assert [host.pod for host in result.hosts] == ["pod-0", "pod-1"]
    return pod


def losses(run: Run) -> list[dict[int, float]]:
    """The curve of each attempt that had a step."""
    curves: list[dict[int, float]] = [{}]
    for event in run.events():
        if event.kind == "restarted":
            curves.append({})
        elif event.kind == "step":
            curves[-1][int(str(event.data["step"]))] = float(str(event.data["loss"]))
    return [curve for curve in curves if curve]


def losing(place: Platform, cluster: Cluster, number: int) -> Sequence[Pod]:
    """Have a run lose a pod and continue with another, or without; return the lost pod."""
    run, pod = counting(cluster, "--lines", "300", pods=2, restarts=1), cluster.pods[number]
    until(
        lambda: all(" line 20" in printed(run, rank) for rank in (0, 1)),
        120,
        why=lambda: run.message,
    )
    lose(place, pod, cluster.path)
    result = run.wait(180, progress=False).raise_for_status()
    (restart,) = result.restarts
    ranks = 2 if place.owns_daemons else 1  # there is no other host in the place of one
    # On Kubernetes the first pod owns the others, which go with it, or a moment later.
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
        assert f"rank {rank} line 299\n" in log
        assert "\0" not in log
    if ranks == 2:
        after = counting(cluster, "--lines", "3", pods=2)
        after.wait(120, progress=False).raise_for_status()
        exact(after, 3)
    return [pod]


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
