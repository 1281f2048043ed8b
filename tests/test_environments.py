"""Environments of scripts on pods, from wheels made here: no index and no network."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.poll import until
from tests.support.takeover import kill_keeper
from tests.support.wheels import wheel
from workbench import Cluster, LocalPods, PodSpec, Run, Script
from workbench.errors import ConfigError
from workbench.results import RunResult
from workbench.rundir.paths import ClusterPaths

pytestmark = pytest.mark.slow
LOOK = """\
import importlib.util, json, os, shutil, sys
import workbench

answer = {
    "python": sys.executable,
    "venv": os.environ.get("VIRTUAL_ENV"),
    "command": shutil.which("python"),
    "packages": sorted(n for n in ("torch", "wb_own", "wb_pip") if importlib.util.find_spec(n)),
}
try:
    import wb_thing
    answer["number"] = wb_thing.NUMBER
except ImportError:
    answer["number"] = None
workbench.log(step=1, loss=0.5)
with open(f"seen-{os.environ['RANK']}.json", "w") as file:
    json.dump(answer, file)
"""
# The build of the package waits, as the build of a large package does.
SLOW_SETUP = """\
import pathlib, time
from setuptools import setup

folder = pathlib.Path({folder!r})
(folder / "started").touch()
for _ in range(1200):
    if (folder / "go").exists():
        break
    time.sleep(0.1)
setup(name="wb_slow", version="1.0", py_modules=["wb_slow"])
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for number in ("1.0", "2.0"):
        wheel(folder, "wb_thing", number)
    wheel(folder, "wb_greedy", "1.0", needs=["wb_thing==3.0"])
    wheel(folder, "wb_pip", "1.0")
    return folder


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Iterator[Cluster]:
    env = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
        # pip reads the variable the other way round: 0 builds with the packages that are there.
        "PIP_NO_BUILD_ISOLATION": "0",
    }
    path = tmp_path_factory.mktemp("environments") / "cluster"
    spec = PodSpec(cpus=1, env=env, pip=["wb_pip"])
    with Cluster(LocalPods(), spec, count=2, path=path, warm=False, idle_timeout_s=3600) as cluster:
        yield cluster


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "look.py"
    path.parent.mkdir()
    path.write_text(LOOK)
    return path


def ended(run: Run) -> RunResult:
    return run.wait(300, progress=False)


def seen(run: Run) -> Mapping[str, object]:
    ended(run).raise_for_status()
    found: dict[str, object] = json.loads((run.paths.outputs / "seen-0.json").read_text())
    return found


def environments(cluster: Cluster) -> dict[str, int]:
    """Return the inode of every made environment's mark, by name."""
    store = cluster.path / "pods" / "store"
    # The folder of an installation that was ended has no mark until it is removed.
    marks = store.glob("environment-*/.workbench-made")
    return {mark.parent.name: mark.stat().st_ino for mark in marks}


def test_two_versions_on_the_same_pods_and_each_is_installed_once(
    pods: Cluster, script: Path
) -> None:
    for number, launcher in (("1.0", "ssh"), ("2.0", "pdsh")):
        needs = [f"wb_thing=={number}"]
        asked = Script(script, requirements=needs, outputs=["seen-*"], launcher=launcher)
        run = pods.submit(asked)
        first = seen(run)
        other = json.loads((run.paths.outputs / "pod-1" / "seen-1.json").read_text())
        for answer in (first, other):
            assert answer["number"] == number
            assert answer["python"] == f"{answer['venv']}/bin/python"
            assert answer["command"] == answer["python"]
            # The pod's own packages, and those of the cluster, are behind.
            assert answer["packages"] == ["torch", "wb_pip"]
        message = run.result.message
        assert "environment of the ranks: 1 requirement of requirements" in message
        # One of two pods that share the folder has installed.
        logs = list(run.paths.logs.glob("packages.*.log"))
        assert any("Successfully installed" in log.read_text() for log in logs)
    before = environments(pods)
    assert len(before) >= 2
    asked = Script(script, requirements=["wb_thing==1.0"], launcher="openmpi")
    again = pods.submit(asked)
    answer = seen(again)
    assert (answer["number"], answer["python"]) == ("1.0", f"{answer['venv']}/bin/python")
    assert environments(pods) == before
    assert not list(again.paths.logs.glob("packages.*"))


@pytest.mark.long
def test_a_header_is_used_and_an_isolated_script_sees_nothing_of_the_pod(
    pods: Cluster, script: Path
) -> None:
    script.write_text(f'# /// script\n# dependencies = ["wb_thing<2"]\n# ///\n{LOOK}')
    run = pods.submit(Script(script, isolated=True))
    answer = seen(run)
    assert (answer["number"], answer["packages"]) == ("1.0", [])
    assert "the header of look.py, isolated from the packages of the pods" in run.result.message
    (event,) = [event for event in run.events() if event.kind == "step"]
    assert event.number("loss") == 0.5
    # With an empty list the header is not used.
    plain = seen(pods.submit(Script(script, requirements=[])))
    assert plain["number"] is None
    assert "store/environment-" not in str(plain["python"])


