"""A page is closed while a run prints: kernel and run continue, and a new page misses nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from poll import until

from tests.browser.conftest import notebook

pytestmark = [pytest.mark.slow, pytest.mark.browser]

BEAT = Path(__file__).resolve().parents[1] / "scripts" / "beat.py"
START = """
from workbench import Cluster, LocalPods, Script
cluster = Cluster(LocalPods(), count=1, path="pods-closed", warm=False).start()
run = cluster.submit(Script(path="beat.py", args=["--until", "{end}"]), path="closed")
run
"""
AGAIN = """
run
"""


@pytest.mark.long
def test_a_closed_page_misses_no_line(lab: Any, open_book: Callable[[str], Any]) -> None:
    shutil.copy(BEAT, lab.folder)
    end = lab.folder / "end"
    log = lab.folder / "closed" / "logs" / "rank-0.stdout.log"
    name = lab.add(notebook(START.format(end=end), AGAIN, "cluster.close()"), "closed.ipynb")
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
