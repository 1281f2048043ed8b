"""A trainer of TRL under the mixin: TRL's own losses, and a resumed run equal to the last digit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.on_pods.evaluation import MethodEvaluator
from workbench.finetune.methods.on_pods.hooks import TrlHooks
from workbench.finetune.model import tiny
from workbench.finetune.recipe.standalone import train_batches
from workbench.finetune.train.best import BestModel
from workbench.finetune.train.callbacks import EventCallback, StopFile
from workbench.finetune.train.checkpoints import Checkpoints
from workbench.finetune.train.measure.meter import StepMeter
from workbench.finetune.train.trainer import TrainerParts, WorkbenchTrainerMixin
from workbench.rundir.events import MARK

STEPS, SAVED = 5, 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


def lengths(rows: Any) -> torch.Tensor:
    return torch.tensor([(len(row["prompt_ids"]), len(row["chosen_ids"])) for row in rows])


class Dpo(TrlHooks, WorkbenchTrainerMixin, trl.DPOTrainer):  # type: ignore[misc]
    def _prepare_dataset(self, *args: Any, **options: Any) -> Any:
        return trl.DPOTrainer._prepare_dataset(self, *args, **options)

    def row_lengths(self) -> torch.Tensor:
        return lengths(self.train_dataset)


class Plain(trl.DPOTrainer):  # type: ignore[misc]
    """TRL's trainer alone, with the rows in the same order."""

    def get_train_dataloader(self) -> Any:
        return train_batches(self)

    def row_lengths(self) -> torch.Tensor:
        return lengths(self.train_dataset)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny.tokenizer_for_all("tiny-llama", list(mini_rows(0, 40)))
    tokenizer.save_pretrained(folder)
    tiny.make("tiny-llama", tokenizer, 0).save_pretrained(folder)
    return folder


def options(model: Path, root: Path) -> dict[str, Any]:
    rows = list(mini_rows(0, 40))
    pairs = [
        {"prompt": row.source, "chosen": row.target, "rejected": rows[n - 1].target}
        for n, row in enumerate(rows)
    ]
    arguments = trl.DPOConfig(
        output_dir=str(root / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        learning_rate=1e-3,
        seed=1,
    )
    return {
        "model": AutoModelForCausalLM.from_pretrained(model),
        "processing_class": AutoTokenizer.from_pretrained(model),
        "args": arguments,
        "train_dataset": Dataset.from_list(pairs),
        "eval_dataset": Dataset.from_list(pairs[:6]),
    }


def trained(model: Path, root: Path, *, resumes: bool = False) -> Dpo:
    job = FineTune(model="tiny-llama", technique="single", eval_steps=2)
    clock, checkpoints = (
        StepMeter(causal=True),
        Checkpoints(root, every=SAVED, resumes=resumes),
    )
    parts = TrainerParts(
        clock=clock,
        stop=StopFile(root / "stop"),
        best=BestModel(job),
        checkpoints=checkpoints,
        causal=True,
        evaluator=MethodEvaluator(),
    )
    given = options(model, root)
    order = given["args"].train_sampling_strategy
    trainer = Dpo(parts=parts, lengths=torch.zeros((0, 2)), sampling=order, **given)
    checkpoints.follow(trainer)
    trainer.use_callbacks(first=[EventCallback(clock, samples=8)], last=[checkpoints])
    clock.resume()
    trainer.train()
    return trainer


def steps_in(output: str) -> list[tuple[int, float, float, float]]:
    events = [
        json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)
    ]
    return [
        tuple(event[name] for name in ("step", "loss", "grad_norm", "learning_rate"))
        for event in events
        if event["kind"] == "step"
    ]


def test_a_dpo_trainer_of_trl_trains_evaluates_saves_and_resumes_under_the_mixin(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = trained(model, tmp_path / "whole")
    steps = steps_in(capfd.readouterr().out)
    assert len(whole.state.log_history) <= 1  # of a step each, it would grow for ever
    plain = Plain(**options(model, tmp_path / "plain"))
    plain.train()
    alone = [entry for entry in plain.state.log_history if "loss" in entry]
    assert [step[0] for step in steps] == [entry["step"] for entry in alone] == [1, 2, 3, 4, 5]
    for place, name in enumerate(("loss", "grad_norm", "learning_rate"), 1):
        expected = [entry[name] for entry in alone]
        assert [step[place] for step in steps] == pytest.approx(expected, rel=1e-6), name
    evaluations = [entry for entry in plain.state.log_history if "eval_loss" in entry]
    expected = {entry["step"]: entry["eval_loss"] for entry in evaluations}
    # The mixin's last evaluation comes after the training, as the job's trainer asks for it.
    assert whole.eval_losses == pytest.approx(expected, rel=1e-6)
    assert "rewards/margins" in whole.figures[2] and "runtime" not in whole.figures[2]
    (tmp_path / "on").mkdir()
    shutil.copytree(
        tmp_path / "whole" / "checkpoints" / f"step-{SAVED}", tmp_path / "on" / "resume"
    )
    capfd.readouterr()
    rest = trained(model, tmp_path / "on", resumes=True)
    assert steps_in(capfd.readouterr().out) == steps[SAVED:]
    assert {step: rest.eval_losses[step] for step in (4, 5)} == {
        step: whole.eval_losses[step] for step in (4, 5)
    }
