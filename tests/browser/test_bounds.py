"""What a run that prints very much costs the disk, the kernel and a real page with the panel."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import notebook
from tests.support.poll import until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]

LINES = 1_000_000
PER_S = 1000
WATCHED_S = 5
GROWTH_MIB = 100
PRINTING = """
import sys, time
from pathlib import Path

lines, per_s = int(sys.argv[1]), float(sys.argv[2])
at_once, go = int(sys.argv[3]), Path(sys.argv[4])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.05)
began = time.monotonic()
for first in range(0, lines, at_once):
    sys.stdout.write("".join(f"line {n} of many: the loss is 1.2345\\n"
                             for n in range(first, first + at_once)))
    sys.stdout.flush()
    time.sleep(max(0.0, began + (first + at_once) / per_s - time.monotonic()))
"""
START = """
import os
from workbench import Cluster, LocalPods, Script
cluster = Cluster(LocalPods(), count=1, path="pods", warm=False).start()
print(f"process {os.getpid()} of this kernel")
"""
PRINT = """
job = Script(path="printing.py", args=["{lines}", "{per_s}", "{at_once}", "{go}"])
run = cluster.submit(job, path="printed-{lines}")
run
"""
COUNT_CHANGES = """cell => {
    window.changes = [];
    const seen = new MutationObserver(() => window.changes.push(performance.now()));
    seen.observe(document.querySelectorAll('.jp-Notebook .jp-Cell')[cell],
        {subtree: true, childList: true});
}"""


@pytest.fixture
def printing(lab: Any, open_book: Callable[..., Any]) -> Any:
    """A page whose cells print many lines: cell 1 some lines a second, cell 3 all at once."""
    (lab.folder / "printing.py").write_text(PRINTING)
    paced = PRINT.format(lines=600 * PER_S, per_s=PER_S, at_once=50, go=lab.folder / "paced")
    at_once = PRINT.format(lines=LINES, per_s="inf", at_once=1000, go=lab.folder / "at-once")
    cells = (START, paced, "run.wait()", at_once, "cluster.close()")
    book = open_book(lab.add(notebook(*cells), "printing.ipynb"))
    book.run(0)
    book.see(0, "of this kernel", 120)
    return book


def test_many_lines_are_drawn_a_few_times_and_kept_on_disk_alone(lab: Any, printing: Any) -> None:
    are_drawn_a_few_times(lab, printing)
    are_on_disk_and_nowhere_else(lab, printing)
    printing.run(4)
    printing.wait_idle(60)


def are_drawn_a_few_times(lab: Any, book: Any) -> None:
    book.run(1)
    book.see(1, "ready", 60)
    book.run(2)
    (lab.folder / "paced").touch()
    book.see(1, "of many", 30)
    book.page.evaluate(COUNT_CHANGES, 1)
    began = time.monotonic()
    time.sleep(WATCHED_S)
    until(lambda: book.page.evaluate("window.changes.length"))
    took_s = time.monotonic() - began
    # What one look at the run changes arrives as several messages within a few milliseconds.
    changes = book.page.evaluate("window.changes")
    updates = sum(1 for n, at in enumerate(changes) if not n or at - changes[n - 1] > 60) / took_s
    # There are four looks a second, and each piece of 50 lines would be twenty.
    # A busy browser may take the messages of one look apart.
    assert 0 < updates <= 12
    book.output(1).get_by_role("button", name="Kill").click()
    book.output(1).get_by_role("button", name="Really kill").click()
    book.see(1, "Processes: all exited", 60)


def are_on_disk_and_nowhere_else(lab: Any, book: Any) -> None:
    said = re.search(r"process (\d+) of", book.said(0))
    assert said
    kernel = int(said[1])
    book.run(3)
    book.see(3, "ready", 60)
    session = book.page.context.new_cdp_session(book.page)
    before = sizes_mib(kernel, session)
    (lab.folder / "at-once").touch()
    book.see(3, "Processes: all exited", 180)
    after = sizes_mib(kernel, session)
    grown = {name: after[name] - before[name] for name in before}
    text = (
        lab.folder / f"printed-{LINES}" / "logs" / "attempt-0" / "rank-0.stdout.log"
    ).read_bytes()
    assert text.startswith(b"ready\nline 0 of many")
    assert text.count(b"\nline ") == LINES
    assert max(grown.values()) < GROWTH_MIB, f"MiB before {before}, growth {grown}"


def sizes_mib(kernel: int, session: Any) -> dict[str, int]:
    """Memory of the kernel, of the browser's processes (shared parts by share), of the script."""
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    page = {
        metric["name"]: metric["value"]
        for metric in session.send("Performance.getMetrics")["metrics"]
    }
    in_kib = {"kernel": share_kib(kernel), "browser": sum(share_kib(pid) for pid in browser_pids())}
    return {name: size >> 10 for name, size in in_kib.items()} | {
        "script": int(page["JSHeapUsedSize"]) >> 20
    }


def share_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1])


def browser_pids() -> list[int]:
    """The processes below this one that are Chromium."""
    parents, names = {os.getpid(): 0}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue  # it has ended
        pid = int(stat.parent.name)
        names[pid], parents[pid] = name.partition("(")[2], int(rest.split()[1])

    def is_below(pid: int) -> bool:
        while pid and pid != os.getpid():
            pid = parents.get(pid, 0)
        return bool(pid)

    return [pid for pid, name in names.items() if name.startswith("chrom") and is_below(pid)]
