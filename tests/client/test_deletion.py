"""An ended run is deleted whole, by a call or a command; what is alive or elsewhere stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.test_history import make_run
from workbench.base.errors import ConfigError, RunError
from workbench.cli import main
from workbench.client.run import Run
from workbench.finetune.notebook.history import history
from workbench.rundir.state import RunState


def test_an_ended_run_is_deleted_with_all_below_and_links_lose_only_the_link(
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rows.jsonl").write_text("{}")
    run = make_run(tmp_path / "runs" / "aaa", 1.0)
    deep = run.path.joinpath("model", *"abc")
    deep.mkdir(parents=True)
    (deep / "weights").write_bytes(bytes(9))
    (run.path / "outputs").symlink_to(outside)
    assert run.delete() == []
    assert not run.path.exists()
    assert (outside / "rows.jsonl").exists()
    assert len(history(tmp_path)) == 0


@pytest.mark.parametrize("place", ["s3://bucket/prefix", "/lustre/me/checkpoints"])
def test_checkpoints_elsewhere_stay_and_are_named(tmp_path: Path, place: str) -> None:
    run = make_run(tmp_path / "aaa", 1.0, {"checkpoints": place})
    assert run.delete() == [f"the files of the run in {place} stay"]


@pytest.mark.parametrize("state", [each for each in RunState if not each.is_terminal])
def test_a_run_that_has_not_ended_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: RunState
) -> None:
    run = make_run(tmp_path / "aaa", 1.0)
    before = sorted(run.path.iterdir())
    monkeypatch.setattr("workbench.client.deletion.state_of", lambda _paths: state)
    with pytest.raises(RunError, match=f"is {state}. Only an ended run can be deleted"):
        run.delete()
    assert sorted(run.path.iterdir()) == before


def test_an_interrupted_deletion_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "aaa", 1.0)
    (run.path / "model").mkdir()
    monkeypatch.setattr("workbench.client.deletion.remove_folder", lambda _path: None)
    with pytest.raises(RunError, match="could not be removed whole"):
        run.delete()
    monkeypatch.undo()
    assert run.delete() == []
    assert not run.path.exists()


def test_the_best_runs_are_kept_with_those_that_cannot_be_compared(tmp_path: Path) -> None:
    for number, loss in enumerate((0.5, 0.25, None, 0.125, 0.75)):
        make_run(tmp_path / f"run-{number}", float(number), eval_loss=loss)
    kept = history(tmp_path).keep_best(2)
    assert [record.id for record in kept] == ["run-3", "run-2", "run-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-1", "run-2", "run-3"]
    with pytest.raises(ConfigError, match="from 1"):
        kept.keep_best(0)
    with pytest.raises(ConfigError, match="no ended run has the figure 'rougeX'"):
        kept.keep_best(1, by="rougeX")


def test_figures_that_are_better_if_larger_keep_the_largest(tmp_path: Path) -> None:
    for number in range(3):
        make_run(tmp_path / f"run-{number}", float(number), metrics={"rouge1": number / 4})
    kept = history(tmp_path).keep_best(1, by="metric.rouge1")
    assert [record.id for record in kept] == ["run-2"]


def test_the_command_deletes_by_name_and_keeps_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, loss in enumerate((0.5, 0.25, 0.125)):
        make_run(tmp_path / f"run-{number}", float(number), eval_loss=loss)
    assert main(["rm", "run-0", "--yes"]) == 0
    assert f"{tmp_path / 'run-0'} is deleted" in capsys.readouterr().out
    assert main(["rm"]) == 2
    assert main(["rm", "none"]) == 1
    assert main(["rm", "--keep-best", "1", "--yes"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run-2"]
    assert Run.load("run-2").id == "run-2"
