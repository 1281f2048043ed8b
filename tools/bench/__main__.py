"""`make bench`: what the project's pieces cost or save, each beside the plain way, in one run.

Both ways of a row take turns, so that other load of the machine hits both;
a figure is the median of its turns. The ratio is what counts: seconds are
those of the machine. Nothing here is a test, and no test is timed.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from tools.bench.equal_samples import equal_samples
from tools.bench.link import link
from tools.bench.pair import Laps, Measured, Pair, Turn, measure
from tools.bench.starts import first_steps, launchers, many_pods, output
from tools.bench.work import answers, reading, training
from tools.bench.yardsticks import yardsticks
from workbench import Cluster, LocalPods
from workbench.base.table import Grid

Rows = Iterator[Sequence[Pair]]
"""Rows that take turns together."""


def transfers(root: Path) -> Rows:
    """Compare the speed of one large verified file over a loopback sshd with plain scp's."""
    from workbench.pods.ssh.bulk.transfer import fetch_file, route_to, send_file
    from workbench.pods.ssh.identity import Identity

    size = 256
    source, target = root / "source", root / "target"
    with source.open("wb") as file:
        for _ in range(size):
            file.write(os.urandom(1 << 20))
    with Cluster(LocalPods(), path=root / "transfers", warm=False) as cluster:
        pod, identity = cluster.pods[0], Identity(cluster.path / "identity")
        route = route_to(pod, identity, 60.0)
        scp = ["scp", "-q", "-F", str(identity.ssh_config)]

        def rate(act: Callable[[], object]) -> float:
            target.unlink(missing_ok=True)
            started = time.monotonic()
            act()
            took_s = time.monotonic() - started
            if target.stat().st_size != size << 20:
                raise RuntimeError("the file did not arrive whole")
            return size / took_s

        def plain(*words: str) -> Turn:
            return lambda: rate(lambda: subprocess.run([*scp, *words], check=True))

        both = {"plain_is": "scp, which verifies nothing", "more_is_better": True}
        yield (
            Pair(
                what="MiB/s from a pod, 256 MiB, loopback",
                ours=lambda: rate(lambda: fetch_file(route, str(source), target)),
                plain=plain(f"{pod.address}:{source}", str(target)),
                **both,
            ),
            Pair(
                what="MiB/s to a pod, 256 MiB, loopback",
                ours=lambda: rate(lambda: send_file(route, source, str(target), f"{target}.part")),
                plain=plain(str(source), f"{pod.address}:{target}"),
                **both,
            ),
        )


GROUPS: Sequence[Callable[[Path], Rows]] = (
    *(
        training,
        yardsticks,
        answers,
        reading,
        link,
        first_steps,
        launchers,
        many_pods,
        output,
        transfers,
    ),
)

TABLES: Sequence[Callable[[Path], Grid]] = (equal_samples,)
"""Tables of their own form, which take too long to be measured unless named."""


def figures_of(make: Callable[[Path], Rows], root: Path, turns: int) -> tuple[list[Measured], bool]:
    """Measure a group; return what it has, also where the rest failed, and whether all is well."""
    done, laps, whole = list[Measured](), Laps(), True
    try:
        with closing(make(root)) as groups:
            for pairs in groups:
                done += measure(pairs, turns, laps)
    except Exception:
        traceback.print_exc()
        whole = False
    if done:
        done[-1].took_s += laps.lap()
    return done, whole


def recorded(table: Grid, only: Sequence[str]) -> Path:
    """Write a table into build/bench, named by day, commit and groups; return the file."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    names = [time.strftime("%Y-%m-%d"), commit.stdout.strip() or "no-commit", *only]
    file = Path("build") / "bench" / f"{'-'.join(names)}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{table}\n", encoding="utf-8")
    return file


def main() -> None:
    """Measure what is named, all by default, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    names = [make.__name__ for make in (*GROUPS, *TABLES)]
    alone = ", ".join(make.__name__ for make in TABLES)
    parser.add_argument(
        "only", nargs="*", help=f"which: {', '.join(names)} (default: all but {alone})"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=3,
        help="how often each way runs at most; the median counts (default 3)",
    )
    options = parser.parse_args()
    if unknown := set(options.only) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    rows, failed, laps = list[Measured](), list[str](), Laps()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for make in GROUPS:
            if options.only and make.__name__ not in options.only:
                continue
            done, whole = figures_of(make, Path(folder), options.turns)
            rows += done
            failed += [] if whole else [make.__name__]
        for make_table in TABLES:
            if make_table.__name__ in options.only:
                print(make_table(Path(folder)))
    day, load = time.strftime("%Y-%m-%d"), f"load {os.getloadavg()[0]:.1f}"
    where = (
        f"{os.cpu_count()} cores, {platform.machine()}, "
        f"{load}, {day}, medians, {laps.lap():.0f} s in all"
    )
    right = ("ours", "plain", "better by", "bound", "turns", "seconds")
    cells = [row.cells for row in rows]
    if cells:
        table = Grid(columns=Measured.COLUMNS, rows=cells, right=right, caption=where)
        print(table)
        print(f"written to {recorded(table, options.only)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
