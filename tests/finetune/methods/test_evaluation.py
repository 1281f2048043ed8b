"""Figures of an evaluation are means over rows: the same on one rank and on several.

Five rows in micro-batches of two leave a micro-batch with one row, and one of two ranks without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

import pytest

from tests.support.forkedruns import Plan, Ran, run_all
from tests.support.methodruns import rows_of, write_prepared
from workbench.finetune.methods.on_pods.evaluation import dealt_in_turn
from workbench.finetune.methods.registry import METHODS, method_of

NAMES = [method.name for method in METHODS if method.uses_trl]
ROWS, SIZE = 5, 2
BY_ROW = ("dpo", "reward")
"""Methods whose figures do not depend on the size of a micro-batch."""
REWARD = "def length(completions, answer):\n    return [len(text) for text in answer]\n"


def add(plan: Plan, name: str, method: str, ranks: int, size: int) -> None:
    """Add a run of one step on the same twelve rows."""
    # The first step makes the model different from its reference. The steps of `orpo` depend on
    # the micro-batches, and those of `grpo` on the ranks' answers.
    rate = 1e-9 if method in ("orpo", "grpo") else 1.0
    # The first evaluation must have the figure, else the run ends.
    figure = "rewards/length/mean" if method == "grpo" else method_of(method).metrics[-1]
    given: dict[str, Any] = {"early_stopping_patience": 9, "metric_for_best_model": figure}
    if method == "grpo":
        given |= {"rewards": ["r.py:length"], "method_options": {"num_generations": 2}}
    plan.add(
        name,
        ranks,
        method=method,
        model="tiny-llama",
        technique="single" if ranks == 1 else "ddp",
        max_steps=1,
        optimizer="sgd",
        learning_rate=rate,
        warmup_steps=0,
        per_device_train_batch_size=12 // ranks,
        per_device_eval_batch_size=size,
        max_target_length=10 if method == "grpo" else 40,
        profile_step=0,
        eval_steps=1,
        **given,
    )
    job = plan.root / name / "job.json"
    sent = {"path": "r.py", "function": "length", "source": REWARD}
    job.write_text(json.dumps({**json.loads(job.read_text()), "rewards": [sent]}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Ran]]:
    plans = []
    for method in NAMES:
        plan = Plan(tmp_path_factory.mktemp(method))
        write_prepared(plan, method, train=12, evaluation=ROWS)
        add(plan, "alone", method, 1, ROWS if method in BY_ROW else SIZE)
        # Three ranks cannot share the two answers to a prompt evenly.
        add(plan, "ranks", method, 3 if method == "grpo" else 2, SIZE)
        plans.append(plan)
    return dict(zip(NAMES, run_all(*plans), strict=True))


def evaluations(run: Ran) -> list[dict[str, float]]:
    """Return the figures at step 0 and at step 1."""
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    found = []
    for event in run.data("eval"):
        metrics = event["metrics"]
        assert isinstance(metrics, dict)
        found.append({"loss": float(str(event["eval_loss"])), **metrics})
    assert len(found) == 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in NAMES if name != "grpo"])
def test_figures_on_two_ranks_are_those_of_one(
    runs: Mapping[str, Mapping[str, Ran]], method: str
) -> None:
    alone, on_ranks = (evaluations(runs[method][name]) for name in ("alone", "ranks"))
    # The weights after a step differ in their last digits.
    for expected, found, within in zip(alone, on_ranks, (1e-6, 1e-5), strict=True):
        names = ["loss", *method_of(method).metrics]
        if method not in BY_ROW:
            assert found.keys() == expected.keys() > {*names}
            names = list(expected)
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=within, abs=within), name
    assert method == "orpo" or alone[0]["loss"] != alone[1]["loss"]


@pytest.mark.slow
def test_rewards_are_means_over_prompts_on_one_rank_and_on_three(
    runs: Mapping[str, Mapping[str, Ran]],
) -> None:
    # The reward ignores the answers, which each rank samples.
    lengths = [len(str(row["answer"])) for row in rows_of("grpo", 1, ROWS) for _ in range(2)]
    for run in runs["grpo"].values():
        for figures in evaluations(run):
            assert figures["reward"] == pytest.approx(mean(lengths))
            assert figures["reward_std"] == pytest.approx(stdev(lengths))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_every_row_counts_on_one_rank(rows: int, ranks: int) -> None:
    dealt = [
        list(dealt_in_turn(rows, size=2, rank=rank, world_size=ranks)) for rank in range(ranks)
    ]
    assert len({len(batches) for batches in dealt}) == 1, "forward passes can be collective"
    batches = [batch for mine in dealt for batch in mine]
    assert all(batch.numbers for batch in batches)
    counting = [batch for batch in batches if batch.weight]
    assert sorted(number for batch in counting for number in batch.numbers) == list(range(rows))
    assert all(batch.weight == len(batch.numbers) for batch in counting)
