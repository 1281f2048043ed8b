"""A killed keeper, and its successor: no line and no metric is lost, and there are never two."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.sentences import says, sentence
from tests.support.smalljobs import small_job
from tests.support.takeover import (
    COUNT,
    counting,
    exact,
    kill_keeper,
    printed,
    under_another_keeper,
)
from workbench import Cluster, LocalPods, PodSpec, Run
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import read_json, write_json
from workbench.base.messages.wire import ask
from workbench.pods.bootstrap.process import AdoptedProcess
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
long = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two pods whose keeper one test after another kills; each leaves another one in its place."""
    with started(tmp_path_factory.mktemp("taken") / "c") as cluster:
        yield cluster


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    with started(tmp_path / "c") as cluster:
        yield cluster


def started(path: Path, **options: object) -> Cluster:
    return described(path, **options).start()


def described(path: Path, **options: object) -> Cluster:
    return Cluster(
        LocalPods(), PodSpec(cpus=1), path=path, **{"count": 2, "warm": False, **options}
    )  # type: ignore[arg-type]


def keepers_of(world: World, cluster: Cluster) -> list[int]:
    return [
        p.pid
        for p in world.processes()
        if "workbench.keeper.keeper" in p.argv and str(cluster.path) in p.argv
    ]


def both_printed(run: Run, line: int) -> bool:
    return all(f" line {line}" in printed(run, rank) for rank in range(2))


# Other tests load the run, attach to the cluster or start one on its path.
WAYS: tuple[Callable[[Cluster, Run], object], ...] = (
    lambda _cluster, run: run.show(),
    lambda cluster, _run: counting(cluster, "--lines", "3"),
    lambda _cluster, run: run.wait(300, progress=False),
)


