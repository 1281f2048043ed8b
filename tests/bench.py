"""`make bench`: what the project's own pieces cost or save, each beside the plain way, in one run on one machine.

Both ways of a pair take turns, so that other load of the machine hits both; a figure is the median of its turns. The
ratio is what counts: seconds are those of the machine. Nothing here is a test, and no test is timed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchforecast import forecasts
from benchlink import link
from benchpair import Pair, Turn
from benchstarts import doctor_and_close, first_steps, from_nothing, launchers, many_pods, output, overhead
from benchwork import answers, reading, training

from workbench import Cluster, LocalPods
from workbench.base.table import Grid


def transfers(root: Path) -> Iterator[Pair]:
    """Compare the speed of one large file over a loopback sshd, verified as ours is, with scp's, which is not."""
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

        yield Pair(
            what="MiB/s from a pod, 256 MiB, loopback",
            ours=lambda: rate(lambda: fetch_file(route, str(source), target)),
            plain=plain(f"{pod.address}:{source}", str(target)),
            plain_is="scp, which verifies nothing",
            more_is_better=True,
        )
        yield Pair(
            what="MiB/s to a pod, 256 MiB, loopback",
            ours=lambda: rate(lambda: send_file(route, source, str(target), f"{target}.part")),
            plain=plain(str(source), f"{pod.address}:{target}"),
            plain_is="scp, which verifies nothing",
            more_is_better=True,
        )


PAIRS: Sequence[Callable[[Path], Iterator[Pair]]] = (
    *(first_steps, launchers, from_nothing, many_pods, doctor_and_close, overhead, output),
    *(training, answers, reading, transfers, forecasts, link),
)


def measured(pair: Pair, turns: int) -> tuple[float, float]:
    """Let both ways take turns; give both medians."""
    ours, plain = [], []
    for turn in range(turns):
        print(f"  {pair.what}: turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
        ours.append(pair.ours())
        plain.append(pair.plain())
    return statistics.median(ours), statistics.median(plain)


def main() -> None:
    """Measure what is named, all by default, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    names = [make.__name__ for make in PAIRS]
    parser.add_argument("only", nargs="*", help=f"which: {', '.join(names)}")
    parser.add_argument("--turns", type=int, default=3, help="how often each way runs; the median counts (default 3)")
    options = parser.parse_args()
    if unknown := set(options.only) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    lines = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for make in PAIRS:
            if options.only and make.__name__ not in options.only:
                continue
            for pair in make(Path(folder)):
                ours, plain = measured(pair, options.turns)
                ratio = ours / plain if pair.more_is_better else plain / ours
                print(f"  {pair.what}: {ours:.3g}, plain {plain:.3g}, {ratio:.2f} x", file=sys.stderr, flush=True)
                lines.append((pair.what, f"{ours:.3g}", f"{plain:.3g}", pair.plain_is, f"{ratio:.2f} x", pair.bound))
    columns = ("measured", "ours", "plain", "the plain way", "better by", "bound")
    day, load = time.strftime("%Y-%m-%d"), f"load {os.getloadavg()[0]:.1f}"
    where = f"{os.cpu_count()} cores, {platform.machine()}, {load}, {day}, median of {options.turns}"
    print(Grid(columns=columns, rows=lines, right=("ours", "plain", "better by", "bound"), caption=where))


if __name__ == "__main__":
    main()
