"""The sidebar of runs in a real JupyterLab: a real run is listed, opened and stopped from there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from poll import until
from writtenrun import write_run

from tests.browser.conftest import ARTIFACTS
from workbench import Cluster, LocalPods, PodSpec, Script
from workbench.rundir.events import Event
from workbench.rundir.figures.curves import ScalarWriter
from workbench.rundir.state import RunState

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser, pytest.mark.timeout(600)]
BEAT = Path(__file__).parents[1] / "scripts" / "beat.py"
WAIT_MS = 120_000
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


def shoot(page: Any, name: str) -> None:
    for theme, width in (("light", 1205), ("dark", 700)):
        page.evaluate(
            "t => window.jupyterapp.commands.execute('apputils:change-theme', {theme: t})",
            f"JupyterLab {theme.title()}",
        )
        page.wait_for_selector(
            f"body[data-jp-theme-light='{str(theme == 'light').lower()}']", state="attached"
        )
        page.set_viewport_size({"width": width, "height": 800})
        time.sleep(1)
        page.screenshot(path=str(ARTIFACTS / f"{name}-{width}-{theme}.png"))


def test_runs_are_listed_opened_and_stopped_from_the_sidebar(
    page: Any, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cluster's user is the server's: the way to a
    # keeper lies in the state folder that both have.
    monkeypatch.setenv("XDG_STATE_HOME", str(lab.home / ".local/state"))
    side = page.locator(".dw-side")
    side.get_by_text("No runs yet").wait_for(timeout=WAIT_MS)
    ended = write_run(lab.folder / "older")
    ended.keeper("closed", alive=False)
    ended.step(30)
    ended.end(
        "failed",
        "<img src=x onerror=alert(1)> on rank 1",
        steps=30,
        peak_memory_gib={"127.0.0.2": 1.5},
    )
    writer = ScalarWriter(ended.paths.tensorboard)
    writer.add(Event(time_s=time.time(), rank=0, kind="step", data={"step": 1, "loss": 2.0}))
    writer.close()
    damaged = ended.paths.root.with_name("damaged")
    shutil.copytree(ended.paths.root, damaged)
    (damaged / "result.json").write_text("{")

    with Cluster(
        LocalPods(), PodSpec(cpus=1), count=1, path=lab.folder / "runs" / "small", warm=False
    ) as cluster:
        run = cluster.submit(Script(str(BEAT)))
        live = side.locator(".dw-run[data-state='running']")
        live.wait_for(timeout=WAIT_MS)
        rows = side.locator(".dw-run")
        until(lambda: rows.count() == 3, 120, why=side.inner_text)
        assert "beat.py" in live.inner_text()
        assert "ready, 1 pod" in side.inner_text()
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
        log.evaluate("e => { document.documentElement.scrollTo(0, 20); e.scrollTo(0, -15); }")
        first = log.text_content()
        until(lambda: log.text_content() != first, 120, every_s=0.5)
        assert log.evaluate(places) == [20, -15], "whoever reads is left alone"
        fold.locator("summary").click()
        first = log.text_content()
        until(lambda: log.text_content() != first, 120, every_s=0.5)
        assert not fold.evaluate("e => e.open")
        fold.locator("summary").click()
        shoot(page, "sidebar-live")

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
        assert run.wait(120, progress=False).state is RunState.STOPPED
        side.locator(".dw-run[data-state='stopped']").wait_for(timeout=WAIT_MS)
        tab.locator(".dw-state", has_text="stopped").wait_for(timeout=WAIT_MS)
        until(lambda: page.evaluate("window.rung"), 120)
        assert page.evaluate("window.rung")[0][0].startswith("Run stopped: beat.py")

    failed.get_by_role("button", name="TensorBoard").click()
    board = page.locator(".dw-tab:visible").frame_locator("iframe[title^=TensorBoard]")
    board.get_by_text(ended.paths.root.name).first.wait_for(timeout=WAIT_MS)
    shoot(page, "sidebar-tensorboard")
