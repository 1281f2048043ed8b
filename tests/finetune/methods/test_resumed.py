"""Every method continues from a checkpoint to the last digit, and learns from chats too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.forkedruns import Plan, Ran, run_all
from tests.support.methodruns import rows_of, write_prepared
from workbench.finetune.methods.registry import METHODS, method_of

pytestmark = [pytest.mark.slow, pytest.mark.long]
NAMES = [method.name for method in METHODS if method.uses_trl]
STEPS, SAVED = 5, 3
REWARD = """\
def size(completions, answer):
    said = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [len({*text} & {*wanted}) / 10 for text, wanted in zip(said, answer)]
"""
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}


def add(plan: Plan, name: str, method: str, *, ranks: int = 2, **options: Any) -> None:
    more = options.pop("more", None)
    given = {"rewards": ["r.py:size"], "method_options": {"num_generations": 4, "beta": 0.1}}
    plan.add(
        name,
        ranks,
        more=more,
        **{
            "method": method,
            "model": "tiny-llama",
            "technique": "zero2",
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_target_length": 10,
            "profile_step": 0,
            "eval_steps": 2,
            **(given if method == "grpo" else {}),
            **options,
        },
    )
    job = plan.root / name / "job.json"
    sent = {"path": "r.py", "function": "size", "source": REWARD}
    job.write_text(json.dumps({**json.loads(job.read_text()), "rewards": [sent]}))


def as_chats(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose texts are turns, after a question and an answer before."""
    made = {}
    for name, value in row.items():
        role = ROLES.get(name, "assistant" if name == "completion" else "")
        made[name] = [{"role": role, "content": value}] if role else value
    before = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Ask."}]
    return {**made, "prompt": [*before, *made["prompt"]]}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Ran]]:
    plans = []
    for method in NAMES:
        plan = Plan(tmp_path_factory.mktemp(method))
        write_prepared(plan, method)
        add(plan, "whole", method, save_steps=SAVED)
        saved = str(plan.root / "whole" / "checkpoints" / f"step-{SAVED}")
        add(plan, "rest", method, resume="before", more={"checkpoint": saved})
        plans.append(plan)
        chats = Plan(tmp_path_factory.mktemp(f"{method}-chats"))
        reader = method_of(method).rows
        for name, count in {"train": 24, "eval": 4}.items():
            rows = [reader.read(as_chats(row), "row") for row in rows_of(method, 0, count)]
            (chats.root / f"{name}.jsonl").write_text("".join(r.to_json() + "\n" for r in rows))
        add(chats, "chats", method, ranks=1, chat_template=TEMPLATE, max_steps=2, predict_rows=2)
        plans.append(chats)
    done = run_all(*plans, timeout_s=1400)
    return {method: {**done[2 * n], **done[2 * n + 1]} for n, method in enumerate(NAMES)}


@pytest.mark.parametrize("method", NAMES)
def test_a_resumed_run_has_the_losses_and_figures_of_the_whole_run(
    ran: Mapping[str, Mapping[str, Ran]], method: str
) -> None:
    whole, rest = ran[method]["whole"], ran[method]["rest"]
    for run in (whole, rest):
        assert set(run.exit_codes.values()) == {0}, run.stderr()
    names = ("step", "loss", "grad_norm", *method_of(method).metrics)
    expected = [tuple(step.get(name) for name in names) for step in whole.data("step")[SAVED:]]
    assert [tuple(step.get(name) for name in names) for step in rest.data("step")] == expected
    assert len(expected) == STEPS - SAVED
    last = [run.data("eval")[-1]["eval_loss"] for run in (whole, rest)]
    assert last[0] == last[1]


@pytest.mark.parametrize("method", NAMES)
def test_chats_are_learned_and_their_prompts_are_asked(
    ran: Mapping[str, Mapping[str, Ran]], method: str
) -> None:
    run = ran[method]["chats"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    answers = [
        json.loads(line)
        for line in (run.folder / "out" / "predictions.jsonl").read_text().splitlines()
    ]
    assert len(answers) == 2
    judged = not method_of(method).scores and method_of(method).rows.has_answers
    for answer in answers:
        assert (answer["expected"] is not None) == judged
        assert ("margin" in answer["predicted"]) == method_of(method).scores
