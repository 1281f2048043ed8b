"""In a window of 1280 or of 640 px no view scrolls sideways, and every verdict is in sight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench.display.views  # noqa: F401 - the views are registered
from tests.browser.test_tables import THEMES
from tests.support.views import EXAMPLES
from workbench.base.display_protocol import as_html

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]
VERDICTS = {"exact", "fits", "outcome", "phase", "state", "difference", "right"}
CELLS = (1080, 860, 700, 504)  # pixels of a cell; the first in a window of 1280, the last of 640
# What must be scrolled sideways: the page, and boxes within.
SCROLLED = """() => [...document.querySelectorAll("html, html *")].filter(box =>
    box.checkVisibility() && box.scrollWidth > box.clientWidth + 1
    && (box === document.documentElement
        || ["auto", "scroll"].includes(getComputedStyle(box).overflowX))).map(box =>
    `${box.tagName} ${box.className}: ${box.scrollWidth} of ${box.clientWidth} px`)"""
# The titles of every table, and those in sight.
TITLES = """() => [...document.querySelectorAll("table")].filter(
    table => table.checkVisibility() && !table.closest("details")).map(table => {
        const titles = [...table.querySelectorAll("thead th")];
        const seen = titles.filter(title => title.checkVisibility()
            && title.getBoundingClientRect().right <= document.documentElement.clientWidth);
        return [titles, seen].map(some => some.map(title => title.textContent));
    })"""


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_no_view_scrolls_sideways(kind: type, page: Any, tmp_path: Path) -> None:
    html = as_html(EXAMPLES[kind](tmp_path))
    for look in THEMES.values():
        page.set_content(
            f"<!doctype html><meta charset=utf-8><body style='margin: 0; background: {look}'>{html}"
        )
        for width in CELLS:
            page.set_viewport_size({"width": width, "height": 400})
            assert page.evaluate(SCROLLED) == [], width
            for titles, seen in page.evaluate(TITLES):
                verdicts = [title for title in titles if title in VERDICTS]
                assert verdicts[:1] == [title for title in seen if title in VERDICTS][:1]
