"""Notebook 7, in a browser on a slow machine: buttons come and work, and a saved run reads."""

from __future__ import annotations

import json
import shutil
from functools import partial
from typing import Any

import pytest
from poll import until

from tests.browser.conftest import ARTIFACTS, Lab, notebook
from tests.browser.test_closed import BEAT
from tests.support.sanitized import Reader

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]

SLOWER = 20  # times
PATIENCE_MS = 180_000
START = """
from workbench import Cluster, LocalPods, Script
cluster = Cluster(LocalPods(), count=1, path="pods-notebook", warm=False).start()
cluster
"""
RUN = """
run = cluster.submit(Script(path="beat.py"), path="beaten")
run
"""


def open_in_notebook7(browser: Any, lab: Lab, name: str) -> Any:
    """Open a notebook in Notebook 7, which JupyterLab's server has too."""
    page = browser.new_page()
    page.goto(f"{lab.url}notebooks/{name}?token={lab.token}")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=PATIENCE_MS)
    return page


def wait_for_kernel(page: Any, lab: Lab, name: str) -> None:
    """Wait until the page is connected with an idle kernel: it drops what is run before."""

    def is_connected() -> bool:
        sessions = page.request.get(f"{lab.url}api/sessions?token={lab.token}").json()
        kernels = [each["kernel"] for each in sessions if each["path"] == name]
        return any(
            kernel["connections"] and kernel["execution_state"] == "idle" for kernel in kernels
        )

    until(is_connected, 120, every_s=0.5)


def output_of(page: Any, cell: int) -> Any:
    return page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-OutputArea").first


def see(area: Any, wanted: str) -> None:
    """Wait until an output holds a text."""
    text = partial(area.evaluate, "e => e.innerText")
    until(lambda: wanted in text(), 120, every_s=0.5, why=text)


def test_buttons_come_and_work_in_a_slow_notebook7_and_a_saved_run_reads(
    lab: Lab, browser: Any
) -> None:
    shutil.copy(BEAT, lab.folder)
    book = notebook(START, RUN)
    page = open_in_notebook7(browser, lab, lab.add(book, "slow.ipynb"))
    wait_for_kernel(page, lab, "slow.ipynb")
    devtools = browser.new_cdp_session(page)
    devtools.send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.keyboard.press("Shift+Enter")
    panel = output_of(page, 0)
    panel.get_by_role("button", name="Stop the cluster").wait_for(timeout=PATIENCE_MS)
    page.keyboard.press("Shift+Enter")
    run = output_of(page, 1)
    stop = run.get_by_role("button", name="Ask to stop")
    stop.wait_for(timeout=PATIENCE_MS)
    see(run, "rank 0 line")
    stop.click(timeout=PATIENCE_MS)
    devtools.send("Emulation.setCPUThrottlingRate", {"rate": 1})
    see(run, "Processes: all exited")
    panel.get_by_role("button", name="Stop the cluster").click()
    panel.get_by_role("button", name="Really stop?").click()
    see(panel, "closed")
    page.screenshot(path=str(ARTIFACTS / "notebook7.png"))
    saved = lab.folder / "slow.ipynb"

    def is_saved() -> bool:
        page.keyboard.press("Control+s")
        text = saved.read_text()
        return "Processes: all exited" in text and "image/png" in text

    until(is_saved, 60, every_s=2)
    page.close()

    # With a cell more it is another notebook than the one that this server signed: not trusted.
    book = json.loads(saved.read_text())
    book["cells"].append(notebook("1").cells[0])
    page = open_in_notebook7(browser, lab, lab.add(book, "untrusted.ipynb"))
    run = output_of(page, 1)
    see(run, "Processes: all exited")
    assert run.locator("svg.wb-plot, style").count() == 0, "not trusted"
    until(lambda: run.locator("img").filter(visible=True).count() == 1, 30)
    assert Reader(run.inner_html()).troubles == [], "no wall of letters"
    page.screenshot(path=str(ARTIFACTS / "notebook7-untrusted.png"))
    page.close()
