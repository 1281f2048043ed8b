"""Plots in a real browser: in a report opened from disk, and in JupyterLab during a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchrows import write_row
from poll import until

from tests.browser.conftest import notebook
from workbench.benchmark.result import rows_below, write_report

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]

CONTRAST = """() => {
  const parts = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const rgba = colour => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map(n => top[3] * top[n] + (1 - top[3]) * below[n]);
  const light = c => {
    const [r, g, b] = c.map(
      v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const behind = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement)
      layers.push(rgba(getComputedStyle(at).backgroundColor));
    const page = matchMedia("(prefers-color-scheme: dark)").matches
      ? [18, 18, 18] : [255, 255, 255];
    return layers.reverse().reduce((below, layer) => over(layer, below), page);
  };
  const low = [];
  for (const element of document.querySelectorAll(".wb *")) {
    const words = [...element.childNodes].filter(n => n.nodeType === 3 && n.data.trim());
    if (!words.length || !element.checkVisibility() || element.closest("svg")) continue;
    const ground = behind(element), ink = over(rgba(getComputedStyle(element).color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5)
      low.push([words[0].data.slice(0, 30), ((a + .05) / (b + .05)).toFixed(2)]);
  }
  return low;
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three rows whose losses differ, one of which failed."""
    root = tmp_path_factory.mktemp("plots")
    for name, drop in (("ddp", 1.0), ("zero1", 1.5), ("zero3", 2.0)):
        run = write_row(
            root / name, technique=name, state="failed" if name == "zero3" else "succeeded"
        )
        steps = [
            {"time_s": 10.0 + n, "rank": 0, "kind": "step", "step": n, "loss": 8.0 / n**drop}
            for n in range(1, 31)
        ]
        (run / "events.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return write_report(rows_below([root])[0], root / "out")


def test_a_report_answers_without_a_network(report: Path, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    page.goto(report.as_uri())
    plot = page.locator('svg.wb-plot[aria-label^="loss of the runs"]').first
    plot.scroll_into_view_if_needed()
    # Words stand beside the pointer, by a rule of the style sheet.
    band = plot.locator(".wb-at span").last
    words = "e => getComputedStyle(e, '::after').content"
    assert "step 30" not in band.evaluate(words)
    band.hover()
    until(lambda: "step 30" in band.evaluate(words), 60, why=lambda: band.evaluate(words))
    assert "1: ddp, 1 pod 0.2667" in band.evaluate(words)

    page.set_viewport_size({"width": 700, "height": 800})
    until(lambda: plot.bounding_box()["width"] < 700, 120)
    assert plot.bounding_box()["height"] > 200
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST) == [], scheme
    assert asked == [report.as_uri()]
    assert errors == []
    page.close()


FOLLOW = """
import json, time
from pathlib import Path
from writtenrun import write_run
from workbench import Run
written = write_run(Path("pods"))
written.state("running", "training")
T = time.time()
for step in range(1, 31):
    written.event("step", T + step, step=step, loss=8.0 / step)
run = Run.load(written.paths.root)
run.plot()
"""
MORE = """
for step in range(31, 41):
    written.event("step", T + step, step=step, loss=8.0 / step)
"""
END = """
written.end()
"""
SIDE = "workbench.compare([run, run], names=['one', 'two'])"


def test_a_plot_in_a_notebook_follows_its_run_and_stays(
    lab: Any, open_book: Callable[[str], Any]
) -> None:
    tests = Path(__file__).resolve().parents[1]
    cells = (
        f"import sys; sys.path.append({str(tests)!r})\n{FOLLOW}",
        MORE,
        END,
        f"import workbench\n{SIDE}",
    )
    book = open_book(lab.add(notebook(*cells), "plots.ipynb"))
    book.run(0)
    plot = book.output(0).locator("svg.wb-plot")
    plot.wait_for()

    def last_words() -> str:
        return str(plot.locator(".wb-at span").last.get_attribute("data-words"))

    assert last_words() == "step 30\ntraining loss 0.2667"
    assert book.output(0).locator("img").filter(visible=True).count() == 0

    book.run(1)
    until(lambda: last_words() == "step 40\ntraining loss 0.2", 120, why=last_words)
    book.shoot(0, "plot-live")

    book.run(2)
    book.run(3)
    side = book.output(3).locator("svg.wb-plot")
    side.first.wait_for()
    book.see(3, "No option differs", 120)
    book.shoot(3, "plot-compare")
    book.save()
    saved = (lab.folder / "plots.ipynb").read_text()
    assert len(saved) < 300_000
    outputs = [
        output
        for cell in json.loads(saved)["cells"]
        for output in cell["outputs"]
        if "data" in output
    ]
    kinds = {kind for output in outputs for kind in output["data"]}
    assert kinds == {"text/plain", "text/html", "image/png"}, "no widget and no program"
    pictures = [output["data"] for output in outputs if {*output["data"]} - {"image/png"}]
    assert ">loss, run 2026" in "".join(pictures[0]["text/html"])
