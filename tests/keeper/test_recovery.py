"""Which runs a new keeper takes over from a dead one, and how others end: no process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runloop import RUN, Fate, KeeperDied, Plan, SimFleet, SimLog, Simulation
from tests.keeper.acts import script
from tests.support.runstores import empty
from workbench.base.files import read_json, write_json
from workbench.base.process import boot_id
from workbench.base.redact import Redactor
from workbench.jobs.job import Rules
from workbench.jobs.script import Script
from workbench.keeper import recovery as module
from workbench.keeper.recovery import inherited_runs, run_context, wanted_pods
from workbench.keeper.run.runner import Runner
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.register.store import DecisionKind, KnownRun, Registration
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.status import ClusterStatus, result_file


class Single(Script):
    """A script with one rank at most."""

    @property
    def rules(self) -> Rules:
        return Rules(most_ranks=1)


def test_a_job_gets_the_pods_that_are_asked_for_up_to_its_own_limit() -> None:
    job = script()
    assert (wanted_pods(job, None, 4), wanted_pods(job, 3, 4)) == (4, 3)
    assert wanted_pods(Single.from_dict({"path": "/home/me/train.py"}), None, 4) == 1


class Kept:
    """The pods and the log of a keeper that died."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "own"))
        monkeypatch.setenv("A", "a secret word")
        self.sim = Simulation(folder, script(env={"A": "a secret word"}), [Plan(others=Fate())])
        self.fleet: Any = SimFleet(self.sim)
        self.log = SimLog(self.sim)
        empty(self.log, self.sim.log_path)
        self.redact = Redactor()
        self.before = ClusterStatus()

    def submitted(self) -> None:
        self.log.add(RUN, DecisionKind.SUBMITTED, path=self.sim.paths.root, pods=["pod-0", "pod-1"])

    def found(self) -> tuple[dict[str, Runner], dict[str, Mapping[str, object]]]:
        return inherited_runs(self.fleet, self.redact, self.before, self.log, self.sim.around)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(tmp_path, monkeypatch)


def test_a_context_has_the_variables_of_the_store_and_masks_secrets(kept: Kept) -> None:
    run = KnownRun(id=RUN, path=kept.sim.paths.root)
    links = kept.fleet.named(["pod-0", "pod-1"])
    store = {"AWS_SECRET_ACCESS_KEY": "another secret word"}
    context = run_context(
        kept.fleet, links, run, kept.sim.job, kept.redact, kept.log, store_environment=store
    )
    assert context.store_environment == store
    assert context.spare == kept.fleet.paths.results / f"{RUN}.json"
    assert (context.inherited, context.unstartable, context.spec.pods) == (False, "", 2)
    assert "another secret" not in kept.redact("x another secret word")
    assert "a secret" not in kept.redact("x a secret word")
    bare = run_context(kept.fleet, links, run, kept.sim.job, kept.redact, kept.log)
    assert bare.store_environment == {}


def test_a_run_of_the_log_is_taken_over_with_its_pods(kept: Kept) -> None:
    kept.submitted()
    runners, failed = kept.found()
    assert failed == {}
    context = runners[RUN].context
    assert [link.pod.name for link in context.links] == ["pod-0", "pod-1"]
    assert (context.inherited, context.restarted) == (True, False)


def test_pods_of_the_log_go_before_those_of_the_hostfile(kept: Kept) -> None:
    kept.log.add(RUN, DecisionKind.SUBMITTED, path=kept.sim.paths.root, pods=["pod-1"])
    kept.sim.context()
    assert [link.pod.name for link in kept.found()[0][RUN].context.links] == ["pod-1"]


def test_pods_that_the_log_does_not_name_are_those_of_the_hostfile(kept: Kept) -> None:
    kept.sim.context()
    for pods in ([], ["pod-0", "pod-7"]):
        empty(kept.log, kept.sim.log_path)
        kept.log.add(RUN, DecisionKind.SUBMITTED, path=kept.sim.paths.root, pods=pods)
        links = kept.found()[0][RUN].context.links
        assert [link.pod.name for link in links] == ["pod-0", "pod-1"]


def test_a_run_of_another_cluster_is_left_alone(kept: Kept) -> None:
    kept.submitted()
    write_json(kept.sim.paths.info, {"id": RUN, "cluster": "/elsewhere"})
    assert kept.found() == ({}, {})
    assert not result_file(kept.sim.paths).exists()


