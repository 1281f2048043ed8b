"""Rows of pairs, of judged answers and of prompts, made of WikiSQL's questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.forkedruns import Plan
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.methods.registry import method_of

Row = Mapping[str, object]


def pairs(seed: int, count: int) -> list[dict[str, str]]:
    """Make rows whose rejected answer is the answer to another question."""
    rows = list(mini_rows(seed, count))
    made = []
    for number, row in enumerate(rows):
        others = [each.target for each in rows if each.target != row.target]
        rejected = others[number % len(others)]
        made.append({"prompt": row.source, "chosen": row.target, "rejected": rejected})
    return made


def judged(seed: int, count: int) -> list[dict[str, object]]:
    """Make rows of one answer each, every other answer bad."""
    made: list[dict[str, object]] = []
    for number, row in enumerate(pairs(seed, count)):
        good = number % 2 == 0
        answer = row["chosen" if good else "rejected"]
        made.append({"prompt": row["prompt"], "completion": answer, "label": good})
    return made


def prompts(seed: int, count: int) -> list[dict[str, object]]:
    return [{"prompt": row["prompt"], "answer": row["chosen"]} for row in pairs(seed, count)]


def rows_of(method: str, seed: int, count: int) -> list[dict[str, object]]:
    made: Sequence[Row] = pairs(seed, count)
    if method == "kto":
        made = judged(seed, count)
    elif method == "grpo":
        made = prompts(seed, count)
    return [dict(row) for row in made]


def write_prepared(plan: Plan, method: str, *, train: int = 48, evaluation: int = 6) -> None:
    """Write rows of a method in place of a plan's rows, as a submission would prepare them."""
    reader = method_of(method).rows
    for seed, (name, count) in enumerate({"train": train, "eval": evaluation}.items()):
        rows = rows_of(method, seed, count)
        lines = [reader.read(row, f"row {n}").to_json() + "\n" for n, row in enumerate(rows)]
        (plan.root / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
