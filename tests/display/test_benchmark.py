"""The table of a benchmark and its live lines: right figures, nothing hidden, text as HTML."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.benchrows import Page, cells_of, make_row, mixed_rows, repeated_rows, write_row
from tests.support.sentences import says
from workbench.base.display_protocol import as_html, as_text
from workbench.benchmark.comparable_groups import groups
from workbench.benchmark.published import CAVEATS
from workbench.benchmark.result import BenchmarkResult, rows_below
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.client.tables.run_table import FIGURES
from workbench.display.benchmark.columns import value_of
from workbench.display.benchmark.live import BenchmarkLive, lines_of, live_doc
from workbench.display.benchmark.sheet import sheet_of
from workbench.display.kit.doc import to_html, to_text
from workbench.finetune.notebook.history import history
from workbench.rundir.state import RunState
from workbench.rundir.totals import Progress

EVIL = "<script>alert(1)</script>"


def result_of(rows: Sequence[BenchmarkRow]) -> BenchmarkResult:
    return BenchmarkResult(name="b", folder=Path(), rows=tuple(rows))


def benchmark_html(rows: Sequence[BenchmarkRow]) -> str:
    return as_html(result_of(rows))


def benchmark_text(rows: Sequence[BenchmarkRow]) -> str:
    return as_text(result_of(rows))


def test_every_figure_of_the_html_is_the_row_s() -> None:
    sheet = sheet_of(groups(mixed_rows()))
    cells = cells_of(Page(benchmark_html(mixed_rows())), sheet)
    assert len(cells) == len(sheet.lines) == 8
    for line in sheet.lines:
        for column, text in zip(sheet.figures, cells[line.number], strict=True):
            assert text.removeprefix("★ ") == column.write(value_of(line.row, column.name))


def test_figures_are_written_as_in_the_history() -> None:
    rows = [make_row("ddp", 1, 1234.5), make_row("zero1", 1, 9.87), make_row("zero3", 1, 0.5)]
    (line, *_) = sheet_of(groups(rows)).lines
    figures = dict(
        zip([column.name for column in sheet_of(groups(rows)).figures], line.figures, strict=True)
    )
    shared = {name: each for name, each in FIGURES.items() if name in figures}
    assert {"train_samples_per_s", "peak_memory_gib", "duration_s", "eval_loss"} <= {*shared}
    for name, each in shared.items():
        assert figures[name] == each.write(value_of(line.row, name))
    assert "duration" in Page(benchmark_html(rows)).text
    assert "�" not in Page(benchmark_html(rows)).text


def test_columns_that_hold_nothing_are_left_out_and_named() -> None:
    for said in (
        Page(benchmark_html(mixed_rows())).text,
        benchmark_text(mixed_rows()),
    ):
        assert (
            "Not measured here: perplexity, exact match, "
            "padded tokens/s, TFLOPS per device, MFU, host" in said
        )
    assert "perplexity" not in [f.title for f in sheet_of(groups(mixed_rows())).figures]


def test_rows_that_did_other_work_stand_apart() -> None:
    sheet = sheet_of(groups(mixed_rows()))
    assert sheet.parts[0].heading == "Comparable rows"
    assert [part.heading for part in sheet.parts[1:]] == [
        "Not comparable with the first table: global batch 72 instead of 24",
        "Not comparable with the first table: model t5-3b instead of tiny-t5",
    ]
    page = Page(benchmark_html(mixed_rows()))
    places = [page.text.index(part.heading) for part in sheet.parts]
    assert places == sorted(places)
    assert "rows 3 over row 2" not in page.text
    assert "row 3 over row 2" in page.text
    assert "speed-up" in page.text


def test_text_and_html_state_the_same() -> None:
    known = [*mixed_rows(), *repeated_rows({"zero2": [100.0, 104.0, 109.0]})]
    text, page = " ".join(benchmark_text(known).split()), Page(benchmark_html(known)).text
    sheet = sheet_of(groups(known))
    for line in sheet.lines:
        for said in (line.outcome_text, line.technique, line.model, *line.figures, *line.spreads):
            assert said in text
            assert said in page
    for part in sheet.parts:
        for said in (part.heading, part.same, *part.notes):
            assert said in text
            assert said in page


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome.FAILED, "rank 1: <b>no such thing</b>"),
        (Outcome.OUT_OF_MEMORY, "killed, asked for 2.50 GiB, limit 0.38 GiB"),
        (Outcome.SKIPPED, "needs 91 GiB"),
    ],
)
def test_a_row_that_did_not_succeed_says_so_and_why(outcome: Outcome, said: str) -> None:
    page = Page(benchmark_html(mixed_rows()))
    place = next(
        n for n, row in enumerate(page.rows) if len(row) > 5 and row[4].endswith(str(outcome))
    )
    assert page.rows[place + 1] == [said]
    text = " ".join(benchmark_text(mixed_rows()).split())
    assert str(outcome) in text
    assert said.split()[0] in text
    assert not [tag for tag, _ in page.tags if tag == "b" and "thing" in tag]


def test_a_row_taken_from_disk_says_so() -> None:
    assert sheet_of(groups(mixed_rows())).lines[1].outcome_text == "✓ succeeded, from disk"


def test_repeats_give_a_median_and_a_spread_and_overlaps_are_not_called_different() -> None:
    rows = repeated_rows(
        {"ddp": [100.0, 110.0, 105.0], "zero1": [108.0, 120.0, 115.0], "zero3": [50.0, 52.0, 51.0]}
    )
    sheet = sheet_of(groups(rows))
    speed = [f.name for f in sheet.figures].index("train_samples_per_s")
    assert [line.figures[speed] for line in sheet.lines] == ["105", "115", "51"]
    assert [line.spreads[speed] for line in sheet.lines] == [
        "100–110",
        "108–120",
        "50–52",
    ]
    assert [line.repeats for line in sheet.lines] == [3, 3, 3]
    (said,) = (note for note in sheet.parts[0].notes if "Not called different" in note)
    assert said.endswith(": rows 1 and 2.")
    page = Page(benchmark_html(rows))
    assert "100–110" in page.text
    alike = sheet_of(
        groups(repeated_rows({name: [100.0, 110.0, 105.0] for name in ("ddp", "zero1", "zero3")}))
    )
    assert any(note.endswith(": rows 1, 2 and 3.") for note in alike.parts[0].notes)


def test_a_model_that_is_a_folder_is_named_by_the_end_of_its_path() -> None:
    for model, short in (
        ("/home/ada/runs/a/model", "…/a/model"),
        ("google-t5/t5-small", "google-t5/t5-small"),
    ):
        sheet = sheet_of(groups([replace(mixed_rows()[0], model=model)]))
        assert [line.model for line in sheet.lines] == [short]


def test_a_repeat_that_failed_is_not_hidden_behind_those_that_did_not() -> None:
    rows = repeated_rows({"ddp": [100.0, 110.0, 105.0]})
    rows[1] = replace(rows[1], outcome=Outcome.FAILED, reason="rank 2 died")
    (line,) = sheet_of(groups(rows)).lines
    assert (line.repeats_text, line.why) == ("2 of 3 repeats", "repeat 2 failed: rank 2 died")
    page, text = (
        Page(benchmark_html(rows)).text,
        " ".join(benchmark_text(rows).split()),
    )
    assert "repeat 2 failed: rank 2 died" in page
    assert "2 of 3 repeats" in text and "repeat 2 failed: rank 2 died" in text


def test_single_runs_are_not_called_different() -> None:
    notes = (
        sheet_of(groups([make_row("ddp", 1, 100.0), make_row("zero1", 1, 300.0)])).parts[0].notes
    )
    assert says(notes, "and small differences mean nothing")


def test_published_figures_stand_apart_with_their_caveats() -> None:
    html, text = Page(benchmark_html(mixed_rows())).text, benchmark_text([])
    for said in (html, " ".join(text.split())):
        first = said.index("Published, not measured here")
        assert all(said.index(" ".join(caveat.split())) > first for caveat in CAVEATS)
        assert "not found" in said


def test_foreign_text_stays_text() -> None:
    rows = [
        replace(row, model=EVIL, technique=EVIL, reason=EVIL, dataset=EVIL) for row in mixed_rows()
    ]
    for page in (benchmark_html(rows), to_html(live_doc(lines_of(rows)))):
        assert not [tag for tag, _ in Page(page).tags if tag == "script"]
    assert EVIL in Page(benchmark_html(rows)).text


def test_what_is_equal_in_all_rows_stands_once_above_and_what_came_out_comes_first() -> None:
    rows = [make_row("ddp", 1, 100.0), make_row("zero1", 1, 90.0), make_row("zero1", 3, 250.0)]
    sheet = sheet_of(groups(rows))
    assert [column.name for column in sheet.figures][:3] == [
        "train_samples_per_s",
        "speed_up",
        "efficiency",
    ]
    assert not {"world_size", "global_batch_size", "steps", "epochs"} & {
        column.name for column in sheet.figures
    }
    assert sheet.parts[0].same.startswith("model tiny-t5, global batch 24, steps 20, ")
    assert sheet.parts[0].same.endswith("ranks 1 a pod, epochs 0.48")
    page, text = Page(benchmark_html(rows)), benchmark_text(rows)
    assert "model tiny-t5" in page.text
    assert next(row[:4] for row in page.rows if row[:1] == ["1"]) == [
        "1",
        "ddp",
        "1",
        "✓ succeeded",
    ]
    assert "model  " not in text.partition("Published")[0]
    other = sheet_of(groups([*rows, make_row("zero1", 2, 170.0, world_size=4, key="four")]))
    assert "world_size" in [column.name for column in other.figures]


def test_the_best_figure_of_a_part_is_marked_unless_it_cannot_be_told_apart() -> None:
    rows = repeated_rows(
        {"ddp": [100.0, 110.0, 105.0], "zero1": [108.0, 120.0, 115.0], "zero3": [50.0, 52.0, 51.0]}
    )
    rows = [replace(row, eval_loss=2.0 if row.technique == "zero3" else 3.0) for row in rows]
    sheet = sheet_of(groups(rows))

    def best(field: str) -> list[bool]:
        return [line.best[[f.name for f in sheet.figures].index(field)] for line in sheet.lines]

    assert best("train_samples_per_s") == [True, True, False], "the ranges of the first two overlap"
    assert best("eval_loss") == [False, False, True]
    assert best("predicted_memory_gib") == best("train_loss") == [False] * 3, (
        "nothing is better, or all are equal"
    )
    for drawn in (benchmark_text(rows), Page(benchmark_html(rows)).text):
        assert "★ 115" in drawn
        assert "★ 51" not in drawn


def test_rows_that_differ_in_an_option_alone_say_which_while_they_run_too() -> None:
    rows = [
        make_row(
            "single",
            1,
            9.0,
            key=f"k{n}",
            global_batch_size=n,
            spec={"job": {"max_source_length": n}},
        )
        for n in (4096, 2048)
    ]
    assert [line.label for line in lines_of(rows)] == [
        "tiny-t5 single on 1 pod, max_source_length 4096",
        "tiny-t5 single on 1 pod, max_source_length 2048",
    ]
    assert [line.extra for line in sheet_of(groups(rows)).lines] == [
        "max_source_length 4096",
        "max_source_length 2048",
    ]


def test_a_benchmark_is_a_data_frame() -> None:
    rows = (
        make_row("ddp", 1, 100.0),
        make_row("ddp", 2, 150.0),
        make_row("zero1", 1, None, outcome=Outcome.FAILED),
    )
    frame = result_of(rows).to_dataframe()
    assert list(frame["technique"]) == ["ddp", "ddp", "zero1"]
    assert list(frame["speed_up"].dropna()) == [1.0, 1.5]
    assert list(frame["peak_memory_gib"]) == [0.5, 0.51, 0.5]
    assert list(frame["seed"]) == [7, 7, 7]
    assert list(frame["state"]) == ["succeeded", "succeeded", "failed"]
    assert "spec" not in frame.columns


def test_a_benchmark_has_the_columns_and_values_of_the_history(tmp_path: Path) -> None:
    for n, technique in enumerate(("zero1", "zero3")):
        facts = {"train_loss": 6.0 + n, "exact_match": 0.5, "device": "a CPU", "devices": n}
        write_row(tmp_path / technique, technique=technique, seed=n, pods=n + 1, **facts)
    rows, problems = rows_below([tmp_path])
    frame = result_of(rows).to_dataframe().set_index("id")
    runs = history(tmp_path).to_dataframe().set_index("id").loc[frame.index]
    shared = [name for name in runs.columns if name in frame.columns]
    assert not problems
    assert {"name", "state", "model", "technique", "peft", "train_samples_per_s", "eval_loss"} <= {
        *shared
    }
    assert {"world_size", "global_batch_size", "exact_match", "peak_memory_gib"} <= {*shared}
    assert [name for name in runs.columns if name.startswith("option.")] == [
        name for name in frame.columns if name.startswith("option.")
    ]
    for name in shared:
        assert list(frame[name].fillna("")) == list(runs[name].fillna("")), name


def running() -> tuple[list[BenchmarkRow], dict[str, Progress]]:
    rows = [*mixed_rows(), make_row("fsdp", 3, None, name="now", outcome=Outcome.RUNNING)]
    far = Progress(
        state=RunState.RUNNING, step=5, max_steps=20, loss=4.25, samples_per_s=88.5, eta_s=9.0
    )
    return [*rows, make_row("fsdp", 2, None, outcome=Outcome.WAITING)], {"now": far}


def test_the_live_lines_state_the_same_as_text_and_html() -> None:
    lines = lines_of(*running())
    doc = live_doc(lines)
    text, page = to_text(doc), Page(to_html(doc)).text
    assert lines[8].share == 0.25
    for line in lines:
        for said in (
            line.label,
            line.outcome_text,
            line.bar,
            line.reason,
            *line.figures,
            *line.figures.values(),
        ):
            assert said in text
            assert said in page
    assert "8 of 10 rows done: 5 succeeded, 1 failed, 1 out of memory, 1 skipped" in text
    assert "5 of 20 steps, 9.0 s left" in page


def test_the_time_left_for_all_rows_follows_from_those_that_ran_here() -> None:
    now = [100.0]
    rows, far = running()
    waiting = [replace(row, from_disk=row.name != "now", outcome=row.outcome) for row in rows]
    with closing(BenchmarkLive(io.StringIO(), clock=lambda: now[0])) as live:
        live.update(waiting, far)
        assert "left for all" not in str(live), "nothing has ended yet that ran here"
    live = BenchmarkLive(io.StringIO(), clock=lambda: now[0])
    some = [make_row("ddp", 1, 9.0), make_row("fsdp", 3, None, name="now", outcome=Outcome.RUNNING)]
    live.update([*some, make_row("fsdp", 2, None, outcome=Outcome.WAITING)], far)
    now[0] += 50
    assert says(live, "about {} left for all", "1 min 10 s"), "1.25 of 3 rows took 50 s"


def test_what_runs_is_drawn_four_times_a_second_at_most_and_what_ends_at_once() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now, out = [0.0], Terminal()
    rows, far = running()
    with closing(BenchmarkLive(out, clock=lambda: now[0])) as live:
        live.update(rows, far)
        before = out.getvalue()
        live.update(rows, {"now": replace(far["now"], step=6)})
        assert out.getvalue() == before
        now[0] = 0.3
        live.update(rows, {"now": replace(far["now"], step=7)})
        assert "7 of 20 steps" in out.getvalue()
        live.update(
            [replace(row, outcome=Outcome.SUCCEEDED) if row.name == "now" else row for row in rows]
        )
        assert out.getvalue().count("fsdp on 3 pods  ✓ \x1b[32msucceeded") == 1
        live.update(rows, {"now": replace(far["now"], step=19)})
    assert "19 of 20 steps" in out.getvalue()
    assert out.getvalue().count("zero3 on 3 pods") == 1


def test_a_file_gets_the_rows_that_ended_and_no_passing_figures() -> None:
    out = io.StringIO()
    with closing(BenchmarkLive(out)) as live:
        live.update(*running())
    lines = out.getvalue().splitlines()
    assert len(lines) == 8
    assert "\r" not in out.getvalue()
