"""A run's or cluster's directory made by another person starts, ends and removes nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sentences import says, sentence
from workbench import Cluster, Run
from workbench.base.errors import BackendError, PodError, RunError
from workbench.base.files import read_json, write_json
from workbench.client.lifecycle import close_cluster
from workbench.client.takeover import end_broken_off, obstacle
from workbench.pods.hosts import far_end
from workbench.pods.hosts.pods import SSHPods
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import QueuedRun, own_runs, write_queue

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
    ended.wait()
    facts = {"phase": "closing", "pid": ended.pid, "start_time": 1, "host": socket.gethostname()}
    write_json(paths.state, {**facts, **state})
    write_queue(paths.root / "queue.json", [QueuedRun(id="r1", path=paths.runs / "r1")])
    return paths


def run_at(root: Path, run_id: str, cluster: str) -> RunPaths:
    root.mkdir(parents=True)
    run = RunPaths(root)
    write_json(run.info, {"id": run_id, "cluster": cluster})
    run.reserve.write_bytes(b"room")
    return run


def locked(paths: ClusterPaths) -> ClusterPaths:
    """Have the state name the lock that is there, as a keeper that ran here would have left it."""
    (paths.root / "keeper.lock").touch(0o600)
    write_json(paths.state, {**read_json(paths.state), "lock": paths.keeper_lock.stat().st_ino})
    return paths


def kubeconfig(path: Path, canary: Path) -> str:
    """A kubeconfig whose user is told by a program, as `exec` plugins are."""
    path.write_text(
        textwrap.dedent(f"""
        apiVersion: v1
        kind: Config
        current-context: c
        clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:9"}}}}]
        contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
        users:
        - name: u
          user:
            exec: {{apiVersion: client.authentication.k8s.io/v1, command: touch, args: ["{canary}"],
                   interactiveMode: Never}}
        """)
    )
    return str(path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["inside", "beside"])
def test_no_program_of_a_given_kubeconfig_runs(tmp_path: Path, way: str, place: str) -> None:
    canary, root = tmp_path / "canary", tmp_path / "c"
    root.mkdir()
    config = kubeconfig((root if place == "inside" else tmp_path) / "kubeconfig", canary)
    paths = given(root, {"kind": "kubernetes", "kubeconfig": config})
    if place == "inside":
        locked(paths)  # even of a directory that is this user's own
    before = {path.name: path.read_bytes() for path in paths.root.glob("*.json")}
    try:
        WAYS[way](paths)
    except (RunError, PodError, ValueError) as error:
        words = "lies in" if place == "inside" else "names no lock of a keeper"
        assert words in str(error) or way == "start", error
    assert not canary.exists()
    after = {path.name: path.read_bytes() for path in paths.root.glob("*.json")}
    assert after == before
    assert not RunPaths(paths.runs / "r1").result.exists()


def test_a_cluster_without_a_lock_in_its_state_says_what_to_do(tmp_path: Path) -> None:
    paths = given(tmp_path / "c")
    assert end_broken_off(paths.root) == ""
    write_json(paths.state, {**read_json(paths.state), "phase": "ready"})
    assert says(obstacle(paths.root), "client.takeover._not_ours.names-lock-keeper")
    with pytest.raises(RunError, match=sentence("client.takeover._not_ours.names-lock-keeper")):
        Cluster.attach(paths.root)


def test_a_queue_ends_no_run_of_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = locked(given(tmp_path / "c"))
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
    write_queue(
        paths.root / "queue.json",
        [*own_runs(paths.root), *(QueuedRun(id="x", path=path) for path in named)],
    )
    assert end_broken_off(paths.root)
    for run in (*others.values(), guess, RunPaths(tmp_path / "o6")):
        assert not run.result.exists()
        assert run.reserve.exists()
    own = RunPaths(paths.runs / "r1")
    assert read_json(own.result)["state"] == RunState.CANCELLED
    assert not own.reserve.exists()


def test_a_run_without_a_cluster_takes_none_over(tmp_path: Path) -> None:
    """Its own directory is then taken for the cluster's."""
    canary, root = tmp_path / "canary", tmp_path / "c"
    root.mkdir()
    backend: dict[str, object] = {
        "kind": "kubernetes",
        "kubeconfig": kubeconfig(tmp_path / "config", canary),
    }
    paths = locked(given(root, backend))
    write_json(RunPaths(root).info, {"id": "r1", "cluster": ""})
    write_queue(paths.root / "queue.json", [QueuedRun(id="r1", path=root)])
    Run.load(root)
    assert not canary.exists()


def test_a_process_that_is_no_keeper_makes_no_directory_a_cluster(tmp_path: Path) -> None:
    """Else `doctor` and `submit` would believe the ssh configuration and the socket there."""
    paths = given(tmp_path / "c", phase="ready", pid=os.getpid(), start_time=None)
    with pytest.raises(
        RunError, match=sentence("client.takeover.not_its_keeper.process-names-keeper", os.getpid())
    ):
        Cluster.attach(paths.root)


@pytest.mark.parametrize(
    "names", [(".", "pod-0"), ("../x", "pod-0"), ("c-0123456789abcdef", ".."), ("c", "pod-0")]
)
def test_a_host_removes_no_folder_that_enter_cannot_have_made(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    home = tmp_path / "home"
    (home / "letters").mkdir(parents=True)
    folder, pod = names
    for verb in ("leave", "enter"):
        answer = far_end.main({verb: {"root": str(home), "folder": folder, "pod": pod}})
        assert "is not the name of" in str(answer["error"])
    note = tmp_path / "c" / "hosts" / "left.json"
    note.parent.mkdir(parents=True)
    there = {"address": "127.0.0.1", "ssh_port": 1, "slots": 1, "phase": "Running"}
    write_json(note, {"folder": folder, "pods": [{"name": pod, **there}]})
    with pytest.raises(BackendError, match=sentence("pods.pods._recall.changed-nothing-done")):
        SSHPods(["127.0.0.1"]).remove_left(tmp_path / "c")
    assert (home / "letters").is_dir()
