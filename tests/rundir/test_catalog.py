"""Runs below a folder: which are found, in which order, and the record of each."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.support.writtenrun import write_run
from workbench.base.errors import ConfigError
from workbench.pods.pod import Pod
from workbench.rundir import status
from workbench.rundir.catalog import store
from workbench.rundir.catalog.benchmarks import add_evaluation, benchmark_figures
from workbench.rundir.catalog.find import find_all, find_runs, stamp_of
from workbench.rundir.catalog.hosts import hosts_in
from workbench.rundir.catalog.label import read_label, write_label
from workbench.rundir.catalog.store import record_of
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.result import HostSlots
from workbench.rundir.state import RunState


def run_at(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")


def names(root: Path, depth: int = 7) -> list[str]:
    return [paths.root.relative_to(root).as_posix() for paths in find_runs(root, depth)]


def test_runs_are_found_nearest_first_and_not_within_each_other(tmp_path: Path) -> None:
    for name in ("a/b/deep", "near", "near/within", ".hidden/run", "pods/run", "a/node_modules/x"):
        run_at(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "file").touch()
    assert names(tmp_path) == ["near", "a/b/deep"]
    assert names(tmp_path, depth=2) == ["near"] and names(tmp_path, depth=3) == names(tmp_path)
    assert names(tmp_path / "near") == ["."], "the folder itself may be a run"
    assert names(tmp_path / "missing") == []


def test_a_cluster_and_its_runs_are_found_and_the_search_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cluster.json").write_text("{}")
    run_at(tmp_path / "runs" / "one")
    found = [*find_all(tmp_path)]
    assert [type(paths) for paths in found] == [ClusterPaths, RunPaths]
    # Every look at the clock takes a second of CPU.
    seconds = itertools.count()
    monkeypatch.setattr(
        "workbench.rundir.catalog.find.time.thread_time", lambda: float(next(seconds))
    )
    assert len([*find_all(tmp_path, cpu_end_s=1.0)]) == 1


def test_a_stamp_changes_with_each_file_of_a_record(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    stamps = {stamp_of(paths)}
    for file in (paths.info, paths.state, paths.result, paths.label, paths.benchmarks):
        file.parent.mkdir(parents=True, exist_ok=True)
        for content in ("{}", '{"a": 1}'):
            file.write_text(content)
            stamps.add(stamp_of(paths))
    assert len(stamps) == 11
    assert stamp_of(paths).count("/") == 4


def test_a_run_in_progress_has_the_figures_of_its_last_events(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.state("running", "training")
    run.step(7)
    record = record_of(run.paths)
    assert (record.state, record.steps, record.is_live) == (RunState.RUNNING, 7, True)
    # Model and technique are those of the spec until the run names its own.
    assert (record.technique, record.pods) == ("zero1", 3)
    assert record.hosts[0].address == "127.0.0.2" and record.id == run.paths.root.name
    assert record.submitted_s is not None and record.message == ""
    run.event("start", model="mine/own")
    assert record_of(run.paths).technique == "zero1"


def test_a_run_whose_keeper_is_gone_is_lost_and_a_silent_keeper_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path)
    run.state("running", "training")
    monkeypatch.setattr(store, "silence_of", lambda *_: "the keeper is silent")
    record = record_of(run.paths)
    assert (record.state, record.message) == (RunState.RUNNING, "the keeper is silent")
    run.keeper(alive=False)
    record = record_of(run.paths)
    assert (record.state, record.is_live, record.message) == (RunState.LOST, False, "")


def test_a_run_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> bool:
        raise RuntimeError("a damaged\nfile")

    monkeypatch.setattr(status, "is_keeper_alive", fails)
    record = record_of(write_run(tmp_path).paths)
    assert record.state is RunState.LOST and "cannot be read" in record.message
    assert "\n" not in record.message


def test_the_last_figure_of_each_benchmark_is_in_the_record(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for trained in (0.25, 0.5):
        scores = [
            {"name": "gsm8k", "trained": trained, "base": 0.125},
            {"name": "mmlu", "trained": None},
            {"trained": 1.0},
        ]
        add_evaluation(run.paths, {"scores": scores})
    figures = {"gsm8k": 0.5, "gsm8k before": 0.125}
    assert benchmark_figures(run.paths) == figures
    assert record_of(run.paths).metrics == figures


def test_hosts_have_the_names_of_their_pods_where_these_are_known(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    assert hosts_in(hostfile) == []
    hostfile.write_text("10.0.0.2 slots=2\n10.0.0.3 slots=1\n")
    pods = [Pod(name="pod-1", address="10.0.0.3")]
    assert hosts_in(hostfile, pods) == [
        HostSlots(address="10.0.0.2", slots=2, pod=""),
        HostSlots(address="10.0.0.3", slots=1, pod="pod-1"),
    ]
    hostfile.write_text("no host at all slots=many\n")
    assert hosts_in(hostfile) == []


def test_a_label_is_kept_within_its_bounds_and_without_secrets(tmp_path: Path) -> None:
    paths = write_run(tmp_path).paths
    write_label(paths, name=" best ", tags=[" a", "b", "a", ""])
    write_label(paths, note="key hf_" + "a1" * 10)
    label = read_label(paths)
    assert (label.name, label.tags) == ("best", ("a", "b"))
    assert label.note == "key " + "*" * 23
    write_label(paths, name="x" * 80, note="y" * 2000, tags=[f"{n:040}" for n in range(20)])
    assert len(read_label(paths).tags) == 20
    for wrong, words in (
        ({"name": "x" * 81}, "at most 80 letters"),
        ({"note": "y" * 2001}, "at most 2000 letters"),
        ({"note": 3}, "the note of a run is 3"),
        ({"tags": "a"}, "give a list of texts"),
        ({"tags": ["z" * 41]}, "at most 40 letters without a comma"),
        ({"tags": ["a,b"]}, "without a comma"),
        ({"tags": [f"{n}" for n in range(21)]}, "the run has 21 tags"),
    ):
        with pytest.raises(ConfigError, match=words):
            write_label(paths, **wrong)
    assert read_label(paths).name == "x" * 80, "a refused change changes nothing"
    paths.label.write_text(json.dumps({"name": 3, "note": "n" * 3000, "tags": [1, "t" * 50]}))
    label = read_label(paths)
    assert (label.name, len(label.note), label.tags) == ("", 2000, ("t" * 40,))
