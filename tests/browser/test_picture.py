"""What is drawn once, in a real page: a run with buttons, loaded anew; the doctor's findings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error

from tests.browser.conftest import notebook
from tests.support.poll import until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]

WRITE = f"""
import sys, tempfile
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from tests.support.writtenrun import write_run
from workbench.client.cluster import Cluster
from workbench.client.run import Run
from workbench.pods.local.pods import LocalPods
written = write_run(Path(tempfile.mkdtemp()))
written.state("running", "training")
written.event("start", world_size=3)
for step in range(1, 21):
    written.step(step)
for rank in range(3):
    written.log(rank, f"rank {{rank}} is ready\\n")
"""
CLUSTER = "Cluster(LocalPods(), count=3, path=written.cluster.root)"
RUN = "Run.load(written.paths.root)"
STEP = "written.step(40)"
END = """
written.end(message="the end", steps=40)
written.keeper("closed", alive=False)
"""
LEFT = """
written = write_run(Path("left behind"))
written.step(3)
written.paths.model.mkdir()
(written.paths.model / "config.json").write_text("{}")
written.end()
"""
ERROR = "Error displaying widget"
UNDER_THE_POINTER = """plot => [...plot.querySelectorAll(".wb-at span:hover")].map(
    band => [band.dataset.words, getComputedStyle(band, "::after").content])"""


def show(book: Any) -> None:
    """Show a cluster and a run that goes on."""
    for cell in (0, 1, 2):
        book.run(cell)
    book.see(1, "pod-2", 60)
    book.see(2, "20 of 100 steps", 60)
    book.output(2).get_by_role("button", name="Kill").wait_for()


def answers_under_the_pointer(cell: Any) -> None:
    """Hold the pointer over the plot of losses: only the nearest step and its loss are seen."""
    plot = cell.locator("svg.wb-plot").first
    found: list[tuple[str, str]] = []

    def is_reached() -> bool:
        with contextlib.suppress(Error):  # it was drawn anew meanwhile
            plot.scroll_into_view_if_needed()
            plot.hover()
            found[:] = plot.evaluate(UNDER_THE_POINTER)
        return len(found) == 1

    until(is_reached, 90)
    [(words, shown)] = found
    step, loss = words.split("\n")
    assert step in shown and loss in shown
    assert loss == f"training loss {8 / int(step.removeprefix('step ')):.4g}"


def test_a_picture_lasts_over_a_new_page_a_restart_and_the_end(
    lab: Any, open_book: Callable[..., Any]
) -> None:
    """One notebook, whose page is loaded three times: each load costs five seconds of CPU."""
    name = lab.add(notebook(WRITE, CLUSTER, RUN, STEP, END, LEFT, RUN), "picture.ipynb")
    book = open_book(name, own_page=True)
    show(book)
    book = a_page_that_is_loaded_anew_goes_on(book, open_book)
    book = reopened_without_a_kernel_the_picture_stands(book, open_book)
    show(book)
    what_is_unfolded_stays_so_while_the_picture_is_drawn_again_and_the_end_takes_the_buttons(book)
    card_and_model_are_downloaded_by_links(book)


def a_page_that_is_loaded_anew_goes_on(book: Any, open_book: Callable[..., Any]) -> Any:
    book.save()
    book.page.close()
    book = open_book(book.name, own_page=True)
    book.run(3)
    book.see(2, "40 of 100 steps", 60)
    book.output(2).get_by_role("button", name="Stacks").wait_for()
    return book


def reopened_without_a_kernel_the_picture_stands(book: Any, open_book: Callable[..., Any]) -> Any:
    book.save()
    book.restart()
    book.output(2).get_by_role("button", name="Stacks").click()
    book.see(2, "Run the cell again", 30)
    assert "40 of 100 steps" in book.said(2)
    book.page.close()
    book = open_book(book.name, own_page=True)
    assert "pod-2" in book.see(1, "Cluster ready", 60)
    # What came after the page was loaded anew is in the page, and not in the notebook's file.
    said = book.see(2, "20 of 100 steps", 60)
    assert "as of" in said
    book.page.wait_for_timeout(2000)  # by then widgets that are not there would say so
    assert ERROR not in book.said(1) + book.said(2)
    assert book.output(2).locator("svg.wb-plot").first.is_visible()
    answers_under_the_pointer(book.output(2))
    return book


def what_is_unfolded_stays_so_while_the_picture_is_drawn_again_and_the_end_takes_the_buttons(
    book: Any,
) -> None:
    cell = book.output(2)
    answers_under_the_pointer(cell)
    assert cell.locator("img").count() == 1 and not cell.locator("img").is_visible()
    book.said(2)
    cell.locator("summary", has_text="log of rank 1").click()
    book.see(2, "rank 1 is ready", 30)
    cell.get_by_role("button", name="Kill").click()
    cell.get_by_role("button", name="Really kill").wait_for()
    book.run(3)
    book.see(2, "40 of 100 steps", 30)
    assert cell.locator("details[open] > summary", has_text="log of rank 1").count() == 1
    book.run(4)
    book.see(2, "the end", 30)
    until(lambda: cell.get_by_role("button").count() == 0, 30)
    assert cell.locator("svg.wb-plot").count() >= 4
    assert "stopped" in book.see(1, "Cluster closed", 30)


def card_and_model_are_downloaded_by_links(book: Any) -> None:
    for cell in (5, 6):
        book.run(cell)
    book.see(6, "Download: run card · config.json (2 bytes)", 60)
    for link, name, begins in (
        ("run card", "card.html", "<!doctype html>"),
        ("config.json", "config.json", "{}"),
    ):
        with book.page.expect_download() as download:
            book.output(6).get_by_role("link", name=link).click()
        assert download.value.suggested_filename == name
        assert Path(download.value.path()).read_text().startswith(begins)
    # The buttons of the receipt put code into a cell below, and stand for the lines of code.
    lines = book.output(6).locator(".wb-instead")
    assert lines.count() == 2 and not lines.first.is_visible()
    book.output(6).get_by_role("button", name="Export").click()
    cells = book.page.locator(".jp-Notebook .jp-Cell")
    until(lambda: cells.count() == 8, 30)
    assert "run.export(" in cells.nth(7).inner_text()


# Below: the doctor's findings, with troubles of every kind.
EXAMINED = """
import json
from workbench.pods.doctor.examination import Diagnosis, judge_result
from workbench.pods.doctor.exchange import Exchange
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.openssh import CommandResult

