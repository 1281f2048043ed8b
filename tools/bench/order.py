"""What an order of rows costs in evaluation loss and saves in CPU time, at the default batch.

`python -m tools.bench.order FOLDER`.

Each order trains tiny-t5 on the same rows of wikisql-mini with the same initial weights: 8 rows a
step, one rank, one thread. The loss is that of 300 held-out rows after half of the steps and after
all. CPU seconds are of the training alone. A run that is in FOLDER already is not done again.
Nothing here is a test, and no test is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path
from statistics import fmean

from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.job.finetune import FineTune
from workbench.rundir.events import parse_event

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = {"train": 8000, "eval": 300}
ORDERS = {
    "random": {"train_sampling_strategy": "random"},
    "mixed": {"train_sampling_strategy": "group_by_length"},
}

Figures = tuple[float, float, float, float]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("folder", type=Path)
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--steps", type=int, default=300)
    asked.add_argument(
        "--orders", nargs="+", choices=[*ORDERS], default=[*ORDERS], help="random is always one"
    )
    given = asked.parse_args()
    given.orders = list(dict.fromkeys(["random", *given.orders]))
    given.folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate(ROWS.items()):
        lines = [row.to_json() + "\n" for row in mini_rows(seed, count)]
        (given.folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    sys.path.insert(0, str(REPOSITORY / "tests" / "finetune" / "train"))
    from forkrun import import_once

    import_once()
    print(where())
    measured: dict[str, list[Figures]] = {name: [] for name in given.orders}
    # Orders take turns, so that other load of the machine hits all of them.
    for seed in range(given.seeds):
        for name in given.orders:
            measured[name].append(figures_of(given.folder, name, seed, given.steps))
            half, last, cpu_s, useful = measured[name][-1]
            print(
                f"seed {seed} {name:7} {half:.4f} {last:.4f} {cpu_s:.1f} s, {useful:.3f} useful",
                flush=True,
            )
    for name in given.orders:
        for number, what in enumerate(
            ("loss after half of the steps", "loss after all steps", "CPU", "useful tokens")
        ):
            each = [
                one[number] / other[number]
                for one, other in zip(measured[name], measured["random"], strict=True)
            ]
            print(
                f"{name:7} to random, {what}: {fmean(each):.3f} "
                f"({' '.join(f'{ratio:.3f}' for ratio in each)})"
            )


def where() -> str:
    """Return the processor and the last commit that changed the package."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    named = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", "workbench"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    ).stdout
    return f"{named or platform.machine()}, {os.cpu_count()} cores, commit {commit.strip()}"


def figures_of(root: Path, name: str, seed: int, steps: int) -> Figures:
    """Return both evaluation losses of a run, its training's CPU seconds, and the useful tokens."""
    folder = root / f"{name}-{seed}-{steps}"
    if not (folder / "cpu.json").exists():
        folder.mkdir(exist_ok=True)
        child = os.fork()
        if child == 0:
            try:
                train(root, folder, name, seed, steps)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{folder.name} failed; see {folder / 'rank-0' / 'stderr.log'}")
    lines = (folder / "rank-0" / "stdout.log").read_text(encoding="utf-8").splitlines()
    events = [event for line in lines if (event := parse_event(line))]
    losses = {
        event.whole("step"): event.number("eval_loss") or 0.0
        for event in events
        if event.kind == "eval"
    }
    (end,) = [event for event in events if event.kind == "end"]
    useful, padded = (end.number(f"{name}_tokens_per_s") or 0.0 for name in ("useful", "padded"))
    return (
        losses[steps // 2],
        losses[steps],
        float(json.loads((folder / "cpu.json").read_text())),
        useful / padded,
    )


def train(root: Path, folder: Path, name: str, seed: int, steps: int) -> None:
    own = folder / "rank-0"
    own.mkdir(exist_ok=True)
    options = dict(ORDERS[name])
    job = FineTune(
        technique="single",
        max_steps=steps,
        eval_steps=steps // 2,
        seed=seed,
        predict_rows=0,
        **options,
    )
    job = job.replace(profile_step=0)
    files = {part: str(root / f"{part}.jsonl") for part in ROWS}
    raw = {"job": job.to_dict(), **files, "hub": None, "deepspeed": None, "gpus": 0}
    (folder / "job.json").write_text(json.dumps(raw))
    for number, stream in ((1, "stdout.log"), (2, "stderr.log")):
        os.dup2(os.open(own / stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(ranks, WORKBENCH_RUN_DIR=str(folder), WORKBENCH_RANK_DIR=str(own))
    from workbench.finetune.train.main import main as run
    from workbench.finetune.train.trainer import FineTuner

    spent = {"train": 0.0, "evaluate": 0.0}

    def timed(method: str) -> None:
        original = getattr(FineTuner, method)

        def call(self: FineTuner, *args: object, **given: object) -> object:
            began = time.process_time()
            try:
                return original(self, *args, **given)
            finally:
                spent[method] += time.process_time() - began

        setattr(FineTuner, method, call)

    timed("evaluate")
    timed("train")
    run()
    (folder / "cpu.json").write_text(json.dumps(spent["train"] - spent["evaluate"]))


if __name__ == "__main__":
    main()
