"""A cluster's and a run's directory of the version before: open, show, report, list, resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench import Run, history
from workbench.base.errors import ConfigError
from workbench.base.files import read_json, write_json
from workbench.cli import main
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.choices import ROW_ORDER
from workbench.rundir.checkpoints import write_manifest
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

# Hidden: `workbench ls` in a checkout then lists no run of the tests.
BEFORE = Path(__file__).parents[1] / "samples" / ".before"
ID = "20261122-091918-zero1-047e"


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterPaths:
    """The two directories as they lay: the run below the cluster's own."""
    paths = ClusterPaths(tmp_path / "cluster")
    shutil.copytree(BEFORE / "cluster", paths.root)
    run = RunPaths(paths.runs / ID)
    shutil.copytree(BEFORE / "run", run.root)
    write_json(run.info, {**read_json(run.info), "cluster": str(paths.root)})
    return paths


@pytest.fixture
def run(cluster: ClusterPaths) -> Run:
    return Run.load(cluster.runs / ID)


def test_it_opens_and_shows(run: Run, tmp_path: Path) -> None:
    result = run.result
    assert (run.state, result.steps, result.technique, result.hosts[0].pod) == (
        "succeeded",
        4,
        "zero1",
        "pod-0",
    )
    assert round(result.eval_loss or 0, 3) == 6.866
    assert (
        result.predictions is not None
        and len(result.predictions) == 4
        and result.profile is not None
    )
    for shown in (result, result.predictions, result.profile):
        assert len(str(shown)) > 100 and "<t" in shown._repr_html_()
    assert "6.866" in str(result) and "6.866" in result._repr_html_()
    assert (
        "pod-0" in run._repr_html_()
        and "6.866" in result.to_html(tmp_path / "card.html").read_text()
    )


def test_its_curves_memory_and_phases_are_read(run: Run) -> None:
    view = RunView(run.path)
    assert view.state is RunState.SUCCEEDED and view.cluster_phase == "closed"
    assert [len(view.curves[name]) for name in ("loss", "eval_loss")] == [4, 3]
    assert view.memory["127.0.0.2"].gib.highest == pytest.approx(0.4091)
    assert (view.progress.step, view.progress.max_steps, view.totals.phases[0]) == (
        4,
        4,
        "predicting",
    )
    assert view.batch.endswith(" = 2")


def test_history_lists_it(run: Run, cluster: ClusterPaths) -> None:
    (record,) = history(cluster.root).records
    assert (record.id, record.state, record.model, record.pods, record.steps) == (
        ID,
        "succeeded",
        "tiny-t5",
        1,
        4,
    )
    assert ID[-4:] in str(history(cluster.root)) and run.path == history(cluster.root)[0].path
    assert history(cluster.root, technique="zero1").records == (record,)


def test_a_report_takes_it(run: Run, tmp_path: Path) -> None:
    assert main(["report", str(run.path), "--out", str(tmp_path / "report")]) == 0
    for name in ("report.md", "report.html"):
        text = (tmp_path / "report" / name).read_text()
        assert "tiny-t5" in text and "6.866" in text


def test_its_spec_starts_the_same_run_again(tmp_path: Path) -> None:
    spec = RunSpec.load(BEFORE / "SPEC.json")
    prepared = prepare_run(spec, root=tmp_path / "again")
    now, then = (
        json.loads(prepared.paths.job.read_text()),
        read_json(BEFORE / "run" / "inputs" / "job.json"),
    )
    assert {name: now["job"][name] for name in then["job"]} == then["job"]  # type: ignore[attr-defined]
    assert now["deepspeed"] == then["deepspeed"]
    assert now["order"] == ROW_ORDER


def test_a_run_goes_on_from_it(run: Run, tmp_path: Path) -> None:
    job = FineTune(
        **{  # type: ignore[arg-type]
            **{k: v for k, v in read_json(run.paths.spec)["job"].items() if k != "kind"},  # type: ignore[attr-defined]
            "max_steps": 8,
            "resume": str(run.path),
            "train_sampling_strategy": "random",
        }
    )
    spec = RunSpec(cluster=ClusterSpec(count=1), job=job)
    other = spec.replace(job=job.replace(train_sampling_strategy="group_by_length"))
    with pytest.raises(
        ConfigError, match=sentence("rundir.checkpoints.newest_good.checkpoint-resume")
    ):
        prepare_run(spec, root=tmp_path / "none")
    part = run.paths.checkpoints / "step-4" / "pod-0" / "rank-0"
    part.mkdir(parents=True)
    (part / "state.json").write_text("{}")
    write_manifest(part, step=4, rank=0, world_size=1)
    with pytest.raises(
        ConfigError,
        match=sentence(
            "finetune.resume._check_settings.is-and-was",
            "train_sampling_strategy is 'group_by_length'",
            "random",
        ),
    ):
        prepare_run(other, root=tmp_path / "other")
    prepared = prepare_run(spec, root=tmp_path / "next")
    chosen = read_json(prepared.paths.job)["resume"]
    note = "max_steps is 8 and was 4: the learning rate follows the schedule of the new length"
    assert chosen == {"step": 4, "parts": {"0": str(part)}, "pods": {}, "notes": [note]}
    assert read_json(prepared.paths.job)["order"] == 1, (
        "rows come in the order of the run that is gone on with"
    )