here = {"python": "3.11.7", "torch": "2.13.0+cpu", "deepspeed": "0.19.8", "transformers": "5.23.0",
        "workbench": "0.1.0"}

def host(number, words="", **changes):
    pod = Pod(name=f"pod-{number}", address=f"10.0.0.{number + 1}", ssh_port=2222, user="me",
              root="/data", python="/opt/python")
    facts = {"time_s": 0.5, "interface": "eth0", "versions": here, "gpus": [],
             "memory_gib": 60.0, "locks": [], "disk": {"free_gib": 200.0, "total_gib": 500.0},
             "shm": {"free_gib": 8.0, "total_gib": 8.0}, **changes}
    seen = CommandResult(reached=not words, exit_code=255 if words else 0,
                         out="" if words else json.dumps(facts),
                         words=words, began_s=0.0, ended_s=0.8)
    return judge_result(seen, pod, PodSpec(), here)

refused = "ssh: connect to host 10.0.0.2 port 2222: Connection refused <img src=x>"
hosts = [host(0), host(1, words=refused)]
older, full = {**here, "torch": "2.12.1"}, {"free_gib": 5.0, "total_gib": 10.0}
hosts += [host(n, versions=older, disk=full) for n in (2, 3)]
hosts += [host(n) for n in (4, 5, 6)]
"""
ILL = "Diagnosis(hosts=tuple(hosts), note='not all pods can be relied on', hosts_s=0.9)"
WELL = """
sizes = tuple((1 << n, 0.0008 * 2 ** (n - 20)) for n in (20, 22, 24))
Diagnosis(hosts=tuple(hosts[:1] + hosts[4:6]), hosts_s=0.9,
          exchange=Exchange(pods=3, backend="gloo", latency_s=2e-4, sizes=sizes))
"""


def test_the_doctors_findings(lab: Any, open_book: Callable[..., Any]) -> None:
    book = open_book(lab.add(notebook(EXAMINED, ILL, WELL), "doctor.ipynb"))
    book.run(0)
    book.run(1)
    said = book.see(1, "Fix:", 30)
    assert "pod-2, pod-3, torch: 2.12.1" in said
    assert "Connection refused <img src=x>" in said
    assert book.page.locator("img[src=x]").count() == 0
    book.page.set_viewport_size({"width": 640, "height": 800})
    assert not book.is_wider_than_its_place(1)
    assert book.output(1).locator(".wb-wide").evaluate("e => e.scrollWidth <= e.clientWidth")
    book.run(2)
    book.see(2, "all checks passed", 30)
