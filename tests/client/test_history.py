"""Runs get names and notes; the table of runs is filtered, sorted, compared, and read as data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ipywidgets.widgets.widget import _instances

from tests.support.poll import until
from tests.support.sentences import sentence
from tests.support.writtenrun import write_run
from workbench.base.display_protocol import as_html, as_text
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import read_json, write_json
from workbench.base.table import Spark, cell_text
from workbench.client.run import Run
from workbench.display.kit.widgets import VIEW
from workbench.finetune.notebook.history import history
from workbench.rundir.figures.glimpse import some_losses
from workbench.rundir.paths import RunPaths

TOKEN = "hf_" + "a1" * 12
RESULT = {
    "state": "succeeded",
    "model": "tiny-t5",
    "technique": "zero1",
    "steps": 20,
    "eval_loss": 0.25,
    "train_loss": 0.5,
    "duration_s": 75.0,
    "hosts": [{"address": "a", "slots": 1}] * 2,
    "metrics": {"rouge1": 0.75},
    "peak_memory_gib": {"a": 0.5, "b": 0.75},
}


def make_run(root: Path, at: float, job: dict[str, Any] | None = None, **facts: Any) -> Run:
    """Write a run that has ended."""
    paths = RunPaths(root)
    root.mkdir(parents=True)
    paths.info.write_text(
        json.dumps({"id": root.name, "cluster": str(root.parent), "submitted_s": at})
    )
    paths.spec.write_text(
        json.dumps(
            {"job": {"kind": "finetune", "model": "tiny-t5", "technique": "zero1", **(job or {})}}
        )
    )
    paths.result.write_text(json.dumps({**RESULT, **facts}))
    return Run(root)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs, of which one has a name and one failed."""
    job = {
        "learning_rate": 0.001,
        "seed": 7,
        "dataset": {"kind": "files", "train": "a.jsonl"},
        "env": {"HF": "${HF}"},
    }
    make_run(tmp_path / "aaa", 1.0, job)
    make_run(
        tmp_path / "bbb", 2.0, {**job, "learning_rate": 0.01}, eval_loss=0.125, steps=100
    ).name = "high rate"
    make_run(
        tmp_path / "ccc",
        3.0,
        {**job, "seed": 8},
        state="failed",
        eval_loss=None,
        model="t5-small",
        technique="ddp",
    )
    return tmp_path


def test_a_name_and_a_note_stay_and_are_shown_wherever_the_run_is(folder: Path) -> None:
    run = Run.load(folder / "aaa")
    assert (run.name, run.note) == ("", "")
    run.name, run.note = "first try", "better rows & <b>more</b> steps"
    again = Run.load(folder / "aaa")
    assert (again.name, again.note) == ("first try", "better rows & <b>more</b> steps")
    for text, page in ((str(run), run._repr_html_()), (str(run.result), run.result._repr_html_())):
        assert "first try" in text
        assert "first try" in page
        assert "<b>more" in text
        assert "&lt;b&gt;more" in page
    card = run.result.to_html(folder / "card.html").read_text()
    assert "first try" in card
    table = str(history(folder))
    assert re.search(r"2  first try +succeeded", table)
    assert "better r…>more</b> steps" in table
    assert repr(history(folder).compare("first try", 1)) == "RunComparison(first try, high rate)"
    run.note = ""
    assert Run.load(folder / "aaa").name == "first try", "one leaves the other"


def test_tags_stay_find_the_run_and_are_checked(folder: Path) -> None:
    run = Run.load(folder / "aaa")
    assert run.tags == ()
    run.name, run.tags = "first try", ["paper", " zero 1 ", "paper", ""]
    assert Run.load(folder / "aaa").tags == ("paper", "zero 1")
    assert run.name == "first try", "one leaves the other"
    (found,) = history(folder, name="ZERO 1")
    assert (found.path, found.tags) == (run.path, ("paper", "zero 1"))
    assert history(folder).rows()[2]["tags"] == "paper, zero 1"
    for wrong in ("paper", [5], ["x" * 41], ["a, b"], ["half \ud800"], [f"{n}" for n in range(21)]):
        with pytest.raises(ConfigError):
            run.tags = wrong
    assert run.tags == ("paper", "zero 1")
    run.tags = [TOKEN]
    assert TOKEN not in RunPaths(run.path).label.read_text()
    label = {"tags": [5, TOKEN, "x" * 99, *(f"{n}" for n in range(99))]}
    RunPaths(run.path).label.write_text(json.dumps(label))
    assert len(run.tags) <= 20 and max(map(len, run.tags)) <= 40
    assert TOKEN not in run.tags, "text of another person"


