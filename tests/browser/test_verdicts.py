"""In a window of 640 px no table scrolls out of sight what names and judges a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench.display.views  # noqa: F401 - the views are registered
from tests.support.views import EXAMPLES
from workbench.base.display_protocol import as_html

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]
VERDICTS = ["exact", "fits", "outcome", "phase", "state"]
# The titles of a table that scrolls, and those in sight once it is scrolled to its end.
SCROLLED = """() => [...document.querySelectorAll(".wb-wide")].filter(
    box => box.checkVisibility() && box.scrollWidth > box.clientWidth + 1).map(box => {
        box.scrollLeft = box.scrollWidth;
        const {left, right} = box.getBoundingClientRect();
        const titles = [...box.querySelector("table").querySelectorAll("thead th")];
        const seen = titles.filter(title => {
            const at = title.getBoundingClientRect();
            return at.left >= left - 1 && at.right <= right + 1;
        });
        return [titles, seen].map(some => some.map(title => title.innerText));
    })"""


def test_a_verdict_stays_in_sight(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    page.set_viewport_size({"width": 580, "height": 400})
    scrolled = 0
    for number, (record, make) in enumerate(EXAMPLES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        page.set_content(f"<!doctype html><meta charset=utf-8>{as_html(make(folder))}")
        for titles, seen in page.evaluate(SCROLLED):
            scrolled += 1
            wanted = {*VERDICTS} & {*titles}
            assert wanted <= {*seen}, (record.__name__, titles, seen)
    page.close()
    assert scrolled, "a table of a benchmark is wider"
