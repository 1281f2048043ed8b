"""Notebooks anywhere: papermill changes their first cell, and pytest runs them in any folder."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

from workbench import FineTune, Run

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(
    path
    for folder in ("notebooks", "docs/walkthroughs")
    for path in (ROOT / folder).glob("*.ipynb")
)
WITHOUT_PODS = "01_prep_dataset"
ROWS = {"train_rows", "dataset", "mine"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_holds_the_parameters(path: Path) -> None:
    """papermill reads an assignment from a line, and runs its own cell behind the tagged one."""
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", ())]
    assert tagged == code[:1]
    names, numbers_and_texts = [], []
    for line in ast.parse(tagged[0].source).body:
        if not isinstance(line, ast.ImportFrom):
            assert isinstance(line, ast.Assign), ast.unparse(line)
            (name,) = line.targets
            assert isinstance(name, ast.Name)
            assert line.lineno == line.end_lineno
            names.append(name.id)
            if isinstance(line.value, ast.Constant):
                numbers_and_texts.append(name.id)
    assert {*numbers_and_texts} <= papermill.inspect_notebook(path).keys()
    assert ROWS & {*names}
    if path.stem != WITHOUT_PODS:
        assert {"backend", "pod", "count"} <= {*names}
        assert {"max_steps", "epochs"} & {*names}
    # A parameter that a later cell does not read, or sets itself, changes nothing.
    later = ast.parse("\n".join(cell.source for cell in code[1:]))
    used = [node for node in ast.walk(later) if isinstance(node, ast.Name) and node.id in names]
    assert {node.id for node in used} == {*names}
    assert [node.id for node in used if not isinstance(node.ctx, ast.Load)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_cell_fails_on_purpose(path: Path) -> None:
    """papermill ends with an error after each cell that fails, whatever the tags of the cell."""
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.id for cell in cells if "raises-exception" in cell.metadata.get("tags", ())] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_starts_one_cluster_and_reads_nothing_outside_the_repository(
    path: Path,
) -> None:
    code = "\n".join(
        cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
    )
    assert len(re.findall(r"\bCluster\(", code)) == (path.stem != WITHOUT_PODS)
    assert not re.search(r"\.\./|[\"']/(?!models)", code)


def parameterized(stem: str, folder: Path, **parameters: object) -> Path:
    """Write a notebook with parameters into a folder, as papermill injects them."""
    made = folder / f"{stem}.ipynb"
    papermill.execute_notebook(
        ROOT / "notebooks" / made.name, made, parameters=parameters, prepare_only=True
    )
    return made


def outputs(book: Path) -> str:
    """Return the text of all outputs of an executed notebook."""
    cells = nbformat.read(book, as_version=4).cells
    shown = [each for cell in cells for each in cell.get("outputs", [])]
    assert [each for each in shown if each.output_type == "error"] == []
    return "".join(each.get("text", each.get("data", {}).get("text/plain", "")) for each in shown)


@pytest.mark.long
@pytest.mark.slow
def test_papermill_trains_on_rows_of_a_file(tmp_path: Path) -> None:
    """The cell "Now with your data" is run with the rows beside the notebooks."""
    rows = ROOT / "notebooks" / "rows.csv"
    parameters = {"max_steps": 4, "train_rows": 100, "mine": str(rows)}
    papermill.execute_notebook(
        ROOT / "notebooks" / "02_single_pod.ipynb",
        tmp_path / "done.ipynb",
        parameters=parameters,
        cwd=tmp_path,
        progress_bar=False,
        execution_timeout=300,
    )
    runs = [Run.load(path.parent) for path in tmp_path.glob("runs/*/runs/*/run.json")]
    jobs = [run.spec.job for run in runs if isinstance(run.spec.job, FineTune)]
    trained = {json.dumps(job.to_dict()["dataset"]): job.max_steps for job in jobs}
    assert len(trained) == 2
    assert set(trained.values()) == {4}
    assert any("rows.csv" in dataset for dataset in trained)
    assert "rows/s on 1 pod" in outputs(tmp_path / "done.ipynb")


RUNNERS = {
    "nbmake": ("pytest", "--nbmake", "--overwrite"),
    "jupyter execute": ("jupyter", "execute", "--inplace"),
    "nbconvert": ("jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace"),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_notebook_runs_with_parameters_in_an_empty_folder(runner: str, tmp_path: Path) -> None:
    """All plugins of the environment load there: no setting of this project leaves one out."""
    rows = tmp_path / "own.csv"
    rows.write_text("question,answer\n" + "Where is my zeppelin?,delivery\n" * 8)
    book = parameterized(WITHOUT_PODS, tmp_path, mine=str(rows))
    outer = ("PYTEST", "COV_")
    done = subprocess.run(
        [sys.executable, "-m", *RUNNERS[runner], book.name],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith(outer)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "zeppelin" in outputs(book)
