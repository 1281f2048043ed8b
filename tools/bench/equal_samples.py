"""What options cost in evaluation loss and save in time, beside plain runs on as many rows.

`make bench ONLY=equal_samples`. Every way trains `tiny-llama` for one pass over the same rows,
about 32 of them a step, on local pods of one thread. A seed decides the initial weights and the
order of the rows, and the ways of a seed differ in nothing but the named options. All ways of a
seed run before the next seed, so that other load of the machine hits all of them.

With BENCH_RECORD=FILE every run is a line of FILE, and a run that FILE has is not done again. The
rows are WikiSQL's if they lie beside the checkout (or in BENCH_WIKISQL), else the built-in ones.
Nothing here is a test, and no test is timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from tools.bench.order import where
from tools.bench.work import ROWS as WIKISQL
from workbench import Cluster, FineTune, LocalPods, PodSpec
from workbench.base.json_values import numbers_of
from workbench.base.table import Grid
from workbench.finetune.data.rows import row_from

__all__ = ["WAYS", "Ran", "Way", "equal_samples", "table"]

SEEDS = 5
STUDENT = 2.776
"""Two-sided 95 % point of Student's t with four degrees of freedom."""
ROWS = {"train": 4800, "eval": 500}
RECORD = os.environ.get("BENCH_RECORD", "")
COLUMNS = (
    "measured",
    "the plain way",
    "evaluation loss",
    "plain",
    "difference",
    "seen",
    "CPU s",
    "CPU to plain",
    "sent to plain",
)
ONE_POD = {
    "model": "tiny-llama",
    "technique": "single",
    "train_sampling_strategy": "random",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
}
TWO_PODS = {**ONE_POD, "technique": "ddp", "per_device_train_batch_size": 8}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train on the rows, and the plain way that it is compared with."""

    name: str
    options: Mapping[str, object]
    plain: str = ""
    """Name of the plain way. Empty: this way is plain."""
    pods: int = 1

    def job(self, folder: Path, seed: int) -> FineTune:
        chosen: dict[str, Any] = {
            "dataset": str(folder),
            "max_source_length": 96,
            "max_target_length": 96,
            "communication": "fp32",
            "predict_rows": 0,
            "profile_step": 0,
            "seed": seed,
            # The clock is read after each evaluation, where one row is answered.
            "metrics": [cpu_s],
            "metric_rows": 1,
        }
        return FineTune(**{**chosen, **self.options})


WAYS = (
    Way("random order", ONE_POD),
    Way(
        "packing",
        # Seven packed rows hold about 30 rows of WikiSQL.
        {
            **ONE_POD,
            "packing": True,
            "per_device_train_batch_size": 7,
            "gradient_accumulation_steps": 1,
        },
        plain="random order",
    ),
    # Twice the default: a yardstick for differences that a learning rate makes as well.
    Way("learning_rate 2e-3", {**ONE_POD, "learning_rate": 2e-3}, plain="random order"),
    Way("ddp, 2 pods", TWO_PODS, pods=2),
    Way(
        "ddp, communication bf16, 2 pods",
        {**TWO_PODS, "communication": "bf16"},
        plain="ddp, 2 pods",
        pods=2,
    ),
    Way(
        "local-sgd, 2 pods",
        {**TWO_PODS, "technique": "local-sgd", "communication": None},
        plain="ddp, 2 pods",
        pods=2,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """Figures of a run."""

    way: str
    seed: int
    steps: int
    before: float
    """Evaluation loss before the first step."""
    eval_loss: float
    """Evaluation loss after the last step."""
    cpu_s: float
    """CPU seconds of rank 0 between the ends of both evaluations: training and an evaluation."""
    s_per_row: float
    """Seconds of a training row, without evaluations. Not in the table, as other work moves it."""
    sent: float
    """Bytes that a pod sent in the training."""
    on: str
    """Rows, processor, commit and day."""
    load: float
    """Load of the machine at the end."""


def cpu_s(predictions: list[str], references: list[str]) -> float:
    """Return the CPU seconds of this rank, as a metric of a run."""
    from time import process_time

    return process_time()


def equal_samples(root: Path) -> Grid:
    """Compare evaluation loss and time of options with plain runs at equal samples, five seeds."""
    folder = root / "equal-samples"
    on = f"{write_rows(folder)}, {where()}, {time.strftime('%Y-%m-%d')}"
    kept = Path(RECORD) if RECORD else None
    done = read(kept) if kept and kept.exists() else []
    had = {(run.way, run.seed) for run in done}
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=root / "equal-cluster") as cluster:
        for seed in range(SEEDS):
            for way in WAYS:
                if (way.name, seed) in had:
                    continue
                done.append(run := ran(cluster, way, seed, folder, on))
                line = json.dumps(asdict(run))
                print(f"  {line}", file=sys.stderr, flush=True)
                if kept:
                    with kept.open("a", encoding="utf-8") as lines:
                        lines.write(line + "\n")
    return table(done)


def write_rows(folder: Path) -> str:
    """Write `train.jsonl` and `eval.jsonl`, and return what the rows are."""
    from workbench.finetune.data.wikisql.mini import mini_rows

    folder.mkdir(parents=True)
    for seed, (part, most) in enumerate(ROWS.items()):
        if WIKISQL.exists():
            with (WIKISQL / f"{part}.jsonl").open(encoding="utf-8") as lines:
                rows = [row_from(json.loads(line), part) for line in islice(lines, most)]
        else:
            rows = list(mini_rows(seed, most))
        text = "".join(row.to_json() + "\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(text, encoding="utf-8")
    return "WikiSQL" if WIKISQL.exists() else "wikisql-mini"


def ran(cluster: Cluster, way: Way, seed: int, folder: Path, on: str) -> Ran:
    """Train in a way, and return the figures."""
    run = cluster.submit(way.job(folder, seed), pods=way.pods)
    result = run.wait(progress=False).raise_for_status()
    first, last = (event for event in run.events() if event.kind == "eval")
    began, ended = (numbers_of(event.data["metrics"])["cpu_s"] for event in (first, last))
    return Ran(
        way=way.name,
        seed=seed,
        steps=last.whole("step") or 0,
        before=first.number("eval_loss") or 0.0,
        eval_loss=last.number("eval_loss") or 0.0,
        cpu_s=ended - began,
        s_per_row=1 / (result.train_samples_per_s or 1.0),
        sent=(result.sent_bytes_per_step or 0.0) * (last.whole("step") or 0),
        on=on,
        load=round(os.getloadavg()[0], 1),
    )


def read(file: Path) -> list[Ran]:
    """Return the runs of a record."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Ran(**json.loads(line)) for line in lines]


