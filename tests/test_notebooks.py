"""Notebooks anywhere: papermill changes their first cell, and pytest runs them in any folder."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

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
    assert {node.id for node in used if isinstance(node.ctx, ast.Load)} == {*names}
    own = {node.id for node in used if not isinstance(node.ctx, ast.Load)}
    assert own <= {"mine"}  # the last cell's file


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_cell_fails_on_purpose(path: Path) -> None:
    """papermill ends with an error after each cell that fails, whatever the tags of the cell."""
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.id for cell in cells if "raises-exception" in cell.metadata.get("tags", ())] == []


@pytest.mark.long
@pytest.mark.slow
def test_papermill_changes_pods_steps_and_rows(tmp_path: Path) -> None:
    """The notebook is run to its job; other tests run jobs."""
    book = nbformat.read(ROOT / "notebooks" / "04_deepspeed_zero3_offload.ipynb", as_version=4)
    job = next(i for i, cell in enumerate(book.cells) if "job = FineTune(" in cell.source)
    shown = "pods = Cluster(backend, pod, count=count).spec.count\n"
    shown += "print(pods, job.max_steps, job.to_dict()['dataset']['train_rows'])"
    book.cells[job + 1 :] = [nbformat.v4.new_code_cell(shown)]
    nbformat.write(book, tmp_path / "book.ipynb")
    done = papermill.execute_notebook(
        tmp_path / "book.ipynb",
        tmp_path / "done.ipynb",
        parameters={"count": 3, "max_steps": 2, "train_rows": 40},
        cwd=tmp_path,
        progress_bar=False,
        execution_timeout=300,
    )
    (output,) = done.cells[-1].outputs
    assert output.text.split() == ["3", "2", "40"]


@pytest.mark.slow
def test_pytest_runs_a_notebook_in_an_empty_folder(tmp_path: Path) -> None:
    """All plugins of the environment load there: no setting of this project leaves one out."""
    cell = nbformat.v4.new_code_cell("1 + 1")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "own.ipynb")
    outer = ("PYTEST", "COV_")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbmake", "own.ipynb"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith(outer)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
