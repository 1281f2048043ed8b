"""A run's or cluster's directory made by another person starts, ends and removes nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path

import pytest

from tests.support.kubeconfig import write_kubeconfig
from tests.support.poll import until
from tests.support.runstores import list_runs
from tests.support.sentences import says, sentence
from workbench import Cluster, Run
from workbench.base import entries
from workbench.base.errors import BackendError, ConfigError, PodError, RunError
from workbench.base.files import read_json, write_json
from workbench.base.process import process_start_time
from workbench.base.redact import Redactor
from workbench.client.lifecycle import close_cluster
from workbench.client.takeover import end_broken_off, obstacle
from workbench.keeper.checkpoints import held_checkpoint
from workbench.keeper.requests import OfRun, Request, RequestServer
from workbench.pods.hosts import remote_helper
from workbench.pods.hosts.note import make_folder, note_of
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.ssh.connection import SSHConnection
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import (
    NotRegistered,
    own_runs,
    register,
    registered,
    registration,
)
from workbench.rundir.register.store import KnownRun
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    cluster_status,
    keeper_process,
)

LOCAL = {"kind": "local"}
WAYS: dict[str, Callable[[ClusterPaths], object]] = {
    "load": lambda paths: Run.load(paths.runs / "r1"),
    "show": lambda paths: Run(paths.runs / "r1").show(),
    "attach": lambda paths: Cluster.attach(paths.root),
    "start": lambda paths: Cluster.from_spec(ClusterSpec(backend=LOCAL), path=paths.root).start(),
    "close": lambda paths: close_cluster(
        paths, ClusterSpec(backend=read_json(paths.config)["backend"])
    ),  # type: ignore[arg-type]
}


def given(root: Path, backend: dict[str, object] = LOCAL, **state: object) -> ClusterPaths:
    """A cluster with one run, whose keeper died while it closed, as a colleague might write it."""
    paths = ClusterPaths(root)
    run_at(paths.runs / "r1", "r1", str(root))
    write_json(paths.config, ClusterSpec(backend=backend).to_dict())
    write_json(root / "kubernetes.json", {"base": "wb-c"})
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(300)
    facts = {"phase": "closing", "pid": ended.pid, "start_time": 1, "host": socket.gethostname()}
    write_json(paths.state, {**facts, **state})
    list_runs(paths.root / "store.db", KnownRun(id="r1", path=paths.runs / "r1"))
    return paths


def run_at(root: Path, run_id: str, cluster: str) -> RunPaths:
    root.mkdir(parents=True)
    run = RunPaths(root)
    write_json(run.info, {"id": run_id, "cluster": cluster})
    run.reserve.write_bytes(b"room")
    return run


def own(paths: ClusterPaths) -> ClusterPaths:
    """Make the cluster one that this user started, and whose keeper died."""
    register(paths, read_json(paths.config))
    paths.keeper_lock.touch(0o600)
    write_json(paths.own_state, read_json(paths.state))
    list_runs(paths.store, KnownRun(id="r1", path=paths.runs / "r1"))
    return paths


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["inside", "beside"])
def test_no_program_of_a_given_kubeconfig_runs(tmp_path: Path, way: str, place: str) -> None:
    canary, root = tmp_path / "canary", tmp_path / "c"
    root.mkdir()
    config = write_kubeconfig((root if place == "inside" else tmp_path) / "kubeconfig", canary)
    paths = given(root, {"kind": "kubernetes", "kubeconfig": config})
    before = {path.name: path.read_bytes() for path in paths.root.glob("*.json")}
    try:
        WAYS[way](paths)
    except (RunError, PodError, ValueError) as error:
        assert "holds no cluster that you started" in str(error) or way == "start", error
    assert not canary.exists()
    after = {path.name: path.read_bytes() for path in paths.root.glob("*.json")}
    assert after == before
    assert not RunPaths(paths.runs / "r1").result.exists()


def test_a_given_cluster_says_what_to_do(tmp_path: Path) -> None:
    paths = given(tmp_path / "c")
    assert end_broken_off(paths.root) == ""
    write_json(paths.state, {**read_json(paths.state), "phase": "ready"})
    assert says(obstacle(paths.root), "another person or another machine wrote the folder")
    assert says(obstacle(paths.root), "The folder is only shown. Start a cluster with another path")
    with pytest.raises(
        RunError, match=sentence("another person or another machine wrote the folder")
    ):
        Cluster.attach(paths.root)


def refused(paths: ClusterPaths, reason: str) -> None:
    """Hold that no way into the cluster changes a file, and that each error has the reason."""
    before = {path: path.read_bytes() for path in paths.root.rglob("*") if path.is_file()}
    said = []
    for way in WAYS.values():
        try:
            way(paths)
        except (RunError, PodError, ValueError) as error:
            said.append(str(error))
    assert re.search(reason, obstacle(paths.root))
    assert any(re.search(reason, words) for words in said)
    assert end_broken_off(paths.root) == ""
    with pytest.raises(NotRegistered, match=reason):
        registered(paths.root)
    after = {path: path.read_bytes() for path in paths.root.rglob("*") if path.is_file()}
    assert {**after, paths.lock: b""} == {**before, paths.lock: b""}  # the lock of `start`
    assert not RunPaths(paths.runs / "r1").result.exists()


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_a_copied_or_moved_cluster_is_data(tmp_path: Path, how: str) -> None:
    paths = own(given(tmp_path / "c"))
    there = tmp_path / "there"
    if how == "copied":
        shutil.copytree(paths.root, there, symlinks=True)
    else:
        paths.root.rename(there)
    run = RunPaths(there / "runs" / "r1")
    write_json(run.info, {"id": "r1", "cluster": str(there)})
    refused(ClusterPaths(there), sentence("or the folder was copied or moved"))
    # The cluster itself is still this user's.
    if how == "copied":
        assert registered(paths.root).inode == paths.root.stat().st_ino


def test_a_folder_in_the_place_of_a_cluster_is_data(tmp_path: Path) -> None:
    paths = own(given(tmp_path / "c"))
    paths.root.rename(tmp_path / "before")
    shutil.copytree(tmp_path / "before", paths.root)
    refused(paths, sentence("is not the folder that its cluster started in"))
    shutil.rmtree(paths.root)
    (tmp_path / "before").rename(paths.root)
    assert registered(paths.root).spec["backend"] == LOCAL


def test_a_folder_in_the_place_of_a_live_cluster_is_data(tmp_path: Path) -> None:
    paths = own(given(tmp_path / "c"))
    keeper = keeper_for(paths.root)
    try:
        write_json(paths.own_state, alive_state(paths, keeper.pid))
        Cluster.attach(paths.root)
        paths.root.rename(tmp_path / "before")
        shutil.copytree(tmp_path / "before", paths.root)
        with pytest.raises(
            NotRegistered, match=sentence("is not the folder that its cluster started in")
        ):
            Cluster.attach(paths.root)
    finally:
        keeper.kill()
        keeper.wait(300)


def keeper_for(root: Path) -> subprocess.Popen[bytes]:
    """A process that the process table shows as the keeper of a directory."""
    wait = "import time; time.sleep(600)"
    keeper = subprocess.Popen([sys.executable, "-c", wait, "-m", entries.KEEPER, str(root)])
    # Popen may return a moment before the table of processes shows the new command.
    until(lambda: keeper_process(root) is not None)
    return keeper


def alive_state(paths: ClusterPaths, pid: int) -> dict[str, object]:
    state = {**read_json(paths.own_state), "phase": "ready", "pid": pid}
    return {**state, "start_time": process_start_time(pid)}


def test_a_process_for_a_directory_that_is_not_registered_is_not_ended(tmp_path: Path) -> None:
    """`close` finds the keeper of a removed directory by its command line."""
    root = tmp_path / "c"
    paths = ClusterPaths(root)
    keeper = keeper_for(root)
    try:
        root.mkdir()
        close_cluster(paths, ClusterSpec(backend=LOCAL))
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(1)
        register(paths, ClusterSpec(backend=LOCAL).to_dict())
        root.joinpath("cluster.json").unlink()
        root.rmdir()
        close_cluster(paths, ClusterSpec(backend=LOCAL))
        assert keeper.wait(300) == -signal.SIGTERM
    finally:
        keeper.kill()
        keeper.wait(300)


def test_a_tidied_cluster_is_no_longer_registered(tmp_path: Path) -> None:
    paths = own(given(tmp_path / "c"))
    assert registered(paths.root).path == str(paths.root)
    assert end_broken_off(paths.root)
    with pytest.raises(NotRegistered, match=sentence("the cluster in {} was closed and tidied up")):
        registered(paths.root)
    close_cluster(paths, ClusterSpec(backend=LOCAL))  # nothing more to do, and no error


def test_a_cluster_of_a_killed_keeper_is_closed_twice(tmp_path: Path) -> None:
    paths = own(given(tmp_path / "c", phase="ready"))
    write_json(paths.runs / "r1" / "result.json", {"state": "succeeded", "message": ""})
    close_cluster(paths, ClusterSpec(backend=LOCAL))
    assert registration(paths.root) is None
    assert cluster_status(paths.root).phase == "lost"
    close_cluster(paths, ClusterSpec(backend=LOCAL))
    shutil.move(paths.root, tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", paths.root)
    with pytest.raises(PodError):  # another folder is in its place
        close_cluster(paths, ClusterSpec(backend=LOCAL))


def test_a_queue_ends_no_run_of_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = own(given(tmp_path / "c"))
    others = {
        "another's": run_at(tmp_path / "o1", "x", str(tmp_path / "other")),
        "nobody's": run_at(tmp_path / "o2", "x", ""),
        "relative": run_at(tmp_path / "o3", "x", "c"),
        "other id": run_at(tmp_path / "o4", "y", str(paths.root)),
    }
    guess = run_at(tmp_path / "o5", "x", str(paths.root))
    link = tmp_path / "link"
    link.symlink_to(run_at(tmp_path / "o6", "x", str(paths.root)).root)
    named = [run.root for run in others.values()] + [Path("o5"), link]
    monkeypatch.chdir(tmp_path)
    list_runs(
        paths.store,
        *own_runs(paths.root),
        *(KnownRun(id=f"x{number}", path=path) for number, path in enumerate(named)),
    )
    assert end_broken_off(paths.root)
    for run in (*others.values(), guess, RunPaths(tmp_path / "o6")):
        assert not run.result.exists()
        assert run.reserve.exists()
    ours = RunPaths(paths.runs / "r1")
    assert read_json(ours.result)["state"] == RunState.CANCELLED
    assert not ours.reserve.exists()


def test_a_queue_in_the_clusters_directory_is_not_read(tmp_path: Path) -> None:
    """A pod may have put the file there."""
    paths = own(given(tmp_path / "c"))
    list_runs(paths.store)
    list_runs(paths.root / "store.db", KnownRun(id="r1", path=paths.runs / "r1"))
    assert own_runs(paths.root) == []
    for name in ("keeper.sock", "keeper.lock"):
        (paths.root / name).touch()
    paths.keeper_lock.unlink()
    (paths.root / "identity").mkdir()
    for path in (paths.socket, paths.keeper_lock, paths.identity):
        assert path.parent == paths.own_state.parent
    paths.own_state.unlink()
    write_json(paths.state, {**read_json(paths.state), "phase": "ready"})
    assert paths.known_state == paths.own_state
    assert cluster_status(paths.root).last_phase != "ready"


def test_a_run_without_a_cluster_takes_none_over(tmp_path: Path) -> None:
    """Its own directory is then taken for the cluster's."""
    canary, root = tmp_path / "canary", tmp_path / "c"
    root.mkdir()
    backend: dict[str, object] = {
        "kind": "kubernetes",
        "kubeconfig": write_kubeconfig(tmp_path / "config", canary),
    }
    paths = given(root, backend)
    write_json(RunPaths(root).info, {"id": "r1", "cluster": ""})
    list_runs(paths.root / "store.db", KnownRun(id="r1", path=root))
    Run.load(root)
    assert not canary.exists()


