"""Beside the panel of a run nothing is said again; a table keeps its verdict in a narrow place."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.views import EXAMPLES, ended
from tests.support.writtenrun import WrittenRun, write_run
from workbench.base.errors import RunFailed
from workbench.base.table import Grid, cell_text
from workbench.client.deletion import bytes_of_run, delete_run
from workbench.client.result import RunResult
from workbench.client.run import Run
from workbench.client.tables.comparison import compare
from workbench.display import failure
from workbench.display.compose.composition import Composition
from workbench.display.compose.form import compose
from workbench.display.kit import live
from workbench.display.kit.doc import Table, blocks_html, to_bundle, to_text
from workbench.display.kit.equal import without_equal
from workbench.display.records import result as results
from workbench.display.records.plan import plan_doc
from workbench.display.run.page import run_doc
from workbench.display.run.panel import RunPanel, wait_for_run
from workbench.finetune.plan.table import PlanTable


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Record the run of a directory as one whose panel a notebook shows."""
    paths: set[object] = set()
    monkeypatch.setattr(live, "_SHOWN", paths)
    return paths.add


def test_waiting_beside_a_panel_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: Callable[[Path], None]
) -> None:
    run = ended(tmp_path)
    with wait_for_run(run) as draw:
        draw()
    assert "succeeded" in capsys.readouterr().out
    shown(run.path)
    with wait_for_run(run) as draw:
        draw()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_a_result_beside_a_panel_states_what_the_panel_lacks(
    tmp_path: Path, shown: Callable[[Path], None], state: str
) -> None:
    run = ended(tmp_path, state)
    result = RunResult.load(run.path)
    whole = to_text(results.shown_result_doc(result))
    assert whole == to_text(results.result_doc(result))
    panel = to_text(run_doc(run))
    shown(run.path)
    short = to_text(results.shown_result_doc(result))
    assert "OutOfMemoryError" not in short
    assert len(short) < len(whole)
    # Nothing is lost: a fact that is left out stands in the panel.
    for name, text in results._pairs(result):
        if text not in ("", "–") and text not in short:
            parts = [part for part in text.replace(" slots=1", "").split(", ") if part]
            words = [word for part in parts for word in part.split()[:1]]
            assert all(word in panel for word in words), (name, text)


def test_an_error_beside_a_panel_is_not_written_again(
    tmp_path: Path, shown: Callable[[Path], None]
) -> None:
    run = ended(tmp_path, "failed")
    with pytest.raises(RunFailed) as raised:
        run.result.raise_for_status()
    assert "OutOfMemoryError" in failure._words(raised.value)
    shown(run.path)
    words = failure._words(raised.value)
    assert "OutOfMemoryError" not in words and "rank 1 on pod-1" in words and "logs" in words


def test_a_card_states_an_exception_once(tmp_path: Path) -> None:
    written = write_run(tmp_path)
    written.log(0, "Traceback\nZeroDivisionError: division by zero\n")
    error = {
        "host": "127.0.0.2",
        "rank": 0,
        "kind": "ZeroDivisionError",
        "message": "division by zero",
        "traceback": 'Traceback\n  File "t.py", line 3\nZeroDivisionError: division by zero\n',
    }
    written.end("failed", "ZeroDivisionError: division by zero", error=error)
    page = str(blocks_html(run_doc(Run.load(written.paths.root)).blocks))
    log = page.index("combined log")
    assert page[:log].count("division by zero") == 1
    assert not page[:log].endswith("<details open><summary>"), "the log is folded"


