"""What the agent has a fork of its do: a run's folder made and listed, while it answers others."""

from __future__ import annotations

import os
import signal
import zipfile
from pathlib import Path

import pytest

from tests.support.deep import deep_tree
from workbench.agent.folders import list_outputs
from workbench.agent.tasks import Tasks
from workbench.base.messages.rpc import Refused


def test_a_folder_is_made_and_listed(agent, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "script.zip", "w") as archive:
        archive.writestr("train.py", "print()\n")
        archive.writestr("data/rows.txt", "a\n")
    sent = str(tmp_path / "script.zip")
    assert agent.ask("stage", run="r", files={"job.json": "{}"}, archive=sent, named="my own")["ok"]
    folder = agent.root / "runs" / "r"
    assert (folder / "job.json").read_text() == "{}"
    assert (folder / "job.json").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "script" / "my own" / "data" / "rows.txt").read_text() == "a\n"
    (folder / "script" / "my own" / "train.py").write_text("print(1)\n")
    (folder / "script" / "my own" / "new.txt").write_text("n" * 100)
    (folder / "out" / "model").write_text("m")
    left = agent.ask("list_outputs", run="r", archive=sent, named="my own", below=1 << 20)
    assert [name for name, _, _ in left["script"]] == ["new.txt", "train.py"]
    assert [name for name, _, _ in left["out"]] == ["model"]


def test_a_list_longer_than_a_pipe_holds_comes_whole(agent) -> None:
    agent.ask("stage", run="r", files={})
    for number in range(1500):
        (agent.root / "runs" / "r" / "out" / f"{number:04}-{'x' * 60}").touch()
    assert len(agent.ask("list_outputs", run="r", archive="-", below=1)["out"]) == 1500


def test_what_goes_wrong_is_said(agent, tmp_path: Path) -> None:
    (tmp_path / "broken.zip").write_text("no zip")
    with pytest.raises(Refused, match="not a zip") as caught:
        agent.ask("stage", run="r", files={}, archive=str(tmp_path / "broken.zip"))
    assert caught.value.answer["full"] is False
    with pytest.raises(Refused, match="run id"):
        agent.ask("stage", run="../r", files={})


def test_one_that_is_killed_is_told_from_one_that_works() -> None:
    tasks = Tasks()

    def wait() -> dict[str, object]:
        signal.pause()
        return {}

    task = tasks.begin(wait)
    assert tasks.result(task) is None
    os.kill(task, signal.SIGKILL)
    os.waitpid(task, 0)
    assert tasks.result(task) == {"error": "it was killed"}
    assert not tasks.pids


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_folder: Path) -> None:
        raise PermissionError

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    found = list_outputs(tmp_path / "out", tmp_path / "none", tmp_path / "none", 1 << 20)
    assert found["unread"] == ["out"]


def test_trees_of_any_depth_are_listed_and_no_folder_that_is_a_link(tmp_path: Path) -> None:
    out, script = tmp_path / "out", tmp_path / "script"
    out.mkdir()
    (out / "a.txt").write_text("a")
    (out / "link").symlink_to(tmp_path)
    script.symlink_to(tmp_path)
    with deep_tree(out / "deep"):
        found = list_outputs(out, script, tmp_path / "none", 1 << 20)
    names = [entry[0] for entry in found["out"]]
    assert names[:2] == ["a.txt", "deep/file"]
    # The rest is too deep for a path. Only its beginning is named.
    assert 1000 < len(names) < 2100
    assert 1 <= len(found["unread"]) <= 5
    assert found["script"] == []
    assert found["links"] == ["link", "script"]
