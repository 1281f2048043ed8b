"""The notebook as a person sees it: a real JupyterLab, a real browser, real pods."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import ARTIFACTS, notebook
from tests.browser.readings import differences, load_records
from tests.browser.shots import SHORT, take_pictures
from tests.support.poll import until
from workbench import Cluster, LocalPods, PodSpec
from workbench.base.process import is_alive
from workbench.display.compose.fields import FIELDS

QUICKSTART = Path(__file__).resolve().parents[2] / "notebooks" / "00_quickstart.ipynb"

pytestmark = [pytest.mark.slow, pytest.mark.browser]

FAILING = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("no such column <img src=x onerror=alert(1)>")
time.sleep(60)
"""
START = """
from workbench import Cluster, FineTune, Script
cluster = Cluster.attach("demo")
cluster
"""
FAIL = """
failing = cluster.submit(Script(path="fail.py"), path="failing")
failing.wait(progress=False)
failing
"""
TRAIN = """
rows = {"kind": "wikisql-mini", "train_rows": 2000, "eval_rows": 20}
job = FineTune(dataset=rows, max_steps=5000, eval_steps=40, per_device_train_batch_size=4)
run = cluster.submit(job, pods=1, path="watched")
run
"""
ATTACH = """
from workbench import Run
run = Run.load("watched")
run
"""
HISTORY = """
import workbench
workbench.history(".")
"""

# The values that a field of the form proposes, and the fields whose placeholder is cut.
LISTED = """label => {
    const labels = [...document.querySelectorAll(".wb-form label")];
    const field = labels.find(each => each.textContent === label);
    return [...document.getElementById(field.htmlFor).list.options].map(option => option.value);
}"""
CUT = """() => {
    const pen = document.createElement("canvas").getContext("2d");
    return [...document.querySelectorAll(".wb-form input[placeholder]")].filter(field => {
        const look = getComputedStyle(field);
        pen.font = look.font;
        const room = field.clientWidth - 2 * parseFloat(look.paddingLeft);
        return field.clientWidth && pen.measureText(field.placeholder).width > room;
    }).map(field => field.placeholder);
}"""


@pytest.fixture(scope="module")
def pods(lab: Any) -> Iterator[None]:
    """Two pods in the lab's folder demo, for several tests: to start them takes 30 s of CPU."""
    with pytest.MonkeyPatch.context() as patch:
        # The state folder is that of the server and of its kernels.
        patch.setenv("XDG_STATE_HOME", str(lab.home / ".local/state"))
        pod = PodSpec(cpus=1, memory_gib=2)
        with Cluster(LocalPods(), pod, count=2, path=lab.folder / "demo", idle_timeout_s=3600):
            yield


# It comes first, while the sidebar has no other runs.
@pytest.mark.long
@pytest.mark.usefixtures("pods")
def test_the_pictures_of_readme_and_docs_are_current(
    lab: Any, open_book: Callable[..., Any]
) -> None:
    recorded = load_records()
    texts = take_pictures(lab, open_book, ARTIFACTS / "pictures", SHORT, recorded)
    stale = "\n".join(differences(recorded, texts))
    assert not stale, f"stale pictures; run `make pictures`:\n{stale}"