def test_a_secret_in_a_name_or_a_note_reaches_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF", "opensesame77")
    run = Run.load(folder / "aaa")
    run.name, run.note = f"with {TOKEN}", "the job's own is opensesame77"
    written = RunPaths(run.path).label.read_text()
    assert TOKEN not in written
    assert "opensesame77" not in written
    assert run.name == f"with {'*' * len(TOKEN)}"
    RunPaths(run.path).label.write_text(json.dumps({"name": TOKEN}))
    assert TOKEN not in str(history(folder)), "what somebody else wrote there"


@pytest.mark.parametrize("name", [5, None, "x" * 81, "half \ud800"])
def test_what_is_no_name_is_refused(folder: Path, name: Any) -> None:
    run = Run.load(folder / "aaa")
    with pytest.raises(
        ConfigError,
        match=sentence("the {} of a run is {}; give text of at most {} letters", "name", 80),
    ):
        run.name = name
    assert not RunPaths(run.path).label.exists()
    with pytest.raises(AttributeError):
        run.nmae = "a slip"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"name": 5, "note": ["x"]}', "\x00", '{"name": "' + "x" * 9000 + '"}'],
)
def test_a_broken_label_breaks_nothing(folder: Path, content: str) -> None:
    RunPaths(folder / "aaa").label.write_text(content)
    assert len(Run.load(folder / "aaa").name) <= 80
    assert len(history(folder)) == 3


def test_the_table_has_what_differs_and_states_above_it_what_does_not(folder: Path) -> None:
    found = history(folder)
    assert found.options() == {"learning_rate": [0.001, 0.01, 0.001], "seed": [8, 7, 7]}
    grid = found.table()
    assert list(grid.columns) == [
        "#",
        "run",
        "state",
        "technique",
        "learning rate",
        "seed",
        "eval loss",
        "when",
        "train loss",
        "duration",
        "pod-hours",
        "steps",
        "on disk",
        "model",
    ]
    assert "the same in all runs: pods 2" in grid.caption
    assert (
        "the same in all runs: technique zero1, pods 2, model tiny-t5"
        in history(folder, state="succeeded").table().caption
    )


def test_a_long_run_has_a_small_curve_of_its_losses(tmp_path: Path) -> None:
    written = write_run(tmp_path / "long")
    for step in range(1, 1001):
        written.step(step, max_steps=1000)
    losses = some_losses(written.paths)
    assert 8 <= len(losses) <= 16
    assert list(losses) == sorted(losses, reverse=True)
    (row,) = history(tmp_path).table().rows
    (curve,) = (cell for cell in row if isinstance(cell, Spark))
    assert (cell_text(curve)[0], cell_text(curve)[-1]) == ("█", "▁")
    assert "<polyline" in as_html(history(tmp_path))


def test_runs_are_filtered_and_sorted(folder: Path) -> None:
    def ids(**wanted: Any) -> list[str]:
        return [record.id for record in history(folder, **wanted)]

    assert ids(state="failed") == ["ccc"]
    assert ids(state=["failed", "succeeded"]) == ["ccc", "bbb", "aaa"]
    assert ids(technique="zero1") == ["bbb", "aaa"]
    assert ids(name="HIGH") == ["bbb"]
    assert ids(name="aa", pods=2) == ["aaa"]
    assert ids(model="t5-small") == ["ccc"]
    assert ids(pods=3) == []
    assert ids(sort="eval_loss") == ["bbb", "aaa", "ccc"], "what is not known comes last"
    assert ids(sort="-eval_loss") == ["aaa", "bbb", "ccc"]
    assert ids(sort="id") == ["aaa", "bbb", "ccc"]
    with pytest.raises(ConfigError, match=sentence(": did you mean '{}'?", "eval_loss")):
        history(folder, sort="evalloss")
    with pytest.raises(ConfigError, match=sentence(": did you mean '{}'?", "failed")):
        history(folder, state="fialed")