def test_a_run_that_was_over_without_a_file_has_its_result_written(kept: Kept) -> None:
    kept.submitted()
    kept.log.add(RUN, DecisionKind.ENDED, 1, state="succeeded", message="all ranks finished")
    runners, failed = kept.found()
    assert runners == {}
    assert (failed[RUN]["state"], failed[RUN]["of"]) == ("succeeded", str(kept.sim.paths.root))
    assert read_json(kept.sim.paths.result)["message"] == "all ranks finished"


def test_a_run_that_was_over_with_a_file_has_a_runner(kept: Kept) -> None:
    kept.submitted()
    kept.log.add(RUN, DecisionKind.ENDED, 1, state="succeeded", message="all ranks finished")
    write_json(kept.sim.paths.result, {"state": "succeeded", "message": "of the file"})
    runners, failed = kept.found()
    assert (list(runners), failed) == ([RUN], {})
    assert runners[RUN].over


def test_a_run_whose_folder_is_gone_ends_once(kept: Kept) -> None:
    kept.submitted()
    kept.sim.paths.info.unlink()
    runners, failed = kept.found()
    assert (runners, failed[RUN]["state"]) == ({}, "failed")
    assert kept.sim.asked_of("pod-0") == ["stop"], "ranks may be alive"
    assert read_json(kept.sim.paths.result)["state"] == "failed"
    decided = kept.log.of(RUN)
    assert decided is not None and decided.over
    assert kept.found()[1] == failed


def test_a_result_that_its_folder_does_not_take_is_kept_by_the_cluster(kept: Kept) -> None:
    kept.submitted()
    kept.sim.paths.info.unlink()
    kept.sim.paths.result.mkdir()
    kept.found()
    elsewhere = kept.fleet.paths.results / f"{RUN}.json"
    assert read_json(elsewhere)["state"] == "failed"


def test_a_result_without_any_place_is_in_the_log(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    kept.submitted()
    kept.sim.paths.info.unlink()
    kept.sim.paths.result.mkdir()
    kept.fleet.paths.results.write_text("a file")
    assert kept.found()[1][RUN]["state"] == "failed"
    assert RUN in caplog.text


def test_a_run_without_a_folder_has_its_result_nowhere(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    kept.log.add(RUN, DecisionKind.SUBMITTED, path=kept.sim.paths.root / "gone")
    assert kept.found()[1][RUN]["state"] == "failed"
    assert not (kept.fleet.paths.results / f"{RUN}.json").exists()
    assert "cannot write" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "boot", "restarted"),
    [
        ("local", "another boot", True),
        ("local", "", False),
        ("local", boot_id(), False),
        ("kubernetes", "another boot", False),
    ],
)
def test_a_machine_that_was_rebooted_has_no_ranks_left(
    kind: str, boot: str, restarted: bool, kept: Kept
) -> None:
    kept.submitted()
    kept.fleet.spec = kept.fleet.spec.replace(backend={"kind": kind})
    kept.before = ClusterStatus(boot=boot)
    assert kept.found()[0][RUN].context.restarted is restarted


def test_pods_whose_variables_are_missing_here_start_no_ranks(kept: Kept) -> None:
    kept.submitted()
    assert kept.found()[0][RUN].context.unstartable == ""
    kept.log.registration = Registration(spec={"pods": {"env": {"B": "", "A": "", "C": ""}}})
    kept.fleet.spec = ClusterSpec(count=2, lease_s=30.0, pods=PodSpec(env={"A": "here"}))
    why = kept.found()[0][RUN].context.unstartable
    assert why.startswith("B, C: ")


def test_a_job_whose_variables_are_missing_here_starts_no_ranks(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.submitted()
    monkeypatch.delenv("A")
    assert "A" in kept.found()[0][RUN].context.unstartable


def test_a_run_that_the_first_keeper_lost_is_carried_out_by_the_next(kept: Kept) -> None:
    kept.sim.plans = [Plan()]
    kept.sim.dies_at = {"before start": 1}
    with pytest.raises(KeeperDied):
        kept.sim.submitted().run()
    runners, failed = kept.sim.taken_over()
    assert failed == {}
    assert runners[RUN].run() == "succeeded"


def test_a_record_that_cannot_be_read_fails_the_run_alone(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> Runner:
        raise OSError("a stale file handle")

    kept.submitted()
    monkeypatch.setattr(module, "_inherited_run", fail)
    runners, failed = kept.found()
    assert runners == {}
    assert "a stale file handle" in str(failed[RUN]["message"])
