"""Ranks that share rows of 1,750 tokens: the curve of one rank, under every technique."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.forkedruns import Plan, Ran
from workbench.finetune.data.rows import Example
from workbench.finetune.data.wikisql.mini import mini_rows

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("one_thread")]

# name: technique, ranks, ranks that share a row, accumulation
RUNS = {
    "single": ("single", 1, 1, 2),
    "ddp": ("ddp", 4, 4, 2),
    "zero2": ("zero2", 4, 2, 1),
    "zero3": ("zero3", 2, 2, 2),
    "fsdp": ("fsdp", 2, 2, 2),
}
SHARED = [name for name in RUNS if name != "single"]
# name: technique, ranks, options
SHORT = {
    "short": ("single", 1, {"gradient_accumulation_steps": 2}),
    "short zero3": ("zero3", 2, {"sequence_parallel": 2, "gradient_accumulation_steps": 2}),
    "lora": ("single", 1, {"peft": "lora", "gradient_accumulation_steps": 2}),
    "lora ddp": (
        "ddp",
        2,
        {"peft": "lora", "sequence_parallel": 2, "gradient_accumulation_steps": 2},
    ),
}
STEPS = 2
WORDS = ("river", "mill", "miller", "sings", "turns", "past", "and", "the", "stone", "wheel")


def text(seed: int, words: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("sequence"))
    for name, count in {"train": 6, "eval": 3}.items():
        # The longest rows have 1,750 tokens, and one row has an odd number of tokens.
        rows = [
            {"source": text(n, 200 + 19 * n), "target": text(-n, 1550 - 45 * n)}
            for n in range(count)
        ]
        lines = [json.dumps(row) + "\n" for row in rows]
        (plan.root / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    for name, (technique, ranks, shared, accumulation) in RUNS.items():
        plan.add(
            name,
            ranks,
            model="tiny-llama",
            technique=technique,
            sequence_parallel=shared,
            # Shared rows are padded, and would be grouped by length.
            train_sampling_strategy="random",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulation,
            per_device_eval_batch_size=2,
            max_source_length=256,
            max_target_length=1792,
            max_steps=STEPS,
            learning_rate=5e-3,
            metrics=["accuracy"],
            gradient_checkpointing=name == "fsdp",
            predict_rows=0,
            profile_step=0,
        )
    for name, (technique, ranks, options) in SHORT.items():
        plan.add(
            name,
            ranks,
            model="tiny-llama",
            technique=technique,
            per_device_train_batch_size=3,
            train_sampling_strategy="random",
            max_steps=4,
            max_target_length=12,
            predict_rows=5,
            profile_step=0,
            **options,
        )
        _give_rows(plan.root / name, mini_rows(0, 24), mini_rows(1, 7))
    return plan.run()


def _give_rows(folder: Path, train: Iterable[Example], evaluation: Iterable[Example]) -> None:
    job = json.loads((folder / "job.json").read_text())
    for name, rows in {"train": train, "eval": evaluation}.items():
        (folder / f"{name}.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
        job[name] = str(folder / f"{name}.jsonl")
    (folder / "job.json").write_text(json.dumps(job))


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_rows_follow_the_curve_of_one_rank(ran: dict[str, Ran], name: str) -> None:
    reference, run = ran["single"], ran[name]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    for metric in ("loss", "grad_norm"):
        assert run.curve(metric) == pytest.approx(reference.curve(metric), rel=1e-5), metric
    for ended, by_one in zip(run.data("eval"), reference.data("eval"), strict=True):
        assert ended["eval_loss"] == pytest.approx(by_one["eval_loss"], rel=1e-5)
        assert ended["metrics"] == pytest.approx(by_one["metrics"], abs=1e-3)


@pytest.mark.parametrize(("one", "shared"), [("short", "short zero3"), ("lora", "lora ddp")])
def test_ranks_that_share_rows_answer_as_one_rank(
    ran: dict[str, Ran], one: str, shared: str
) -> None:
    assert set(ran[shared].exit_codes.values()) == {0}, ran[shared].stderr()
    assert ran[shared].curve("loss") == pytest.approx(ran[one].curve("loss"), rel=1e-5)
    answers, by_one = (
        (ran[name].folder / "out" / "predictions.jsonl").read_text() for name in (shared, one)
    )
    assert answers == by_one and len(answers.splitlines()) == 5
