"""Runs over each other: curves in one picture, options that differ, figures, and unlike parts."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from tests.support.writtenrun import WrittenRun, write_run
from workbench import FineTune, Run, Script, compare, history
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import write_json
from workbench.client.result import RunResult

SAME = {
    "kind": "finetune",
    "technique": "zero1",
    "per_device_train_batch_size": 8,
    "env": {"TOKEN": "${TOKEN}"},
}


def written(folder: Path, name: str, **job: object) -> WrittenRun:
    run = write_run(folder / name, {**SAME, **job})
    write_json(run.paths.origin, {"data": job.get("dataset", "rows")})
    run.event("start", model="tiny-t5", world_size=3, global_batch_size=24)
    run.event("eval", step=0, eval_loss=9.5)
    for step in (1, 2):
        run.step(step)
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[WrittenRun]:
    done, running, failed = (
        written(tmp_path, name, technique=technique)
        for name, technique in (("done", "zero1"), ("running", "zero3"), ("failed", "zero1"))
    )
    done.event("eval", step=2, eval_loss=3.25)
    figures = {"train_loss": 6.0, "first_eval_loss": 9.5, "eval_loss": 3.25, "eval_step": 2}
    done.end(
        steps=2,
        global_batch_size=24,
        metrics={"rougeL": 0.5},
        peak_memory_gib={"127.0.0.2": 0.75},
        **figures,
    )
    running.state("running", "training")
    failed.end("failed", "rank 1 died", steps=2, global_batch_size=24)
    return [done, running, failed]


def test_curves_options_and_figures_of_runs_in_any_state(runs: list[WrittenRun]) -> None:
    paths = [run.paths.root for run in runs]
    both = compare(
        [str(paths[0]), Run.load(paths[1]), RunResult.load(paths[2])],
        names=["one", "<b>two</b>", "three"],
    )
    text, page = str(both), both._repr_html_()
    assert [row[0] for row in both.options().rows] == ["technique"]
    assert both.options().rows[0][1:] == ("zero1", "zero3", "zero1")
    figures = {
        row[0]: dict(zip(both.figures().columns, row, strict=True)) for row in both.figures().rows
    }
    assert [figures[name]["state"] for name in ("one", "<b>two</b>", "three")] == [
        "succeeded",
        "running",
        "failed",
    ]
    assert (figures["one"]["eval loss"], figures["one"]["at step"], figures["one"]["rougeL"]) == (
        "3.25",
        "2",
        "0.5",
    )
    assert figures["<b>two</b>"]["eval loss"] == "–", "it was evaluated before its first step alone"
    assert (
        "one: 8 at optimizer step 1, 4 at 2\none, evaluation: 9.5 at optimizer step 0, 3.25 at 2"
        in text
    )
    assert page.count("<svg") == 1 and "<b>two" not in page
    for fact in (
        "3.25",
        "0.75 GiB",
        "zero3",
        "succeeded",
        "Options that differ",
        "figures up to the last step",
        "Results",
    ):
        assert fact in text and fact in html.unescape(page)
    assert "TOKEN" not in text + page
    assert both.notes == (
        "Incomplete runs (figures up to the last step): <b>two</b> (running), three (failed).",
    )


def test_rows_of_history_and_what_is_not_like_for_like(tmp_path: Path) -> None:
    for name, more in (("a", {}), ("b", {"dataset": "other", "max_source_length": 64})):
        written(tmp_path, name, **more).end(
            steps=2, global_batch_size=24 if name == "a" else 48, device=name, devices=3
        )
    notes = compare(list(history(tmp_path)), names="ab").notes
    assert [note.rpartition(": ")[2] for note in notes] == [
        "the runs use different training or evaluation rows.",
        "the runs use different models, prompts or loss settings.",
        "The runs trained on different numbers of rows.",
        "the runs used different devices.",
    ]


@pytest.mark.parametrize(
    ("other", "end"),
    [
        ({"method": "orpo"}, "the runs use different models, prompts or loss settings."),
        ({"label_smoothing_factor": 0.1}, "different models, prompts or loss settings."),
        ({"chat_template": "{{ x }}"}, "the runs use different models, prompts or loss settings."),
        ({"packing": True}, "options of the runs change the work of a step."),
        ({"learning_rate": 1.0}, ""),
    ],
)
def test_another_loss_or_other_work_has_a_note(
    tmp_path: Path, other: dict[str, object], end: str
) -> None:
    base = FineTune(model="tiny-llama", method="dpo" if "method" in other else "sft")
    for name, more in (("a", {}), ("b", other)):
        written(tmp_path, name, **{**base.to_dict(), **more}).end(steps=2, devices=3)
    notes = compare(list(history(tmp_path)), names="ab").notes
    assert len(notes) == bool(end)
    assert all(note.endswith(end) for note in notes)


def test_options_of_another_kind_of_job_are_folded_away(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    job = FineTune(model="tiny-t5", dataset="wikisql-mini").to_dict()
    written(tmp_path, "a", **job)
    written(tmp_path, "b", **{**job, "learning_rate": 0.5})
    write_run(tmp_path / "c", {"kind": "script", **Script(str(script)).to_dict()})
    paths = [Path(record.path) for record in history(tmp_path)]
    three = compare(sorted(paths), names="abc")
    assert [row[0] for row in three.options().rows] == ["kind", "learning_rate"]
    assert three.options().rows[1] == ("learning_rate", "None", "0.5", "–")
    equal = {str(row[0]): row[1:] for row in three.equal_options().rows}
    assert equal["path"][:2] == ("–", "–") and str(equal["path"][2]).endswith("/train.py")
    assert equal["model"] == ("tiny-t5", "tiny-t5", "–")
    assert not {"None", "[]", "{}"} & {cell for row in equal.values() for cell in row}
    assert "Losses may not be comparable: the jobs are of different kinds." in three.notes
    text, page = str(three), three._repr_html_()
    # The equal options are folded in a page, and the text names the call that returns them.
    folded = f"<summary>{len(equal)} equal options</summary>"
    before, _, after = page.partition(folded)
    assert "per_device_eval_batch_size" in after
    assert "per_device_eval_batch_size" not in before + text
    assert f"{len(equal)} equal options: equal_options() returns them" in text


def test_a_damaged_directory_is_a_row_that_says_so(runs: list[WrittenRun]) -> None:
    runs[1].paths.events.write_bytes(b"\0\xff{]\n" * 9)
    runs[1].paths.spec.unlink()
    runs[2].paths.result.write_text("{")
    both = compare([run.paths.root for run in runs], names="abc")
    assert len(both.figures().rows) == 3
    assert "b: no losses" in str(both)


def test_long_values_that_differ_at_their_ends_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(
            tmp_path,
            name,
            dataset={"kind": "files", "train": f"/data/{'x' * 90}/{name}.jsonl", "eval": "e"},
        )
    (row,) = compare(list(history(tmp_path)), names="ab").options().rows
    assert row[1] != row[2] and all(len(str(cell)) <= 60 for cell in row)


def test_what_cannot_be_compared_is_refused(runs: list[WrittenRun], tmp_path: Path) -> None:
    path = runs[0].paths.root
    for wrong, words in (
        ([path], sentence("compare takes two runs or more, and was given", 1)),
        (path, sentence("compare takes runs in a list: compare([one, other])")),
        ([path, path], sentence("two of the names are the same: {}; give names of their own")),
    ):
        with pytest.raises(ConfigError, match=words):
            compare(wrong)  # type: ignore[call-overload]
    with pytest.raises(
        ConfigError, match=sentence("compare was given {} runs and {} names; give as many", 2, 1)
    ):
        compare([path, runs[1].paths.root], names=["a"])
    with pytest.raises(RunError, match=sentence("not a run directory: {} holds no run.json")):
        compare([path, tmp_path])