def test_an_ended_run_offers_code_and_its_page_has_the_line(tmp_path: Path) -> None:
    written = write_run(tmp_path)
    written.paths.checkpoints.mkdir()
    (written.paths.checkpoints / "checkpoint-3").mkdir()
    written.paths.model.mkdir()
    (written.paths.model / "config.json").write_text("{}")
    notes = "predict_rows were not answered; resume=run.path continues from the checkpoint"
    written.end("stopped", f"stopped after a checkpoint at step 3; {notes}")
    panel = RunPanel(Run.load(written.paths.root))
    page = str(to_bundle(panel.look())["text/html"])
    buttons = {each["name"]: each for each in panel.bar().widget.buttons}
    assert [*buttons] == ["Continue", "Ask", "Export", "board"] and panel.keeps_buttons
    for name in ("Continue", "Ask", "Export"):
        compile(str(buttons[name]["cell"]), name, "exec")
        assert f'<div class="wb-instead">{name}: <code>' in page
    assert "Notes: predict_rows were not answered" in page
    assert "resume=run.path continues" not in page
    panel._bar._actions["Export"]()  # a front end that cannot insert a cell
    assert "run.export(" in panel.bar().widget.extra


def test_a_run_that_stops_has_no_time_left(tmp_path: Path) -> None:
    written = write_run(tmp_path)
    written.state("running", "training")
    for step in (1, 2, 3):
        written.step(step)
    run = Run.load(written.paths.root)
    assert "left" in to_text(run_doc(run))
    written.event("stopped", step=3)
    written.event("phase", name="evaluating")
    text = to_text(run_doc(run))
    assert "stopping after step 3 · evaluating" in text and " left" not in text


def test_what_a_deletion_frees_is_what_the_files_hold(tmp_path: Path) -> None:
    run = ended(tmp_path)
    before = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    size = bytes_of_run(run.path)
    delete_run(run.paths)
    after = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size == before - after > 0


CELLS = st.sampled_from(["a", "b", ""])


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[CELLS] * n), max_size=4)))
def test_equal_columns_become_a_line_and_nothing_is_lost(rows: list[tuple[str, ...]]) -> None:
    titles = [f"t{n}" for n in range(len(rows[0]) if rows else 2)]
    left, facts = without_equal(Grid(columns=titles, rows=rows), titles)
    words = {f"{title} {cell}" for row in rows for title, cell in zip(titles, row, strict=True)}
    shown = {
        f"{title} {cell_text(cell)}"
        for row in left.rows
        for title, cell in zip(left.columns, row, strict=True)
    }
    assert {word for word in words if not word.endswith(" ")} <= shown | {*facts}
    if len(rows) > 1:
        for place, _ in enumerate(left.columns):
            assert len({cell_text(row[place]) for row in left.rows}) > 1


def test_the_verdict_of_a_plan_stays_in_sight(tmp_path: Path) -> None:
    doc = plan_doc(EXAMPLES[PlanTable](tmp_path))
    grid = next(block for block in doc.blocks if isinstance(block, Table)).grid
    assert {"technique", "fits"} <= {*grid.stay}
    assert "(| 4 GiB)" in " ".join(grid.columns)


def test_runs_without_names_are_named_by_what_differs(tmp_path: Path) -> None:
    runs = []
    for technique, rate in (("ddp", 0.004), ("zero1", 0.004), ("zero1", 0.002)):
        job = {"kind": "finetune", "technique": technique, "learning_rate": rate}
        written: WrittenRun = write_run(tmp_path / f"{technique}{rate}", job=job)
        written.end()
        runs.append(written.paths.root)
    names = [run.name for run in compare(runs).runs]
    assert names == [
        "ddp, learning_rate 0.004",
        "zero1, learning_rate 0.004",
        "zero1, learning_rate 0.002",
    ]


def test_a_count_that_fails_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Composition] = []

    def fail(composition: Composition) -> str:
        asked.append(composition)
        return "the disk is full"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("workbench.display.compose.form.count_memory", fail)
    form = compose(count=2)
    assert form.widget.fields
    deadline = time.monotonic() + 60
    while not form.preview.is_counted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert form.preview.memory == "Memory is not predicted: the disk is full"
    time.sleep(0.5)
    assert len(asked) == 1
