"""Faults of the keeper's own resources (descriptors, threads, folders) cost no other run."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.smalldisk import small_disk
from tests.support.runstores import decisions_in
from tests.support.takeover import counting, exact, kill_keeper, printed, under_another_keeper
from workbench import Cluster, LocalPods, PodSpec, Run
from workbench.base.errors import RunError
from workbench.base.files import load_json
from workbench.base.messages.lines import to_line
from workbench.base.messages.wire import ask
from workbench.base.process import find
from workbench.client.takeover import take_over
from workbench.rundir.figures.samples import SampleTail
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import register
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two pods that every fault leaves usable, under one keeper after another."""
    path = tmp_path_factory.mktemp("resources") / "c"
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=path, warm=False) as cluster:
        yield cluster


@contextmanager
def no_descriptor(pid: int) -> Iterator[None]:
    """Let a process open nothing more for some time; with a lower limit it could not even poll."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def answers(cluster: Cluster) -> bool:
    try:
        return bool(ask(ClusterPaths(cluster.path).socket, {"op": "status"}, timeout_s=2.0))
    except RunError:
        return False


@pytest.mark.long
def test_a_keeper_without_descriptors_for_some_seconds_answers_again_and_loses_no_line(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")
    run = counting(cluster, "--lines", "500", "--gate", str(gate))
    world.until(lambda: all(" line 49" in printed(run, rank) for rank in range(2)), 60)
    world.until(
        lambda: list(run.paths.tensorboard.glob("events.out.tfevents.*")), 60
    )  # its library is loaded
    without_descriptors(world, cluster, lambda: gate.write_text("1" * 5))
    assert run.state is RunState.RUNNING
    kill_keeper(cluster)  # the pods are no children of the next keeper
    Cluster.attach(cluster.path)
    world.until(lambda: all(" line 249" in printed(run, rank) for rank in range(2)), 60)
    without_descriptors(world, cluster, lambda: gate.write_text("1" * 10))
    result = world.ended(run, 120)
    result.raise_for_status()
    assert result.message == "all ranks finished", "nothing is missing, and no disk was full"
    exact(run, 500)
    endless = counting(cluster, "--until", str(tmp_path / "never"))
    world.until(lambda: " line 5" in printed(endless, 1), 60)
    without_descriptors(world, cluster, lambda: None)
    endless.cancel()
    ended = world.ended(endless)
    assert ended.state is RunState.CANCELLED, ended.message
    assert "incomplete" not in ended.message, "a shortage that has ended leaves nothing behind"


def without_descriptors(world: World, cluster: Cluster, meanwhile: Callable[[], object]) -> None:
    """Take a keeper's descriptors while something happens, and see that it answers afterwards."""
    log = ClusterPaths(cluster.path).keeper_log
    known = len(log.read_text())
    with no_descriptor(cluster_status(cluster.path).pid or 0):
        meanwhile()
        for _ in range(3):
            answers(cluster)  # each takes a descriptor, where there is one
        # Some hundred lines that cannot be written, and a look at the pods.
        world.until(lambda: "Too many open files" in log.read_text()[known:], 60)
        time.sleep(3.0)
    world.until(lambda: answers(cluster), 60)


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Take the last byte of a disk."""
    with (disk / "ballast").open("ab", buffering=0) as ballast:
        for size in (1 << 16, 1 << 8, 1):
            try:
                while True:
                    ballast.write(bytes(size))
            except OSError:
                continue


@as_root
def test_a_queued_run_whose_disk_becomes_read_only_ends_alone(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    ends = [tmp_path / "a", tmp_path / "b"]
    running = [
        world.submit("beat.py", "--until", str(end), cluster=cluster, pods=1) for end in ends
    ]
    for run in running:
        world.beats(run, 1)
    with small_disk(tmp_path / "disk", "8m") as disk:
        poor = world.submit("beat.py", "--lines", "3", cluster=cluster, pods=1, into=disk / "run")
        behind = world.submit("beat.py", "--lines", "3", cluster=cluster, pods=1)
        read_only(disk)
        ends[1].touch()  # the poor run was handed the first pod, and its turn comes on the second
        world.ended(running[1]).raise_for_status()
        result = poor.wait(300, progress=False)
        assert result.state is RunState.FAILED
        assert "Read-only file system" in result.message
        world.ended(behind).raise_for_status()
        assert (cluster.phase, running[0].state) == ("ready", RunState.RUNNING)
        assert Run.load(poor.path).result.message == result.message, (
            "the cluster's directory has the result"
        )
        ends[0].touch()
        world.ended(running[0]).raise_for_status()


@pytest.mark.long
@as_root
@pytest.mark.parametrize("harm", [fill, read_only])
def test_another_keeper_takes_over_though_the_disk_of_one_run_takes_nothing(
    world: World, cluster: Cluster, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")
    healthy = counting(cluster, "--lines", "100", "--gate", str(gate), pods=1)
    with small_disk(tmp_path / "disk", "4m") as disk:
        poor = world.submit(
            "count.py",
            "--lines",
            "100",
            "--gate",
            str(gate),
            cluster=cluster,
            pods=1,
            into=disk / "run",
        )
        world.until(lambda: all(" line 49" in printed(run, 0) for run in (healthy, poor)), 60)
        harm(disk)
        kill_keeper(cluster)
        assert Run.load(healthy.path).state is not RunState.LOST
        gate.write_text("11")
        result = poor.wait(300, progress=False)
        world.nothing_left(poor)
        if harm is fill:  # it needs no room to continue
            assert (result.state, "the disk is full" in result.message) == (
                RunState.SUCCEEDED,
                True,
            )
        else:
            assert (result.state, "Read-only file system" in result.message) == (
                RunState.FAILED,
                True,
            )
        world.ended(healthy).raise_for_status()
        exact(healthy, 100, ranks=1)
        assert cluster.phase == "ready"
        world.ended(counting(cluster, "--lines", "3")).raise_for_status()


@pytest.mark.long
@as_root
def test_a_disk_full_for_a_while_and_then_another_keeper_leave_every_event_once(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")
    with small_disk(tmp_path / "disk", "4m") as disk:
        run = world.submit(
            "count.py", "--lines", "200", "--gate", str(gate), cluster=cluster, into=disk / "run"
        )
        world.until(lambda: all(" line 49" in printed(run, rank) for rank in range(2)), 60)
        fill(disk)
        gate.write_text("11")
        time.sleep(2)  # the keeper sees 50 lines, and the pause after a failed write grows
        (disk / "ballast").unlink()
        gate.write_text("111")
        # The new events are written before the log is read again from where the log ends.
        world.until(lambda: len(list(run.events())) > 220, 60)
        kill_keeper(cluster)
        gate.write_text("1111")
        run = Run.load(run.path)
        result = world.ended(run)
        assert result.raise_for_status().message == "all ranks finished"
        exact(run, 200)
        numbers = {}
        for event in run.events():
            assert event.attempt == 0
            numbers.setdefault(event.rank, []).append(event.offset)
        assert [len(numbers[rank]) for rank in range(2)] == [200, 200]
        assert all(offsets == sorted(set(offsets)) for offsets in numbers.values())
        samples, _ = SampleTail(run.paths.samples).read()
        assert {sample.pod for sample in samples} == {"pod-0", "pod-1"}


FAULTY = """
import sys
from pathlib import Path
from workbench.keeper import keeper
from workbench.keeper.run_queue import RunQueue
begin_next = RunQueue._begin_next
def faulty(self):
    if Path(sys.argv[2]).exists():
        raise ValueError("a mistake of the keeper")
    return begin_next(self)
