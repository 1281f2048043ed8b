"""The report: from run directories alone, complete, one file that loads nothing, and right."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.benchrows import Page, cells_of, mixed_rows, write_row
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError, RunError
from workbench.benchmark.result import BenchmarkResult, Report, rows_below, write_report
from workbench.benchmark.row import Outcome
from workbench.cli import main
from workbench.display.benchmark.plots import loss_plots
from workbench.display.benchmark.sheet import sheet_of
from workbench.rundir.paths import RunPaths

EVIL = "<script>alert(1)</script>"


def of_benchmark(run: Path, **note: object) -> Path:
    """Mark a run as one that a benchmark submitted."""
    info = RunPaths(run).info
    known = json.loads(info.read_text())
    info.write_text(json.dumps({**known, "benchmark": {"repeat": 0, **note}}))
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: two comparable, one with an evil name, one broken, one without an end."""
    root = tmp_path_factory.mktemp("bench")
    of_benchmark(write_row(root / "a", technique="zero1", pods=1))
    speeds = {"train_samples_per_s": 213.5, "eval_loss": 0.53125}
    of_benchmark(write_row(root / "b", technique="zero1", pods=3, **speeds))
    write_row(root / "c", technique="ddp", model=EVIL)
    RunPaths(write_row(root / "half", seed=4)).result.unlink()
    broken = RunPaths(write_row(root / "torn", seed=5))
    broken.result.write_text('{"state": ')
    broken.events.write_bytes(b"\xff\xfe{")
    return root


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report on it."""
    rows, problems = rows_below([folder])
    out = tmp_path_factory.mktemp("out") / "new"
    html = write_report(rows, out, problems=problems)
    assert [path.name for path in out.iterdir()] == ["report.html"]
    return html.read_text()


def test_it_holds_everything(written: str) -> None:
    # The words of a plot stand in attributes.
    page = " ".join([Page(written).text, *re.findall(r'data-text="([^"]*)"', written)])
    for heading in (
        "Results",
        "Options that differ",
        "Scaling",
        "Loss",
        "Time of a step",
        "Published figures",
        "Provenance",
        "Every run",
    ):
        assert f"{heading} " in page
    for fact in (
        "Comparable rows",
        "Not comparable with the first table: model",
        "speed-up in samples/s",
        "87%, published: 16 nodes",
        "optimizer step",
        "seconds since the start was asked for",
        "FLOPS profile of one step of rank 0",
        "3 answers",
        "torch 2.13.0",
        "the last words of tiny-t5",
        "Run this row again, alone",
        "Unpack the files",
        "2.146",
    ):
        assert fact in page, fact
    assert written.count("<details><summary>✓ succeeded") == 3


def test_it_needs_nothing_from_elsewhere_and_foreign_text_stays_text(
    written: str,
) -> None:
    tags = Page(written).tags
    for tag, attributes in tags:
        assert tag not in ("link", "iframe", "object", "img", "base", "form", "image")
        assert tag != "script" or attributes == {}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value is not None
                assert value.startswith(("data:", "#"))
    scripts = re.findall(r"<script>(.*?)</script>", written, flags=re.DOTALL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', written)
    assert policy and policy[1].startswith("default-src 'none'; ")
    for text in scripts:
        checksum = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f" 'sha256-{checksum}'" in html.unescape(policy[1])
    assert "unsafe-eval" not in policy[1] and "http" not in policy[1]
    page = written
    assert page.count('<svg class="wb-plot"') >= 3
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert html.escape(EVIL) in written
    named = [
        attributes["id"] for _, attributes in tags if attributes.get("id", "").startswith("files")
    ]  # type: ignore[union-attr]
    assert len(set(named)) == len(named) == 3


def test_its_figures_are_the_rows(folder: Path, written: str) -> None:
    sheet = sheet_of(Report(rows_below([folder])[0]).groups)
    tables = cells_of(Page(written.partition('id="options-that-differ"')[0]), sheet)
    assert len(tables) == len(sheet.lines) == 5
    for line in sheet.lines:
        assert tuple(cell.removeprefix("★ ") for cell in tables[line.number]) == line.figures
    speeds = {
        line.row.path.name: line.row.train_samples_per_s for line in sheet.lines if line.row.path
    }
    assert (speeds["a"], speeds["b"]) == (99.5, 213.5)
    assert "213.5" in written


def test_what_is_broken_or_goes_on_is_named(written: str) -> None:
    text = Page(written).text
    assert says(text, "Not all could be read, or has ended:")
    assert "torn" in text
    assert "half" in text


def test_rows_are_enough(tmp_path: Path) -> None:
    page = write_report(mixed_rows(), tmp_path, title="Mine & yours").read_text()
    assert "<title>Mine &amp; yours</title>" in page
    assert "Never started." in page
    assert "needs 91 GiB" in page
    gone = tmp_path / "gone"
    (problem,) = Report([replace(mixed_rows()[0], path=gone)]).problems
    assert problem.endswith(f"the run directory {gone} is gone")


def test_the_title_names_what_a_report_holds(folder: Path, tmp_path: Path) -> None:
    rows, _ = rows_below([folder / "a", folder / "b"])
    assert Report(rows, with_cards=False).title == "2 runs of tiny-t5: zero1"
    one, other = rows[0], replace(rows[1], technique="ddp")
    assert Report([one], with_cards=False).title == "1 run of tiny-t5: zero1"
    assert Report([one, other], with_cards=False).title == "2 runs of tiny-t5: zero1, ddp"
    result = BenchmarkResult(name="sweep", folder=tmp_path, rows=tuple(rows))
    assert "<title>Benchmark sweep</title>" in result.report(tmp_path / "named").read_text()


def page_of(folder: Path) -> str:
    rows, _ = rows_below([folder])
    return write_report(rows, folder / "out").read_text()


def headings_of(page: str) -> list[str]:
    return re.findall(r'<h2 id="([^"]+)">', page)


def test_a_report_of_ordinary_runs_speaks_of_no_benchmark(tmp_path: Path) -> None:
    for name, pods in (("one", 1), ("three", 3)):
        write_row(tmp_path / name, pods=pods, started_s=8.0)
    page = page_of(tmp_path)
    text = Page(page).text
    assert "scaling" in headings_of(page) and "published" not in text.lower()
    assert "Not measured here" not in text
    assert "2 runs: 2 succeeded; submitted 1970-01-01 00:00 UTC; report written 20" in text
    of_benchmark(tmp_path / "one")
    asked = page_of(tmp_path)
    assert "published-figures" in headings_of(asked)
    assert all(word in Page(asked).text for word in ("Not measured here", "2 rows:"))


def test_a_missing_plot_is_named_only_where_a_benchmark_asked_for_it(tmp_path: Path) -> None:
    for name, pods in (("two", 2), ("three", 3)):
        write_row(tmp_path / name, pods=pods)
        RunPaths(tmp_path / name).events.write_text("")
    page = page_of(tmp_path)
    assert not {"scaling", "loss"} & {*headings_of(page)} and "Not drawn" not in page
    for name in ("two", "three"):
        of_benchmark(tmp_path / name)
    page = page_of(tmp_path)
    assert "scaling" in headings_of(page) and "loss" not in headings_of(page)
    assert says(Page(page).text, "data and sequence handling")


def test_options_that_differ_stand_side_by_side(tmp_path: Path) -> None:
    write_row(tmp_path / "a", seed=1)
    write_row(tmp_path / "b", seed=2)
    script = write_row(tmp_path / "c")
    spec = json.loads(RunPaths(script).spec.read_text())
    spec["job"] = {"kind": "script", "path": "/home/me/train.py", "seed": 9}
    RunPaths(script).spec.write_text(json.dumps(spec))
    page = page_of(tmp_path)
    rows = [row[1:] for row in Page(page.partition('id="options-that-differ"')[2]).rows[:4]]
    assert rows == [["seed"], ["1"], ["2"], ["9"]]
    assert "options-that-differ" not in headings_of(page_of(script))


def test_lines_of_a_technique_with_and_without_adapters_look_unlike(tmp_path: Path) -> None:
    for peft in ("none", "lora"):
        run = write_row(tmp_path / peft, technique="ddp")
        spec = json.loads(RunPaths(run).spec.read_text())
        spec["job"]["peft"] = peft
        RunPaths(run).spec.write_text(json.dumps(spec))
    write_row(tmp_path / "other", technique="zero1")
    report = Report(rows_below([tmp_path])[0])
    sheet = sheet_of(report.groups)
    (plot,) = loss_plots(sheet, report)
    assert sorted(line.technique for line in sheet.lines) == ["ddp", "ddp lora", "zero1"]
    assert len({(one.look.colour, one.look.marker) for one in plot.series}) == 3


def test_the_loss_of_a_script_has_no_unit(tmp_path: Path) -> None:
    write_row(tmp_path / "tuned")
    script = write_row(tmp_path / "script", model="")
    spec = json.loads(RunPaths(script).spec.read_text())
    spec["job"] = {"kind": "script", "path": "/home/me/train.py"}
    RunPaths(script).spec.write_text(json.dumps(spec))
    labels = re.findall(r'aria-label="loss of the runs [^"]*: ([^"]*: [^"]*)"', page_of(tmp_path))
    units = {label.partition(":")[0]: "nats per token" in label for label in labels}
    assert units == {"tiny-t5": True, "train.py": False}


def test_long_answers_stand_whole_in_the_runs_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = write_row(tmp_path / name, seed=ord(name))
        answer = {"source": "q", "expected": "SELECT a", "predicted": f"{name} " * 400 + "end"}
        RunPaths(run).predictions.write_text(json.dumps({**answer, "exact_match": False}))
    before, _, runs = page_of(tmp_path).partition('id="every-run"')
    assert "a a a" not in before
    assert "a a a end" in runs and "b b b end" in runs


def test_the_code_of_a_script_is_told_from_other_scripts(tmp_path: Path) -> None:
    for name, script in (("a", "1" * 16), ("b", "2" * 16)):
        run = write_row(tmp_path / name, seed=ord(name), package="workbench-0123456789abcdef.zip")
        RunPaths(run).origin.write_text(json.dumps({"script": script}))
    page = Page(page_of(tmp_path).partition('id="provenance"')[2])
    codes = [row[6] for row in page.rows[1:3]]
    assert codes == ["01234567 11111111", "01234567 22222222"]


def test_a_report_is_small_and_its_pictures_have_values(folder: Path, tmp_path: Path) -> None:
    command = ["report", str(folder / "a"), str(folder / "b"), "--out", str(tmp_path)]
    assert main(command) == 0
    page = (tmp_path / "report.html").read_text()
    assert 'aria-label="loss of the runs' in page and "data-words=" in page, "static, with values"
    assert len(page) < 700_000


def test_runs_of_different_lengths_share_a_plot_of_losses(tmp_path: Path) -> None:
    for name, steps in (("long", 9), ("short", 5)):
        write_row(tmp_path / name, technique="ddp", steps=steps)
    other = write_row(tmp_path / "other", technique="ddp", model="t5-small")
    rows, _ = rows_below([tmp_path])
    report = Report(rows)
    sheet = sheet_of(report.groups)
    plots = loss_plots(sheet, report)
    drawn = [[one.name for one in plot.series] for plot in plots]
    assert sorted(len(names) for names in drawn) == [1, 2]
    (pair,) = [plot.series for plot in plots if len(plot.series) == 2]
    assert pair[0].look != pair[1].look, "of one technique on as many pods, yet told apart"
    assert other.name not in str(drawn)


def test_the_order_and_the_skipped_rows_are_those_of_the_benchmark(tmp_path: Path) -> None:
    for name in ("a", "b", "b-before"):
        of_benchmark(write_row(tmp_path / name), key=name[0])
    skipped = next(row for row in mixed_rows() if row.outcome is Outcome.SKIPPED)
    mine = [rows_below([tmp_path / name])[0][0].to_dict() for name in ("b", "a")]
    kept = {"rows": [{**mine[0], "cost": 1.5}, skipped.to_dict(), mine[1]]}
    (tmp_path / "benchmark.json").write_text(json.dumps(kept, default=str))
    rows, broken = rows_below([tmp_path])
    assert [row.name for row in rows] == ["b", "3b", "a"]
    assert [row.cost for row in rows] == [1.5, None, None]
    assert broken == ["1 older run(s) left out: newer runs of the same rows exist"]
    assert len(rows_below([tmp_path, tmp_path / "a"])[0]) == 3


def test_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder / "a"), str(folder / "b"), "--out", str(tmp_path / "x")]) == 0
    assert "2 rows: 2 succeeded" in (tmp_path / "x" / "report.html").read_text()
    assert capsys.readouterr().out.split() == [str(tmp_path / "x" / "report.html")]
    assert main(["report", str(folder / "a"), "--out", str(tmp_path / "report.md")]) == 2
    refused = sentence("give the folder for the page", "report.md")
    assert re.search(refused, capsys.readouterr().out) and not (tmp_path / "report.md").exists()
    assert main(["report", str(tmp_path / "none")]) == 2
    assert says(capsys.readouterr().out, "a cluster's directory or a benchmark's folder")
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert says(capsys.readouterr().out, "give run directories (with a run.json) or folders above")
    (tmp_path / "file").write_text("")
    assert main(["report", str(folder / "a"), "--out", str(tmp_path / "file")]) == 1


def test_a_report_that_cannot_be_written_leaves_the_old_one(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=sentence("give run directories (with a run.json) or folders above")
    ):
        rows_below([tmp_path])
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RunError, match=sentence("cannot be written to")):
        write_report(rows_below([folder / "a"])[0], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]
