"""Pages of Notebook 7, pages that are closed or missed a message: runs continue, buttons work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import ARTIFACTS, Lab, notebook
from tests.support.poll import until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]

BEAT = Path(__file__).resolve().parents[1] / "scripts" / "beat.py"
PATIENCE_MS = 300_000
START = """
from workbench import Cluster, LocalPods, Script
cluster = Cluster(LocalPods(), count=1, path="pods-notebook", warm=False).start()
cluster
"""
RUN = """
run = cluster.submit(Script(path="beat.py"), path="beaten")
run
"""
UNTIL_END = """
from workbench import Cluster, LocalPods, Script
cluster = Cluster(LocalPods(), count=1, path="pods-closed", warm=False).start()
run = cluster.submit(Script(path="beat.py", args=["--until", "{end}"]), path="closed")
run
"""
AGAIN = """
run
"""
# The kernel holds the button and has sent none: as where its message came before the page listened.
LOST = """
from dataclasses import asdict
from IPython.display import display
from workbench.display.kit.widgets import Button, ButtonBar

bar = ButtonBar("buttons of the test", {"stop": lambda: bar.say("stopped")}, [])
display(bar.bundle("none"), raw=True)
stop = Button(name="stop", text="Stop the test", tip="Ends it")
bar.widget._trait_values["buttons"] = [asdict(stop)]
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


def test_buttons_work_in_notebook7_and_the_run_is_saved(lab: Lab, browser: Any) -> None:
    shutil.copy(BEAT, lab.folder)
    book = notebook(START, RUN)
    page = open_in_notebook7(browser, lab, lab.add(book, "notebook7.ipynb"))
    wait_for_kernel(page, lab, "notebook7.ipynb")
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
    see(run, "Processes: all exited")
    panel.get_by_role("button", name="Stop the cluster").click()
    panel.get_by_role("button", name="Really stop?").click()
    see(panel, "closed")
    page.screenshot(path=str(ARTIFACTS / "notebook7.png"))
    saved = lab.folder / "notebook7.ipynb"

    def is_saved() -> bool:
        page.keyboard.press("Control+s")
        return "Processes: all exited" in saved.read_text()

    until(is_saved, 60, every_s=2)
    page.close()


def test_a_closed_page_misses_no_line(lab: Any, open_book: Callable[[str], Any]) -> None:
    shutil.copy(BEAT, lab.folder)
    end = lab.folder / "end"
    log = lab.folder / "closed" / "logs" / "attempt-0" / "rank-0.stdout.log"
    name = lab.add(notebook(UNTIL_END.format(end=end), AGAIN, "cluster.close()"), "closed.ipynb")
    book = open_book(name)
    book.run(0)
    book.see(0, "rank 0 line", 120)
    book.page.close()
    before = log.read_text().count("\n")
    until(lambda: log.read_text().count("\n") > before + 200, 120)
    book = open_book(name)
    book.run(1)
    book.see(1, "rank 0 line", 60)
    end.touch()
    book.see(1, "Processes: all exited", 60)
    lines = log.read_text().splitlines()
    assert lines == [f"rank 0 line {n}" for n in range(len(lines))]
    # The log is folded away once the run has ended: what is not unfolded is there, but not seen.
    text = partial(book.output(1).evaluate, "e => e.textContent")
    until(lambda: lines[-1] in text() and "succeeded" in text(), 30, every_s=0.3, why=text)
    book.run(2)
    book.wait_idle(60)


def test_buttons_come_though_their_first_state_was_lost(
    lab: Any, open_book: Callable[[str], Any]
) -> None:
    book = open_book(lab.add(notebook(LOST), "lost.ipynb"))
    book.run(0)
    button = book.output(0).get_by_role("button", name="Stop the test")
    button.wait_for()
    button.click()
    book.see(0, "stopped", 60)
