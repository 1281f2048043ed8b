"""What a script writes for TensorBoard by torch's own writer stands in the panel too, and nothing in it changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.base import entries
from workbench.rundir.events import MARK
from workbench.worker.rank.trainer_events import _figure

ROOT = Path(__file__).parent.parent.parent
LOOP = """
from torch.utils.tensorboard import SummaryWriter

writer, valid = SummaryWriter("logs"), SummaryWriter("logs/valid")
for step in range(1, 2001):
    writer.add_scalar("Loss/train", 8 / step, step)
    writer.add_scalar("lr", 1e-3, step)
    writer.add_scalar("weights/std", 0.5, step)
    if step % 1000 == 0:
        valid.add_scalar("loss", 16 / step, step)
        writer.add_scalar("val/accuracy", step / 4000, step)
"""


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("Loss/train", "loss"), ("train_loss", "loss"), ("lr", "learning_rate"), ("train/grad_norm", "grad_norm"),
        ("val_loss", "eval_loss"), ("Loss/test", "eval_loss"), ("eval/accuracy", "eval_accuracy"), ("eval", ""),
        ("layer1/std", ""), ("loss/layer1", ""),
    ],
)  # fmt: skip
def test_a_tag_has_a_name_in_the_panel_or_is_tensorboards_alone(tag: str, name: str) -> None:
    assert _figure(tag) == name


@pytest.mark.slow
def test_losses_and_evaluations_of_a_loop_are_reported_by_step_and_not_every_one(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    env = {**os.environ, "PYTHONPATH": f"{ROOT / entries.SCRIPT_SITE}:{ROOT}", "RANK": "0", "WORKBENCH_RUN": "r"}
    command = [sys.executable, "-u", "loop.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=True)
    events = [json.loads(line.removeprefix(MARK)) for line in ended.stdout.splitlines() if line.startswith(MARK)]
    steps = [event for event in events if event["kind"] == "step"]
    assert steps[-1] | {"time_s": 0} == {
        "time_s": 0, "rank": 0, "kind": "step", "step": 2000, "loss": 0.004, "learning_rate": 0.001,
    }  # fmt: skip
    assert all(event["loss"] == 8 / int(str(event["step"])) for event in steps)
    assert len(steps) < 500
    assert [(event["step"], event["eval_loss"], event["metrics"]) for event in events if event["kind"] == "eval"] == [
        (1000, 0.016, {"accuracy": 0.25}), (2000, 0.008, {"accuracy": 0.5}),
    ]  # fmt: skip
    assert len(list((tmp_path / "logs").rglob("events.out.*"))) == 2
