"""The plain way to train and ask: the Trainer, sequences padded to 96, one question at a time.

`padded.py train|learn|ask FOLDER COUNT`: FOLDER holds `model/`,
`train.jsonl` and `eval.jsonl`. Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

WIDTH = 96
ROWS = 32


def padded(tokenizer: Any, rows: list[dict[str, str]]) -> list[dict[str, torch.Tensor]]:
    source, target = (
        tokenizer(
            [row[key] for row in rows],
            padding="max_length",
            truncation=True,
            max_length=WIDTH,
            return_tensors="pt",
        )
        for key in ("source", "target")
    )
    labels = target.input_ids.masked_fill(target.attention_mask == 0, -100)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(source.input_ids, source.attention_mask, labels, strict=True)
    ]


class Ends(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.monotonic())


def batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def cut(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Cut a batch to its longest source and target: only what is masked goes."""
    made = batch(rows)
    source, target = (
        int(mask.sum(1).max()) for mask in (made["attention_mask"], made["labels"] != -100)
    )
    return {
        name: each[:, : target if name == "labels" else source].contiguous()
        for name, each in made.items()
    }


def trained(
    model: Any, data: list[dict[str, torch.Tensor]], steps: int, collate: Any
) -> list[float]:
    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=ROWS,
        max_steps=steps,
        learning_rate=1e-3,
        warmup_steps=0.1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    ends = Ends()
    Trainer(
        model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[ends]
    ).train()
    return ends.times


def train(
    model: Any, tokenizer: Any, rows: dict[str, list[dict[str, str]]], steps: int
) -> dict[str, float]:
    """Return the speed of all steps but the first, which are of one shape whatever their rows."""
    times = trained(model, padded(tokenizer, rows["train"][: steps * ROWS]), steps, batch)
    return {"samples_per_s": (steps - 1) * ROWS / (times[-1] - times[0])}


def learn(
    model: Any, tokenizer: Any, rows: dict[str, list[dict[str, str]]], steps: int
) -> dict[str, float]:
    """Return the evaluation loss after so many steps, and the share of tokens in padded rows."""
    data = padded(tokenizer, rows["train"])
    trained(model, data, steps, cut)
    useful = sum(int(row["attention_mask"].sum() + (row["labels"] != -100).sum()) for row in data)
    return {
        "eval_loss": masked_loss(model, padded(tokenizer, rows["eval"])),
        "useful": useful / (2 * WIDTH * len(data)),
    }


def masked_loss(model: Any, rows: list[dict[str, torch.Tensor]]) -> float:
    total = tokens = 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(rows), ROWS):
            some = cut(rows[start : start + ROWS])
            count = float((some["labels"] != -100).sum())
            total, tokens = total + float(model(**some).loss) * count, tokens + count
    return total / tokens


def ask(
    model: Any, tokenizer: Any, rows: dict[str, list[dict[str, str]]], count: int
) -> dict[str, float]:
    began = time.monotonic()
    model.eval()
    for row in rows["eval"][:: len(rows["eval"]) // count]:
        ids = tokenizer(row["source"], truncation=True, max_length=WIDTH, return_tensors="pt")
        with torch.no_grad():
            tokenizer.decode(
                model.generate(**ids, max_new_tokens=WIDTH, do_sample=False)[0],
                skip_special_tokens=True,
            )
    return {"answers_per_s": count / (time.monotonic() - began)}


def main() -> None:
    action, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    }
    print(
        json.dumps(
            {"train": train, "learn": learn, "ask": ask}[action](model, tokenizer, rows, count)
        )
    )


if __name__ == "__main__":
    main()
