"""Reward functions of a notebook are tried on rows before a pod starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from workbench import FineTune
from workbench.base.errors import ConfigError
from workbench.finetune.data.sources.dataset import dataset_from, prepare
from workbench.finetune.methods.registry import method_of
from workbench.finetune.submit.metric_inputs import reward_inputs
from workbench.finetune.submit.rewards import try_rewards


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """Write rows of which the fourth has no answer."""
    rows: list[dict[str, Any]] = [{"prompt": f"{n}?", "answer": str(n)} for n in range(6)]
    del rows[3]["answer"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = dataset_from({"kind": "files", "train": str(path), "eval": str(path)})
    prepared = prepare(dataset, tmp_path / "run" / "inputs", reader=method_of("grpo").rows)
    assert prepared.train is not None
    return prepared.train


def test_the_first_row_and_the_first_row_that_lacks_a_column_are_tried(train: Path) -> None:
    seen: list[Any] = []

    def judged(prompts: Sequence[str], completions: Sequence[str], answer: Any) -> list[int]:
        seen.append((list(prompts), list(answer)))
        return [1 for _ in completions]

    try_rewards([judged], train)
    assert seen == [(["0?", "3?"], ["0", None])]


def test_none_and_coroutines_are_accepted(train: Path) -> None:
    async def later(completions: Sequence[str], answer: Sequence[str | None]) -> list[Any]:
        return [None if wanted is None else 1.0 for wanted in answer]

    def never(completions: Sequence[str]) -> list[None]:
        return [None for _ in completions]

    try_rewards([later, never], train)


def test_a_function_that_fails_for_a_row_without_the_column_is_refused(train: Path) -> None:
    def strict(completions: Sequence[str], answer: Sequence[str]) -> list[int]:
        return [len(wanted) for wanted in answer]

    words = r"rewards: the reward function strict raised TypeError.*column 'answer' is None in 1 of"
    with pytest.raises(ConfigError, match=rf"{words} .*3\?.* made up for 2 rows"):
        try_rewards([strict], train)


def test_an_async_function_of_a_file_is_a_reward_and_no_metric(tmp_path: Path) -> None:
    path = tmp_path / "judge.py"
    path.write_text("async def judged(completions, **_):\n    return [1.0 for _ in completions]\n")
    job = FineTune(
        model="tiny-llama",
        method="grpo",
        rewards=[f"{path}:judged"],
        per_device_eval_batch_size=8,
    )
    (sent,) = reward_inputs(job)
    assert sent["function"] == "judged"

    async def metric(predictions: list[str], references: list[str]) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="metric is an async function, and metrics are called"):
        FineTune(model="tiny-llama", metrics=[metric])
