from __future__ import annotations

import json
from pathlib import Path

import pytest
from markupsafe import escape

from workbench.display.compose.composition import Composition, find_problems
from workbench.display.compose.fields import COLUMNS, FIELDS
from workbench.display.compose.form import compose
from workbench.finetune.job.finetune import FineTune
from workbench.pods.pod_spec import PodSpec


def test_defaults_and_choices_are_those_of_the_records() -> None:
    assert list(Composition()) == list(FIELDS)
    assert Composition().make_job() == FineTune()
    assert Composition().value("learning_rate") is None and Composition().value("precision") is None
    assert FIELDS["technique"].option.default == FineTune().technique
    assert Composition().value("cpus") == PodSpec().cpus


def test_the_default_can_start() -> None:
    assert find_problems(Composition()) == {}


@pytest.mark.parametrize(
    ("choices", "where", "said"),
    [
        ({"precision": "fp16"}, {"precision"}, "use 'bf16'"),
        ({"precision": "tf32"}, {"precision"}, "needs NVIDIA GPUs"),
        ({"technique": "single", "launcher": "pdsh"}, {"technique", "launcher"}, "Use 'ssh'"),
        ({"technique": "zero-1"}, {"technique"}, "did you mean 'zero1'"),
        ({"count": 0}, {"count"}, "1 or more"),
        ({"cpus": -1.0}, {"cpus"}, "more than 0"),
        ({"gpus": 1000}, {"gpus"}, "need 3000 GPUs"),
        ({"dataset": "wikisq"}, {"dataset"}, "did you mean 'wikisql'"),
        ({"model": "/no/such/folder"}, {"model"}, "neither a folder on this machine"),
        ({"learning_rate": -1.0}, {"learning_rate"}, "more than 0"),
        ({"per_device_train_batch_size": 0}, {"per_device_train_batch_size"}, "1 or more"),
        ({"epochs": 0.0}, {"epochs"}, "more than 0"),
        ({"local.port": 70000}, {"local.port"}, "65535"),
        ({"deepspeed": "/no/such.json"}, {"deepspeed"}, "does not exist"),
    ],
)
def test_a_mistake_is_explained_at_the_fields_that_mend_it(
    choices: dict[str, object], where: set[str], said: str
) -> None:
    problems = find_problems(Composition(**choices))
    assert set(problems) == where
    assert all(said in why for why in problems.values())


def test_a_deepspeed_file_that_contradicts_the_technique_is_explained_at_both(
    tmp_path: Path,
) -> None:
    own = tmp_path / "ds.json"
    own.write_text('{"zero_optimization": {"stage": 3}}')
    problems = find_problems(Composition(technique="single", deepspeed=str(own)))
    assert "deepspeed" in problems
    problems = find_problems(Composition(technique="zero2", deepspeed=str(own)))
    assert "deepspeed" in problems
    # The technique that the form begins with counts as left open: the stage of the JSON says which.
    assert Composition(technique="zero1", deepspeed=str(own)).make_job().deepspeed == str(own)
    assert find_problems(Composition(technique="zero3", deepspeed=str(own))) == {}


def test_several_mistakes_are_all_found() -> None:
    wrong = Composition(
        count=0, dataset="nothing", precision="fp16", technique="single", launcher="openmpi"
    )
    assert set(find_problems(wrong)) == {"count", "dataset", "precision", "technique", "launcher"}


def test_columns_are_chosen_beside_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tickets.csv").write_text("Customer Message ,Team\nWhere is it?,orders\n" * 9)
    form = compose(dataset="tickets.csv")
    columns = {"source": "Customer Message ", "target": "Team"}
    proposed = json.dumps(columns)
    assert form.columns == form.widget.state["columns"] == proposed
    assert proposed in str(form) and str(escape(proposed)) in form._repr_html_()
    form.choose(form.composition.replace(**{COLUMNS: proposed}))
    files = {"kind": "files", "train": "tickets.csv"}
    assert form.composition.make_job().dataset == {**files, "columns": columns}
    assert form.columns == ""
    named = form.composition.replace(**{COLUMNS: "source=a, target=b"})
    assert named.make_job().dataset == {**files, "columns": {"source": "a", "target": "b"}}
    Path("tickets.csv").write_text("Message,Team\nWhere is it?,orders\n" * 9)
    assert compose(dataset="tickets.csv").columns == "source=Message, target=Team"
    refused = find_problems(Composition(**{"dataset": "wikisql-mini", COLUMNS: "source=a"}))
    assert "is not known" in refused[COLUMNS]


def test_the_job_is_what_was_chosen() -> None:
    job = Composition(technique="zero3", gradient_accumulation_steps=4, max_steps=7).make_job()
    assert job == FineTune(technique="zero3", gradient_accumulation_steps=4, max_steps=7)
    assert Composition(max_steps=0, epochs=2.5).make_job().epochs == 2.5
    assert Composition(max_steps=0).make_job().max_steps is None