@pytest.mark.long
def test_the_form_explains_starts_stops_and_is_saved(
    lab: Any, open_book: Callable[[str], Any]
) -> None:
    (lab.folder / "rows.jsonl").write_text("")
    book = open_book(
        lab.add(
            notebook("from workbench.forms import compose\ncompose(count=1, max_steps=10)"),
            "form.ipynb",
        )
    )
    book.run(0)
    form = book.output(0)
    book.see(0, "1 rank = 8 rows")
    form.get_by_role("button", name="Insert as a cell").wait_for()
    launcher = form.get_by_title(FIELDS["launcher"].option.help).get_by_label("Launcher")
    fold = form.locator("details", has=book.page.get_by_label("Launcher")).last
    fold.locator("summary").first.click(timeout=30_000)
    assert launcher.is_visible()
    form.get_by_label("Technique").select_option("single")
    form.get_by_label("Launcher").select_option("pdsh")
    book.see(0, "launcher 'pdsh' does nothing")
    assert "with Cluster(" not in book.said(0)
    assert book.said(0).count("launcher 'pdsh' does nothing") == 1, "at two fields, and said once"
    assert form.locator("[aria-invalid=true]").count() == 2
    cell = form.get_by_title(FIELDS["launcher"].option.help)
    meaning = cell.locator(".wb-form-help")
    assert not meaning.is_visible()
    cell.get_by_role("button", name="Help").focus()
    book.page.keyboard.press("Enter")
    assert meaning.inner_text() == FIELDS["launcher"].option.help.replace("`", "")
    assert "rows.jsonl" in book.page.evaluate(LISTED, "Dataset")
    assert book.page.evaluate(CUT) == [], "a placeholder that is cut"
    assert form.get_by_role("button", name="Start").is_disabled()
    form.get_by_label("Launcher").select_option("ssh")
    book.see(0, "with Cluster(")
    assert not form.get_by_label("LoRA rank").is_visible()
    form.get_by_label("PEFT").select_option("lora")
    for field, value in {
        "Max steps": "2000",
        "Per-device batch size": "4",
        "LoRA rank": "2",
    }.items():
        form.get_by_label(field).fill(value)
        form.get_by_label(field).press("Tab")
    book.see(0, "1 rank = 4 rows; 2,000 steps")
    book.see(0, 'lora={"r": 2}')
    form.get_by_role("button", name="Insert as a cell").click()
    until(lambda: len(book.saved()["cells"]) == 2, 10)
    first, second = book.saved()["cells"]
    assert second["source"].startswith("from workbench import ") and second["source"] in book.said(
        0
    )
    assert second["cell_type"] == "code" and not second["outputs"] and first["outputs"], (
        "it is put there, and not run"
    )
    form.get_by_role("button", name="Start").click()
    moving_steps(book, 0, 3, 120)
    form.get_by_role("button", name="Stop the pods").click()
    form.get_by_role("button", name="Stop, really?").click()
    book.see(0, "The pods are gone", 60)
    form.get_by_role("button", name="Show the form").click()
    form.get_by_label("Technique").wait_for()

    def saved() -> str:
        outputs = book.saved()["cells"][0]["outputs"]
        return "".join(str(output.get("data", {}).get("text/html", "")) for output in outputs)

    assert "with Cluster(" in saved()
    # The panel draws the end of the run at its next look.
    until(lambda: "cancelled" in saved(), 60)


@pytest.mark.long
def test_tensorboard_is_in_the_notebook_and_ends_with_the_kernel(
    lab: Any, open_book: Callable[[str], Any]
) -> None:
    write = """
import time
from pathlib import Path
from workbench.client.tensorboard.board import show_tensorboard
from workbench.rundir.events import Event
from workbench.rundir.figures.curves import ScalarWriter

writer = ScalarWriter(Path("board"))
for step in range(50):
    data = {"step": step, "loss": 50.0 - step}
    writer.add(Event(time_s=time.time(), rank=0, kind="step", data=data))
writer.close()
"""
    show = (
        "board = show_tensorboard({'tiny': "
        "Path('board')})\nprint(board.server.pid, board.server.start_time)\nboard"
    )
    book = open_book(lab.add(notebook(write, show, show), "board.ipynb"))
    book.run(0)
    book.run(1)
    pid, start_time = (int(word) for word in book.see(1, "it ends with this kernel").split()[:2])
    link = str(
        book.output(1).get_by_role("link", name="Open TensorBoard in a tab").get_attribute("href")
    )
    assert link.startswith("/workbench/tensorboard/"), "it comes through this very server"
    frame = book.output(1).frame_locator("iframe:visible")
    frame.get_by_text("train", exact=False).first.wait_for()
    frame.get_by_text("loss", exact=False).first.wait_for()
    drawer = frame.locator("metrics-dashboard-right-pane")
    assert drawer.count() == 0
    frame.get_by_text("Settings", exact=True).click()
    drawer.first.wait_for()
    book.run(2)
    assert book.see(2, "it ends with this kernel").split()[:2] == [str(pid), str(start_time)]
    book.restart()
    until(lambda: not is_alive(pid, start_time))


