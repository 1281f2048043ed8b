"""The notebook as a person sees it: a real JupyterLab, a real browser, real pods."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from workbench.runs.state import is_alive

QUICKSTART = Path(__file__).resolve().parents[2] / "notebooks" / "00_quickstart.ipynb"

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]


def notebook(*cells: str) -> dict[str, Any]:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    return book


def test_the_form_explains_and_starts(lab: Any, open_book: Callable[[str], Any]) -> None:
    cells = ("from workbench.display.compose import compose\nform = compose(count=1, max_steps=10)\nform",)
    book = open_book(lab.add(notebook(*cells), "form.ipynb"))
    book.run(0)
    book.see(0, "16 rows per optimizer step")
    book.output(0).get_by_label("Technique").select_option("single")
    book.output(0).get_by_label("Launcher").select_option("pdsh")
    book.see(0, "is one rank; launcher 'pdsh' has no use")
    book.shoot(0, "compose-refused")
    book.output(0).get_by_label("Launcher").select_option("ssh")
    book.see(0, "1 rank = 16 rows")
    book.shoot(0, "compose")


def test_tensorboard_is_in_the_notebook_and_ends_with_the_kernel(lab: Any, open_book: Callable[[str], Any]) -> None:
    write = """
import time
from pathlib import Path
from workbench.display.tensorboard import show_tensorboard
from workbench.runs.events import Event
from workbench.runs.scalars import ScalarWriter

writer = ScalarWriter(Path("board"))
for step in range(50):
    writer.add(Event(time_s=time.time(), rank=0, kind="step", data={"step": step, "loss": 50.0 - step}))
writer.close()
"""
    show = "board = show_tensorboard(Path('board'))\nprint(board.server.pid, board.server.start_time)\nboard"
    book = open_book(lab.add(notebook(write, show, show), "board.ipynb"))
    book.run(0)
    book.run(1)
    pid, start_time = (int(word) for word in book.see(1, "it ends with this kernel").split()[:2])
    frame = book.output(1).frame_locator("iframe")
    frame.get_by_text("train", exact=False).first.wait_for(timeout=60_000)
    frame.get_by_text("loss", exact=False).first.wait_for(timeout=60_000)
    book.shoot(1, "tensorboard")
    book.run(2)
    assert book.see(2, "it ends with this kernel").split()[:2] == [str(pid), str(start_time)]
    book.restart()
    deadline = time.monotonic() + 10
    while is_alive(pid, start_time) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(pid, start_time)


def test_the_quickstart(lab: Any, open_book: Callable[[str], Any]) -> None:
    book = nbformat.read(QUICKSTART, as_version=4)
    for cell in book.cells:  # fewer steps: what is looked at here is the screen
        cell.source = re.sub(r"max_steps=\d+", "max_steps=60", cell.source)
        cell.source = re.sub(r"eval_steps=\d+", "eval_steps=20", cell.source)
    waits = next(i for i, cell in enumerate(book.cells) if "run.wait()" in cell.source)
    page = open_book(lab.add(book, "00_quickstart.ipynb"))
    page.run_all()
    steps = seen_steps(page, waits, 120)
    assert len(steps) > 3, f"the bar hardly moved: {steps}"
    page.wait_idle(60)
    page.see(waits + 1, "Run succeeded")
    page.shoot(waits, "quickstart-run")


def seen_steps(book: Any, index: int, timeout_s: float) -> list[int]:
    """The different steps that a cell's output showed until the run had ended."""
    steps: list[int] = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        area = book.output(index)
        found = re.findall(r"(\w+) \[[#-]*\] (\d+)/", area.inner_text() if area.count() else "")
        if found and int(found[-1][1]) not in steps:
            steps.append(int(found[-1][1]))
        if found and found[-1][0] == "succeeded":
            return steps
        time.sleep(0.1)
    raise AssertionError(f"the run never succeeded; it showed the steps {steps}")