def test_a_process_that_is_no_keeper_makes_no_directory_a_cluster(tmp_path: Path) -> None:
    """Else `doctor` and `submit` would believe the ssh configuration and the socket there."""
    paths = given(tmp_path / "c", phase="ready", pid=os.getpid(), start_time=None)
    with pytest.raises(NotRegistered, match=sentence("holds no cluster that you started on")):
        Cluster.attach(paths.root)


@pytest.mark.parametrize(
    "names", [(".", "pod-0"), ("../x", "pod-0"), ("c-0123456789abcdef", ".."), ("c", "pod-0")]
)
def test_a_host_removes_no_folder_that_enter_cannot_have_made(
    tmp_path: Path, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(remote_helper.LISTENS))
    home = tmp_path / "home"
    (home / "letters").mkdir(parents=True)
    folder, pod = names
    for verb in ("leave", "enter"):
        answer = remote_helper.main({verb: {"root": str(home), "folder": folder, "pod": pod}})
        assert "is not the name of" in str(answer["error"])
    # Not even a note in the user's own folder may name them.
    root = tmp_path / "c"
    make_folder(root)
    write_json(note_of(root), hosts_note(folder, pod))
    with pytest.raises(BackendError, match=sentence("nothing is done on the named hosts")):
        SSHPods(["127.0.0.1"]).remove_left(root)
    assert (home / "letters").is_dir()


