"""Tables in a real browser: nothing leaves the cell, no word is broken, and a click sorts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.test_history import make_run
from tests.display.test_plan import LARGE, table
from tests.support.benchrows import make_row, mixed_rows
from workbench.base.display_protocol import as_html, as_page
from workbench.benchmark.result import BenchmarkResult, Report
from workbench.client.result import RunResult
from workbench.finetune.answers.predictions import Answers, Predictions
from workbench.finetune.data.scoring import judge
from workbench.finetune.notebook.history import history

pytestmark = [pytest.mark.slow, pytest.mark.browser]

CELL = 1205  # pixels of an output in a JupyterLab of 1400
NARROW = 700
MODEL = "/home/somebody/projects/text-to-sql/runs/20261121-140252/model-of-the-house"
THEMES = {
    "light": "#fff; color: #212121",
    "dark": "#111; color: #e6e6e6; --jp-layout-color0: #111; "
    "--jp-ui-font-color1: #e6e6e6; --jp-ui-font-color2: #aaa",
}
OUT_OF_SIGHT = """box => [...box.querySelectorAll("table")].filter(
    table => table.getBoundingClientRect().right > box.getBoundingClientRect().right + 1).map(
    table => `${table.caption?.innerText}: ${table.getBoundingClientRect().right}`)"""
BROKEN = """(box, longest) => {
    const broken = [], range = document.createRange();
    const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode;
        const parent = node.parentElement;
        if (!parent.closest("td, th") || parent.closest("style, script, svg")) continue;
        for (const word of node.textContent.matchAll(/[\\p{L}\\p{N}_.]+/gu)) {
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            const lines = new Set([...range.getClientRects()].map(line => Math.round(line.top)));
            if (lines.size > 1 && word[0].length < longest) broken.push(word[0]);
        }
    }
    return broken;
}"""


def answers() -> Answers:
    asked = [
        judge(
            f"How many people live in town {n} of the county that has most?",
            "SELECT COUNT people WHERE town = a",
            said,
        )
        for n, said in enumerate(["SELECT COUNT people WHERE town = b", "a " * 300, "x" * 90, ""])
    ]
    return Answers(
        names=("before training", "zero1 on 3 pods"), models=(Predictions(tuple(asked)),) * 2
    )


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The records that people look at, as a notebook gets them."""
    folder = tmp_path_factory.mktemp("runs")
    for n in range(6):
        job = {
            "learning_rate": 0.001 * (n + 1),
            "per_device_train_batch_size": 8 + n,
            "dataset": f"/data/{n}/rows.jsonl",
        }
        facts = {"train_samples_per_s": 131.25 * n, "exact_match": 0.25, "eval_loss": 1.0 / (n + 1)}
        root = folder / f"benchmark-{n % 2}" / f"20261121-14025{n}-zero1-6c8c"
        run = make_run(root, float(n), job, model=MODEL if n % 2 else "tiny-t5", **facts)
        run.name, run.note = (
            f"try number {n}",
            "with the rows that were cleaned on Tuesday, and a longer warm-up",
        )
    rows = [
        *mixed_rows(),
        *(make_row("zero2", n, 90.0 + n, exact_match=0.5, perplexity=3.0) for n in (1, 2, 3)),
    ]
    result = BenchmarkResult(name="sweep", folder=folder, rows=tuple(rows))
    return {
        "plan": as_html(table(*LARGE)),
        "history": as_html(history(folder)),
        "benchmark": as_html(result),
        "answers": as_html(answers()),
        "one model's answers": as_html(Answers(names=("answered",), models=answers().models[:1])),
        "result": as_html(RunResult.load(Path(str(run.path)))),
        "report": as_page(Report(rows, title="sweep", with_cards=False)),
    }


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of each test's own: what sorts tables is once in a page, also after new content."""
    page = browser.new_page()
    yield page
    page.close()