def test_runs_are_filtered_by_any_figure(folder: Path) -> None:
    make_run(folder / "ddd", 4.0, step_figures={"reward": 0.5}, metrics={"rouge1": 0.25})

    def ids(**bounds: Any) -> list[str]:
        return [record.id for record in history(folder, within=bounds)]

    assert ids(eval_loss=(None, 0.2)) == ["bbb"]
    assert ids(eval_loss=(0.125, None)) == ["ddd", "bbb", "aaa"], "one run has no such loss"
    assert ids(rouge1=(0.5, 1), steps=(50, None)) == ["bbb"]
    assert ids(eval_rouge1=(None, 0.5)) == ids(reward=(0, 1)) == ["ddd"]
    with pytest.raises(ConfigError, match="rouge1"):
        ids(rouge=(0, 1))
    with pytest.raises(ConfigError, match=r"within\['model'\] names a column of text"):
        ids(model=(0, 1))
    for wrong in (0.5, (0.5,), (1, 0), ("a", None)):
        with pytest.raises(ConfigError, match=r"within\['steps'\] is .*; give the least"):
            ids(steps=wrong)


def test_a_name_of_a_metric_and_of_the_steps_is_the_metric_of_each_run_else_the_steps(
    folder: Path,
) -> None:
    make_run(folder / "low", 4.0, step_figures={"accuracy": 0.34})
    make_run(folder / "best", 5.0, step_figures={"accuracy": 0.94})
    make_run(folder / "other", 6.0, step_figures={"accuracy": 0.99}, metrics={"accuracy": 0.5})

    def ids(**wanted: Any) -> list[str]:
        return [record.id for record in history(folder, **wanted)]

    assert ids(within={"accuracy": (0.9, None)}) == ["best"]
    assert ids(within={"step.accuracy": (0.9, None)}) == ["other", "best"]
    assert ids(within={"metric.accuracy": (0.4, None)}) == ["other"]
    assert ids(sort="-accuracy")[:3] == ["best", "other", "low"]
    shown = [column.key for column in history(folder, sort="-accuracy").metrics()]
    assert shown == ["metric.accuracy", "step.accuracy"]


def test_runs_are_compared_by_number_name_or_id(folder: Path) -> None:
    found = history(folder)
    assert repr(found.compare(0, 2)) == "RunComparison(ccc, aaa)"
    assert repr(found.compare("high rate", "aa")) == "RunComparison(high rate, aaa)"
    assert len(found.compare().runs) == 3
    assert found["high rate"].id == "bbb"
    with pytest.raises(RunError, match=sentence("or have an id that begins so", 0)):
        found.compare("nobody", 0)


def test_the_history_is_a_data_frame_with_units_in_its_names(folder: Path) -> None:
    frame = history(folder, sort="submitted_s").to_dataframe()
    assert list(frame["id"]) == ["aaa", "bbb", "ccc"]
    assert list(frame["eval_loss"].dropna()) == [0.25, 0.125]
    assert list(frame["duration_s"]) == [75.0] * 3
    assert list(frame["peak_memory_gib"]) == [0.75] * 3
    assert list(frame["option.learning_rate"]) == [0.001, 0.01, 0.001]
    assert list(frame["metric.rouge1"]) == [0.75] * 3
    assert list(frame["state"]) == ["succeeded", "succeeded", "failed"]
    compared = history(folder, sort="submitted_s").compare().to_dataframe()
    assert list(compared.columns) == list(frame.columns)
    assert compared.drop(columns="name").equals(frame.drop(columns="name"))
    assert list(compared["name"]) == ["aaa", "high rate", "ccc"]
    empty = history(folder, name="nobody").to_dataframe()
    assert len(empty) == 0
    assert "eval_loss" in empty.columns


def test_events_are_iterated_anew_and_are_a_data_frame(folder: Path) -> None:
    run = Run.load(folder / "aaa")
    assert list(run.events().to_dataframe().columns) == ["time_s", "rank", "kind"]
    lines = [
        {"time_s": float(n), "rank": 0, "kind": "step", "step": n, "loss": 1.0 / n} for n in (1, 2)
    ]
    lines[1]["metrics"] = {"accuracy": 0.75}
    run.paths.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = run.events()
    assert (
        [event.whole("step") for event in events]
        == [event.whole("step") for event in events]
        == [1, 2]
    )
    frame = events.to_dataframe()
    assert list(frame.columns) == ["time_s", "rank", "kind", "step", "loss", "metric.accuracy"]
    assert list(frame["loss"]) == [1.0, 0.5]
    assert frame["metric.accuracy"][1] == 0.75


def test_history_notices_a_new_name(folder: Path) -> None:
    assert "found later" not in [record.name for record in history(folder)]
    Run.load(folder / "aaa").name = "found later"
    assert [record.name for record in history(folder)] == ["", "high rate", "found later"]


