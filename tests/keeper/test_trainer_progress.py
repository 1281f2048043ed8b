"""A Trainer that logs as seldom as it does by default shows how far it is, and no loss twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.poll import until
from workbench import Cluster, Script
from workbench.display.kit.line import progress_text
from workbench.rundir.events import Event
from workbench.rundir.totals import RunTotals
from workbench.rundir.view import RunView

PLAIN = """
import time
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Rows:
    def __len__(self):
        return 4000

    def __getitem__(self, number):
        time.sleep(0.01)  # a step takes some time
        return {"input_ids": [number % 60] * 8, "labels": [number % 60] * 8}

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
args = TrainingArguments("out", use_cpu=True, save_strategy="no")
assert args.logging_steps == 500
Trainer(model=model, args=args, train_dataset=Rows()).train()
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_trainer_with_defaults_shows_its_step_its_total_and_the_time_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "own" / "plain.py"
    script.parent.mkdir()
    script.write_text(PLAIN)
    run = cluster.submit(Script(script), pods=1)
    until(
        lambda: run.state.is_terminal or run.progress.eta_s is not None,
        300,
        why=lambda: run.message,
    )
    progress = run.progress
    # 4,000 rows in batches of 8, three times; the first loss comes with step 500.
    assert (progress.max_steps, progress.loss) == (1500, None)
    assert progress.step is not None and 0 < progress.step < 500
    assert progress.eta_s is not None and progress.eta_s > 0
    assert progress.samples_per_s is not None and 0 < progress.samples_per_s < 100
    assert f"/{progress.max_steps:,}" in progress_text(progress)
    run.stop()
    result = run.wait(300, progress=False)
    steps = [event for event in run.events() if event.kind == "step"]
    numbers = [event.whole("step") for event in steps]
    assert numbers == sorted(set(numbers)), "no step is reported twice"
    assert result.steps == numbers[-1], "the step after which it was stopped is among them"
    assert len(RunView(run.path).curves["loss"]) == sum("loss" in event.data for event in steps)
    assert "notebook is not told" not in run.logs(0, "stderr")


def test_the_last_loss_stays_while_steps_without_one_are_reported() -> None:
    data = [
        {"step": 499, "max_steps": 1500},
        {"step": 500, "max_steps": 1500, "loss": 2.5, "profiled": True},
        {"step": 510, "max_steps": 1500, "train_samples_per_s": 8.0},
    ]
    totals = RunTotals.of(
        Event(time_s=at, rank=0, kind="step", data=each) for at, each in enumerate(data)
    )
    assert totals.last_step is not None
    assert totals.last_step.data == {
        "step": 510,
        "max_steps": 1500,
        "loss": 2.5,
        "train_samples_per_s": 8.0,
    }
