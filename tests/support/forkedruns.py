"""Runs of the trainer on real ranks, without a cluster: forks of a process that imported torch."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.measured import MEASURED
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.deepspeed.unsupported_keys import own_keys
from workbench.finetune.job.deepspeed_config import completed
from workbench.finetune.job.finetune import FineTune
from workbench.rundir.events import Event, parse_event

END_S = 300
STEPS = 6
GLOBAL_BATCH = 12
# Rows for two epochs of these steps. Neither two nor three ranks share the evaluation evenly, and
# one rank needs two batches for it.
TRAIN_ROWS, EVALUATION_ROWS = 144, 19
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3", "zero3-offload", "fsdp")
SHORTEST = 4
"""Fewest steps of a curve that is compared."""
# A wrong scale of the gradients hides in AdamW, which
# divides it out, and shows in SGD without momentum.
OPTIMIZERS = ("adamw", "sgd")
LENGTH = {"max_target_length": 24}
# A model that has learned nothing answers up to the last token it may.
DEFAULTS = {"predict_rows": 0, "max_steps": STEPS, "learning_rate": 2e-3, "max_target_length": 40}


@dataclass
class Ran:
    folder: Path
    exit_codes: dict[int, int]

    def events(self, rank: int = 0) -> list[Event]:
        text = (self.folder / f"rank-{rank}" / "stdout.log").read_text(errors="replace")
        return [event for line in text.splitlines() if (event := parse_event(line))]

    def data(self, kind: str, rank: int = 0) -> list[dict[str, object]]:
        return [dict(event.data) for event in self.events(rank) if event.kind == kind]

    def notes(self) -> list[str]:
        """Give the notes, without those on cut answers: these runs cut answers to be short."""
        every = [str(note["message"]) for note in self.data("note")]
        return [note for note in every if "(max_target_length); the longest has" not in note]

    def curve(self, name: str) -> list[float]:
        return [float(str(step[name])) for step in self.data("step")]

    def stderr(self, rank: int = 0) -> str:
        return (self.folder / f"rank-{rank}" / "stderr.log").read_text(errors="replace")

    def record(self, rank: int, name: str) -> dict[str, object]:
        return dict(json.loads((self.folder / f"rank-{rank}" / name).read_text()))


class Plan:
    """Runs to come, and their rows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: list[dict[str, object]] = []
        counts = {"train": TRAIN_ROWS, "eval": EVALUATION_ROWS}
        for seed, (name, count) in enumerate(counts.items()):
            lines = [row.to_json() + "\n" for row in mini_rows(seed, count)]
            (root / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    def add(
        self,
        name: str,
        ranks: int,
        *,
        patch: object = None,
        more: Mapping[str, object] | None = None,
        sent: Mapping[str, object] | None = None,
        **job: object,
    ) -> None:
        """Add a run; `more` are keys of forkrun.py's plan, `sent` travels for its metrics."""
        folder = self.root / name
        folder.mkdir()
        spec = FineTune(**{**DEFAULTS, **job})  # type: ignore[arg-type]
        # Unchecked: an earlier run of the plan may make the model, and hybrid shards, refused on
        # CPUs, are rehearsed here with several ranks that count as one pod's.
        config = completed(choose(spec, gpus=0, world_size=ranks), gpus=0)
        if callable(patch):
            patch(config)
        files = {name: str(self.root / f"{name}.jsonl") for name in ("train", "eval")}
        raw = {"job": spec.to_dict(), **files, "hub": None, "deepspeed": config, "gpus": 0}
        raw |= {"metric_inputs": sent or {}}
        raw["json_keys"] = (
            list(own_keys(spec.deepspeed)) if isinstance(spec.deepspeed, Mapping) else []
        )
        (folder / "job.json").write_text(json.dumps(raw))
        self.runs.append({"folder": str(folder), "world_size": ranks, **(more or {})})

    def run(self, *, timeout_s: float = 1600) -> dict[str, Ran]:
        """Do the runs, one after another, and give them by name."""
        return run_all(self, timeout_s=timeout_s)[0]

    def ran(self) -> dict[str, Ran]:
        """Give the runs that were done by name."""
        folders = [Path(str(run["folder"])) for run in self.runs]
        codes = {
            f.name: {int(k): v for k, v in json.loads((f / "exit.json").read_text()).items()}
            for f in folders
        }
        return {f.name: Ran(folder=f, exit_codes=codes[f.name]) for f in folders}


def run_all(*plans: Plan, timeout_s: float = 1600) -> list[dict[str, Ran]]:
    """Do the runs of several plans, forked from one process, and give those of each by name."""
    for plan in plans:
        (plan.root / "plan.json").write_text(json.dumps(plan.runs))
    parent = _parent()
    assert parent.stdin is not None and parent.stdout is not None
    request = {"plans": [str(plan.root / "plan.json") for plan in plans], "env": dict(os.environ)}
    parent.stdin.write(json.dumps(request) + "\n")
    parent.stdin.flush()
    answered = select.select([parent.stdout], [], [], timeout_s)[0]
    assert answered, f"the runs took more than {timeout_s:.0f} s"
    failed = plans[0].root / "failed.txt"
    code = parent.stdout.readline()
    why = failed.read_text() if failed.exists() else f"exit code {code!r}"
    assert code == "0\n", f"the runs could not be done: {why}"
    return [plan.ran() for plan in plans]


@functools.cache
def _parent() -> subprocess.Popen[str]:
    """What every run of this session is forked from: to import takes it 5 s of CPU."""
    forkrun = Path(__file__).parents[1] / "finetune" / "train" / "forkrun.py"
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(forkrun)], stdin=pipe, stdout=pipe, text=True, start_new_session=True
    )


def end_parent() -> None:
    """End it, if there is one, and its forks if a run hangs."""
    if _parent.cache_info().currsize:
        parent = _parent()
        try:
            parent.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.communicate(timeout=END_S)


def follows(run: Ran, reference: Ran, what: str = "") -> None:
    """Hold a run to another's curves at equal global batches; note the difference by name."""
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    off: dict[str, float] = {}
    for metric in ("loss", "grad_norm", "learning_rate"):
        expected, got = reference.curve(metric), run.curve(metric)
        assert len(got) == len(expected) >= SHORTEST
        assert got == pytest.approx(expected, rel=0.01), metric
        off[metric] = max(abs(g - e) / abs(e) for g, e in zip(got, expected, strict=True) if e)
    (end,), (reference_end,) = run.data("end"), reference.data("end")
    for key in ("eval_loss", "first_eval_loss", "train_loss"):
        assert end[key] == pytest.approx(reference_end[key], rel=0.01)
    if what:
        MEASURED.append(
            f"{what}: loss within {off['loss']:.1e}, gradient "
            f"norm within {off['grad_norm']:.1e} of single"
        )