def test_ticked_rows_are_compared_below_the_table_once_there_are_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, Any] = {}
    monkeypatch.setattr("workbench.display.records.history.has_widgets", lambda: True)
    monkeypatch.setattr(
        "workbench.display.records.history.put",
        lambda bundle, name, update=True: shown.update({name: bundle}),
    )
    history(folder)._ipython_display_()
    buttons, table, *below = shown
    assert shown[table]["text/html"].startswith(f'<div class="wb-picture" data-wb="{table}">')
    assert all(shown[place]["text/html"] == "" for place in below)
    bar = _instances[shown[buttons][VIEW]["model_id"]]
    bar._handle_custom_msg({"click": "compare", "ticked": [1]}, [])
    until(lambda: "Tick two runs or more." in bar.note.get("text", ""))
    bar._handle_custom_msg({"click": "compare", "ticked": [2, 0]}, [])
    until(lambda: any("Results" in shown[place]["text/plain"] for place in below))
    text = "\n".join(shown[place]["text/plain"] for place in below)
    assert "aaa" in text and "ccc" in text and "high rate" not in text


def test_a_long_history_shows_the_newest_runs_and_names_the_way_to_the_others(
    tmp_path: Path,
) -> None:
    for n in range(53):
        make_run(tmp_path / f"run-{n:03}", float(n), {"learning_rate": 0.1 * (n % 2)})
    runs = history(tmp_path)
    page, text = runs._repr_html_(), str(runs)
    for shown in (page, text):
        assert "run-003" in shown and "run-002" not in shown
        assert "the newest 50 shown" in shown and "history()[50:] shows the older runs" in shown
    # A field that filters is made by a script: without one there is no dead field.
    assert "wb-filter" in page and "<input" not in page.partition("<script>")[0]
    few = history(tmp_path, name="run-00")
    assert "wb-filter" not in few._repr_html_().partition("</style>")[2].partition("<script>")[0]


def test_states_have_colours_and_dates_are_iso(folder: Path) -> None:
    page = history(folder)._repr_html_()
    assert re.search(r'<span style="color: var\(--wb-good, #\w+\)">succeeded</span>', page)
    assert re.search(r'<span style="color: var\(--wb-bad, #\w+\)">failed</span>', page)
    assert re.search(r">\d{4}-\d\d-\d\d \d\d:\d\d<", page)


def test_gpu_hours_belong_to_a_run_and_to_a_person(tmp_path: Path) -> None:
    """Of pods without GPUs, the hours of the pods count."""
    started = {
        "anna": [(8, 3600.0), (8, 1800.0)],
        "ben": [(4, 7200.0), (0, 3600.0)],
        "": [(8, None)],
    }
    for user, runs in started.items():
        for number, (gpus, duration_s) in enumerate(runs):
            run = write_run(tmp_path / f"{user}-{number}", pods=2)
            write_json(run.cluster.config, {"count": 2, "started": {"user": user}})
            spec = read_json(run.paths.spec)
            cluster = {"count": 2, "pods": {"gpus": gpus}}
            write_json(run.paths.spec, {**spec, "cluster": cluster})
            if duration_s is not None:
                run.end(duration_s=duration_s)
    found = history(tmp_path)
    frame = found.to_dataframe()
    by_person = frame.groupby("user")[["gpu_hours", "pod_hours"]].sum()
    assert dict(by_person["gpu_hours"]) == {"": 0.0, "anna": 24.0, "ben": 16.0}
    assert dict(by_person["pod_hours"]) == {"": 0.0, "anna": 3.0, "ben": 6.0}
    assert history(tmp_path, sort="-gpu_hours")[0].result.duration_s in (3600.0, 7200.0)
    text = as_text(found)
    assert "GPU-hours: anna 24, ben 16; pod-hours: ben 2" in " ".join(text.split())
    assert {"GPU-hours", "pod-hours", "user"} <= {*found.table().columns}


def test_records_without_a_person_or_with_strange_ones_are_listed(tmp_path: Path) -> None:
    for number, user in enumerate([None, 7, ["a"], "x\x1b[31m" * 9]):
        run = write_run(tmp_path / str(number))
        write_json(run.cluster.config, {"started": {"user": user}})
        run.end()
    assert len(history(tmp_path).rows()) == 4
    assert "\x1b" not in as_text(history(tmp_path))