def table(runs: Iterable[Ran]) -> Grid:
    """Return a row for each way that is not plain."""
    by_way: dict[str, dict[int, Ran]] = {}
    for run in runs:
        by_way.setdefault(run.way, {})[run.seed] = run
    rows = [
        cells(way, by_way[way.name], by_way[way.plain])
        for way in WAYS
        if way.plain and way.name in by_way
    ]
    every = [run for seeds in by_way.values() for run in seeds.values()]
    loads = [run.load for run in every]
    caption = (
        f"tiny-llama, {ROWS['train']} rows, {SEEDS} seeds; "
        f"{'; '.join(sorted({run.on for run in every}))}; load {min(loads)} to {max(loads)}"
    )
    return Grid(columns=COLUMNS, rows=rows, right=COLUMNS[2:5] + COLUMNS[6:], caption=caption)


def cells(way: Way, ours: Mapping[int, Ran], plain: Mapping[int, Ran]) -> Sequence[str]:
    """Return the row of a way, whose runs are paired with the plain runs of the same seed."""
    pairs = [(ours[seed], plain[seed]) for seed in sorted(ours)]
    differences = [one.eval_loss - other.eval_loss for one, other in pairs]
    sent = ""
    if way.pods > 1:
        sent = ratio([one.sent / other.sent for one, other in pairs])
    return (
        way.name,
        way.plain,
        spread([one.eval_loss for one, _ in pairs]),
        spread([other.eval_loss for _, other in pairs]),
        f"{fmean(differences):+.2g} ± {stdev(differences):.2g}",
        seen(differences),
        f"{median(one.cpu_s for one, _ in pairs):.1f}",
        ratio([one.cpu_s / other.cpu_s for one, other in pairs]),
        sent,
    )


def spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation over the seeds."""
    return f"{fmean(values):.4f} ± {stdev(values):.4f}"


def ratio(values: Sequence[float]) -> str:
    """Return the median of paired ratios, with the lowest and the highest."""
    return f"{median(values):.2f} × ({min(values):.2f} to {max(values):.2f})"


def seen(differences: Sequence[float]) -> str:
    """Return whether the mean difference is outside of what the seeds alone explain."""
    mean = fmean(differences)
    if abs(mean) <= STUDENT * stdev(differences) / len(differences) ** 0.5:
        return "within the spread"
    return "higher" if mean > 0 else "lower"
