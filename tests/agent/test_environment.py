"""Environments as the agent makes them: half ones, full disks, and the reasons of a failure."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.wheels import wheel
from workbench.agent.folders import remove_environments
from workbench.agent.packages import environment
from workbench.agent.packages.installs import Installs, is_made
from workbench.agent.packages.target import install
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


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (
            "Collecting x\nERROR: Could not find x\nERROR: No matching distribution for x\n",
            "pip: ERROR: No matching distribution for x",
        ),
        (
            "ERROR: Could not find a version that satisfies x (from versions: none)\n"
            "ERROR: No matching distribution found for x\n",
            "pip: ERROR: No matching distribution found for x. The index at pypi.example.org lacks"
            " the package, or cannot be reached",
        ),
        ("Segmentation fault\n", "pip: Segmentation fault"),
        ("", "pip: exit code 1"),
        (
            "WARNING: Retrying: Failed to establish a new connection: refused\nERROR: none\n",
            "pip could not reach the package index at pypi.example.org",
        ),
    ],
)
def test_the_reason_of_a_failure(output: str, why: str, tmp_path: Path) -> None:
    index = environment._index({"PIP_INDEX_URL": "https://me:pw@pypi.example.org/simple"}, ["x"])
    error = environment._failure("pip", 1, output, tmp_path, index)
    assert str(error).startswith(why)
    assert "pw" not in str(error)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_POD", "/pods/pod-1")
    output = (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    )
    error = environment._failure("pip", 1, output, tmp_path, "")
    assert isinstance(error, DiskFull)
    assert str(error).startswith(f"the disk of pod-1 is full: {tmp_path} needs more room")


def test_uv_installs_isolated_environments_without_settings_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    monkeypatch.setattr(environment, "_PIP_FILES", ())
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}

    def name(more: Mapping[str, str], *, isolated: bool = True) -> str:
        found, command = environment._installer(tmp_path, {**env, **more}, isolated=isolated)
        assert (command[0] == str(uv)) == (found == "uv")
        return found

    assert name({}) == "uv"
    assert name({}, isolated=False) == "pip"
    assert name({"PIP_INDEX_URL": "https://example.org"}) == "pip"
    both = {"PIP_INDEX_URL": "https://example.org", "UV_INDEX_URL": "https://example.org"}
    assert name(both) == "uv"
    settings = tmp_path / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    settings.touch()
    assert name({}) == "pip"


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
    packages = tmp_path / "packages"
    install(packages, ["wb_thing", "pytest"], env)
    assert (packages / "wb_thing.py").exists()
    made = tmp_path / "environment"
    answer = environment.make(made, tmp_path / "log", {"lines": ["wb_thing"], "env": env})
    assert answer == {"state": "made", "line": "installed"}
    assert list(made.glob("lib/*/site-packages/wb_thing.py"))
    assert not elsewhere.exists()
