"""LoRA on every linear layer of mixtures trains on several ranks as plain peft trains it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft import set_peft_model_state_dict as set_state
from torch import nn
from transformers import AutoTokenizer

import tests.support.tinyfamilies as families
from tests.support.forkedruns import Plan, Ran
from tests.support.tinyfamilies import RATE, STEPS, Trained
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.layers import with_lora
from workbench.finetune.options.adapters import Lora

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("one_thread")]

TECHNIQUES = {"single": 1, "zero3": 2, "fsdp": 2}
# Weights that plain peft adapts by their name. Their routers are linear layers by class alone.
PARAMETERS = {
    "llama4_text": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
    "phimoe": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
}
PAIRS = [*product(PARAMETERS, TECHNIQUES)]
TRAIN = range(8)
EVALUATION = range(20, 25)
CLOSE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("mixtures")
    for name in PARAMETERS:
        families.build(name, root / name)
    return {name: root / name for name in PARAMETERS}


@pytest.fixture(scope="module")
def ran(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("runs"))
    families.write_rows(plan.root, {"train": TRAIN, "eval": EVALUATION})
    for family, technique in PAIRS:
        plan.add(
            f"{family}-{technique}",
            TECHNIQUES[technique],
            model=str(folders[family]),
            peft="lora",
            technique=technique,
            per_device_train_batch_size=len(TRAIN) // TECHNIQUES[technique],
            max_steps=STEPS,
            optimizer="sgd",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            warmup_steps=0,
            router_aux_loss_coef=0,
            profile_step=0,
        )
    return plan.run()


def adapted(folder: Path, parameters: list[str]) -> Any:
    """Return a model with the adapters of plain peft, and the values that a run begins with."""
    base = families.read(folder, pairs=False)
    linear = []
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ("lm_head", "router"):
            linear.append(name)
    config = LoraConfig(
        r=Lora().r,
        lora_alpha=Lora().alpha,
        target_modules=linear,
        target_parameters=parameters,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    torch.manual_seed(FineTune().seed)
    begun = with_lora(families.read(folder, pairs=False), Lora(), checkpointing=False)
    set_state(model, get_peft_model_state_dict(begun))
    return model


@pytest.fixture(scope="module")
def plainly(folders: Mapping[str, Path]) -> Mapping[str, Trained]:
    trained = {}
    for name, folder in folders.items():
        model = adapted(folder, PARAMETERS[name])
        words = AutoTokenizer.from_pretrained(folder)
        trained[name] = families.taught(
            model, words, pairs=False, train=TRAIN, evaluation=EVALUATION
        )
    return trained


@pytest.mark.parametrize(("family", "technique"), PAIRS)
def test_adapters_of_a_mixture_train_as_in_plain_peft(
    family: str,
    technique: str,
    ran: Mapping[str, Ran],
    plainly: Mapping[str, Trained],
    folders: Mapping[str, Path],
) -> None:
    run = ran[f"{family}-{technique}"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()[-2000:]
    expected = plainly[family]
    (end,) = run.data("end")
    assert end["first_eval_loss"] == pytest.approx(expected.first_eval_loss, abs=CLOSE)
    assert run.curve("loss") == pytest.approx(expected.losses, abs=CLOSE)
    assert end["eval_loss"] == pytest.approx(expected.eval_loss, abs=CLOSE)
    assert end["eval_loss"] < float(str(end["first_eval_loss"])) - 1e-3
    # Plain peft reads the saved adapters as they were trained.
    base = families.read(folders[family], pairs=False)
    saved = PeftModel.from_pretrained(base, str(run.folder / "out" / "model"))
    words = families.tokenizer(ends=False)
    loss = families.eval_loss(saved, words, EVALUATION, pairs=False)
    assert loss == pytest.approx(expected.eval_loss, abs=CLOSE)
