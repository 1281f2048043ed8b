"""A beginner's wrong calls: the refusal names the value, and a line that works when pasted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest

import workbench
from workbench import Cluster, FineTune, LocalPods, SSHPods, preview
from workbench.base.errors import ConfigError
from workbench.finetune.data.sources.dataset import dataset_from, prepare

ODD = "".join(f"hello {n},{'' if n == 4 else 'sales'}\n" for n in range(1, 31))
EMPTY = "".join(f"{'' if n in (3, 7) else 'hello'} ,sales{n}\n" for n in range(1, 31))
HEADLESS = "".join(f"how are you number {n},fine {n}\n" for n in range(30))
COLUMNS = {"source": "Customer Message ", "target": "Team"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.csv").write_text("Customer Message ,Team\n" + ODD)
    (tmp_path / "empty.csv").write_text("Customer Message ,Team\n" + EMPTY)
    (tmp_path / "headless.csv").write_text(HEADLESS)
    (tmp_path / "survey.csv").write_text("What is your question to us?,Which team?\n" + ODD)
    (tmp_path / "qa.csv").write_text("question,answer\n" + ODD)
    return tmp_path


# The call as typed, the value that the refusal must show, and how to paste its line.
JOB = r"write ((?:\w+=.+))$"
DATASET = r"(dataset=.+)$"
CALL = r"[Ww]rite (Cluster\(.+\))$"
CALLS: dict[str, tuple[Callable[[], object], str, str]] = {
    "third position": (lambda: FineTune("tiny-t5", "qa.csv", "zero1"), "zero1", JOB),
    "place as text": (lambda: Cluster("local"), "local", CALL),  # type: ignore[arg-type]
    "place of hosts as text": (lambda: Cluster("ssh"), "ssh", CALL),  # type: ignore[arg-type]
    "unknown place as text": (lambda: Cluster("my laptop"), "my laptop", CALL),  # type: ignore[arg-type]
    "class of a place": (lambda: Cluster(LocalPods), "LocalPods", CALL),  # type: ignore[arg-type]
    "number of pods": (lambda: Cluster(LocalPods(), 3), "3", CALL),  # type: ignore[arg-type]
    "options of a method": (lambda: FineTune(method_options={"beta": 0.1}), "beta", JOB),
    "technique lora": (lambda: FineTune(technique="lora"), "lora", r"(peft='lora')"),  # type: ignore[arg-type]
    "technique dpo": (lambda: FineTune(technique="dpo"), "dpo", r"(method='dpo')"),  # type: ignore[arg-type]
    "method lora": (lambda: FineTune(method="lora"), "lora", r"(peft='lora')"),  # type: ignore[arg-type]
    "peft zero3": (lambda: FineTune(peft="zero3"), "zero3", r"write (technique='zero3')"),  # type: ignore[arg-type]
    "columns beside": (lambda: FineTune(dataset="odd.csv", columns=COLUMNS), "columns", JOB),  # type: ignore[call-arg]
    "no kind": (lambda: FineTune(dataset={"train": "qa.csv"}), "kind", DATASET),
    "path": (lambda: FineTune(dataset={"kind": "files", "path": "qa.csv"}), "path", DATASET),
    "path without kind": (lambda: FineTune(dataset={"path": "qa.csv"}), "kind", DATASET),
    "no header": (
        lambda: preview(FineTune(dataset="headless.csv")),
        "headless.csv",
        r"names of columns: (dataset=pandas.+)$",
    ),
    "questions as header": (
        lambda: preview(FineTune(dataset="survey.csv")),
        "Which team?",
        r": (dataset=\{.+\})\. If the first line",
    ),
    "odd header": (lambda: preview(FineTune(dataset="odd.csv")), "Customer Message ", DATASET),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_names_the_value_and_a_line_that_works_when_pasted(
    name: str, files: Path
) -> None:
    call, value, line = CALLS[name]
    with pytest.raises(ConfigError) as refused:
        call()
    text = str(refused.value)
    assert value in text
    found = re.search(line, text)
    assert found, text
    pasted = found[1]
    names = {**vars(workbench), "pandas": pandas, "SSHPods": SSHPods}
    if pasted.startswith("Cluster"):
        eval(pasted, names)
        return
    job = eval(f"FineTune(model='tiny-llama', {pasted})", names)
    if "dataset" in pasted:
        made = prepare(dataset_from(job.dataset), files / "rows")
        assert made.train_rows > 20, "the pasted line trains on the file"


@pytest.mark.parametrize("model", ["tiny-t5", "tiny-llama"])
def test_an_empty_question_is_counted_for_every_model_and_the_option_drops_it(
    model: str, files: Path
) -> None:
    dataset = {"kind": "files", "train": "empty.csv", "columns": COLUMNS}
    with pytest.raises(ConfigError) as refused:
        preview(FineTune(model=model, dataset=dataset))
    text = str(refused.value)
    assert "empty.csv, line 4" in text and "2 of 30 rows" in text and "'drop_empty': True" in text
    found = re.search(DATASET, text)
    assert found
    pasted = eval(found[1].removeprefix("dataset="))
    assert pasted == {**dataset, "drop_empty": True}
    made = prepare(dataset_from(pasted), files / "rows")
    assert made.train_rows + made.eval_rows == 28
    assert sum(made.remarks.values()) == 2, "preview and the run's log count the rows"


def test_the_line_for_many_columns_knows_of_empty_cells(files: Path) -> None:
    """So an own file takes two tries, also where the two columns are yours to name."""
    rows = "".join(
        f"T-{n},{'' if n in (12, 80) else 'hello'},{'' if n == 20 else 'sales'},{n}\n"
        for n in range(1, 101)
    )
    (files / "many.csv").write_text("Ticket #,Customer Message ,Team,Closed on (UTC)\n" + rows)
    with pytest.raises(ConfigError) as refused:
        preview(FineTune("tiny-t5", "many.csv"))
    text = str(refused.value)
    assert all(repr(name) in text for name in ("Ticket #", "Closed on (UTC)"))
    found = re.search(DATASET, text)
    assert found
    line = found[1].removeprefix("dataset=")
    pasted = eval(line.replace("…", "Customer Message ", 1).replace("…", "Team"))
    made = prepare(dataset_from(pasted), files / "rows")
    assert made.train_rows + made.eval_rows == 97


def test_the_line_for_odd_headers_knows_of_empty_cells(files: Path) -> None:
    """So an own file takes two tries: the path, and the pasted line."""
    with pytest.raises(ConfigError) as refused:
        preview(FineTune(dataset="empty.csv"))
    found = re.search(DATASET, str(refused.value))
    assert found
    pasted = eval(found[1].removeprefix("dataset="))
    assert pasted == {
        "kind": "files",
        "train": "empty.csv",
        "columns": COLUMNS,
        "drop_empty": True,
    }
    made = prepare(dataset_from(pasted), files / "rows")
    assert made.train_rows + made.eval_rows == 28
