"""Rows of `make bench` on training's speed, beside the best plain ways that a user would pick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tools.bench.pair import Pair
from tools.bench.ways import ACCUMULATION, LEFT_OUT, MICRO, RATE, ROWS
from tools.bench.work import REPOSITORY, write_model
from tools.bench.work import ROWS as DATA
from workbench import Cluster, FineTune, LocalPods, PodSpec

STEPS = 45
"""Steps of a turn; the first five count nowhere."""
PLAIN = {
    "trainer": "Trainer, lengths alike, padded to the longest",
    "loop": "a loop by hand, eight steps sorted",
    "packing": "TRL, packed to 512 tokens",
    "original": "the original's recipe, padded to 96 + 96",
}
WAYS = {
    "tiny-t5": ("trainer", "loop", "original"),
    "tiny-llama": ("trainer", "loop", "packing", "original"),
}
BOUNDS = {
    "tiny-t5": ">= 1.2 x",
    "tiny-llama": ">= 1.3 x",
    "t5-9m": ">= 1.2 x",
    "llama-9m": ">= 1.3 x",
}
"""Wanted of the ratio to each way but the original's."""
DEFAULTS = {"t5-9m": ("trainer",), "llama-9m": ("trainer", "packing")}
"""Ways at the default batch, for models whose steps are more than fixed costs."""
SORTED_STEPS = 50
"""Steps that transformers sorts by length together. Fewer would be of its longest rows alone."""
SETTINGS = {"16 x 2": ("16x2", 1), "8 x 1": ("8x1", 1), "3 pods x 4": ("4x1", 3)}
"""Rows of a micro-batch and micro-batches, and ranks."""
Figures = dict[str, float]


def yardsticks(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare the seconds of 1,280 rows with those of plain ways, on one pod and on several."""
    for model in DEFAULTS if DATA.exists() else ():
        folder = root / f"yard-{model}"
        write_model(folder, model, evaluated=64)
        for setting in SETTINGS:
            yield _at(setting, model, folder)
    for model in WAYS if DATA.exists() else ():
        folder = root / f"yard-{model}"
        write_model(folder, model, evaluated=64)
        yield _one_pod(model, folder)
    if DATA.exists():
        folder = root / "yard-tiny-t5"
        with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / "yard-cluster") as cluster:
            yield [_pods(cluster, folder, pods) for pods in (2, 3)]


def _at(setting: str, model: str, folder: Path) -> Sequence[Pair]:
    """Return the rows of a model at a setting, in CPU seconds of all ranks together."""
    step, ranks = SETTINGS[setting]

    def cpu_s(way: str) -> float:
        return _figures(way, folder, ranks=ranks, step=step, steps=LEFT_OUT + SORTED_STEPS)["cpu_s"]

    gone: list[float] = []

    def ours(*, first: bool) -> float:
        if first:
            gone.append(cpu_s("ours"))
        return gone[-1]

    return [
        Pair(
            what=f"CPU seconds of 1,280 rows, {model}, {setting}",
            ours=partial(ours, first=number == 0),
            plain=partial(cpu_s, way),
            plain_is=PLAIN[way],
            bound=BOUNDS[model],
        )
        for number, way in enumerate(DEFAULTS[model])
    ]


def _one_pod(model: str, folder: Path) -> Sequence[Pair]:
    """Return the rows of a model; all figures of a turn are of one training each way."""
    seen: dict[str, Figures] = {}
    work = _figures("peak", folder)

    def cpu_s(way: str) -> float:
        seen[way] = _figures(way, folder)
        return seen[way]["cpu_s"]

    def share(way: str) -> float:
        return 100 * work["operations"] / seen[way]["cpu_s"] / work["peak"]

    pairs: list[Pair] = []
    for way in WAYS[model]:
        first = way == "trainer"
        both = {
            "plain_is": PLAIN[way],
            "bound": "" if way == "original" else BOUNDS[model],
        }
        pairs += (
            Pair(
                what=f"CPU seconds of 1,280 rows, {model}",
                ours=partial(cpu_s, "ours") if first else lambda: seen["ours"]["cpu_s"],
                plain=partial(cpu_s, way),
                **both,
            ),
            Pair(
                what=f"seconds of 1,280 rows, {model}",
                ours=lambda: seen["ours"]["wall_s"],
                plain=lambda way=way: seen[way]["wall_s"],
                **both,
            ),
        )
    pairs.append(
        Pair(
            what=f"% of a core's matrix product, {model}",
            ours=partial(share, "ours"),
            plain=partial(share, "trainer"),
            plain_is=PLAIN["trainer"],
            more_is_better=True,
        )
    )
    return pairs


def _pods(cluster: Cluster, folder: Path, pods: int) -> Pair:
    job = FineTune(
        model=str(folder / "model"),
        dataset=str(folder),
        technique="ddp",
        max_steps=STEPS,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=RATE,
        max_source_length=96,
        max_target_length=96,
        eval_strategy="no",
        predict_rows=0,
        profile_step=0,
    )

    def ours() -> float:
        run = cluster.submit(job, pods=pods)
        run.wait(progress=False).raise_for_status()
        times = [event.time_s for event in run.events() if event.kind == "step"][4:]
        return pods * ROWS * (len(times) - 1) / (times[-1] - times[0])

    def loop() -> float:
        return 1280 / _figures("loop", folder, ranks=pods)["wall_s"]

    return Pair(
        what=f"rows/s, tiny-t5, ddp, {pods} pods",
        ours=ours,
        plain=loop,
        plain_is="torchrun, the same loop by hand",
        bound=">= 1 x",
        more_is_better=True,
    )


def _figures(
    way: str, folder: Path, ranks: int = 1, step: str = "16x2", steps: int = STEPS
) -> Figures:
    """Run a way in processes of one thread each; CPU seconds are of all ranks together."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*start, "-m", "tools.bench.ways", way, str(folder), str(steps)]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "BENCH_STEP": step,
    }
    ended = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{way} did not train:\n{ended.stderr[-3000:]}")
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"wall_s"')]
    if way == "peak":
        lines = ended.stdout.splitlines()[-1:]
    every: list[Figures] = [json.loads(line) for line in lines]
    figures = every[0]
    if "cpu_s" in figures:
        figures["cpu_s"] = sum(each["cpu_s"] for each in every)
    return figures
