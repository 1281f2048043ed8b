"""Environments as the agent makes them: half ones, full disks, and the reasons of a failure."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.sentences import says
from tests.support.wheels import wheel
from workbench.agent.folders import remove_environments
from workbench.agent.packages import environment
from workbench.agent.packages.installs import Installs, is_made
from workbench.agent.ranks.request import RunRequest, rank_environment
from workbench.agent.tasks import Tasks
from workbench.base.errors import DiskFull
from workbench.base.process import RankPlace

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def made(installs: Installs, folder: Path, log: Path, lines: list[str]) -> Mapping[str, object]:
    request = {
        "lines": lines,
        "isolated": True,
        "env": {**OFFLINE, "PIP_FIND_LINKS": str(log.parent)},
    }
    until = time.monotonic() + 300
    while time.monotonic() < until:
        answer = installs.ask("r1", folder, log, request, begin=True)
        if answer["state"] != "busy":
            return answer
        time.sleep(0.05)
    raise AssertionError("no end in 300 s")


@pytest.mark.slow
def test_a_half_environment_is_made_again_and_a_whole_one_is_kept(tmp_path: Path) -> None:
    wheel(tmp_path, "wb_thing", "1.0")
    folder = tmp_path / "store" / "environment-1"
    log = tmp_path / "packages.log"
    folder.mkdir(parents=True)
    (folder / "half").touch()
    installs = Installs(Tasks())
    assert made(installs, folder, log, ["wb_thing"])["line"] == "installed"
    assert is_made(folder)
    assert not (folder / "half").exists()
    (folder / "kept").touch()
    assert made(installs, folder, log, ["wb_thing"]) == {"state": "made", "line": ""}
    assert (folder / "kept").exists()


@pytest.mark.slow
def test_a_failure_leaves_no_environment_and_is_told_once(tmp_path: Path) -> None:
    folder = tmp_path / "environment-1"
    log = tmp_path / "packages.log"
    installs = Installs(Tasks())
    answer = made(installs, folder, log, ["wb_absent"])
    assert answer["state"] == "failed"
    assert answer["why"] == "pip: ERROR: No matching distribution found for wb_absent"
    assert "No matching distribution" in str(answer["tail"])
    assert not folder.exists()
    request = {"lines": ["wb_absent"]}
    assert installs.ask("r1", folder, log, request, begin=False) == {"state": "none", "line": ""}


def test_environments_are_removed_and_other_content_of_the_store_stays(tmp_path: Path) -> None:
    (tmp_path / "environment-1" / "lib").mkdir(parents=True)
    (tmp_path / "environment-1" / "lib" / "x.py").touch()
    (tmp_path / "environment-1.lock").touch()
    (tmp_path / "packages-1").mkdir()
    assert remove_environments(tmp_path) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["environment-1.lock", "packages-1"]
    assert remove_environments(tmp_path / "absent") == {}


LOOKING = "Looking in indexes: https://me:****@pypi.example.org/simple, https://b.org/simple\n"


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (
            "Collecting x\nERROR: Could not find x\nERROR: No matching distribution for x\n",
            "pip: ERROR: No matching distribution for x",
        ),
        (
            f"{LOOKING}ERROR: Could not find a version that satisfies x (from versions: none)\n"
            "ERROR: No matching distribution found for x\n",
            "pip: ERROR: No matching distribution found for x. The index at pypi.example.org, "
            "b.org lacks the package, or cannot be reached",
        ),
        ("Segmentation fault\n", "pip: Segmentation fault"),
        ("", "pip: exit code 1"),
        (f"{sys.executable}: No module named pip\n", f"{sys.executable} has no pip"),
        ("ModuleNotFoundError: No module named pip\n", "pip: ModuleNotFoundError"),
        (
            "WARNING: Retrying: Failed to establish a new connection: refused\nERROR: none\n",
            "pip could not reach the package index at pypi.org",
        ),
    ],
)
def test_the_reason_of_a_failure(output: str, why: str, tmp_path: Path) -> None:
    error = environment._failure("pip", 1, output, tmp_path, asks=True)
    assert str(error).startswith(why)
    assert "me" not in str(error).split()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_POD", "/pods/pod-1")
    output = (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    )
    error = environment._failure("pip", 1, output, tmp_path, asks=False)
    assert isinstance(error, DiskFull)
    assert str(error).startswith(f"the disk of pod-1 is full: {tmp_path} needs more room")


@pytest.mark.slow
@pytest.mark.usefixtures("in_fork")
@pytest.mark.parametrize("how", ["file", "variable", "line"])
def test_the_index_of_every_setting_is_named_without_its_password(tmp_path: Path, how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        place = f"127.0.0.1:{closed.getsockname()[1]}"
    address = f"http://me:s3cretword@{place}/simple"
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nretries = 1\n" + f"index-url = {address}\n" * (how == "file"))
    env = {"PIP_CONFIG_FILE": str(settings), "no_proxy": "*", "PIP_NO_INDEX": "0"}
    if how == "variable":
        env["PIP_INDEX_URL"] = address
    lines = [f"--index-url {address}"] * (how == "line") + ["wb_absent"]
    log = tmp_path / "log"
    answer = environment.make(tmp_path / "environment", log, {"lines": lines, "env": env})
    assert answer["state"] == "failed"
    assert says(answer["why"], "could not reach the package index at", place)
    for text in (str(answer), log.read_text()):
        assert "s3cretword" not in text


def test_ranks_find_the_commands_of_their_environment() -> None:
    place = RankPlace(rank=0, local_rank=0, pod="pod-0")
    request = RunRequest(
        run="r1",
        ranks=(place,),
        argv=("/store/environment-1/bin/python",),
        world_size=1,
        environment="/store/environment-1",
        env={"PATH": "/mine"},
    )
    base = {"PATH": "/usr/bin", "PYTHONHOME": "/usr", "VIRTUAL_ENV": "/pods"}
    env = rank_environment(request, place, Path("/pods/pod-0"), base, {})
    assert env["PATH"] == "/store/environment-1/bin:/mine"
    assert env["VIRTUAL_ENV"] == "/store/environment-1"
    assert "PYTHONHOME" not in env


@pytest.mark.slow
@pytest.mark.usefixtures("in_fork")
@pytest.mark.parametrize("how", ["file", "variables"])
def test_places_in_a_hosts_settings_of_pip_do_no_harm(tmp_path: Path, how: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    settings = {
        **dict.fromkeys(["user", "require-virtualenv", "dry-run", "force-reinstall"], "true"),
        **dict.fromkeys(["target", "prefix", "root", "report"], str(elsewhere)),
        "quiet": "3",
    }
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "wb_thing", "1.0")
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    if how == "file":
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        (tmp_path / "pip.conf").write_text("".join(["[install]\n", *lines]))
        env["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
    else:
        env |= {f"PIP_{name.upper().replace('-', '_')}": settings[name] for name in settings}
        env["PIP_CONFIG_FILE"] = os.devnull
    for keep in (False, True):
        made = tmp_path / f"environment-{keep}"
        request = {"lines": ["wb_thing", "pytest"], "keep": keep, "env": env}
        answer = environment.make(made, tmp_path / "log", request)
        assert answer == {"state": "made", "line": "installed"}
        assert list(made.glob("lib/*/site-packages/wb_thing.py"))
    assert not elsewhere.exists()
