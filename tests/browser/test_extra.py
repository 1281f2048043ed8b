"""What a button opens stands below the picture, and goes with a click or at the kernel's word."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser]

CELL = """<div class="jp-OutputArea"><div class="jp-OutputArea-child" id="bar"></div>
<div class="jp-OutputArea-child" id="picture" style="height: 2000px">picture</div></div>"""
SHOW = """async ([script, place]) => {
    const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
    const { default: { render } } = await import(url);
    const values = { label: "", buttons: [], note: {}, extra: "", picture: "", ticks: "", beat: 0 };
    const heard = {};
    window.sent = [];
    window.set = (name, value) => { values[name] = value; heard[name]?.(); };
    const model = { get: name => values[name], send: message => window.sent.push(message),
        on: (names, act) => names.split(" ").forEach(n => heard[n.replace("change:", "")] = act) };
    window.leave = render({ model, el: document.querySelector(place) });
}"""
TOP = "e => e.getBoundingClientRect().top + scrollY"


@pytest.mark.parametrize("place", ["#bar", "#elsewhere"])
def test_opened_content_stands_below_the_picture(browser: Any, place: str) -> None:
    script = files("workbench.display").joinpath("templates/assets/buttons.js").read_text()
    page = browser.new_page()
    page.set_content(CELL + '<div id="elsewhere"></div>')
    page.evaluate(SHOW, [script, place])
    page.evaluate(f"set('extra', {json.dumps('<p>positions</p>')})")
    opened = page.locator(".wb-extra")
    if place == "#bar":
        assert opened.evaluate(TOP) > page.locator("#picture").evaluate(TOP) + 1900
        # The picture stays where it was, and the opened content comes into sight.
        assert page.locator("#picture").evaluate(TOP) < 100
        assert opened.evaluate("e => e.getBoundingClientRect().top < innerHeight")
    else:
        assert page.locator("#elsewhere .wb-extra").count() == 1, "no output area: at the buttons"
    page.get_by_role("button", name="Close").click()
    assert {"close": True} in page.evaluate("sent")
    page.evaluate("set('extra', '')")
    assert opened.count() == 0
    page.evaluate("set('extra', 'again'); leave()")
    assert opened.count() == 0
    page.close()