@pytest.mark.long
@pytest.mark.usefixtures("pods")
def test_explain_watch_restart_reattach_stop(lab: Any, open_book: Callable[[str], Any]) -> None:
    (lab.folder / "fail.py").write_text(FAILING)
    book = open_book(lab.add(notebook(START, FAIL, TRAIN, ATTACH, HISTORY), "scenes.ipynb"))
    book.run(0)
    book.see(0, "pod-1", 120)

    book.run(1)
    said = book.see(1, "rank 1 on pod-1", 60)
    assert "no such column <img src=x onerror=alert(1)>" in said
    assert 'File "' in book.said(1)
    assert book.page.locator("img[src=x]").count() == 0

    book.run(2)
    before = moving_steps(book, 2, 3, 120)
    book.output(2).locator("svg.wb-plot").first.wait_for()

    book.restart()
    book.run(3)
    after = moving_steps(book, 3, 3, 60)
    assert min(after) > max(before), "the run did not go on while the kernel was away"
    book.output(3).locator("svg.wb-plot").first.wait_for()
    book.output(3).get_by_role("button", name="Stop after a checkpoint").click()
    said = book.see(3, "Processes: all exited", 90)
    assert "stopped after a checkpoint at step" in said
    assert "model" in said.partition("Files:")[2]

    book.restart()
    book.run(3)
    said = book.see(3, "Processes: all exited", 30)
    assert "stopped" in said
    assert book.output(3).locator("svg.wb-plot").count() >= 1

    book.run(4)
    said = book.see(4, "-fail-", 30)  # the id of the run of fail.py
    assert "zero1" in said
    assert "stopped" in said


def test_the_quickstart(lab: Any, open_book: Callable[[str], Any]) -> None:
    """All cells in turn; `make quickstart` trains as long as the notebook says."""
    book = nbformat.read(QUICKSTART, as_version=4)
    (given,) = [cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ())]
    assert "max_steps = 500" in given.source
    given.source = given.source.replace("max_steps = 500", "max_steps = 32")
    panel, result = (
        next(i for i, cell in enumerate(book.cells) if each in cell.source)
        for each in ("run.wait()", "display(result")
    )
    page = open_book(lab.add(book, "00_quickstart.ipynb"))
    page.run_all()
    # JupyterLab goes to the last cell: what happens is to be seen from there.
    for words in ("127.0.0.2", "start, "):
        expect(page.output(panel).get_by_text(words).first).to_be_in_viewport(timeout=300_000)
    page.output(panel).locator("svg.wb-plot").first.wait_for()
    page.see(panel, "Processes: all exited", 600)
    page.see(panel, "succeeded", 30)
    page.see(result, "127.0.0.3 slots=1", 60)
    page.wait_idle(60)
    errors = [
        output
        for cell in page.saved()["cells"]
        for output in cell.get("outputs", ())
        if output["output_type"] == "error"
    ]
    assert errors == []


def moving_steps(book: Any, index: int, wanted: int, timeout_s: float) -> list[int]:
    """The different optimizer steps that a cell's output shows in turn, until there are so many."""
    steps: list[int] = []

    def enough() -> bool:
        shown = re.findall(r"([\d,]+) of [\d,]+ steps", book.said(index))
        if shown and (step := int(shown[-1].replace(",", ""))) not in steps:
            steps.append(step)
        return len(steps) >= wanted

    until(
        enough,
        timeout_s,
        every_s=0.3,
        why=lambda: f"the bar showed {steps}; the cell:\n{book.said(index)[-2000:]}",
    )
    return steps
