"""The sidebar of runs in a real JupyterLab: a real run is listed, opened and stopped from there."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import ARTIFACTS
from tests.support.poll import until
from tests.support.writtenrun import WrittenRun, write_run
from workbench import Cluster, LocalPods, PodSpec, Script
from workbench.display.kit.plots.figure import look_of_run
from workbench.rundir.catalog.label import read_label
from workbench.rundir.events import Event
from workbench.rundir.figures.curves import ScalarWriter
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.state import RunState

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]
BEAT = Path(__file__).parents[1] / "scripts" / "beat.py"
DEFAULT_NAME = "cluster-20261124-191654-1373"  # as of a cluster without a path
WAIT_MS = 300_000
# What a person who looks at something else is told; headless, a page always has the focus.
ELSEWHERE = """
window.rung = [];
document.hasFocus = () => false;
window.Notification = class {
    static permission = "default";
    static async requestPermission() { return (this.permission = "granted"); }
    constructor(title, options) { window.rung.push([title, options.body]); }
};
"""

# Looks at the frame of the tab in sight in every picture of the browser.
WATCH = """() => {
    window.seen = [];
    const frame = [...document.querySelectorAll(".dw-tab iframe")].find(f => f.offsetParent);
    const look = () => {
        requestAnimationFrame(look);
        const page = frame.contentDocument?.documentElement; // none while the frame loads
        const scheme = page?.style.colorScheme ?? "", head = !!page?.querySelector("h1");
        const now = [getComputedStyle(frame).visibility, scheme, head];
        if (String(now) !== String(window.seen.at(-1))) window.seen.push(now);
    };
    look();
}"""


@pytest.fixture
def page(browser: Any, lab: Any) -> Iterator[Any]:
    page = browser.new_page()
    page.add_init_script(ELSEWHERE)
    page.goto(f"{lab.url}lab/workspaces/sidebar?token={lab.token}")
    page.wait_for_selector("#jp-main-dock-panel", timeout=WAIT_MS)
    page.evaluate(
        "() => window.jupyterapp.restored.then(() => window.jupyterapp.shell.activateById"
        "('deepspeed-workbench-runs'))"
    )
    page.locator(".dw-side").wait_for(timeout=WAIT_MS)
    yield page
    page.screenshot(path=str(ARTIFACTS / "last-sidebar.png"))
    page.close()


def test_runs_are_listed_opened_and_stopped_from_the_sidebar(
    page: Any, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cluster's user is the server's: the way to a
    # keeper lies in the state folder that both have.
    monkeypatch.setenv("XDG_STATE_HOME", str(lab.home / ".local/state"))
    # As in a kernel of this notebook.
    monkeypatch.setenv("JPY_SESSION_NAME", str(lab.folder / "course" / "train.ipynb"))
    side = page.locator(".dw-side")
    side.get_by_text("No runs yet").wait_for(timeout=WAIT_MS)
    ended = write_run(lab.folder / "older")
    ended.keeper("closed", alive=False)
    ended.step(30)
    writer = ScalarWriter(ended.paths.tensorboard)
    writer.add(Event(time_s=time.time(), rank=0, kind="step", data={"step": 1, "loss": 2.0}))
    writer.close()
    ended.end(
        "failed",
        "<img src=x onerror=alert(1)> on rank 1",
        steps=30,
        peak_memory_gib={"127.0.0.2": 1.5},
    )
    damaged = ended.paths.root.with_name("damaged")
    shutil.copytree(ended.paths.root, damaged)
    (damaged / "result.json").write_text("{")

    with Cluster(
        LocalPods(), PodSpec(cpus=1), count=1, path=lab.folder / "runs" / DEFAULT_NAME, warm=False
    ) as cluster:
        run = cluster.submit(Script(str(BEAT)))
        live = side.locator(".dw-run[data-state='running']")
        live.wait_for(timeout=WAIT_MS)
        rows = side.locator(".dw-run")
        until(lambda: rows.count() == 3, 120, why=side.inner_text)
        assert "beat.py" in live.inner_text()
        title = page.get_by_role("button", name="train.ipynb · local pods · 20")
        small = side.locator(".dw-group").filter(has=title)
        assert "ready, 1 pod" in small.inner_text()
        stops = small.get_by_role("button", name="Stop the pods of train.ipynb")
        assert not stops.is_visible(), "a cluster with a run is not stopped"
        failed = side.locator(".dw-run[data-state='failed']")
        assert "peak 1.50 GiB" in failed.inner_text()
        assert "<img src=x onerror=alert(1)>" in failed.inner_text()
        assert "result.json" in side.locator(".dw-run[data-state='lost']").inner_text()
        assert page.locator("img[src=x]").count() == 0

        side.get_by_role("button", name="Notify me").click()
        live.locator(".dw-open").focus()
        page.keyboard.press("Enter")
        tab = page.locator(".dw-tab:visible")
        frame = tab.frame_locator("iframe")
        frame.get_by_text("line").first.wait_for(timeout=WAIT_MS)
        assert run.id in frame.locator("body").inner_text()
        assert (
            page.evaluate("() => window.jupyterapp.shell.currentWidget.title.label")
            == "beat.py script"
        )
        assert tab.locator("iframe").get_attribute("sandbox") == "allow-same-origin"
        log, fold = frame.locator(".wb-log").first, frame.locator("details").first
        until(lambda: log.evaluate("e => e.scrollHeight > e.clientHeight"), 120, every_s=0.5)
        page.set_viewport_size({"width": 1205, "height": 300})
        places = "e => [document.documentElement.scrollTop, e.scrollTop]"
        scrolls = f"""e => {{
            document.documentElement.scrollTo(0, 20);
            e.scrollTo(0, -15);
            return ({places})(e);
        }}"""
        # The page can be scrolled once JupyterLab has made the tab smaller too.
        until(lambda: log.evaluate(scrolls) == [20, -15], 120, every_s=0.5)
        first = log.text_content()
        until(lambda: log.text_content() != first, 120, every_s=0.5)
        assert log.evaluate(places) == [20, -15], "whoever reads is left alone"
        fold.locator("summary").click()
        first = log.text_content()
        until(lambda: log.text_content() != first, 120, every_s=0.5)
        assert not fold.evaluate("e => e.open")
        fold.locator("summary").click()
        page.set_viewport_size({"width": 1205, "height": 800})

        ends = side.get_by_role("button", name=f"Stop run {run.id}")
        ends.click()
        assert "asked to stop" not in side.inner_text(), "one click is none"

        def asked() -> bool:
            if "asked to stop" in side.inner_text() or run.state.is_terminal:
                return True
            if ends.is_visible():
                ends.click()  # the second of two within some seconds is the one that counts
            return False

        until(asked, 120, every_s=0.5)
        assert run.wait(300, progress=False).state is RunState.STOPPED
        side.locator(".dw-run[data-state='stopped']").wait_for(timeout=WAIT_MS)
        tab.locator(".dw-state", has_text="stopped").wait_for(timeout=WAIT_MS)
        until(lambda: page.evaluate("window.rung"), 120)
        assert page.evaluate("window.rung")[0][0].startswith("Run stopped: beat.py")
        stops.click()
        assert cluster.phase == "ready", "one click is none"

        def closed() -> bool:
            if cluster.phase == "ready" and stops.is_visible():
                stops.click()
            return cluster.phase == "closed"

        until(closed, 120, every_s=0.5, why=side.inner_text)
        small.wait_for(state="hidden", timeout=WAIT_MS)

    failed.get_by_label("More of run").click()
    failed.get_by_role("button", name="TensorBoard").click()
    board = page.locator(".dw-tab:visible").frame_locator("iframe[title^=TensorBoard]")
    board.get_by_text(ended.paths.root.name).first.wait_for(timeout=WAIT_MS)

    deletes = failed.get_by_role("button", name="Delete run")
    deletes.click()
    assert "Really delete" in deletes.inner_text() and "KiB" in deletes.inner_text()
    assert ended.paths.root.exists(), "one click is none"

    def deleted() -> bool:
        if ended.paths.root.exists() and deletes.is_visible():
            deletes.click()
        return not ended.paths.root.exists()

    until(deleted, 120, every_s=0.5, why=side.inner_text)
    side.get_by_text("the run is deleted").wait_for(timeout=WAIT_MS)
    assert damaged.exists()


def test_runs_are_found_named_compared_and_repeated(page: Any, lab: Any) -> None:
    folder = lab.folder / "swept"
    first = write_run(folder)
    first.state("running", "training on 3 pods")
    first.step(1)
    first.step(20)
    now = time.time()
    for number in range(30):
        other = first.paths.root.with_name(f"swept-{number:02d}")
        shutil.copytree(first.paths.root, other)
        ended = WrittenRun(RunPaths(other), ClusterPaths(folder / f"closed-{number:02d}"))
        submitted_s = now - (number >= 14) * 100 * 86_400 - number
        info = {"id": other.name, "submitted_s": submitted_s}
        ended.paths.info.write_text(json.dumps(info))
        ended.end(steps=20, eval_loss=0.5)
    rows = page.locator(".dw-side .dw-run")
    side, filter_field = page.locator(".dw-side"), page.get_by_label("Filter runs")

    # A filter finds runs of any age; folded and long groups have no elements for their runs.
    filter_field.fill("swept-0 succeeded")
    until(lambda: rows.count() == 10, 60, why=side.inner_text)
    side.get_by_text("10 of ").wait_for(timeout=WAIT_MS)
    filter_field.fill("swept")
    side.get_by_role("button", name="Show 4 more of Today").click()
    until(lambda: rows.count() == 1 + 14 + 10, 60, why=side.inner_text)
    side.get_by_role("button", name="Today").click()
    assert rows.count() == 11
    side.get_by_role("button", name="Today").click()

    # A name and tags are stored with the run.
    one = rows.filter(has=page.get_by_label("Compare run swept-03"))
    one.get_by_label("More of run").click()
    assert not one.get_by_role("button", name="TensorBoard").is_visible(), "it has no event files"
    one.get_by_role("button", name="Name and tags").click()
    page.keyboard.type("the third")
    one.get_by_role("textbox", name="Tags").fill("paper, zero 1")
    page.keyboard.press("Enter")
    filter_field.fill("paper third")
    until(lambda: rows.count() == 1, 60, why=side.inner_text)
    assert one.locator(".dw-tag").all_inner_texts() == ["paper", "zero 1"]
    assert read_label(RunPaths(first.paths.root.with_name("swept-03"))).name == "the third"

    # Ticks stay while the filter changes; the comparison follows the live run.
    one.get_by_label("Compare run").check()
    compares = side.get_by_role("button", name="Compare the ticked runs")
    assert compares.is_disabled(), "one run is no comparison"
    filter_field.fill("swept running")
    until(lambda: "running" in rows.inner_text() if rows.count() == 1 else False, 60)
    live = rows.filter(has=page.get_by_label(f"Compare run {first.paths.root.name}"))
    live.get_by_label("Compare run").check()
    compares.click()
    tab = page.locator(".dw-tab:visible")
    frame = tab.frame_locator("iframe")
    frame.get_by_text("the third").locator("visible=true").first.wait_for(timeout=WAIT_MS)
    for run, row in (("swept-03", "the third"), (first.paths.root.name, first.paths.root.name)):
        colour = look_of_run(run).colour
        assert frame.locator(f"path[style*='stroke:{colour}']").count(), "the line of the run"
        legend = tab.locator(".dw-legend .dw-run", has_text=row).locator(".dw-colour")
        assert legend.get_attribute("style") == background(colour)
    assert live.locator(".dw-colour").get_attribute("style") == background(colour)
    frame.locator("td", has_text="20").first.wait_for(timeout=WAIT_MS)
    first.step(64)
    frame.locator("td", has_text="64").first.wait_for(timeout=WAIT_MS)

    # A page that is on its way is announced, and seen in the colours of the lab alone.
    page.route("**/workbench/api/page?*", lambda route: None)
    live.locator(".dw-open").click()
    tab.get_by_text("Loading the run").wait_for(timeout=WAIT_MS)
    page.evaluate(
        "() => window.jupyterapp.commands.execute"
        "('apputils:change-theme', {theme: 'JupyterLab Dark'})"
    )
    page.wait_for_selector("body[data-jp-theme-light='false']", state="attached")
    page.evaluate(WATCH)
    page.unroute("**/workbench/api/page?*")  # and lets the held request go
    frame.get_by_text("64 of 100 steps").wait_for(timeout=WAIT_MS)
    tab.get_by_text("Loading the run").wait_for(state="hidden", timeout=WAIT_MS)
    page.wait_for_function("window.seen.at(-1)[0] === 'visible'")
    seen = page.evaluate("window.seen")
    assert seen[0][0] == "hidden" and ["visible", "dark", False] in seen
    wrong = [each for each in seen if each[0] == "visible" and each[1:] != ["dark", False]]
    assert wrong == [], "white paper, or a heading of its own"

    # The code of a run comes into a new notebook, and then below its cell.
    again = live.get_by_role("button", name="Again with changes")
    again.click()
    cells = page.locator(".jp-Notebook:visible .jp-Cell")
    cells.filter(has_text=f"The job of run {first.paths.root.name}").wait_for(timeout=WAIT_MS)
    assert cells.count() == 1 and "FineTune(" in cells.inner_text()
    again.click()
    until(lambda: cells.count() == 2, 60)


def background(colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return f"background: rgb({red}, {green}, {blue});"
