"""Reward functions get what they name; a failing one is named with the row, and a run keeps its
last step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from methodruns import write_prepared

from workbench.finetune.methods.judging import Raised, call_reward
from workbench.rundir.checkpoints import problem_of

ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}]


def test_a_function_gets_the_arguments_that_it_names() -> None:
    def judged(completions: list[str], answer: list[str]) -> list[bool]:
        return [said == wanted for said, wanted in zip(completions, answer, strict=True)]

    assert call_reward(judged, "judged", ROWS, ["2", "5"], trainer_state=None) == [1.0, 0.0]

    def everything(prompts: list[str], **others: Any) -> list[int]:
        assert others.keys() == {"completions", "answer", "trainer_state"}
        return [len(prompt) for prompt in prompts]

    assert call_reward(everything, "f", ROWS, ["2", "5"], trainer_state=None) == [4.0, 4.0]


def test_the_answers_to_a_chat_are_messages() -> None:
    turns = [{"prompt": [{"role": "user", "content": "1+1?"}]}]

    def judged(completions: list[list[dict[str, str]]]) -> list[int]:
        return [len(turns[0]["content"]) for turns in completions]

    assert call_reward(judged, "judged", turns, ["two"]) == [3.0]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0, float("nan")], r"returned nan, .* completion '5' of the row .*2\+2\?"),
        ([1.0, None], "returned None, no finite number"),
        ([1.0], "returned 1 values for 2 completions"),
        (0.5, "returned float for 2 completions"),
    ],
)
def test_a_reward_that_is_no_number_is_refused_with_its_row(returned: Any, words: str) -> None:
    with pytest.raises(Raised, match=f"the reward function judged {words}"):
        call_reward(lambda completions: returned, "judged", ROWS, ["2", "5"])


def test_an_error_is_named_with_the_first_row_and_kept_as_the_cause() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(Raised, match=r"broken raised KeyError: 'answer'.*1\+1\?") as caught:
        call_reward(broken, "broken", ROWS, ["2", "5"])
    assert isinstance(caught.value.__cause__, KeyError)


LATER = """\
calls = 0
def judged(completions, trainer_state, **_):
    global calls
    calls += 1
    if {fails}:
        raise ValueError("no judge")
    return [float(len(said)) for said in completions]
"""
FAILS = {
    "amid": "trainer_state.global_step == 2",
    "last": "trainer_state.global_step == 4",
    "never": "False",
}


@pytest.mark.slow
def test_a_failing_reward_ends_the_run_and_loses_no_finished_step(tmp_path: Path) -> None:
    from forkedruns import Plan

    plan = Plan(tmp_path)
    write_prepared(plan, "grpo")
    for name, condition in FAILS.items():
        plan.add(
            name,
            2,
            method="grpo",
            model="tiny-llama",
            technique="ddp",
            max_steps=4,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            max_target_length=6,
            profile_step=0,
            rewards=["judged.py:judged"],
            method_options={"num_generations": 4},
        )
        job = tmp_path / name / "job.json"
        source = LATER.format(fails=condition)
        sent = {"path": "/notebook/judged.py", "function": "judged", "source": source}
        job.write_text(json.dumps({**json.loads(job.read_text()), "rewards": [sent]}))
    ran = plan.run(timeout_s=600)
    assert set(ran["never"].exit_codes.values()) == {0}, ran["never"].stderr()
    # Amid the training: the function, its line and the row are named, and the step is kept.
    amid = ran["amid"]
    assert 0 not in amid.exit_codes.values()
    error = amid.record(0, "error.json")
    assert "the reward function judged raised ValueError: no judge" in str(error["message"])
    assert "prompt" in str(error["message"])
    assert "judged.py" in str(error["traceback"])
    for rank in (0, 1):
        assert not problem_of(amid.folder / "checkpoints" / "step-2" / f"rank-{rank}")
    # After the last step: the model is there, and only the figures are missing.
    last = ran["last"]
    assert set(last.exit_codes.values()) == {0}, last.stderr()
    assert (last.folder / "out" / "model" / "model.safetensors").is_file()
    notes = [str(note["message"]) for note in last.data("note")]
    assert any("the last evaluation failed" in note and "no judge" in note for note in notes)
