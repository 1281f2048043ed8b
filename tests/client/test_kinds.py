"""Which class a run and its result have, by the kind of the job in `spec.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.sentences import sentence
from tests.support.writtenrun import WrittenRun, write_run
from workbench import Run, history
from workbench.base import entries
from workbench.base.errors import ConfigError, RunError
from workbench.results import FineTuneResult, FineTuneRun, RunResult

SCRIPT = {"kind": "script", "path": "train.py"}
OF_FINETUNE = ("predict", "chat", "export", "merge", "push")
OF_ITS_RESULT = ("profile", "trace", "predictions", "tflops_per_device", "mfu")


@pytest.fixture
def script(tmp_path: Path) -> WrittenRun:
    run = write_run(tmp_path, SCRIPT)
    run.end(technique="script", model="")
    return run


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module with a kind of job that brings a handle and a result of its own."""
    module = ModuleType("kind_of_a_test")
    exec(
        """
from workbench.client.run import Run
from workbench.client.result import RunResult
from workbench.jobs.job import Job, Prepared, Traits

class Simulation(Job):
    kind = "simulation"
    launcher: str = "ssh"
    env: dict[str, str] = {}
    restarts: int = 0
    stall_timeout_s: float | None = None

    def prepare(self, run):
        return Prepared(job=self)

    def program_on(self, pod):
        raise NotImplementedError

    traits = Traits(
        run_class="kind_of_a_test:SimulationRun",
        result_class="kind_of_a_test:SimulationResult",
    )

class SimulationRun(Run):
    __slots__ = ()
    def replay(self):
        return f"replay of {self.id}"

class SimulationResult(RunResult):
    __slots__ = ()
    @property
    def derived(self):
        return {"tflops_per_device": 2.0}
""",
        vars(module),
    )
    monkeypatch.setitem(sys.modules, "kind_of_a_test", module)
    monkeypatch.setitem(entries.JOBS, "simulation", "kind_of_a_test:Simulation")
    yield module


def test_a_finetune_has_its_own_handle_and_result(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.end()
    handle = Run.load(run.paths.root)
    assert type(handle) is FineTuneRun
    assert type(handle.result) is FineTuneResult
    assert type(RunResult.load(run.paths.root)) is FineTuneResult
    assert handle.result.profile is None and handle.result.predictions is None
    assert type(history(tmp_path)[0]) is FineTuneRun


def test_a_run_that_was_not_loaded_names_the_way_to_its_own_class(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with pytest.raises(
        RunError,
        match=sentence("(…) has no {}; load the run instead: Run.load({})", "Run", "predict"),
    ):
        Run(run.paths.root).predict  # noqa: B018


def test_a_job_without_a_kind_is_a_finetune(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    spec = json.loads(run.paths.spec.read_text())
    del spec["job"]["kind"]
    run.paths.spec.write_text(json.dumps(spec))
    assert type(Run.load(run.paths.root)) is FineTuneRun


def test_a_script_has_what_every_run_has(script: WrittenRun) -> None:
    handle = Run.load(script.paths.root)
    assert type(handle) is Run and type(handle.result) is RunResult
    assert handle.plot().name == "loss"
    assert "Repeat it" in handle.result.to_html(script.paths.root / "card.html").read_text()


@pytest.mark.parametrize("name", OF_FINETUNE)
def test_what_fine_tuning_alone_has_is_named_on_other_runs(script: WrittenRun, name: str) -> None:
    handle = Run.load(script.paths.root)
    wanted = f"is the run of a script job and has no {name}; runs of finetune jobs have it"
    with pytest.raises(RunError, match=wanted):
        getattr(handle, name)
    assert not hasattr(handle, name)


@pytest.mark.parametrize("name", OF_ITS_RESULT)
def test_the_result_of_a_script_says_the_same(script: WrittenRun, name: str) -> None:
    with pytest.raises(
        RunError,
        match=sentence("is the run of {} and has no {}; runs of {} jobs have it", name, "finetune"),
    ):
        getattr(Run.load(script.paths.root).result, name)


def test_a_name_that_no_kind_has_is_a_plain_attribute_error(script: WrittenRun) -> None:
    with pytest.raises(
        AttributeError,
        match=sentence("object has no attribute", "Run", "predcit"),
    ) as error:
        getattr(Run.load(script.paths.root), "predcit")  # noqa: B009
    assert not isinstance(error.value, RunError)


def test_the_class_of_another_kind_does_not_read_a_run(script: WrittenRun) -> None:
    with pytest.raises(
        RunError,
        match=sentence("is the run of a {} job; {} does not read it", "script", "FineTuneRun"),
    ):
        FineTuneRun.load(script.paths.root)
    with pytest.raises(
        RunError,
        match=sentence("is the run of a {} job; {} does not read it", "script", "FineTuneResult"),
    ):
        FineTuneResult.load(script.paths.root)


@pytest.mark.parametrize("spec", ["{", '{"job": {"kind": "of a package that is gone"}}'])
def test_a_run_of_an_unknown_kind_has_what_every_run_has(tmp_path: Path, spec: str) -> None:
    run = write_run(tmp_path)
    run.end()
    run.paths.spec.write_text(spec)
    handle = Run.load(run.paths.root)
    assert type(handle) is Run and type(handle.result) is RunResult
    assert "tiny-t5" in handle.result.to_html(tmp_path / "card.html").read_text()
    with pytest.raises(
        RunError,
        match=sentence(
            "is the run of {} and has no {}; runs of {} jobs have it", "predict", "finetune"
        ),
    ):
        handle.predict()  # type: ignore[attr-defined]


def test_a_third_kind_brings_its_own_classes(tmp_path: Path, third: ModuleType) -> None:
    run = write_run(tmp_path, {"kind": "simulation"})
    run.end()
    handle = Run.load(run.paths.root)
    assert type(handle) is third.SimulationRun
    assert handle.replay() == f"replay of {run.paths.root.name}"
    assert type(handle.result) is third.SimulationResult
    assert "2 TFLOP/s per rank" in str(handle.result)
    card = handle.result.to_html(tmp_path / "card.html").read_text()
    assert "FLOPS profile" not in card and "Repeat it" not in card


def test_a_kind_without_a_handover_is_refused_with_what_to_do(
    tmp_path: Path, third: ModuleType
) -> None:
    run = write_run(tmp_path, {"kind": "simulation"})
    refused = sentence("submit it to a cluster instead", "simulation")
    with pytest.raises(ConfigError, match=refused):
        Run.load(run.paths.root).manifest("trainjob", image="me/worker:1")
