"""Every view as saved, read where JupyterLab does not trust it, on a code host, in other places."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

import workbench
from tests.browser.conftest import ARTIFACTS, REPOSITORY, notebook
from tests.support.poll import until
from tests.support.sanitized import GitHub, Reader, numbers
from tests.support.sentences import says
from tests.support.views import EXAMPLES
from workbench.base import display_protocol
from workbench.display import views

SHEET = Path(workbench.__file__).parent / "display" / "templates" / "assets" / "sheet.css"
SETUP = f"""
import sys
sys.path[:0] = [{str(REPOSITORY)!r}]
from contextlib import closing
from pathlib import Path
from tests.support.benchrows import make_row
from tests.support.views import EXAMPLES, ended
from workbench.display.benchmark.live import BenchmarkLive
examples = {{record.__name__: make for record, make in EXAMPLES.items()}}
"""
CELLS = {
    record.__name__: f"examples[{record.__name__!r}](Path({record.__name__!r}))"
    for record in EXAMPLES
} | {
    "failed": "ended(Path('failed'), 'failed')",
    "live benchmark": "with closing(BenchmarkLive()) as live:\n"
    "    live.update([make_row('zero1', pods, float(pods)) for pods in (1, 2, 3)])",
}
PANEL_BYTES = 96_000
PNG = b"\x89PNG"
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook with a cell for each view, executed and saved."""
    book = notebook(SETUP, *CELLS.values())
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("views"))}}
    NotebookClient(book, timeout=300, resources=where).execute()
    return book


@pytest.fixture(scope="module")
def saved(book: Any) -> dict[str, list[dict[str, Any]]]:
    """The outputs of each view."""
    return {
        name: [dict(output["data"]) for output in cell.outputs]
        for name, cell in zip(CELLS, book.cells[1:], strict=True)
    }


def words_of(outputs: list[dict[str, Any]]) -> str:
    """What a terminal shows of outputs, widgets and PNG behind a picture apart."""
    return "\n".join(each["text/plain"] for each in outputs)


def test_no_view_is_forgotten() -> None:
    """A record with a new view gets an example, so that all tests here read it."""
    drawn = {*views._DOCS, *views._VIEWS[display_protocol.as_html]}
    assert drawn == {*EXAMPLES}


def only_text(line: str) -> bool:
    """Whether a line names modules of a profile that only HTML shows."""
    return says(line, "sort='latency') shows those of a level")


def test_every_view_on_a_code_host_has_its_figures_and_no_words_run_together(
    saved: dict[str, list[dict[str, Any]]],
) -> None:
    for name, outputs in saved.items():
        kept = [Reader(GitHub(each.get("text/html", "")).kept) for each in outputs]
        assert [each.troubles for each in kept if each.troubles] == [], name
        text = "\n".join(line for each in kept for line in (each.text, *each.titles))
        # What has no HTML is shown as text, or as its PNG.
        shown_as_text = [each for each in outputs if {*each} == {"text/plain"}]
        said = [line for line in words_of(outputs).splitlines() if not only_text(line)]
        missing = numbers("\n".join(said)) - numbers(text + words_of(shown_as_text))
        assert not missing, (name, missing)


def test_where_a_trusted_view_has_svg_an_untrusted_one_has_an_image(
    saved: dict[str, list[dict[str, Any]]],
) -> None:
    pictured = []
    for name, outputs in saved.items():
        for place, output in enumerate(outputs):
            if '<svg class="wb-plot"' in output.get("text/html", ""):
                behind = outputs[place + 1].get("image/png", "")
                assert base64.b64decode(behind).startswith(PNG), name
                pictured.append(name)
    assert {"Run", "failed", "BenchmarkPlots", "RunComparison", "RunPlot"} <= {*pictured}


def test_a_runs_panel_stays_small(saved: dict[str, list[dict[str, Any]]]) -> None:
    for name in ("Run", "failed"):
        size = len(json.dumps(saved[name]))
        assert 20_000 < size < PANEL_BYTES, (name, size)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    yield page
    page.close()


def test_jupyterlabs_own_sanitizer_leaves_every_view_readable(
    lab: Any, open_book: Callable[..., Any], book: Any, saved: dict[str, list[dict[str, Any]]]
) -> None:
    opened = open_book(lab.add(book, "untrusted.ipynb"), own_page=True)
    widget = "window.jupyterapp.shell.currentWidget.content"
    assert not opened.page.evaluate(f"() => {widget}.model.cells.get(1).trusted"), "no one ran it"
    sanitize = f"html => {widget}.rendermime.sanitizer.sanitize(html)"
    for name, outputs in saved.items():
        for output in outputs:
            html = output.get("text/html", "")
            kept = opened.page.evaluate(sanitize, html)
            assert not any(tag in kept for tag in ("<svg", "<style", "<script")), name
            assert Reader(kept).troubles == [], name
    run = 1 + [*CELLS].index("Run")
    opened.see(run, "succeeded", 60)
    cell = opened.output(run)
    assert cell.locator("svg.wb-plot").count() == 0
    images = cell.locator("img")
    until(lambda: images.count() == 1 and images.first.is_visible(), 30)
    # A trusted notebook that is open in another tab brings the style sheet.
    opened.page.add_style_tag(path=SHEET)
    assert images.first.is_visible()
    receipt = cell.locator(".wb-receipt").bounding_box()
    for fold in cell.locator(".wb-plots summary").all():
        box = fold.bounding_box()
        assert box["y"] + box["height"] <= receipt["y"], "nothing lies over the receipt"
    opened.page.screenshot(path=str(ARTIFACTS / "untrusted.png"))


def test_where_svg_is_drawn_no_place_shows_the_png_too(
    page: Any, saved: dict[str, list[dict[str, Any]]], book: Any, tmp_path: Path
) -> None:
    converted = tmp_path / "views.html"
    html, _ = HTMLExporter(require_js_url="", mathjax_url="").from_notebook_node(book)
    converted.write_text(html)
    page.goto(converted.as_uri())
    behind = sum(
        '<svg class="wb-plot"' in output.get("text/html", "")
        for outputs in saved.values()
        for output in outputs
    )
    assert page.locator("img").count() >= behind
    assert page.locator("img").filter(visible=True).count() == 0
    picture, image = saved["Run"]
    # As VS Code's notebook has it: styles are kept.
    outputs = f'<div class="display"><img src="data:image/png;base64,{image["image/png"]}"></div>'
    frame = '<div class="output_container"><div class="output">{}</div></div>'
    page.set_content(frame.format(picture["text/html"]) + frame.format(outputs))
    assert page.locator("svg.wb-plot").first.is_visible()
    assert not page.locator("img").is_visible()
