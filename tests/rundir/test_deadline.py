"""The end of the pods beside the pace of a run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.support.sentences import says
from workbench import Cluster, LocalPods
from workbench.base.files import write_json
from workbench.jobs.job import Checkpoints, Rules
from workbench.jobs.script import Script
from workbench.jobs.views import JobViews
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.events import Event
from workbench.rundir.figures.deadline import early_end, end_of, said_at_submit
from workbench.rundir.make.prepare import PreparedRun, prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import ClusterStatus
from workbench.rundir.totals import Progress


def progress(**facts: object) -> Progress:
    return Progress(state=RunState.RUNNING, **facts)  # type: ignore[arg-type]


def test_the_first_end_counts() -> None:
    pods = [Pod(name="a"), Pod(name="b", ends_s=9.0), Pod(name="c", ends_s=7.0)]
    assert (end_of(pods), end_of(pods[:1])) == (7.0, None)


def test_a_run_that_ends_before_its_pods_has_nothing_to_say() -> None:
    at_work = progress(step=10, max_steps=100, eta_s=90.0)
    assert early_end(at_work, 0, None, 0.0) == ""
    assert early_end(at_work, 0, 91.0, 0.0) == ""
    over = Progress(state=RunState.SUCCEEDED, step=100, max_steps=100)
    assert early_end(over, 0, 1.0, 0.0) == ""


def test_the_step_that_is_reached_and_the_last_checkpoint_are_named() -> None:
    at_work = progress(step=10, max_steps=100, eta_s=90.0)
    words = early_end(at_work, 0, 45.0, 0.0)
    assert ", about step 55 of 100, before this run with 1 min 30 s left" in words
    assert "no checkpoint so far" in words
    assert "the last checkpoint is of step 50" in early_end(at_work, 50, 45.0, 0.0)
    assert "about step 10 of 100" in early_end(at_work, 0, 45.0, 60.0), "the end has passed"
    assert "about step" not in early_end(progress(eta_s=90.0), 0, 45.0, 0.0)


def test_before_the_first_steps_the_hour_of_the_end_is_named() -> None:
    words = early_end(progress(), 0, 45.0, 0.0)
    assert says(words, "the pace of the run is unknown until its first steps")


def prepared(folder: Path, name: str, *args: str, ranks: int = 1) -> PreparedRun:
    script = folder / "train.py"
    script.write_text("print(1)\n")
    pods = PodSpec(ranks=ranks) if ranks > 1 else PodSpec()
    spec = RunSpec(
        cluster=ClusterSpec(pods=pods, count=1), job=Script(str(script), args=list(args))
    )
    return prepare_run(spec, root=folder / "runs" / name)


def ended(run: PreparedRun, state: str, duration_s: float) -> None:
    result = {"state": state, "duration_s": duration_s, "world_size": 1}
    write_json(run.paths.result, result)
    write_json(run.paths.info, {"id": run.run_id})


def said(run: PreparedRun, left_s: float | None, leave_s: float | None = None) -> list[str]:
    now_s = time.time()
    ends_s = None if left_s is None else now_s + left_s
    pods = [Pod(name="pod-0", ends_s=ends_s, leave_s=leave_s)]
    return said_at_submit(run.spec, run.paths, run.paths.root.parent, pods, now_s)


def test_a_first_run_says_when_its_pods_end(tmp_path: Path) -> None:
    (words,) = said(prepared(tmp_path, "1"), 300.0)
    assert words.startswith("the pods end at ") and ", in 5 min" in words
    assert says(words, "the pace of the run is unknown until its first steps")
    assert said(prepared(tmp_path, "2"), None) == []


def test_an_earlier_run_of_the_same_job_is_the_measure_at_submission(tmp_path: Path) -> None:
    def takes(run: PreparedRun, left_s: float) -> bool:
        return any(says(each, "the same job takes", "1") for each in said(run, left_s))

    first = prepared(tmp_path, "1")
    ended(first, "succeeded", 600.0)
    second = prepared(tmp_path, "2")
    assert takes(second, 300.0)
    assert said(second, 1000.0) == []
    assert not takes(prepared(tmp_path, "3", "--more"), 300.0), "another job"
    assert not takes(prepared(tmp_path, "4", ranks=2), 300.0), "other ranks"
    shutil.rmtree(first.paths.root)
    ended(second, "failed", 600.0)
    assert not takes(prepared(tmp_path, "5"), 300.0), "a run that failed without steps"


@pytest.mark.parametrize(
    ("saved_in_s", "leave_s", "warns"),
    [(40.0, 25.0, True), (20.0, 25.0, False), (40.0, None, False), (None, 25.0, False)],
)
def test_a_checkpoint_that_takes_longer_than_the_notice_is_said_at_submission(
    tmp_path: Path, saved_in_s: float | None, leave_s: float | None, warns: bool
) -> None:
    first = prepared(tmp_path, "1")
    ended(first, "succeeded", 600.0)
    if saved_in_s is not None:
        saved = Event(time_s=1.0, rank=0, kind="checkpoint", data={"step": 5, "took_s": saved_in_s})
        first.paths.events.write_text(f"{saved.to_json()}\n")
    words = said(prepared(tmp_path, "2"), None, leave_s)
    assert [says(each, "a checkpoint of this job took", "1") for each in words] == [True] * warns


@pytest.mark.parametrize(
    ("brings", "leave_s", "gbit"),
    [
        (True, 25.0, "31"),
        (True, 565.0, "1"),
        (True, 800.0, ""),
        (False, 25.0, ""),
        (True, None, ""),
    ],
)
def test_a_checkpoint_that_needs_a_fast_link_for_the_notice_is_said_at_submission(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    brings: bool,
    leave_s: float | None,
    gbit: str,
) -> None:
    run = prepared(tmp_path, "1")
    monkeypatch.setattr(Script, "rules", Rules(checkpoints=Checkpoints(brings=brings)))
    monkeypatch.setattr(JobViews, "checkpoint_bytes", 96_000_000_000)
    words = said(run, None, leave_s)
    assert len(words) == bool(gbit)
    assert all(says(each, "a checkpoint of this job has {}", "96 GB") for each in words)
    assert all(f"needs {gbit} Gbit/s" in each for each in words)


@pytest.mark.parametrize(
    ("step", "resumed", "left_s", "warns"),
    [
        (25, None, 2300.0, True),  # 600 s for a quarter of 100 steps
        (25, None, 2500.0, False),
        (75, 50, 1100.0, True),  # 600 s for half of the 50 steps that were left
        (75, 50, 1300.0, False),
        (50, 50, 1.0, False),
    ],
)
def test_a_run_that_its_deadline_ended_is_the_measure_by_its_pace(
    tmp_path: Path, step: int, resumed: int | None, left_s: float, warns: bool
) -> None:
    first = prepared(tmp_path, "1")
    ended(first, "failed", 600.0)
    write_json(
        first.paths.result,
        {"state": "failed", "duration_s": 600.0, "world_size": 1, "resumed_step": resumed},
    )
    at_step = Event(time_s=1.0, rank=0, kind="step", data={"step": step, "max_steps": 100})
    first.paths.events.write_text(f"{at_step.to_json()}\n")
    again = prepared(tmp_path, "2")
    words = said(again, left_s)
    assert any(says(each, "the same job takes", "1") for each in words) == warns


def test_a_submission_warns_of_pods_that_end_before_the_same_job_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(LocalPods(), path=tmp_path)
    ends_s = time.time() + 300.0
    status = ClusterStatus(pods=[Pod(name="pod-0", ends_s=ends_s)])
    looked = "workbench.client.submission.cluster_status"
    monkeypatch.setattr(looked, lambda _root: status)
    ended(prepared(tmp_path, "1"), "succeeded", 600.0)
    with pytest.warns(RuntimeWarning, match="the same job takes 10 min"):
        cluster._warn_of_ends(prepared(tmp_path, "2"))
    monkeypatch.setattr(looked, lambda _root: ClusterStatus())
    cluster._warn_of_ends(prepared(tmp_path, "3"))
