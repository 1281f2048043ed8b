"""Plots that answer a person: in a report opened from disk, and in JupyterLab during a run."""

from __future__ import annotations

import json
import re
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
    return write_report(rows_below([root])[0], root / "out", interactive=True)[0]


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
    plot = page.locator(".js-plotly-plot").filter(has_text="training loss").first
    plot.scroll_into_view_if_needed()
    plot.locator(".updatemenu-button", has_text="raw").wait_for()
    lines = plot.locator(".scatterlayer .trace .js-line")
    assert lines.count() >= 2

    hover = plot.locator(".hoverlayer")
    page.mouse.wheel(0, 200)  # clear of the window's edge

    def over_the_last_point() -> bool:
        box = plot.locator(".nsewdrag").first.bounding_box()
        x = plot.evaluate("e => e._fullLayout.xaxis.d2p(30)")
        page.mouse.move(box["x"] + x - 3, box["y"] + box["height"] / 2)
        page.mouse.move(box["x"] + x - 1, box["y"] + box["height"] / 2 + 4)
        return "optimizer step 30" in hover.text_content()

    until(over_the_last_point, 60, every_s=0.2, why=hover.text_content)
    assert "1: ddp, 1 pod : 0.26667" in hover.text_content()

    ticks = plot.locator(".ytick text")
    before = ticks.all_text_contents()
    plot.locator(".updatemenu-button", has_text="log").click()
    until(
        lambda: (
            plot.evaluate("e => e.layout.yaxis.type") == "log"
            and ticks.all_text_contents() != before
        ),
        120,
    )
    plot.locator(".updatemenu-button", has_text="seconds").click()
    until(
        lambda: "seconds since the start was asked for" in plot.locator(".xtitle").text_content(),
        120,
    )
    plot.locator(".updatemenu-button", has_text=re.compile("^0.9$")).click()
    until(lambda: plot.evaluate("e => e.data[0].y.at(-1)") > 0.3, 120)

    drawn = lines.count()
    plot.locator(".legendtoggle").first.click()
    until(lambda: 0 < lines.count() < drawn, 120)

    page.set_viewport_size({"width": 700, "height": 800})
    until(lambda: plot.bounding_box()["width"] < 700, 120)
    assert plot.bounding_box()["height"] > 300
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
    plot = book.output(0).locator(".wb-live-plot")
    plot.locator(".updatemenu-button", has_text="raw").wait_for()
    assert book.output(0).locator("svg.wb-plot").is_hidden(), (
        "the picture stands aside while the figure lives"
    )
    plot.locator(".updatemenu-button", has_text="log").click()
    until(lambda: plot.evaluate("e => e.layout.yaxis.type") == "log", 120)
    plot.evaluate("e => e.querySelector('.nsewdrag').scrollIntoView({block: 'center'})")
    box = plot.locator(".nsewdrag").first.bounding_box()
    page = book.page
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 20, steps=5)
    page.mouse.up()
    until(lambda: plot.evaluate("e => e.layout.xaxis.autorange") is False, 120)
    zoomed = plot.evaluate("e => e.layout.xaxis.range")

    book.run(1)
    until(lambda: plot.evaluate("e => e.data[0].x.length") == 40, 120)
    assert plot.evaluate("e => [e.layout.yaxis.type, e.layout.xaxis.range]") == ["log", zoomed]
    book.shoot(0, "plot-live")
    assert plot.bounding_box()["height"] > 300, "it is still there in a narrow window"

    book.run(2)
    book.run(3)
    final = book.output(0).locator(
        ".jp-RenderedPlotly .js-plotly-plot, .jp-RenderedPlotly.js-plotly-plot"
    )
    final.first.wait_for()
    until(lambda: book.output(0).locator(".wb-live-plot").count() == 0, 120)
    side = book.output(3).locator(".jp-RenderedPlotly")
    side.first.wait_for()
    book.see(3, "No option differs", 120)
    book.shoot(3, "plot-compare")
    book.save()
    saved = (lab.folder / "plots.ipynb").read_text()
    assert len(saved) < 1_000_000 and "plotly.js v" not in saved
    outputs = [
        output
        for cell in json.loads(saved)["cells"]
        for output in cell["outputs"]
        if "data" in output
    ]
    assert not [
        output for output in outputs if "application/vnd.jupyter.widget-view+json" in output["data"]
    ]
    title, plotted = (output["data"] for output in outputs[:2])
    assert ">loss, run 2026" in "".join(title["text/html"])
    # JupyterLab's plotly adds a PNG of what it drew.
    assert {"image/jpeg", "application/vnd.plotly.v1+json"} <= {*plotted}
    assert "text/html" not in plotted
