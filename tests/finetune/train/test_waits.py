"""A step whose figures are not logged waits for nothing on its device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainingArguments, TrainerCallback

from tests.support.waits import DEVICE, Waits
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import tiny
from workbench.finetune.recipe.order import pad
from workbench.finetune.train.best import BestModel
from workbench.finetune.train.callbacks import EventCallback, StopFile
from workbench.finetune.train.checkpoints import Checkpoints
from workbench.finetune.train.measure.meter import StepMeter
from workbench.finetune.train.trainer import FineTuner, TrainerParts

FIRST, LAST = 2, 4
ACCUMULATION = 2
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Arguments(Seq2SeqTrainingArguments):  # type: ignore[misc]
    @property
    def device(self) -> torch.device:
        assert super().device.type == DEVICE.type
        return DEVICE


class Watched(TrainerCallback):  # type: ignore[misc]
    """Watch the steps from the second to the last but one."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.waits.watching = FIRST <= state.global_step + 1 <= LAST


class Unmasked(FineTuner):
    """A causal model needs no mask of padding on the right."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
        return super().compute_loss(model, inputs, *args, **options)


def waits_of(name: str, root: Path, trainer_class: type[FineTuner]) -> list[str]:
    waits = Waits()
    trainer = trained(name, root, trainer_class, waits)
    assert trainer.state.global_step == LAST + 2
    return waits.seen


def trained(name: str, root: Path, trainer_class: type[FineTuner], waits: Waits) -> FineTuner:
    rows = list(mini_rows(0, 64))
    tokenizer = tiny.tokenizer_for_all(name, rows)
    model = tiny.make(name, tokenizer, 0)
    causal = not model.config.is_encoder_decoder
    encoded = []
    for row in rows:
        source, target = tokenizer(row.source).input_ids, tokenizer(row.target).input_ids
        labels = [-100] * len(source) + target if causal else target
        encoded.append({"input_ids": source + target if causal else source, "labels": labels})
    for weight in model.parameters():
        waits.put(weight)
    clock = StepMeter(causal=causal)
    parts = TrainerParts(
        clock=clock,
        stop=StopFile(root / "stop"),
        best=BestModel(FineTune(technique="single")),
        checkpoints=Checkpoints(root, every=None, resumes=False),
        causal=causal,
    )
    arguments = Arguments(
        output_dir=str(root / "trainer"),
        max_steps=LAST + 2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=ACCUMULATION,
        train_sampling_strategy="random",
        save_strategy="no",
        logging_steps=100,
        logging_nan_inf_filter=False,
        optim="adamw_torch_fused",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    start = None if causal else model.config.decoder_start_token_id
    trainer = trainer_class(
        parts=parts,
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=encoded,
        data_collator=partial(pad, pad_id=tokenizer.pad_token_id, start_id=start),
    )
    events = EventCallback(clock, samples=8)
    trainer.use_callbacks(first=[events], last=[Watched(waits)])
    clock.resume()
    with waits.watch():
        trainer.train()
    return trainer


def test_a_step_that_is_not_logged_waits_for_no_device(tmp_path: Path) -> None:
    assert waits_of("tiny-llama", tmp_path, Unmasked) == []


def test_rows_that_are_read_ahead_train_alike(tmp_path: Path) -> None:
    class ReadsAhead(FineTuner):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.reads_ahead = True

    losses = []
    for trainer_class in (FineTuner, ReadsAhead):
        trainer = trained("tiny-llama", tmp_path / trainer_class.__name__, trainer_class, Waits())
        losses.append([entry["train_loss"] for entry in trainer.state.log_history[-1:]])
        weights = [weight.detach().sum() for weight in trainer.model.parameters()]
        losses[-1] += [float(each) for each in weights]
    assert losses[0] == losses[1]


def test_only_a_mask_of_the_library_waits_in_a_step_of_an_encoder_decoder(tmp_path: Path) -> None:
    """transformers asks on the host whether a mask hides anything, once for each part."""
    waits = waits_of("tiny-t5", tmp_path, FineTuner)
    assert {each.rpartition(" in ")[2].partition(":")[0] for each in waits} <= {"masking_utils.py"}
    assert len(waits) <= 2 * ACCUMULATION * (LAST - FIRST + 1)


def test_the_record_of_waits_sees_reads_copies_and_sizes() -> None:
    waits = Waits()
    host = torch.arange(4)
    waits.watching = True
    with waits.watch():
        int(host.sum())
        host[host > 1]
        there = host.to(DEVICE, non_blocking=True) + 1
        assert waits.seen == []
        host.to(DEVICE)
        torch.tensor(3, device=DEVICE)
        bool((there > 1).all())
        there[there > 1]
        there.nonzero()
        there.tolist()
    kinds = [each.partition(" in ")[0] for each in waits.seen]
    assert kinds == ["to", "tensor", "_local_scalar_dense", "index", "nonzero", "tolist"]