RunQueue._begin_next = faulty
sys.exit(keeper.main([sys.argv[1], "--takes-over"]))
"""


@pytest.mark.long
def test_a_keeper_that_ends_of_its_own_error_leaves_its_pods_to_another(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")  # the run goes on until the faulty keeper has ended
    run = counting(cluster, "--lines", "300", "--gate", str(gate))
    world.until(lambda: " line 49" in printed(run, 1), 60)
    mistake = tmp_path / "mistake"
    with under_another_keeper(cluster, FAULTY, str(mistake)) as keeper:
        world.until(lambda: cluster_status(cluster.path).alive and cluster.phase == "ready", 60)
        mistake.touch()
        assert keeper.wait(300) == 1
    assert find(keeper.pid) is None
    assert load_json(ClusterPaths(cluster.path).state)["phase"] == "lost"
    words = "the keeper ended because of an internal error: ValueError: a mistake of the keeper"
    assert cluster.message == words
    assert run.state is RunState.LOST
    assert words in run.message
    gate.write_text("1" * 6)
    world.ended(Run.load(run.path)).raise_for_status()
    exact(run, 300)
    assert cluster.phase == "ready"


DIES_IN_CLEAR = """
import os, signal, sys
from workbench.keeper import keeper
from workbench.keeper.run import runner
clear = runner.clear
def dying(link, pod, **options):
    clear(link, pod, **options)
    if pod.root.parent.parent.name == "pod-1":
        os.kill(os.getpid(), signal.SIGKILL)