def show(page: Any, html: str, width: int, theme: str = "light") -> Any:
    """Show HTML in a cell of so many pixels, and return the cell."""
    page.set_viewport_size({"width": width + 20, "height": 900})
    style = f"margin: 0; font: 13px/1.4 sans-serif; background: {THEMES[theme]}"
    cell = f'<div id="cell" style="width: {width}px">{html}</div>'
    page.set_content(f'<!doctype html><body style="{style}">{cell}</body>')
    return page.locator("#cell")


@pytest.mark.parametrize(
    "name", ["plan", "history", "benchmark", "answers", "one model's answers", "result"]
)
def test_the_last_column_is_in_sight_and_no_word_is_broken(
    page: Any, views: dict[str, str], name: str
) -> None:
    assert show(page, views[name], CELL).evaluate(OUT_OF_SIGHT) == []
    assert show(page, views[name], NARROW).evaluate(BROKEN, 40) == []


def test_what_came_out_of_a_benchmark_is_in_sight_before_what_was_put_in(
    page: Any, views: dict[str, str]
) -> None:
    cell = show(page, views["benchmark"], CELL)
    for title in ("samples/s", "speed-up", "peak memory", "eval loss", "exact match"):
        box = cell.locator("thead th", has_text=title).first.bounding_box()
        assert box["x"] + box["width"] <= CELL, title
    assert show(page, views["benchmark"], NARROW).evaluate(BROKEN, 40) == []


@pytest.mark.parametrize("name", ["benchmark", "report"])
def test_a_click_sorts_a_part_and_what_is_not_known_stays_last(
    page: Any, views: dict[str, str], name: str
) -> None:
    errors: list[str] = []
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    if name == "report":
        page.set_content(views[name])
    else:
        show(page, views[name], CELL)
    title = page.locator(".wb-sort thead th", has_text="samples/s").first
    body = page.locator(".wb-sort tbody").first

    def order() -> list[str]:
        return [
            row.split("\t")[0].strip()
            for row in body.inner_text().splitlines()
            if row.split("\t")[0].strip().isdigit()
        ]

    before = order()
    title.click()
    rising = order()
    assert title.get_attribute("aria-sort") == "ascending"
    title.press("Enter")
    falling = order()
    assert title.get_attribute("aria-sort") == "descending"
    assert sorted(rising) == sorted(falling) == sorted(before)
    known = [n for n in rising if n not in ("5", "6")]
    assert falling == [*reversed(known), "5", "6"]
    assert rising == [*known, "5", "6"] != before
    assert (
        "no such thing"
        in body.locator("tr", has_text="failed")
        .locator("xpath=following-sibling::tr[1]")
        .inner_text()
    )
    assert errors == []


def test_a_long_history_is_filtered_and_sorted(page: Any, tmp_path: Path) -> None:
    for n in range(40):
        state = "failed" if n == 3 else "succeeded"
        make_run(tmp_path / f"run-{n:03}", float(n), state=state, eval_loss=float(n))
    cell = show(page, "", CELL)
    # As a front end does: the output is put into the page, and its scripts are executed.
    cell.evaluate(
        """(cell, html) => { cell.innerHTML = html;
        for (const old of cell.querySelectorAll("script")) {
            const script = document.createElement("script");
            script.textContent = old.textContent; old.replaceWith(script); } }""",
        as_html(history(tmp_path)),
    )
    seen = "rows => rows.filter(row => row.checkVisibility()).map(row => row.cells[1].innerText)"
    rows = cell.locator("table").first.locator("tbody tr")
    assert len(rows.evaluate_all(seen)) == 40
    field = cell.get_by_label("Filter")
    field.fill("FAILED run-00")
    assert rows.evaluate_all(seen) == ["run-003"]
    assert cell.get_by_role("status").inner_text() == "1 of 40"
    field.fill("")
    assert len(rows.evaluate_all(seen)) == 40
    cell.locator("th", has_text="eval").first.click()
    assert rows.evaluate_all(seen)[:2] == ["run-000", "run-001"]
    assert rows.count() == 40