def test_packages_that_do_not_go_together_fail_the_run_in_words(
    pods: Cluster, script: Path
) -> None:
    before = environments(pods)
    run = pods.submit(Script(script, requirements=["wb_greedy"]))
    result = ended(run)
    assert result.state == "failed"
    assert result.error is not None
    assert result.error.kind == "packages"
    assert re.fullmatch(r"pod-[01]", result.error.pod)
    assert "wb_greedy (requirements) could not be installed: pip: ERROR:" in result.message
    assert "wb_thing==3.0" in result.error.traceback
    log = run.paths.packages_log(result.error.pod)
    assert str(log) in result.message
    assert "wb_thing==3.0" in log.read_text()
    assert environments(pods) == before
    assert not run.paths.rank_log(0, 0, "stdout").exists()


@pytest.mark.long
def test_an_index_that_does_not_answer_is_named_and_its_password_is_not(
    pods: Cluster, script: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    env = {
        "PIP_INDEX_URL": f"http://me:s3cret-word-7@127.0.0.1:{port}/simple",
        "PIP_NO_INDEX": "0",
        "PIP_RETRIES": "1",
        "no_proxy": "*",
    }
    run = pods.submit(Script(script, requirements=["wb_absent"], env=env))
    result = ended(run)
    assert re.search(
        rf"pip could not reach the package index at 127\.0\.0\.1:{port}", result.message
    )
    for file in run.path.rglob("*"):
        if file.is_file():
            assert b"s3cret-word-7" not in file.read_bytes(), file


@pytest.mark.long
def test_pip_installs_where_the_pod_has_uv(pods: Cluster, script: Path) -> None:
    env = {"UV_FIND_LINKS": "/nowhere", "UV_OFFLINE": "1"}
    run = pods.submit(Script(script, requirements=["wb_thing"], isolated=True, env=env))
    assert seen(run)["number"] == "2.0"
    assert "UV_FIND_LINKS, UV_OFFLINE in env: not used" in run.result.message


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A package whose build waits for the file `go`."""
    folder = tmp_path / "slow" / "wb_slow-1.0"
    folder.mkdir(parents=True)
    (folder / "wb_slow.py").write_text("")
    (folder / "setup.py").write_text(SLOW_SETUP.format(folder=str(folder.parent)))
    return folder


def processes_in(folder: Path) -> list[str]:
    mark = os.fsencode(folder)
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "cmdline").read_bytes():
                found.append(place.name)
        except OSError:
            continue
    return found


def building(run: Run, slow: Path) -> bool:
    return (slow.parent / "started").exists() and "installing packages" in run.message


@pytest.mark.long
def test_a_cancel_ends_the_installation(pods: Cluster, script: Path, slow: Path) -> None:
    before = environments(pods)
    run = pods.submit(Script(script, requirements=[f"wb_slow @ {slow.as_uri()}"]))
    store = pods.path / "pods" / "store"
    until(lambda: building(run, slow), 60)
    assert processes_in(store)
    run.cancel()
    result = run.wait(300, progress=False)
    assert result.state == "cancelled"
    until(lambda: not processes_in(store))
    # The half environment goes after its processes.
    until(lambda: environments(pods) == before)
    folders = [folder for folder in store.glob("environment-*") if folder.is_dir()]
    assert len(folders) == len(before), "a half environment is left"


@pytest.mark.long
def test_another_keeper_finishes_an_installation(
    pods: Cluster, script: Path, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A keeper that takes over finds the variables of the pods here.
    for name, value in pods.spec.pods.env.items():
        monkeypatch.setenv(name, value)
    run = pods.submit(Script(script, requirements=[f"wb_slow @ {slow.as_uri()}"]))
    until(lambda: building(run, slow), 60)
    kill_keeper(pods)
    adopted = Run.load(run.path)
    log = ClusterPaths(pods.path).keeper_log
    until(lambda: "taking over from a keeper that died" in log.read_text())
    (slow.parent / "go").touch()
    assert seen(adopted)["venv"] is not None
    logs = [log.read_text() for log in run.paths.logs.glob("packages.*.log")]
    assert sum(log.count("Successfully installed") for log in logs) == 1, logs


def test_what_can_be_known_is_refused_before_anything_starts(
    pods: Cluster, script: Path, tmp_path: Path
) -> None:
    runs = pods.path / "runs"
    before = sorted(runs.iterdir())
    script.write_text("# /// script\n# requires-python = '<3.11'\n# ///\n")
    with pytest.raises(
        ConfigError, match=r"look\.py requires Python <3\.11, and pod-0 has Python 3"
    ):
        pods.submit(Script(script))
    with pytest.raises(ConfigError, match=r"'absent\.txt' does not exist"):
        pods.submit(Script(script, requirements="absent.txt"))
    assert sorted(runs.iterdir()) == before