def test_another_keeper_goes_on_with_a_run_and_nothing_of_it_is_lost(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    pods = cluster.pods
    lines = 50 * (len(WAYS) + 1)
    gate = tmp_path / "gate"
    gate.write_text("1")
    run = counting(cluster, "--lines", f"{lines}", "--gate", str(gate))
    waiting = counting(cluster, "--lines", "3")
    before = set()
    for number, take_over in enumerate(WAYS, start=1):
        world.until(lambda number=number: both_printed(run, 50 * number - 1), 60)
        before.add(kill_keeper(cluster))
        gate.write_text("1" * (number + 1))  # what is printed now waits for the next keeper
        assert (run.state, cluster.phase) == (RunState.LOST, "lost")
        take_over(cluster, run)
        assert run.state is not RunState.LOST
    submitted = cluster.runs[-1]
    for each in (run, waiting, submitted):
        world.ended(each).raise_for_status()
    exact(run, lines)
    exact(waiting, 3)
    exact(submitted, 3)
    assert [pod.root for pod in cluster.pods] == [pod.root for pod in pods]
    (keeper,) = keepers_of(world, cluster)
    assert keeper not in before
    assert cluster.phase == "ready"
    duration_s = run.result.duration_s
    assert duration_s is not None
    assert duration_s > lines * 0.02, "it is counted from the start under the first keeper"


DIES_IN_LAUNCH = """
import os, signal, sys
from workbench.keeper import keeper
from workbench.rundir.journal import Journal
state = Journal.state
def dying(self, new, message=""):
    state(self, new, message)
    if message == "starting ranks":
        os.kill(os.getpid(), signal.SIGKILL)
Journal.state = dying
sys.exit(keeper.main([sys.argv[1], "--takes-over"]))
"""


@long
def test_a_run_outlives_keepers_that_die_while_files_travel_and_ranks_start(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    # Without these files, which are sent and brought back, these phases take 20 ms and are missed.
    script = Path(shutil.copy(COUNT, tmp_path))
    (tmp_path / "sent").write_bytes(os.urandom(48 << 20))
    run = counting(cluster, "--lines", "20", "--leaves-mib", "48", path=script)
    world.until(lambda: "sending" in run.message, 60)
    with under_another_keeper(cluster, DIES_IN_LAUNCH) as keeper:
        assert not run.paths.result.exists()
        assert keeper.wait(300) == -signal.SIGKILL
    assert run.paths.state.exists() and "starting ranks" in run.paths.state.read_text()
    Run.load(run.path)
    world.until(lambda: "bringing" in run.message, 60)
    kill_keeper(cluster)
    assert not run.paths.result.exists()
    Run.load(run.path)
    world.ended(run).raise_for_status()
    exact(run, 20)


@long
@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_a_launcher_outlives_its_keeper_and_is_followed_on(
    world: World, cluster: Cluster, launcher: str
) -> None:
    run = counting(cluster, "--lines", "150", launcher=launcher)
    world.until(lambda: " line 20" in world.log(run, 1), 60)
    kill_keeper(cluster)
    world.ended(Run.load(run.path)).raise_for_status()
    exact(run, 150)


def test_a_run_that_was_asked_to_end_ends_under_the_next_keeper(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    run = counting(cluster, "--until", str(tmp_path / "never"))
    world.until(lambda: both_printed(run, 99), 60)
    os.kill(
        cluster_status(cluster.path).pid or 0, signal.SIGSTOP
    )  # it takes the wish down and comes no further
    write_json(run.paths.state, {**read_json(run.paths.state), "wish": "cancel"})
    kill_keeper(cluster)
    assert world.ended(Run.load(run.path)).state is RunState.CANCELLED
    exact(run, 100)


@long
def test_ranks_that_ended_well_after_their_keeper_are_a_success(
    world: World, tmp_path: Path
) -> None:
    """The lease is over; both agents have ended, and the daemon of the pod that nobody uses."""
    with started(tmp_path / "c", lease_s=8) as cluster:
        run = counting(cluster, "--lines", "40")
        world.until(lambda: " line 5" in world.log(run, 1), 60)
        with SSHConnection(cluster.pods[1], Identity(ClusterPaths(cluster.path).identity)):
            kill_keeper(cluster)
            left = [AdoptedProcess(Path(pod.root)) for pod in cluster.pods]
            world.until(lambda: [process.poll() for process in left] == [0, None], 60)
            world.ended(Run.load(run.path)).raise_for_status()
            exact(run, 40)
        another = counting(Cluster.attach(cluster.path), "--lines", "5")
        another.wait(300, progress=False)
        exact(another, 5)


@long
def test_ranks_that_their_lease_ended_are_said_to_be(world: World, tmp_path: Path) -> None:
    with started(tmp_path / "c", lease_s=8) as cluster:
        run = counting(cluster, "--until", str(tmp_path / "never"))
        world.until(lambda: " line 5" in world.log(run, 1), 60)
        kill_keeper(cluster)
        world.until(lambda: not nothing_but_keepers(world, cluster), 60, every_s=0.2)
        result = world.ended(Cluster.attach(cluster.path).runs[0])
        assert result.state is RunState.FAILED
        assert says(result.message, "no new keeper came within the lease of the pod's agent")
        assert len(world.log(run, 1).splitlines()) > 10, (
            "what was printed after its keeper died is here"
        )


def nothing_but_keepers(world: World, cluster: Cluster) -> list[int]:
    here = f"{cluster.path}{os.sep}pods"
    found = [
        p.pid
        for p in world.processes()
        if any(here in word for word in [*p.argv, *p.environ.values()])
    ]
    return found + [pid for pid in psutil.pids() if _works_in(pid, here)]


def _works_in(pid: int, folder: str) -> bool:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/cwd").readlink()).startswith(folder)
    return False


@long
def test_a_run_is_resumed_from_what_its_pods_keep_after_their_keeper_died(
    world: World, shared_pods: Cluster, tmp_path: Path
) -> None:
    options = {"max_steps": 400, "save_steps": 2, "per_device_train_batch_size": 2}
    job = small_job(60, 4, technique="zero1", **options)
    cluster = started(tmp_path / "c", lease_s=8, warm=True)
    run = cluster.submit(job)
    world.until(lambda: (run.progress.step or 0) >= 4, 120)
    kill_keeper(cluster)
    world.until(lambda: not nothing_but_keepers(world, cluster), 60, every_s=0.2)
    # The ranks trained on until their lease was over;
    # no keeper has read what they saved meanwhile.
    parts = (cluster.path / "pods").glob(f"pod-*/runs/{run.id}/checkpoints/step-*")
    saved = [int(part.name.removeprefix("step-")) for part in parts]
    more = shared_pods.submit(job.replace(resume=str(run.path), max_steps=max(saved) + 2))
    result = more.wait(300, progress=False).raise_for_status()
    assert result.resumed_step is not None
    assert result.resumed_step >= max(saved) - 2
    assert run.result.state is RunState.FAILED
    cluster.close()
    assert not ClusterPaths(cluster.path).identity.exists()


LOAD = "import sys; from workbench import Run; print(Run.load(sys.argv[1]).state)"


@long
def test_many_who_take_over_at_once_start_one_keeper(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    log = ClusterPaths(cluster.path).keeper_log
    run = counting(cluster, "--lines", "200", "--until", str(tmp_path / "end"))
    world.until(lambda: " line 5" in world.log(run, 1), 60)
    before = len(log.read_text())
    kill_keeper(cluster)
    command = [sys.executable, "-c", LOAD, str(run.path)]
    notebooks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {notebook.communicate(timeout=300)[0].strip() for notebook in notebooks} <= {
        "starting",
        "running",
    }
    world.until(
        lambda: len(keepers_of(world, cluster)) == 1, 20, every_s=0.2
    )  # who found another one ends
    (tmp_path / "end").touch()
    world.ended(run).raise_for_status()
    exact(run, 200)
    assert log.read_text()[before:].count("starting: taking over from a keeper that died") == 1


@long
def test_nothing_is_started_for_what_is_not_ones_own_or_not_in_need(
    world: World, cluster: Cluster
) -> None:
    run = counting(cluster, "--lines", "3")
    world.ended(run).raise_for_status()
    going = counting(cluster, "--lines", "400")
    world.until(lambda: " line 3" in world.log(going, 1), 60)
    kill_keeper(cluster)
    assert Run.load(run.path).state is RunState.SUCCEEDED, "a run that ended needs no keeper"
    copy = cluster.path.parent / "copy"
    shutil.copytree(cluster.path, copy, ignore=shutil.ignore_patterns("*.sock", "pods"))
    write_json(copy / "runs" / going.path.name / "run.json", {"id": going.id, "cluster": str(copy)})
    assert Run.load(copy / "runs" / going.path.name).state is RunState.LOST
    elsewhere = cluster.path.parent / "elsewhere"
    shutil.copytree(going.path, elsewhere)
    assert Run.load(elsewhere).state is RunState.LOST, "the cluster knows no run there"
    os.chown(going.paths.info, 12345, -1)
    assert Run.load(going.path).state is RunState.LOST
    os.chown(going.paths.info, os.getuid(), -1)
    os.chown(ClusterPaths(cluster.path).store, 12345, -1)
    assert Run.load(going.path).state is RunState.LOST
    with pytest.raises(
        RunError, match=sentence("belongs to another user, or others may write to it", "store.db")
    ):
        Cluster.attach(cluster.path)
    os.chown(ClusterPaths(cluster.path).store, os.getuid(), -1)
    assert keepers_of(world, cluster) == []
    with pytest.raises(ConfigError, match=sentence("holds a cluster that was asked to be another")):
        described(cluster.path, count=3).start()
    world.ended(Run.load(going.path)).raise_for_status()
    exact(going, 400)


@long
def test_a_cluster_whose_keeper_died_is_closed_and_its_run_has_a_result(
    world: World, tmp_path: Path
) -> None:
    cluster = started(tmp_path / "c")
    run = counting(cluster, "--until", str(tmp_path / "never"))
    world.until(lambda: both_printed(run, 99), 60)
    kill_keeper(cluster)
    cluster.close()
    assert world.ended(run).state is RunState.CANCELLED
    exact(run, 100)
    world.until(lambda: not nothing_but_keepers(world, cluster), 20, every_s=0.2)
    assert not ClusterPaths(cluster.path).identity.exists()


BEGUN: dict[str, Callable[[ClusterPaths], object]] = {
    "spawned": lambda paths: cluster_status(paths.root).pid,
    "with its key": lambda paths: (paths.identity / "id_ed25519").exists(),
    "with a pod": lambda paths: any((paths.root / "pods").glob("pod-*/guardian.json")),
}
START = (
    "import sys; from workbench import Cluster, LocalPods; "
    "Cluster(LocalPods(), count=2, path=sys.argv[1]).start()"
)


def test_a_keeper_that_dies_while_its_cluster_starts_is_said_and_leaves_nothing(
    world: World, tmp_path: Path
) -> None:
    dies_in_a_start(world, ClusterPaths(tmp_path / "c"), "with a pod")


@long
def test_a_cluster_starts_where_the_keepers_of_earlier_starts_died(
    world: World, tmp_path: Path
) -> None:
    paths = ClusterPaths(tmp_path / "c")
    for moment in ("spawned", "with its key"):
        dies_in_a_start(world, paths, moment)
    with described(paths.root) as again:
        assert again.phase == "ready"


def dies_in_a_start(world: World, paths: ClusterPaths, moment: str) -> None:
    """Kill the keeper of a cluster that starts, and see that this is said and nothing is left."""
    kernel = subprocess.Popen(
        [sys.executable, "-c", START, str(paths.root)], stderr=subprocess.PIPE, text=True
    )
    world.until(lambda: BEGUN[moment](paths), 120, every_s=0.002)
    kernel.send_signal(
        signal.SIGSTOP
    )  # else it would tidy up itself; its death first would end the keeper
    kill_keeper(Cluster(LocalPods(), path=paths.root))
    kernel.kill()
    kernel.communicate(timeout=300)
    assert cluster_status(paths.root).phase == "lost"
    with pytest.raises(
        RunError,
        match=r"closed: its keeper died before its pods were there, and what it left has been",
    ):
        Cluster.attach(paths.root)
    nobody = Cluster(LocalPods(), path=paths.root)
    world.until(lambda: not nothing_but_keepers(world, nobody), 20, every_s=0.2)
    assert not list((paths.root / "pods").glob("pod-?"))
    assert not paths.identity.exists()


@long
def test_a_keeper_that_dies_while_it_closes_is_said_and_leaves_nothing(
    world: World, tmp_path: Path
) -> None:
    cluster = started(tmp_path / "c")
    dies_in_closing(world, cluster, lambda: described(cluster.path).start(), "start")
    assert cluster.phase == "ready"
    dies_in_closing(world, cluster, lambda: refused(cluster), "attach")
    assert (cluster.phase, cluster.message) == ("closed", DIED_IN_CLOSING)
    world.until(lambda: not nothing_but_keepers(world, cluster), 20, every_s=0.2)
    assert not ClusterPaths(cluster.path).identity.exists()


DIED_IN_CLOSING = "its keeper died while it closed the cluster"


def refused(cluster: Cluster) -> None:
    words = sentence(DIED_IN_CLOSING) + sentence("and what it left has been removed")
    with pytest.raises(RunError, match=words):
        Cluster.attach(cluster.path)


def dies_in_closing(
    world: World, cluster: Cluster, take_over: Callable[[], object], way: str
) -> None:
    """Kill the keeper of a cluster that closes, and see what its run says after a takeover."""
    run = counting(cluster, "--until", str(cluster.path / "never"))
    world.until(lambda: both_printed(run, 99), 60)
    ask(ClusterPaths(cluster.path).socket, {"op": "close"})
    kill_keeper(cluster)
    assert cluster.phase == "lost"
    began = time.monotonic()
    take_over()
    world.measured("13", f"keeper dead in closing -> words by {way}", time.monotonic() - began, 5)
    result = run.wait(300, progress=False)
    assert (result.state, result.message) == (RunState.CANCELLED, DIED_IN_CLOSING)
    assert (run.state, run.message) == (result.state, result.message)
    assert not run.paths.reserve.exists()
    world.nothing_left(run, 60)


def restart(world: World, cluster: Cluster) -> None:
    """End all of a cluster at once, as if this were under an earlier start of the machine."""
    mine = {os.getpid(), os.getppid()}

    def left() -> list[int]:
        here = f"{cluster.path}"
        each = (
            (p.pid, [*p.argv, *p.environ.values()]) for p in world.processes() if p.pid not in mine
        )
        return [pid for pid, words in each if any(here in word for word in words)]

    for pid in left():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    world.until(lambda: not left(), 120, every_s=0.2, why=left)
    paths = ClusterPaths(cluster.path)
    for file in (
        paths.state,
        paths.own_state,
        *(cluster.path / "pods").glob("pod-*/guardian.json"),
    ):
        earlier = {
            "boot": "an-earlier-one",
            "pid": os.getpid(),
        }  # its pids are others' by now, and its clocks began anew
        write_json(file, {**read_json(file), **earlier, "start_time": 10**12, "time_s": 10**11})


@long
def test_a_machine_that_was_started_again_is_said_and_what_is_on_disk_stays(
    world: World, own: Cluster
) -> None:
    cluster = own
    began_s = time.time()
    run = counting(cluster, "--until", str(cluster.path / "never"))
    waiting = counting(cluster, "--lines", "3")
    world.until(lambda: both_printed(run, 99), 120)
    restart(world, cluster)
    # The system may hold the lock of a killed keeper for a moment.
    world.until(lambda: (run.state, cluster.phase) == (RunState.LOST, "lost"), 20)
    Run.load(run.path)
    result = world.ended(run, 120)
    assert result.state is RunState.FAILED
    assert says(result.message, "ended with the pod when this machine was rebooted")
    exact(run, 100)
    world.ended(waiting, 120).raise_for_status()
    exact(waiting, 3)
    world.until(lambda: cluster.phase == "ready", 120)
    lasted_s = run.result.duration_s
    assert lasted_s is not None
    assert 0 <= lasted_s <= time.time() - began_s, "clocks of two starts are not mixed"
