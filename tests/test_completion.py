"""What an editor completes: names that a user may call, and the values of closed sets."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from pydantic import BaseModel

import workbench
from tests.support.scripts import script_job
from tests.support.writtenrun import write_run
from workbench import Cluster, FineTune, LocalPods, PodSpec, Run, Script, SSHPods, history
from workbench.base.errors import ConfigError
from workbench.finetune.methods.registry import METHODS, MethodName
from workbench.finetune.techniques.registry import TECHNIQUES, TechniqueName
from workbench.jobs.launcher import Launcher, LauncherName
from workbench.places import CMLProject
from workbench.results import FineTuneResult, RunResult
from workbench.rundir.state import RunState, StateName

JOB = FineTune(model="tiny-t5", dataset="wikisql-mini")
OF_PYDANTIC = {name for name in dir(BaseModel) if not name.startswith("_")}
RECORDS = [JOB, script_job(path="train.py"), PodSpec(cpus=1), LocalPods(), SSHPods(hosts=["a"])]


def public(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_completes_its_options_and_nothing_of_pydantic(record: object) -> None:
    options = {option.name for option in type(record).options()}
    assert public(record) == options | {"kind", "from_dict", "options", "replace", "to_dict"}
    assert public(record) & OF_PYDANTIC == set()
    assert {"__class__", "__repr__"} <= {*dir(record)}


@pytest.mark.parametrize("kind", [RunResult, FineTuneResult])
def test_a_result_completes_its_figures(kind: type[RunResult]) -> None:
    result = kind(path=Path("run"), state=RunState.SUCCEEDED)
    assert {"steps", "eval_loss", "to_dict", "raise_for_status"} <= public(result)
    assert public(result) & {"at", "derived", "of_kind", "read"} == set()


def test_a_cluster_completes_its_verbs(tmp_path: Path) -> None:
    names = public(Cluster(LocalPods(), PodSpec(cpus=1), path=tmp_path / "cluster"))
    assert {"submit", "plan", "doctor", "close"} <= names
    assert "submit_prepared" not in names


def test_a_project_completes_its_verbs_too() -> None:
    assert {"run_job", "tensorboard"} <= set(CMLProject.__dir__(CMLProject.__new__(CMLProject)))


def test_closed_sets_are_literals_with_the_names_of_the_registries() -> None:
    assert get_args(TechniqueName) == tuple(each.name for each in TECHNIQUES)
    assert get_args(MethodName) == tuple(each.name for each in METHODS)
    assert get_args(LauncherName) == tuple(map(str, Launcher))
    assert get_type_hints(Script)["launcher"] == LauncherName
    assert TechniqueName in get_args(get_type_hints(history)["technique"])
    assert get_args(StateName) == tuple(map(str, RunState))
    hints = get_type_hints(FineTune)
    assert (hints["technique"], hints["method"], hints["launcher"]) == (
        TechniqueName,
        MethodName,
        LauncherName,
    )


def test_a_value_outside_a_closed_set_is_refused_with_the_allowed_values(tmp_path: Path) -> None:
    write_run(tmp_path)
    with pytest.raises(ConfigError, match=r"'pdhs' .*mean 'pdsh'.*ssh, pdsh, openmpi"):
        Script(path="train.py", launcher="pdhs")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"technique 'zero-1' .*did you mean 'zero1'.*script"):
        history(tmp_path, technique="zero-1")
    with pytest.raises(ConfigError, match=r"state 'done' .*succeeded"):
        history(tmp_path, state="done")  # type: ignore[arg-type]
    assert len(history(tmp_path, technique=["fsdp", "script"])) == 0


def test_the_package_has_at_most_20_names() -> None:
    assert len(workbench.__all__) <= 20
    assert [*map(str, sorted(workbench.__all__))] == dir(workbench)


def test_status_of_a_run_is_called_state(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path).paths.root)
    with pytest.raises(AttributeError) as caught:
        run.status  # type: ignore[attr-defined]  # noqa: B018
    shown = "".join(traceback.format_exception_only(caught.value))
    assert "Use 'state'" in shown and "stacks" not in shown
