"""The keeper writes through no link that a pod which shares a run's directory puts there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from tests.support.writtenrun import write_run
from workbench.base.errors import RunError
from workbench.base.files.gate import make_folders, pinned_folder
from workbench.rundir.events import Event
from workbench.rundir.journal import Journal
from workbench.rundir.output.collect import Collector, mask_file
from workbench.rundir.paths import RunPaths

EVENT = Event(time_s=1.0, rank=0, kind="note", data={"message": "$(id > PWNED)"})


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return write_run(tmp_path / "run").paths


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".bashrc").write_text("mine\n")
    return tmp_path / "home"


def untouched(home: Path) -> bool:
    return (home / ".bashrc").read_text() == "mine\n" and [
        each.name for each in home.iterdir()
    ] == [".bashrc"]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_events_are_not_written_through_a_link(paths: RunPaths, home: Path, kind: str) -> None:
    journal = Journal(paths)
    journal.event(EVENT)
    paths.events.unlink()
    paths.events.symlink_to(home / ".bashrc") if kind == "link" else os.mkfifo(paths.events)
    journal.event(EVENT)
    with pytest.raises(OSError):
        Journal(paths)
    assert untouched(home)


@pytest.mark.parametrize("place", ["logs/attempt-0/rank-0.stdout.log", "logs"])
def test_logs_are_not_written_through_a_link(paths: RunPaths, home: Path, place: str) -> None:
    collector = Collector(paths, [0])
    where = paths.root / place
    where.rename(paths.root / "away")
    target = home / ".bashrc" if place != "logs" else home
    where.symlink_to(target)
    collector.take({"attempt-0/rank-0.stdout.log": {"offset": 0, "data": "evil\n"}})
    assert set(collector.cut) == {"attempt-0/rank-0.stdout.log"}
    with pytest.raises((OSError, RunError)):
        Collector(paths, [0])
    assert untouched(home)


def test_a_log_that_is_a_link_is_not_masked(paths: RunPaths, home: Path) -> None:
    from workbench.base.redact import Redactor

    (home / ".bashrc").write_text("export A=hf_" + "a1" * 20)
    paths.launcher_log.symlink_to(home / ".bashrc")
    with pytest.raises(OSError):
        mask_file(paths.launcher_log, Redactor(), paths.root)
    assert "hf_a1" in (home / ".bashrc").read_text()


@pytest.mark.parametrize("name", ["model", "outputs", "checkpoints", "logs", "tensorboard"])
def test_no_folder_of_a_run_is_made_or_used_through_a_link(
    paths: RunPaths, home: Path, name: str
) -> None:
    where = paths.root / name
    if where.exists():
        where.rename(paths.root / "away")
    where.symlink_to(home)
    with pytest.raises(
        RunError, match=sentence("and nothing that a pod left is written through one")
    ):
        make_folders(where / "deep", paths.root)
    if name in ("logs", "tensorboard"):
        with pytest.raises(
            RunError, match=sentence("and nothing that a pod left is written through one")
        ):
            Journal(paths)
    with pytest.raises(OSError), pinned_folder(where, paths.root):
        pass
    assert untouched(home)
