from __future__ import annotations

import html
import json
import os
from pathlib import Path

import pytest

from tests.support.counted import calls_of
from tests.support.sentences import says, sentence
from workbench.base.errors import RunError
from workbench.base.process import process_start_time
from workbench.client.tables.history import history
from workbench.rundir.catalog.store import find_runs
from workbench.rundir.paths import RunPaths
from workbench.rundir.state import RunState

RESULT = {
    "state": "succeeded",
    "model": "tiny-t5",
    "technique": "zero1",
    "steps": 1200,
    "eval_loss": 0.25,
    "exact_match": 0.5,
    "train_samples_per_s": 123.4,
    "hosts": [{"address": "a", "slots": 1}] * 3,
}


def make_run(
    root: Path, *, submitted: float = 0.0, result: object = None, cluster: Path | None = None
) -> RunPaths:
    paths = RunPaths(root)
    root.mkdir(parents=True)
    info = {"id": root.name, "cluster": str(cluster or root.parent), "submitted_s": submitted}
    paths.info.write_text(json.dumps(info))
    if result is not None:
        paths.result.write_text(json.dumps(result))
    return paths


def make_cluster(root: Path, pid: int) -> Path:
    root.mkdir(parents=True)
    (root / "cluster.json").write_text("{}")
    (root / "state.json").write_text(
        json.dumps({"pid": pid, "start_time": process_start_time(pid)})
    )
    return root


def test_runs_are_listed_newest_first_with_their_figures(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "c" / "runs" / "old", submitted=10.0, result=RESULT)
    make_run(
        tmp_path / "elsewhere" / "new",
        submitted=20.0,
        result={**RESULT, "state": "failed", "eval_loss": None},
    )
    found = history(tmp_path)
    assert [record.id for record in found] == ["new", "old"]
    old = found.records[1]
    assert (old.state, old.model, old.technique, old.pods, old.steps) == (
        RunState.SUCCEEDED,
        "tiny-t5",
        "zero1",
        3,
        1200,
    )
    assert (old.eval_loss, old.train_samples_per_s) == (0.25, 123.4)
    assert old.of_kind["exact_match"] == 0.5
    assert found.records[0].eval_loss is None
    assert repr(found) == f"History(2 runs below {tmp_path}, 0 live)"


def test_a_run_is_had_by_its_place_or_the_beginning_of_its_id(tmp_path: Path) -> None:
    made = make_run(tmp_path / "abc-1", submitted=1.0, result=RESULT)
    make_run(tmp_path / "abd-2", submitted=2.0, result=RESULT)
    found = history(tmp_path)
    assert found[1].path == found["abc"].path == made.root
    assert [record.id for record in found[:1]] == ["abd-2"]
    with pytest.raises(RunError, match=sentence("or have an id that begins so", 2)):
        found["ab"]
    with pytest.raises(RunError, match=sentence("or have an id that begins so", 0)):
        found["x"]
    with pytest.raises(IndexError):
        found[2]


