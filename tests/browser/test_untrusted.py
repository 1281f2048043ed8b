"""A saved notebook that JupyterLab does not trust: its sanitizer leaves words and an image."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from poll import until
from writtenrun import WrittenRun

import workbench
from tests.browser.conftest import ARTIFACTS, notebook
from workbench.client.run import Run
from workbench.display.kit.doc import to_bundle
from workbench.display.run.panel import RunPanel

SHEET = Path(workbench.__file__).parent / "display" / "templates" / "assets" / "sheet.css"
pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]


def saved_book(written: WrittenRun) -> Any:
    """A notebook as saved with the picture of a finished run: HTML, and the plot as an image."""
    written.event("start", world_size=3, global_batch_size=24, parameters=1_033_984)
    for step in range(1, 120):
        written.step(step)
        written.event(
            "sample", 1_700_000_000.0 + step, rank=None, host="127.0.0.2", rss_gib=0.5 + step / 1000
        )
    written.end()
    panel = RunPanel(Run.load(written.paths.root))
    bundle = dict(to_bundle(panel.look(at_once=True)))
    bundle["text/html"] = f'<div class="wb-picture">{bundle["text/html"]}</div>'
    book = notebook("run")
    html = nbformat.v4.new_output("display_data", data=bundle)
    image = {"text/plain": "(plot)", "image/png": base64.b64encode(panel.still() or b"").decode()}
    book.cells[0].outputs = [html, nbformat.v4.new_output("display_data", data=image)]
    return book


@pytest.mark.long
def test_an_untrusted_notebook_reads_as_a_panel(
    lab: Any, open_book: Callable[[str], Any], written: WrittenRun
) -> None:
    book = open_book(lab.add(saved_book(written), "untrusted.ipynb"))
    assert not book.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.model.cells.get(0).trusted"
    ), "no one has run it here"
    said = book.see(0, "succeeded", 60)
    assert book.output(0).locator("svg.wb-plot").count() == 0
    assert re.search(r"succeeded · (\S.* · )?Run \d{8}-", said), said[:300]
    assert not [line for line in said.splitlines() if len(re.findall(r"\d", line)) > 80], (
        "no wall of figures"
    )
    assert "step 1training" not in said and "steptraining" not in said
    images = book.output(0).locator("img")
    until(lambda: images.count() == 1 and images.first.is_visible(), 30)
    # A trusted notebook that is open in another tab brings the style sheet.
    book.page.add_style_tag(path=SHEET)
    assert images.first.is_visible()
    book.page.screenshot(path=str(ARTIFACTS / "untrusted.png"))
