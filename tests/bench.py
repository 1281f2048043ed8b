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
from dataclasses import dataclass
from pathlib import Path

from workbench import Cluster, FineTune, LocalPods, PodSpec
from workbench.base.table import Grid
from workbench.results.recipe import recipe_of

Turn = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two ways to do one thing."""

    what: str
    """What is measured, with its unit."""
    ours: Turn
    """Do it our way once, and give the figure."""
    plain: Turn
    """Do it the plain way."""
    plain_is: str
    """What the plain way is."""
    bound: str = ""
    """What is wanted of our figure (`<= 1.5 s`) or of the ratio (`>= 4 x`)."""
    more_is_better: bool = False
    """Whether the figure is a rate; else it is a time."""


def first_step(root: Path) -> Iterator[Pair]:
    """Compare the time from asking for a three-rank ZeRO-1 run to its first step's end, pods already there."""
    job = FineTune(technique="zero1", max_steps=2, predict_rows=0, per_device_train_batch_size=4)
    with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / "cluster") as cluster:

        def ours() -> float:
            result = cluster.submit(job).wait().raise_for_status()
            assert result.time_to_first_step_s is not None
            return result.time_to_first_step_s

        model = cluster.submit(job).wait().raise_for_status()  # and the warm servers are ready
        recipe = recipe_of(model)
        folder = root / "plain"
        for name, content in recipe.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

        def plain() -> float:
            return _until_first_step(folder)

        yield Pair(
            what="seconds to the first step, 3 ranks, ZeRO-1",
            ours=ours,
            plain=plain,
            plain_is="torchrun, same training",
            bound="<= 1.5 s",
        )


def _until_first_step(folder: Path) -> float:
    """Start the recipe's script with torchrun and wait for the first step's loss."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "3", "train.py"]
    started = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        torchrun, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        took = None
        seen = []
        for line in process.stdout or ():
            seen.append(line)
            if took is None and "'loss'" in line:
                took = time.monotonic() - started
    if process.returncode or took is None:
        raise RuntimeError("torchrun did not train:\n" + "".join(seen[-30:]))
    return took


def padding(_root: Path) -> Iterator[Pair]:
    """Compare rows a second of one rank, rows of WikiSQL's length, padded as we do and all to 96 + 96 tokens."""
    import torch

    from workbench.jobs.data.sources.mini import mini_rows
    from workbench.worker.data.rows import Collator, Example, Row, tokenize
    from workbench.worker.model.load import load
    from workbench.worker.standalone import token_loss

    torch.set_num_threads(1)
    examples = [Example(source=row.source, target=row.target) for row in mini_rows(0, 2000)]
    loaded = load("tiny-t5", examples, seed=0)
    rows = tokenize(loaded.tokenizer, examples, max_source_length=96, max_target_length=96)
    collate = Collator(pad_id=0, start_id=0)
    optimizer = torch.optim.AdamW(loaded.model.parameters())

    def rate(make: Callable[[Sequence[Row]], dict[str, torch.Tensor]], size: int = 32, batches: int = 8) -> float:
        started = time.monotonic()
        for number in range(batches):
            batch = make(rows[number * size : (number + 1) * size])
            labels = batch.pop("labels")
            token_loss(loaded.model(**batch), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return size * batches / (time.monotonic() - started)

    def whole(some: Sequence[Row]) -> dict[str, torch.Tensor]:
        batch = collate(some)
        fill = {"labels": -100}
        return {
            name: torch.nn.functional.pad(ids, (0, 96 - ids.shape[1]), value=fill.get(name, 0))
            for name, ids in batch.items()
        }

    yield Pair(
        what="rows/s of one rank, tiny-t5, 32 rows",
        ours=lambda: rate(collate),
        plain=lambda: rate(whole),
        plain_is="all rows padded to 96 + 96 tokens",
        bound=">= 4 x",
        more_is_better=True,
    )


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


PAIRS: Sequence[Callable[[Path], Iterator[Pair]]] = (first_step, padding, transfers)


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
                lines.append((pair.what, f"{ours:.3g}", f"{plain:.3g}", pair.plain_is, f"{ratio:.2f} x", pair.bound))
    columns = ("measured", "ours", "plain", "the plain way", "better by", "bound")
    day, load = time.strftime("%Y-%m-%d"), f"load {os.getloadavg()[0]:.1f}"
    where = f"{os.cpu_count()} cores, {platform.machine()}, {load}, {day}, median of {options.turns}"
    print(Grid(columns=columns, rows=lines, right=("ours", "plain", "better by", "bound"), caption=where))


if __name__ == "__main__":
    main()