def test_a_live_run_tells_its_last_step_and_is_marked(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path / "c", os.getpid())
    paths = make_run(tmp_path / "c" / "runs" / "r", submitted=1.0, cluster=cluster)
    paths.state.write_text('{"state": "running"}')
    paths.spec.write_text('{"job": {"kind": "finetune", "model": "m", "technique": "zero3"}}')
    paths.hostfile.write_text("127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    at = {"time_s": 1.0, "rank": 0}
    steps = [{**at, "kind": "step", "step": n, "samples_per_s": 1.5 * n} for n in range(5000)]
    evals = [
        {**at, "kind": "eval", "step": n, "eval_loss": loss} for n, loss in ((0, 9), (4999, 0.75))
    ]
    events = [*steps[:100], evals[0], *steps[100:], evals[1]]
    paths.events.write_text("".join(json.dumps(e) + "\n" for e in events) + '{"kind": "step", "st')
    (record,) = history(tmp_path)
    assert record.is_live
    assert (record.steps, record.eval_loss, record.train_samples_per_s) == (4999, 0.75, 1.5 * 4999)
    assert (record.model, record.technique, record.pods) == ("m", "zero3", 2)
    assert "● running" in str(history(tmp_path))
    assert "1 live" in str(history(tmp_path))


def test_a_run_whose_keeper_died_is_lost(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "r", submitted=1.0)
    paths.state.write_text('{"state": "running"}')
    assert [record.state for record in history(tmp_path)] == [RunState.LOST]


@pytest.mark.parametrize(
    "broken", ["", "[]", "{", '{"id": 5, "submitted_s": "x", "cluster": 7}', "\x00"]
)
def test_a_broken_run_breaks_no_list(tmp_path: Path, broken: str) -> None:
    paths = make_run(tmp_path / "bad", submitted=1.0)
    for path in (paths.info, paths.state, paths.spec, paths.hostfile, paths.events):
        path.write_text(broken)
    make_run(tmp_path / "good", submitted=1.0, result=RESULT)
    strange = {"state": "won", "hosts": 3, "steps": "many", "eval_loss": True, "exact_match": None}
    make_run(tmp_path / "strange", submitted=1e300, result=strange)
    found = {record.path.name: record for record in history(tmp_path)}
    assert set(found) == {"bad", "good", "strange"}
    assert found["good"].state is RunState.SUCCEEDED
    assert found["strange"].steps is found["strange"].eval_loss is None
    assert "good" in str(history(tmp_path))


def test_what_is_no_place_for_runs_is_not_looked_into(tmp_path: Path) -> None:
    made = make_run(tmp_path / "r", result=RESULT)
    for name in (".hidden", "pods", "node_modules"):
        make_run(tmp_path / name / "r", result=RESULT)
    make_run(made.root / "model" / "inner", result=RESULT)
    make_run(tmp_path.joinpath(*"12345678") / "deep", result=RESULT)
    (tmp_path / "again").symlink_to(tmp_path)
    assert [paths.root for paths in find_runs(tmp_path)] == [made.root]
    assert [paths.root for paths in find_runs(made.root)] == [made.root]
    assert len(list(find_runs(tmp_path, depth=9))) == 2
    with pytest.raises(RunError, match=sentence("there is no folder")):
        history(tmp_path / "nowhere")


def test_an_empty_folder_has_no_runs(tmp_path: Path) -> None:
    assert len(history(tmp_path)) == 0
    assert str(history(tmp_path)).startswith(f"0 runs below {tmp_path}")


CALLS_PER_RUN = 2000


def make_runs(tmp_path: Path, numbers: range) -> None:
    if not (cluster := tmp_path / "c").exists():
        make_cluster(cluster, os.getpid())
    for n in numbers:
        root = tmp_path / "c" / "runs" / f"run-{n:04}"
        paths = make_run(
            root, submitted=float(n), result=RESULT if n % 10 else None, cluster=cluster
        )
        for inner in ("logs", "inputs", "model", "tensorboard"):
            (root / inner).mkdir()
        paths.spec.write_text('{"job": {"model": "m", "technique": "zero1"}}')
        paths.events.write_text('{"kind": "step", "step": 3, "samples_per_s": 2.0}\n' * 50)


def test_the_cost_of_a_list_grows_with_its_runs_and_no_faster(tmp_path: Path) -> None:
    make_runs(tmp_path, range(100))
    history(tmp_path)
    few = calls_of(lambda: history(tmp_path))
    make_runs(tmp_path, range(100, 1000))
    many = calls_of(lambda: history(tmp_path))
    assert many < 12 * few
    assert many < 1000 * CALLS_PER_RUN
    found = history(tmp_path)
    assert len(found) == 1000
    text, page = str(found), found._repr_html_()
    assert "1,000 runs" in text
    assert says(text, "the newest {} shown", 50)
    assert page.count("<tr>") == 204, "four tables of fifty runs, each with a head"
    assert len(found.table().rows) == 1000


def test_text_and_html_state_the_same_and_nothing_is_obeyed(tmp_path: Path) -> None:
    make_run(
        tmp_path / "<b>x", submitted=5.0, result={**RESULT, "model": "<img src=x onerror=alert(1)>"}
    )
    found = history(tmp_path)
    text, page = str(found), found._repr_html_()
    assert "<img" not in page
    assert "<b>" not in page
    for line in text.splitlines():
        for piece in line.split("  "):
            assert set(piece) <= {"-"} or piece.strip() in html.unescape(page)
