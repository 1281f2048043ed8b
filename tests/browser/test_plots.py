"""Plots in a real browser: in a report opened from disk, and in JupyterLab during a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchrows import write_row
from tests.support.poll import until
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