FOLDER = "c-0123456789abcdef"


def hosts_note(folder: str = FOLDER, pod: str = "pod-0", **more: object) -> dict[str, object]:
    there = {"address": "127.0.0.1", "ssh_port": 1, "slots": 1, "phase": "Running", "user": "me"}
    return {"folder": folder, "pods": [{"name": pod, **there, **more}]}


@pytest.fixture
def logins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that somebody tried to log in to."""
    tried: list[str] = []

    def refuse(connection: SSHConnection) -> None:
        tried.append(connection.pod.address)
        raise PodError("nobody is there")

    monkeypatch.setattr(SSHConnection, "open", refuse)
    return tried


def test_a_note_in_the_clusters_directory_is_not_read(tmp_path: Path, logins: list[str]) -> None:
    """A pod may share the directory, and have written the note and the host keys."""
    root = tmp_path / "c"
    earlier = root / "hosts" / "left.json"
    earlier.parent.mkdir(parents=True)
    write_json(earlier, hosts_note())
    SSHPods(["127.0.0.1"]).remove_left(root)
    assert logins == []


@contextmanager
def answering(paths: ClusterPaths) -> Iterator[list[str]]:
    """Answer every request at a cluster's socket, and list the requests, as `op run`."""
    asked: list[str] = []

    def answer(request: Request) -> dict[str, object]:
        assert isinstance(request, OfRun)
        asked.append(f"{request.op} {request.run}")
        return {"notes": [], "stacks": {}, "state": "running", "message": "mine"}

    server = RequestServer(paths.socket, answer, Redactor())
    try:
        yield asked
    finally:
        server.close()


