from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import get_args

import pytest
from transformers.training_args import (
    OptimizerNames,
)

from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.choices import BITSANDBYTES, Optimizer
from workbench.finetune.train import settings
from workbench.finetune.train.settings import Assignment, training_arguments


def arguments_of(folder: Path, *, rank: int = 0, **job: object) -> object:
    told = FineTune(**{"technique": "single", **job})  # type: ignore[arg-type]
    nothing = {
        "base": told.model,
        "train": None,
        "evaluation": None,
        "hub": None,
        "deepspeed": None,
    }
    work = Assignment(
        job=told, gpus=0, folder=folder, rank_folder=folder, rank=rank, world_size=1, **nothing
    )  # type: ignore[arg-type]
    return training_arguments(work)


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_every_optimizer_is_one_that_the_trainer_knows_and_no_two_are_the_same(
    tmp_path: Path, optimizer: Optimizer
) -> None:
    names = {each: arguments_of(tmp_path, optimizer=each).optim for each in get_args(Optimizer)}  # type: ignore[attr-defined]
    assert isinstance(names[optimizer], OptimizerNames)
    assert list(names.values()).count(names[optimizer]) == 1
    words = str(names[optimizer].value)
    assert (optimizer in BITSANDBYTES) == any(word in words for word in ("8bit", "paged"))
    assert ("8bit" in words, "paged" in words) == ("8bit" in optimizer, "paged" in optimizer)


def test_only_rank_0_reports_to_trackers_and_checkpointing_reaches_the_trainer(
    tmp_path: Path,
) -> None:
    asked = {"report_to": ["mlflow"], "gradient_checkpointing": True}
    first, second = (arguments_of(tmp_path, rank=rank, **asked) for rank in (0, 1))
    assert (first.report_to, second.report_to) == (["mlflow"], [])  # type: ignore[attr-defined]
    recompute = [
        getattr(first, n, False) for n in ("activation_checkpointing", "gradient_checkpointing")
    ]
    assert any(recompute)
    assert not first.bf16 and not first.fp16  # type: ignore[attr-defined]


def test_one_process_with_several_gpus_does_not_cut_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings.Seq2SeqTrainingArguments, "n_gpu", property(lambda _: 4))
    assert arguments_of(tmp_path)._n_gpu == 1  # type: ignore[attr-defined]


def test_a_precision_that_was_chosen_gives_way_where_the_gpu_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(settings.torch.cuda, "is_available", lambda: True)
    read = {}
    for chosen, has in itertools.product((["precision"], []), (True, False)):
        monkeypatch.setattr(settings.torch.cuda, "is_bf16_supported", lambda has=has, **_: has)
        job = FineTune(model="gpt2", precision="bf16", learning_rate=1.0).to_dict()
        (tmp_path / "job.json").write_text(json.dumps({"job": job, "gpus": 1, "chosen": chosen}))
        read[bool(chosen), has] = Assignment.read().job.precision
    assert read == {
        (True, True): "bf16",
        (True, False): "fp32",
        (False, True): "bf16",
        (False, False): "bf16",
    }
