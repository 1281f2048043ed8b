"""Ways to train on a folder's rows, each with the steps' wall and CPU clock: ours and plain ones.

`python -m tools.bench.ways WAY FOLDER STEPS`, or through torchrun on several ranks. FOLDER holds
`model/` and `train.jsonl`, as `work.write_model` writes them. BENCH_STEP is a rank's step, such as
"8x1": rows of a micro-batch, and micro-batches; else 16x2. Each rank prints a line of JSON, whose
figures leave out the first five steps.

Plain ways are those that a user who cares for speed would pick: `trainer`, transformers' Trainer
with batches of like lengths; `packing`, TRL's trainer with packed rows, for causal models; `loop`,
a DDP loop by hand over windows of eight sorted steps. `original` is the recipe that the project
grew out of: every row padded to 96 + 96. All use the fused AdamW and state the loss each step.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler

MICRO, ACCUMULATION = map(int, os.environ.get("BENCH_STEP", "16x2").split("x"))
LEFT_OUT, WIDTH = 5, 96
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
ROWS = MICRO * ACCUMULATION
"""Rows of a rank's step."""
PACKED = 512 if MICRO >= 8 else 256
"""Tokens of a packed sequence; a sequence for each eight rows of a micro-batch."""
WINDOW = 8
"""Steps whose rows the loop sorts together."""
RATE = 1e-3
Tokens = dict[str, list[int]]


class Clock:
    """Wall and CPU seconds of this process after each step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def tick(self) -> None:
        self.wall.append(time.monotonic())
        self.cpu.append(time.process_time())

    def figures(self, rows_of_a_step: float) -> dict[str, float]:
        """Return the seconds of 1,280 rows of all ranks together: 40 steps of one rank."""
        steps = len(self.wall) - LEFT_OUT
        share = 1280 / (steps * rows_of_a_step)
        return {
            name: share * (times[-1] - times[LEFT_OUT - 1])
            for name, times in (("wall_s", self.wall), ("cpu_s", self.cpu))
        }

    def watch_trainer(self) -> None:
        """Tick after each step of any Trainer of this process."""
        ended = CallbackHandler.on_step_end

        def on_step_end(handler: Any, *given: Any, **named: Any) -> Any:
            self.tick()
            return ended(handler, *given, **named)

        CallbackHandler.on_step_end = on_step_end


def loaded(folder: Path) -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    place = folder / "model"
    kind = (
        AutoModelForSeq2SeqLM
        if AutoConfig.from_pretrained(place).is_encoder_decoder
        else AutoModelForCausalLM
    )
    return kind.from_pretrained(place), AutoTokenizer.from_pretrained(place)


def texts(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def tokens(folder: Path, model: Any, tokenizer: Any) -> list[Tokens]:
    """Return each row's tokens; a causal model learns the answer alone, as `FineTune` does."""
    made: list[Tokens] = []
    for row in texts(folder):
        source = tokenizer(row["source"], truncation=True, max_length=WIDTH).input_ids
        target = tokenizer(row["target"], truncation=True, max_length=WIDTH).input_ids
        if model.config.is_encoder_decoder:
            made.append({"input_ids": source, "labels": target})
        else:
            answer = [*target, tokenizer.eos_token_id]
            labels = [-100] * len(source) + answer
            made.append({"input_ids": [*source, *answer], "labels": labels})
    return made


def arguments(folder: Path, steps: int, **more: Any) -> dict[str, Any]:
    chosen = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": steps,
        "learning_rate": RATE,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        "ddp_backend": "gloo" if RANKS > 1 else None,
    }
    return {**chosen, **more}


