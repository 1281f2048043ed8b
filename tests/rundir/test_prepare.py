"""The directory of a run before it starts: its name, its files, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.base.files import read_json
from workbench.jobs.launcher import Launcher
from workbench.jobs.script import Script
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.make import prepare
from workbench.rundir.make.prepare import check_launcher, prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known commit, without the process of git."""
    monkeypatch.setattr(prepare, "commit_of", lambda _: "c0ffee")


@pytest.fixture
def script(tmp_path: Path) -> Script:
    path = tmp_path / "count.py"
    path.write_text("print(1)\n")
    return Script(path=str(path))


def spec_of(script: Script, *, count: int = 2, pods: int | None = None) -> RunSpec:
    return RunSpec(cluster=ClusterSpec(pods=PodSpec(), count=count), job=script, pods=pods)


def test_a_run_has_an_id_by_time_and_job_that_no_other_run_has(
    script: Script, tmp_path: Path
) -> None:
    runs = [prepare_run(spec_of(script), parent=tmp_path / "runs") for _ in range(2)]
    for run in runs:
        assert re.fullmatch(r"\d{8}-\d{6}-count-[0-9a-f]{4}", run.run_id)
        assert run.paths.root == tmp_path / "runs" / run.run_id
        assert read_json(run.paths.state)["state"] == "queued"
        assert read_json(run.paths.spec) == run.spec.to_dict()
        assert read_json(run.paths.origin)["commit"] == "c0ffee"
    assert runs[0].run_id != runs[1].run_id
    chosen = prepare_run(spec_of(script), root=tmp_path / "mine", parent=tmp_path / "runs")
    assert chosen.paths.root == tmp_path / "mine"


@pytest.mark.parametrize(("pods", "fits"), [(None, True), (1, True), (2, True), (3, False)])
def test_a_run_has_at_most_the_pods_of_the_cluster(
    script: Script, tmp_path: Path, pods: int | None, fits: bool
) -> None:
    if fits:
        assert prepare_run(spec_of(script, pods=pods), root=tmp_path / "run").spec.pods == pods
        return
    with pytest.raises(ConfigError, match=sentence("pods is {}; the cluster has", pods)):
        prepare_run(spec_of(script, pods=pods), root=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_launcher_that_is_not_installed_is_refused_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_launcher(Launcher.SSH)
    packages = {Launcher.PDSH: ("pdsh", "pdsh"), Launcher.OPENMPI: ("mpirun", "openmpi-bin")}
    for launcher, (program, package) in packages.items():
        with pytest.raises(
            ConfigError,
            match=sentence("or choose launcher 'ssh", program, package),
        ):
            check_launcher(launcher)
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
        check_launcher(launcher)


def test_a_directory_that_holds_files_is_refused_and_stays_as_it_is(
    script: Script, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.pdf").write_text("years of work")
    with pytest.raises(ConfigError, match=sentence("is not empty; choose a new directory")):
        prepare_run(spec_of(script), root=full)
    assert (full / "thesis.pdf").read_text() == "years of work"
    run = prepare_run(spec_of(script), root=tmp_path / "run")
    with pytest.raises(
        ConfigError, match=sentence("already holds a run or a cluster", "spec.json")
    ):
        prepare_run(spec_of(script), root=run.paths.root)
    assert read_json(run.paths.spec) == run.spec.to_dict()
    below_a_file = full / "thesis.pdf" / "run"
    with pytest.raises(ConfigError, match=sentence("cannot make the directory")):
        prepare_run(spec_of(script), root=below_a_file)


def test_nothing_is_left_of_a_run_that_could_not_be_prepared(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(root: Path, room: int) -> None:
        assert (root / "spec.json").exists() and room > 0
        raise ConfigError("no room")

    monkeypatch.setattr(prepare, "check_room", no_room)
    with pytest.raises(ConfigError, match="no room"):
        prepare_run(spec_of(script), root=tmp_path / "run")
    assert not (tmp_path / "run").exists()
