"""The plain way to train and to ask: the Trainer, both sequences padded to 96 tokens, and one question at a time.

`padded.py train|ask FOLDER STEPS`: FOLDER holds `model/`, `train.jsonl` and `eval.jsonl`. Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Trainer, TrainingArguments

WIDTH = 96


def padded(tokenizer: Any, rows: list[dict[str, str]]) -> list[dict[str, torch.Tensor]]:
    source, target = (
        tokenizer(
            [row[key] for row in rows], padding="max_length", truncation=True, max_length=WIDTH, return_tensors="pt"
        )
        for key in ("source", "target")
    )
    labels = target.input_ids.masked_fill(target.attention_mask == 0, -100)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(source.input_ids, source.attention_mask, labels, strict=True)
    ]


def train(model: Any, tokenizer: Any, rows: dict[str, list[dict[str, str]]], steps: int) -> dict[str, float]:
    data = padded(tokenizer, rows["train"])
    arguments = TrainingArguments(
        output_dir="trainer", per_device_train_batch_size=32, max_steps=steps, learning_rate=1e-3, warmup_steps=0.1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    ended = Trainer(model=model, args=arguments, train_dataset=data).train()
    used = data[: steps * 32]
    useful = sum(int(row["attention_mask"].sum() + (row["labels"] != -100).sum()) for row in used)
    return {
        "samples_per_s": steps * 32 / ended.metrics["train_runtime"],
        "eval_loss": masked_loss(model, padded(tokenizer, rows["eval"])),
        "useful": useful / (2 * WIDTH * len(used)),
    }


def masked_loss(model: Any, rows: list[dict[str, torch.Tensor]]) -> float:
    total = tokens = 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(rows), 32):
            some = rows[start : start + 32]
            batch = {name: torch.stack([row[name] for row in some]) for name in some[0]}
            count = float((batch["labels"] != -100).sum())
            total, tokens = total + float(model(**batch).loss) * count, tokens + count
    return total / tokens


def ask(model: Any, tokenizer: Any, rows: dict[str, list[dict[str, str]]], count: int) -> dict[str, float]:
    began = time.monotonic()
    model.eval()
    for row in rows["eval"][:count]:
        ids = tokenizer(row["source"], truncation=True, max_length=WIDTH, return_tensors="pt")
        with torch.no_grad():
            tokenizer.decode(model.generate(**ids, max_new_tokens=WIDTH, do_sample=False)[0], skip_special_tokens=True)
    return {"answers_per_s": count / (time.monotonic() - began)}


def main() -> None:
    action, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    }
    print(json.dumps({"train": train, "ask": ask}[action](model, tokenizer, rows, count)))


if __name__ == "__main__":
    main()
