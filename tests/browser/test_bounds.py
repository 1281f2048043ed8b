"""What a run that prints without end costs the disk, the kernel and the browser: a real page with the live panel."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import notebook

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]

LINES = 1_000_000
MIB = 1 << 20
NOISE = """
import os, sys, time
from pathlib import Path
lines, per_s = int(sys.argv[1]), float(sys.argv[2])
print("ready", flush=True)
while not Path("GO").exists():
    time.sleep(0.05)
rank, began = os.environ["RANK"], time.monotonic()
for first in range(0, lines, 1000):
    text = "".join(f"line {n} of rank {rank}: loss 1.2345 and some more words\\n" for n in range(first, first + 1000))
    sys.stdout.write(text)
    sys.stdout.flush()
    time.sleep(max(0.0, began + (first + 1000) / per_s - time.monotonic()))
"""
START = """
import os
from workbench import Cluster, LocalPods, Script
cluster = Cluster(LocalPods(), count=1, path="pods").start()
print("kernel", os.getpid(), "is ready")
"""
PRINT = """
run = cluster.submit(Script(path="noise.py", args=[{arguments}]), path="{name}")
run
"""


@pytest.fixture
def book(lab: Any, open_book: Callable[[str], Any]) -> Iterator[Any]:
    (lab.folder / "noise.py").write_text(NOISE.replace('"GO"', repr(str(lab.folder / "go"))))
    steady = NOISE.replace('"GO"', repr(str(lab.folder))).replace("1000", "50")
    (lab.folder / "steady.py").write_text(steady)
    cells = (
        START,
        PRINT.format(arguments=f"'{LINES}', 'inf'", name="million"),
        PRINT.format(arguments="'36000', '1000'", name="steady").replace("noise.py", "steady.py"),
    )
    book = open_book(lab.add(notebook(*cells), "bounds.ipynb"))
    book.run(0)
    book.see(0, "is ready", 120)
    yield book


def test_a_million_lines(book: Any, lab: Any) -> None:
    kernel = int(book.said(0).split()[1])
    session = book.page.context.new_cdp_session(book.page)
    book.run(1)
    book.see(1, "ready", 60)
    time.sleep(3)
    before = figures(kernel, session)
    (lab.folder / "go").touch()
    began = time.monotonic()
    book.see(1, "Ranks: all gone", 120)
    took = time.monotonic() - began
    time.sleep(1)
    after = figures(kernel, session)
    log = lab.folder / "million" / "logs" / "rank-0.stdout.log"
    lines = log.read_bytes().count(b"\nline ")
    print(f"{took:.1f} s for {lines:,} lines", file=sys.stderr)
    for name in before:
        print(f"{name}: {before[name] / MIB:.0f} -> {after[name] / MIB:.0f} MiB", file=sys.stderr)
    assert lines == LINES
    for name in before:
        assert after[name] - before[name] < 100 * MIB

    # a thousand lines a second
    frames: list[float] = []
    book.run(2)
    book.see(2, "line 100", 60)
    book.page.evaluate("""() => {
        window.__t = [];
        new MutationObserver(() => window.__t.push(performance.now())).observe(
            document.querySelectorAll('.jp-Notebook .jp-Cell')[2], {subtree: true, childList: true, characterData: true, attributes: true});
    }""")
    cpu0, t0 = cpu_s(kernel), time.monotonic()
    time.sleep(25)
    cpu1, t1 = cpu_s(kernel), time.monotonic()
    times = book.page.evaluate("() => window.__t")
    bursts = [t for i, t in enumerate(times) if i == 0 or t - times[i-1] > 60]
    print(f"kernel {(cpu1 - cpu0) / (t1 - t0):.2%} of a core; {len(times)} mutation callbacks, {len(bursts) / (t1 - t0):.2f} bursts/s", file=sys.stderr)
    gaps = sorted(b - a for a, b in zip(bursts, bursts[1:]))
    print("gaps ms", [round(g) for g in gaps[:10]], file=sys.stderr)
    book.output(2).get_by_role("button", name="Kill").click()
    book.output(2).get_by_role("button", name="Really kill").click()
    book.see(2, "Ranks: all gone", 60)


def figures(kernel: int, session: Any) -> dict[str, int]:
    session.send("HeapProfiler.collectGarbage")
    metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]} if session.send("Performance.enable") is not None else {}
    return {
        "kernel": resident(kernel),
        "browser": sum(proportional(pid) for pid in chromium()),
        "js heap": int(metrics.get("JSHeapUsedSize", 0)),
    }


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def proportional(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1]) * 1024


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def chromium() -> list[int]:
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
        except OSError:
            continue
        parents[int(folder.name)] = int(rest.split()[1])
        names[int(folder.name)] = name.partition("(")[2]
    ours = []
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and names[pid].startswith("chromium") or names[pid].startswith("chrome"):
            ours.append(pid)
    return ours