def trainer(folder: Path, steps: int, clock: Clock) -> float:
    """Train with batches of like lengths, padded to their longest row."""
    model, tokenizer = loaded(folder)
    options = arguments(folder, steps, train_sampling_strategy="group_by_length")
    Trainer(
        model=model,
        args=TrainingArguments(**options),
        train_dataset=tokens(folder, model, tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
    ).train()
    return ROWS * RANKS


def packing(folder: Path, steps: int, clock: Clock) -> float:
    """Train with TRL's trainer on packed rows; return the rows of a step, which are a mean."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = loaded(folder)
    given = tokens(folder, model, tokenizer)
    rows = [
        {
            "input_ids": row["input_ids"],
            "completion_mask": [int(label != -100) for label in row["labels"]],
        }
        for row in given
    ]
    options = arguments(
        folder,
        steps,
        per_device_train_batch_size=max(1, MICRO // 8),
        packing=True,
        max_length=PACKED,
        completion_only_loss=True,
        gradient_checkpointing=False,
        bf16=False,
    )
    made = SFTTrainer(
        model=model,
        args=SFTConfig(**options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    made.train()
    sequences = max(1, MICRO // 8) * ACCUMULATION * RANKS
    return sequences * len(rows) / len(made.train_dataset)


def original(folder: Path, steps: int, clock: Clock) -> float:
    """Train on rows padded to 96 tokens a side."""
    model, tokenizer = loaded(folder)
    rows = tokens(folder, model, tokenizer)
    sides = 1 if model.config.is_encoder_decoder else 2
    pads = {"input_ids": tokenizer.pad_token_id, "labels": -100}

    def batch(some: list[Tokens]) -> dict[str, torch.Tensor]:
        made = {
            name: torch.tensor(
                [row[name] + [pad] * (sides * WIDTH - len(row[name])) for row in some]
            )
            for name, pad in pads.items()
        }
        return {**made, "attention_mask": (made["input_ids"] != tokenizer.pad_token_id).long()}

    options = arguments(folder, steps, per_device_train_batch_size=ROWS)
    options["gradient_accumulation_steps"] = 1
    Trainer(
        model=model, args=TrainingArguments(**options), train_dataset=rows, data_collator=batch
    ).train()
    return ROWS


def micro_batches(rows: list[Tokens], rank: int, ranks: int) -> Iterator[list[list[Tokens]]]:
    """Give this rank's micro-batches, a step at a time, for ever."""
    order = random.Random(0)
    size = WINDOW * ROWS * ranks
    while True:
        order.shuffle(rows)
        for start in range(0, len(rows) - size + 1, size):
            window = sorted(rows[start : start + size], key=lambda row: len(row["input_ids"]))
            cut = [window[n : n + MICRO] for n in range(0, size, MICRO)]
            # Neighbours are alike in length: they are the ranks' micro-batches of the same moment.
            moments = [cut[n : n + ranks] for n in range(0, len(cut), ranks)]
            order.shuffle(moments)
            own = [moment[rank] for moment in moments]
            for n in range(0, len(own), ACCUMULATION):
                yield own[n : n + ACCUMULATION]


def loop(folder: Path, steps: int, clock: Clock) -> float:
    """Train by hand, with DDP where there are several ranks."""
    rank, ranks = int(os.environ.get("RANK", 0)), RANKS
    plain, tokenizer = loaded(folder)
    model = plain
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    collate = DataCollatorForSeq2Seq(tokenizer, plain, return_tensors="pt")
    given = micro_batches(tokens(folder, plain, tokenizer), rank, ranks)
    model.train()
    for step in range(steps):
        total = 0.0
        for number, rows in enumerate(next(given), 1):
            if ranks > 1:
                model.require_backward_grad_sync = number == ACCUMULATION
            loss = model(**collate(rows)).loss / ACCUMULATION
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if rank == 0:
            print({"step": step, "loss": total}, file=sys.stderr)
        clock.tick()
    if ranks > 1:
        torch.distributed.destroy_process_group()
    return ROWS * ranks


def ours(folder: Path, steps: int, clock: Clock) -> float:
    """Train as a rank of a run does, without the pod around it."""
    from workbench import FineTune
    from workbench.finetune.train.main import main as run

    rank = int(os.environ.get("RANK", 0))
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", os.getpid())
    work = folder / f"ours-{run_id}"
    own = work / f"rank-{rank}"
    own.mkdir(parents=True)
    job = FineTune(
        model=str(folder / "model"),
        technique="single" if RANKS == 1 else "ddp",
        max_steps=steps,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=RATE,
        max_source_length=WIDTH,
        max_target_length=WIDTH,
        eval_strategy="no",
        predict_rows=0,
        profile_step=0,
    )
    raw = {
        "job": job.to_dict(),
        "train": str(folder / "train.jsonl"),
        "eval": str(folder / "eval.jsonl"),
        "hub": None,
        "deepspeed": None,
        "gpus": 0,
    }
    file = own / "job.json"
    file.write_text(json.dumps(raw), encoding="utf-8")
    file.replace(work / "job.json")
    # Each rank is a pod.
    ranks = {"RANK": "0", "WORLD_SIZE": "1", **os.environ}
    os.environ.update(ranks, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(WORKBENCH_RUN_DIR=str(work), WORKBENCH_RANK_DIR=str(own))
    run()
    return ROWS * RANKS


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss, with scores at no more positions than those that have a label."""
    if model.config.is_encoder_decoder:
        return model(**batch).loss
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1]
    labels = batch["labels"][:, 1:]
    learned = labels != -100
    scores = model.lm_head(hidden[learned])
    return torch.nn.functional.cross_entropy(scores, labels[learned])


def peak(folder: Path) -> dict[str, float]:
    """Return the fewest operations of 1,280 rows, and those a second of one matrix product."""
    from torch.utils.flop_counter import FlopCounterMode

    model, tokenizer = loaded(folder)
    model.set_attn_implementation("eager")
    collate = DataCollatorForSeq2Seq(tokenizer, model, return_tensors="pt")
    some = tokens(folder, model, tokenizer)[::100]
    with FlopCounterMode(display=False) as counted:
        for row in some:
            loss_of(model, collate([row])).backward()
    side, best = 1024, 0.0
    left, right = torch.randn(side, side), torch.randn(side, side)
    for _ in range(10):
        began = time.process_time()
        left @ right
        best = max(best, 2 * side**3 / (time.process_time() - began))
    return {"operations": counted.get_total_flops() * 1280 / len(some), "peak": best}


WAYS: dict[str, Callable[[Path, int, Clock], float]] = {
    way.__name__: way for way in (ours, trainer, packing, loop, original)
}


def main() -> None:
    way, folder = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    if way == "peak":
        print(json.dumps(peak(folder)))
        return
    clock = Clock()
    if way != "loop":
        clock.watch_trainer()
    rows = WAYS[way](folder, int(sys.argv[3]), clock)
    print(json.dumps(clock.figures(rows)), flush=True)


if __name__ == "__main__":
    main()