ABOUT_A_RUN: dict[str, Callable[[Run], object]] = {
    "cancel": Run.cancel,
    "stop": Run.stop,
    "fetch": Run.fetch,
    "stacks": Run.stacks,
}


@pytest.mark.parametrize("op", ABOUT_A_RUN)
@pytest.mark.parametrize("place", ["elsewhere", "beside the run"])
def test_a_directory_that_names_a_live_run_of_the_reader_reaches_no_run(
    tmp_path: Path, op: str, place: str
) -> None:
    paths = own(given(tmp_path / "c"))
    there = tmp_path / "given" if place == "elsewhere" else paths.runs / "r2"
    forged = run_at(there, "r1", str(paths.root))
    write_json(forged.state, {"state": RunState.QUEUED})  # as if on its way to the keeper
    link = tmp_path / "link"
    link.symlink_to(paths.runs / "r1")
    keeper = keeper_for(paths.root)
    try:
        write_json(paths.own_state, alive_state(paths, keeper.pid))
        with answering(paths) as asked:
            with pytest.raises(RunError, match=sentence("and the cluster has that run in")):
                ABOUT_A_RUN[op](Run(forged.root))
            assert asked == []
            # The reader's own directory does, by any of its paths.
            for path in (paths.runs / "r1", link):
                ABOUT_A_RUN[op](Run(path))
            assert asked == [f"{op} r1"] * 2
            # Without its record the forged directory shows nothing of the reader's run.
            run = Run(forged.root)
            forged.info.unlink()
            assert "mine" not in run.message
            assert len(asked) == 2
    finally:
        keeper.kill()
        keeper.wait(300)


@pytest.mark.parametrize("whose", ["own", "another's id", "not listed"])
def test_checkpoints_are_asked_of_a_registered_cluster_that_lists_the_run(
    tmp_path: Path, whose: str
) -> None:
    paths = own(given(tmp_path / "c"))
    run = RunPaths(paths.runs / "r1")
    if whose == "another's id":
        run = run_at(tmp_path / "given", "r1", str(paths.root))
        write_json(run.state, {"state": RunState.QUEUED})
    elif whose == "not listed":
        list_runs(paths.store)
    write_json(run.held, {"parts": {"3": {"0": "pod-0"}}})
    # The other cluster has no keeper, so only the request to the named cluster matters.
    with answering(paths) as asked, suppress(ConfigError):
        held_checkpoint(tmp_path / "other", run, None, 1)
    assert asked == (["bring r1"] if whose == "own" else [])
