from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from workbench.display.kit.doc import Doc, Note
from workbench.display.kit.live import WIDGET, Live


class Panel:
    """A panel whose run ends when the test says so."""

    def __init__(self) -> None:
        self.widget = SimpleNamespace(model_id="m1")
        self.over = self.in_use = False
        self.starts = 0

    def start(self) -> None:
        self.starts += 1


@pytest.fixture
def shown() -> Iterator[list[dict[str, Any]]]:
    """What a front end is sent."""
    shell = InteractiveShell.instance()
    before, shell.display_pub = shell.display_pub, CapturingDisplayPublisher()
    yield shell.display_pub.outputs
    shell.display_pub = before
    InteractiveShell.clear_instance()


RUN = SimpleNamespace(path=Path("/runs/r1"))


def live() -> Live:
    words = iter(["queued", "running", "succeeded", "closed"])
    return Live(lambda _run: Doc(blocks=[Note(next(words))]))


def test_widgets_become_html_when_the_object_has_ended(shown: list[dict[str, Any]]) -> None:
    objects, panel = live(), Panel()
    objects.show(RUN, lambda: panel)
    objects.show(RUN, Panel)
    first, second = shown
    assert first["data"][WIDGET]["model_id"] == second["data"][WIDGET]["model_id"] == "m1"
    assert first["data"]["text/plain"] == "queued"
    assert ">queued<" in first["data"]["text/html"]
    assert panel.starts == 2

    panel.over = True
    objects.settle(RUN)
    updates = shown[2:]
    assert [u["update"] for u in updates] == [True, True]
    assert [u["transient"]["display_id"] for u in updates] == [s["transient"]["display_id"] for s in shown[:2]]
    assert all(WIDGET not in u["data"] for u in updates)
    objects.settle(RUN)
    assert len(shown) == 4


def test_what_the_user_has_open_or_asked_to_keep_stays(shown: list[dict[str, Any]]) -> None:
    objects, panel = live(), Panel()
    objects.show(RUN, lambda: panel)
    panel.in_use = True
    objects.settle(RUN)
    assert len(shown) == 1
    objects.show(RUN, lambda: panel, keep=True)
    panel.in_use, panel.over = False, True
    objects.settle(RUN)
    assert len(shown) == 3  # the one display that may change


def test_where_no_widget_is_wanted_there_is_none(shown: list[dict[str, Any]]) -> None:
    live().show(RUN, None)
    assert sorted(shown[0]["data"]) == ["text/html", "text/plain"]


WRITTEN = f"""
import itertools, sys, threading
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from writtenrun import write_run
from workbench.display.kit.line import ProgressLine
from workbench.rundir.figures.progress import Progress
from workbench.client.run import Run
from workbench.rundir.state import RunState
"""
SHOWN = """
written = write_run(Path("{name}"))
with ProgressLine(clock=itertools.count().__next__) as line:
    for step in range(4):
        line.update(Progress(state=RunState.STARTING, message=f"step {{step}} of {name}"))
Run.load(written.paths.root)
"""
ENDED = """
written.end(message="the end of {name}")
written.keeper("closed", alive=False)
for thread in [each for each in threading.enumerate() if each.name.startswith("panel-")]:
    thread.join(30)
"""


def test_a_program_that_executes_a_notebook_and_joins_streams_gets_what_each_panel_became(tmp_path: Path) -> None:
    names = [f"run{number}" for number in range(20)]
    cells = [new_code_cell(source.format(name=name)) for name in names for source in (SHOWN, ENDED)]
    book = new_notebook(cells=[new_code_cell(WRITTEN), *cells])
    NotebookClient(book, timeout=60, coalesce_streams=True, resources={"metadata": {"path": str(tmp_path)}}).execute()
    nbformat.validate(book)
    for name, cell in zip(names, book.cells[1::2], strict=True):
        line, panel = cell.outputs
        assert line["data"] == {"text/plain": f"starting: step 3 of {name}"}
        assert f"the end of {name}" in panel["data"]["text/plain"]
        assert WIDGET not in panel["data"]
