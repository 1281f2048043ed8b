"""The end of the pods beside the pace of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import script_job
from tests.support.sentences import says
from workbench import Cluster, LocalPods
from workbench.jobs.job import Checkpoints, Rules
from workbench.jobs.script import Script
from workbench.jobs.views import JobViews
from workbench.pods.pod import Pod
from workbench.rundir.figures.deadline import early_end, end_of, said_at_submit
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
    monkeypatch: pytest.MonkeyPatch,
    brings: bool,
    leave_s: float | None,
    gbit: str,
) -> None:
    spec = RunSpec(cluster=ClusterSpec(count=1), job=script_job("train.py"))
    monkeypatch.setattr(Script, "rules", Rules(checkpoints=Checkpoints(brings=brings)))
    monkeypatch.setattr(JobViews, "checkpoint_bytes", 96_000_000_000)
    words = said_at_submit(spec, [Pod(name="pod-0", leave_s=leave_s)])
    if not gbit:
        assert words == ""
        return
    assert says(words, "a checkpoint of this job has {}", "96 GB")
    assert f"needs {gbit} Gbit/s" in words


def test_a_submission_warns_of_a_checkpoint_that_may_not_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Script, "rules", Rules(checkpoints=Checkpoints(brings=True)))
    monkeypatch.setattr(JobViews, "checkpoint_bytes", 96_000_000_000)
    status = ClusterStatus(pods=[Pod(name="pod-0", leave_s=25.0)])
    monkeypatch.setattr("workbench.client.submission.cluster_status", lambda _root: status)
    monkeypatch.setattr(Cluster, "_check_ready", lambda _cluster: None)
    monkeypatch.setattr("workbench.client.submission.ask", lambda *_args, **_options: {})
    cluster = Cluster(LocalPods(), path=tmp_path / "c")
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    with pytest.warns(RuntimeWarning, match="needs 31 Gbit/s") as warned:
        cluster.submit(Script(str(script)))
    assert warned[0].filename == __file__