runner.clear = dying
sys.exit(keeper.main([sys.argv[1], "--takes-over"]))
"""


def test_a_job_that_is_submitted_while_a_keeper_takes_over_waits_for_it(
    world: World, cluster: Cluster
) -> None:
    kill_keeper(cluster)
    take_over(cluster.path)
    assert cluster.phase == "starting"
    run = counting(cluster, "--lines", "5")
    world.ended(run).raise_for_status()
    exact(run, 5)


@pytest.mark.long
def test_a_run_whose_pods_are_cleared_has_its_result_already(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")  # the first keeper does not see the end
    run = counting(cluster, "--lines", "200", "--gate", str(gate))
    world.until(lambda: " line 49" in printed(run, 1), 60)
    with under_another_keeper(cluster, DIES_IN_CLEAR) as keeper:
        gate.write_text("1" * 4)
        keeper.wait(300)
    assert list((cluster.path / "pods").glob(f"pod-1/runs/{run.id}")) == []
    assert run.state is RunState.SUCCEEDED
    assert Cluster.attach(cluster.path).phase == "ready"
    assert run.result.message == "all ranks finished"
    exact(run, 200)


FAILS_SLOWLY = """
import sys, time
from workbench.keeper import keeper
serve = keeper.Keeper.serve
def slow(self):
    result = serve(self)
    time.sleep(3)
    return result
