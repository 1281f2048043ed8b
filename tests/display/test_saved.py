"""What an executed notebook keeps of a run that continued meanwhile, and what a reader sees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

from tests.support.sentences import says

SETUP = f"""
import itertools, sys, time
from contextlib import closing
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests.support.writtenrun import write_run
from workbench.client.cluster import Cluster
from workbench.client.run import Run
from workbench.display.kit.line import ProgressLine
from workbench.pods.local.pods import LocalPods
from workbench.rundir.totals import Progress
from workbench.rundir.state import RunState
"""
SHOWN = """
written = write_run(Path("{name}"))
with closing(ProgressLine(clock=itertools.count().__next__)) as line:
    for step in range(4):
        line.update(Progress(state=RunState.STARTING, message=f"step {{step}} of {name}"))
cluster = Cluster(LocalPods(), count=3, path=written.cluster.root)
display(cluster)
Run.load(written.paths.root)
"""
GOES_ON = """
written.state("running", "training")
for step in range(1, 31):
    written.step(step, loss=8.0 / step)
"""
ENDED = """
written.event("eval", step=30, eval_loss=0.{number}25)
written.end(message="the end of {name}", steps=30, eval_loss=0.{number}25)
"""
CLOSED = """
written.keeper("closed", alive=False)
"""
BENCHMARK = f"""
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.support.benchrows import make_row
from workbench.display.benchmark.live import BenchmarkLive
with closing(BenchmarkLive()) as live:
    for ended in range(3):
        live.update([make_row("zero1", pods, float(pods)) for pods in range(1, ended + 2)])
"""
RUNS = 6
pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook with several runs, each of which ended in a later cell than its own view."""
    cells = [new_code_cell(SETUP)]
    for number in range(RUNS):
        parts = (SHOWN, GOES_ON, ENDED, CLOSED) if number % 2 else (SHOWN, GOES_ON + ENDED + CLOSED)
        cells += [
            new_code_cell(part.format(name=f"run{number}", number=number + 10)) for part in parts
        ]
    book = new_notebook(cells=[*cells, new_code_cell(BENCHMARK)])
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("book"))}}
    NotebookClient(book, timeout=300, coalesce_streams=True, resources=where).execute()
    return book


def outputs(book: Any) -> list[list[dict[str, Any]]]:
    """The outputs of the cells that show a run: its cluster's come first."""
    return [
        [out["data"] for out in cell.outputs]
        for cell in book.cells
        if "ProgressLine(" in cell.source
    ]


def test_a_program_that_executes_a_notebook_and_joins_streams_keeps_every_last_picture(
    book: Any,
) -> None:
    nbformat.validate(book)
    cells = outputs(book)
    assert len(cells) == RUNS
    for number, (line, cluster, run, image) in enumerate(cells):
        assert line == {"text/plain": f"starting: step 3 of run{number}"}
        for kind in ("text/plain", "text/html"):
            assert "Cluster closed" in cluster[kind] and "Running" not in cluster[kind]
            for words in (
                "succeeded",
                f"the end of run{number}",
                f"0.{number + 10}25",
                "Pods: stopped",
            ):
                assert words in run[kind]
        assert run["text/html"].count('<svg class="wb-plot"') >= 4
        assert len(image["image/png"]) > 5000
        assert "as of" not in run["text/plain"]


def test_a_benchmark_that_was_followed_keeps_its_last_lines(book: Any) -> None:
    (lines,) = (output["data"] for output in book.cells[-1].outputs)
    assert says(lines["text/html"], "of {} rows done", 3)


def test_nothing_that_is_saved_needs_a_kernel_or_a_network(book: Any) -> None:
    assert "widgets" not in book.metadata
    for data in (each for cell in outputs(book) for each in cell):
        assert set(data) <= {"text/plain", "text/html", "image/png"}
        assert not re.search(
            r"<(script|link|iframe)|\b(src|href)=\"(?!#)|url\((?!#)|@import",
            data.get("text/html", ""),
        )


def test_where_style_and_svg_are_stripped_the_figures_and_a_plot_are_still_there(book: Any) -> None:
    for number, (*_, run, image) in enumerate(outputs(book)):
        page = re.sub(r"<(style|svg)\b.*?</\1>", "", run["text/html"], flags=re.DOTALL)
        words = " ".join(re.sub(r"<[^>]*>", " ", page).split())
        assert f"0.{number + 10}25" in words and "succeeded" in words
        assert image["image/png"]


def test_an_untrusted_notebook_shows_words_and_no_wall_of_figures(book: Any) -> None:
    """JupyterLab drops the elements of SVG and keeps their text; it drops style sheets whole."""
    for *_, cluster, run, _image in outputs(book):
        for page in (cluster["text/html"], run["text/html"]):
            kept = re.sub(r"<(style|script|textarea|option)\b.*?</\1>", "", page, flags=re.DOTALL)
            for svg in re.findall(r"<svg.*?</svg>", kept, flags=re.DOTALL):
                assert re.sub(r"<[^>]*>", "", svg).strip() == ""
        words = " ".join(re.sub(r"<[^>]*>", "", kept).split())
        assert re.search(r"succeeded · (\S.* · )?Run \d{8}-", words), words[:200]
        assert re.search(r"model \S+ (\([^)]*\) )?· technique ", words), words[:300]


def test_a_page_of_it_shows_the_same(book: Any) -> None:
    page, _ = HTMLExporter(require_js_url="", mathjax_url="").from_notebook_node(book)
    assert page.count('class="wb-picture"') == 2 * RUNS
    assert "widget-view" not in page