keeper.Keeper.serve = slow
sys.exit(keeper.main([sys.argv[1]]))
"""


@pytest.mark.long
def test_a_start_that_failed_keeps_its_reason_when_its_notebook_goes(
    world: World, tmp_path: Path
) -> None:
    paths = ClusterPaths(tmp_path / "c")
    paths.root.mkdir(mode=0o700)
    with socket.create_server(("127.0.0.2", 0)) as taken:
        spec = Cluster(
            LocalPods(port=taken.getsockname()[1]), PodSpec(cpus=1), path=paths.root
        ).spec
        register(paths, spec.to_dict())
        command = [sys.executable, "-c", FAILS_SLOWLY, str(paths.root)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as keeper:
            assert keeper.stdin is not None
            keeper.stdin.write(to_line(spec.to_dict()))
            keeper.stdin.flush()
            world.until(lambda: cluster_status(paths.root).phase == "failed", 60)
            before = cluster_status(paths.root).message
            keeper.stdin.close()
            keeper.wait(300)
    assert (cluster_status(paths.root).phase, cluster_status(paths.root).message) == (
        "failed",
        before,
    )
    assert "port" in before


def guardian_of(cluster: Cluster, number: int) -> int:
    return int(str(load_json(Path(cluster.pods[number].root) / "guardian.json")["pid"]))


@pytest.mark.long
def test_a_keeper_that_is_ended_while_it_replaces_a_pod_leaves_nothing(
    world: World, tmp_path: Path
) -> None:
    cluster = Cluster(
        LocalPods(), PodSpec(cpus=1), count=3, path=tmp_path / "c", warm=False
    ).start()
    run = counting(cluster, "--until", str(tmp_path / "never"), restarts=1)
    world.until(lambda: all(" line 5" in printed(run, rank) for rank in range(3)), 60)
    log = ClusterPaths(cluster.path).keeper_log
    os.kill(guardian_of(cluster, 2), signal.SIGKILL)
    world.until(lambda: "looking for replacements" in log.read_text(), 60)
    keeper = cluster_status(cluster.path).pid or 0
    os.kill(keeper, signal.SIGTERM)
    world.until(lambda: find(keeper) is None, 120)
    here = str(cluster.path)

    def left() -> list[tuple[int, list[str]]]:
        words = ((p, [*p.argv, *p.environ.values()]) for p in world.processes())
        return [(p.pid, p.argv) for p, each in words if any(here in word for word in each)]

    world.until(lambda: not left(), 30, every_s=0.2, why=left)
    assert list((cluster.path / "pods").glob("pod-?")) == []
    assert not ClusterPaths(cluster.path).identity.exists()
    assert cluster.phase == "closed"


DIES_IN_RESTART = """
import os, signal, sys
from workbench.keeper import keeper
from workbench.keeper.run import restart
make_ready = restart._make_ready
def dying(context, link, **options):
    make_ready(context, link, **options)
    os.kill(os.getpid(), signal.SIGKILL)
restart._make_ready = dying
sys.exit(keeper.main([sys.argv[1], "--takes-over"]))
"""


@pytest.mark.long
def test_a_restart_whose_keeper_dies_is_done_by_another_keeper_and_counts_once(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")  # no rank ends before its pod
    run = counting(cluster, "--lines", "300", "--gate", str(gate), restarts=2)
    world.until(lambda: all(" line 49" in printed(run, rank) for rank in range(2)), 60)
    pod = guardian_of(cluster, 1)
    with under_another_keeper(cluster, DIES_IN_RESTART) as keeper:
        os.kill(pod, signal.SIGKILL)
        gate.write_text("1" * 6)
        try:
            assert keeper.wait(300) == -signal.SIGKILL
        finally:
            keeper.kill()
    result = Run.load(run.path).wait(300, progress=False).raise_for_status()
    (restart,) = result.restarts
    assert restart.what == "pod-1 was lost"
    assert all(f"rank {rank} line 299\n" in printed(run, rank) for rank in range(2))

    def made() -> list[tuple[str, int]]:
        return [
            (each.what, each.attempt)
            for each in decisions_in(ClusterPaths(cluster.path).store)
            if each.run == run.id
            and each.what in (DecisionKind.STAGED, DecisionKind.RESTARTED, DecisionKind.ENDED)
        ]

    # The row of the end follows the result.
    world.until(lambda: ("ended", 2) in made(), 60)
    assert made() == [("staged", 1), ("restarted", 2), ("staged", 2), ("ended", 2)]


@pytest.mark.long
def test_a_run_with_restarts_outlives_a_pod_and_its_keeper_that_die_together(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")  # no rank ends before its pod
    run = counting(cluster, "--lines", "300", "--gate", str(gate), restarts=2)
    world.until(lambda: all(" line 49" in printed(run, rank) for rank in range(2)), 60)
    pod = guardian_of(cluster, 1)
    kill_keeper(cluster)
    os.kill(pod, signal.SIGKILL)
    gate.write_text("1" * 6)
    result = run.wait(300, progress=False).raise_for_status()
    (restart,) = result.restarts
    assert restart.what == "pod-1 was lost"
    assert printed(run, 0).count("rank 0 line 20\n") == 2
    assert "rank 1 line 299\n" in printed(run, 1)
