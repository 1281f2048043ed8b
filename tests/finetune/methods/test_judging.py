"""Function functions get what they name; a failing one is named with the row, and a run keeps its
last step."""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from math import nan
from typing import Any

import numpy as np
import pytest

from tests.support.forkedruns import Plan, Ran, run_all
from tests.support.methodruns import prompts, write_prepared, write_rows
from workbench.finetune.data.sources.dataset import dataset_from, prepare
from workbench.finetune.methods.judging import Raised, Row, call_rewards, text_row, unjudged
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.metrics import Function
from workbench.rundir.checkpoints import problem_of

ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}]


def call(
    function: Function, rows: Sequence[Row], completions: Sequence[Any], **further: Any
) -> Any:
    """Return the rewards of one function."""
    (judged,) = call_rewards([("judged", function)], rows, completions, **further)
    return judged


def test_a_function_gets_the_arguments_that_it_names() -> None:
    def judged(completions: list[str], answer: list[str]) -> list[bool]:
        return [said == wanted for said, wanted in zip(completions, answer, strict=True)]

    assert call(judged, ROWS, ["2", "5"], trainer_state=None) == [1.0, 0.0]

    def everything(prompts: list[str], **others: Any) -> list[int]:
        assert others.keys() == {"completions", "answer", "trainer_state"}
        return [len(prompt) for prompt in prompts]

    assert call(everything, ROWS, ["2", "5"], trainer_state=None) == [4.0, 4.0]


def test_the_answers_to_a_chat_are_messages() -> None:
    turns = [{"prompt": [{"role": "user", "content": "1+1?"}]}]

    def judged(completions: list[list[dict[str, str]]]) -> list[int]:
        return [len(turns[0]["content"]) for turns in completions]

    assert call(judged, turns, ["two"]) == [3.0]


def test_the_prompt_of_a_chat_is_the_list_of_messages_of_the_row() -> None:
    turns = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "1+1?"},
    ]
    example = method_of("grpo").rows.read({"prompt": turns, "answer": "2"}, "line 1")
    assert text_row(example) == {"prompt": turns, "answer": "2"}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0, float("nan")], r"returned nan, .* completion '5' of the row .*2\+2\?"),
        ([1.0, "2"], "returned '2', no finite number"),
        ([[1.0], [2.0]], r"returned \[1.0\], no finite number"),
        (np.ones((2, 1)), r"returned ndarray of shape \(2, 1\) for 2 completions"),
        (np.float32(1.0), r"returned float32 of shape \(\) for 2 completions"),
        ([1.0], "returned 1 values for 2 completions"),
        (0.5, "returned float for 2 completions"),
    ],
)
def test_a_reward_that_is_no_number_is_refused_with_its_row(returned: Any, words: str) -> None:
    with pytest.raises(Raised, match=f"the reward function judged {words}"):
        call(lambda completions: returned, ROWS, ["2", "5"])


def test_an_error_is_named_with_the_first_row_and_kept_as_the_cause() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(Raised, match=r"judged raised KeyError: 'answer'.*1\+1\?") as caught:
        call(broken, ROWS, ["2", "5"])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("number", [np.True_, True, Decimal(1), Fraction(1), np.float16(1)])
def test_a_number_of_any_type_is_a_reward(number: object) -> None:
    assert call(lambda completions: [number, 0], ROWS, ["2", "5"]) == [1.0, 0.0]


def test_none_means_that_a_function_does_not_apply() -> None:
    def some(completions: list[str], answer: list[str]) -> list[float | None]:
        return [None if wanted == "2" else 1.0 for wanted in answer]

    def never(completions: list[str]) -> list[None]:
        return [None for _ in completions]

    judged = call_rewards([("some", some), ("never", never)], ROWS, ["2", "5"])
    assert str(judged) == "[[nan, 1.0], [nan, nan]]"
    assert unjudged(judged) == [0]
    objects = call(lambda completions: np.array([1, None]), ROWS, ["2", "5"])
    assert str(objects) == "[1.0, nan]"


def test_async_functions_run_together_on_a_loop_that_stays() -> None:
    loops = []
    met = asyncio.Event()

    async def waits(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        await met.wait()
        return [1.0 for _ in completions]

    async def meets(completions: list[str], answer: list[str]) -> list[float | None]:
        met.set()
        return [None if wanted == "2" else 2.0 for wanted in answer]

    def plain(completions: list[str]) -> list[float]:
        return [3.0 for _ in completions]

    named = [("waits", waits), ("plain", plain), ("meets", meets)]
    judged = call_rewards(named, ROWS, ["2", "5"])
    assert str(judged) == "[[1.0, 1.0], [3.0, 3.0], [nan, 2.0]]"
    # A notebook runs a loop of its own.
    asyncio.run(asyncio.to_thread(call_rewards, named, ROWS, ["2", "5"]))

    async def in_a_notebook() -> Any:
        return call(functools.partial(waits), ROWS, ["2", "5"])

    assert asyncio.run(in_a_notebook()) == [1.0, 1.0]
    assert len({*loops}) == 1


@pytest.mark.parametrize("error", [KeyError("answer"), SystemExit(2), asyncio.CancelledError()])
def test_an_async_function_that_fails_is_named(error: BaseException) -> None:
    async def broken(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(Raised, match=f"judged raised {type(error).__name__}.*1.1") as caught:
        call(broken, ROWS, ["2", "5"])
    assert caught.value.__cause__ is error
    assert call(lambda completions: [1, 2], ROWS, ["2", "5"]) == [1.0, 2.0]


def test_a_column_that_a_row_lacks_is_none_and_named_with_the_row() -> None:
    rows = [{**ROWS[0], "hint": None}, {"prompt": "2+2?", "answer": None, "hint": "4"}]

    def strict(completions: list[str], answer: list[Any]) -> list[float]:
        return [len(wanted) for wanted in answer]

    words = r"judged raised TypeError.*column 'answer' is None in 1 of them, first in .*2\+2\?"
    with pytest.raises(Raised, match=words) as caught:
        call(strict, rows, ["2", "5"])
    assert "hint" not in str(caught.value).partition("the column")[2].partition("first in")[0]


def test_every_completion_has_the_form_of_its_own_prompt() -> None:
    rows = [{"prompt": "1+1?"}, {"prompt": [{"role": "user", "content": "2+2?"}]}]
    seen: list[Any] = []
    for said in (["2", "4"], [[{"role": "assistant", "content": each}] for each in "24"]):
        call(lambda completions: seen.extend(completions) or [1, 1], rows, said)
    assert seen == ["2", [{"role": "assistant", "content": "4"}]] * 2


LATER = """\
def judged(completions, trainer_state, **_):
    if {fails}:
        raise ValueError("no judge")
    return [float(len(said)) for said in completions]
"""
# An epoch has two steps: the second run fails at its begin, the third amid.
FAILS = {
    "whole": "False",
    "second": "trainer_state.global_step == 2",
    "third": "trainer_state.global_step == 3",
    "last": "trainer_state.global_step == 5",
}
STEPS = 5
SOME = """\
def some(completions, answer):
    assert len(answer) == len(completions)
    return [wanted and float(len(said)) for said, wanted in zip(completions, answer)]

async def later(completions, answer, **_):
    return [None if wanted != "SELECT" else 1.0 for wanted in answer]
"""


def add(plan: Plan, name: str, ranks: int, source: str, *functions: str, **options: Any) -> None:
    """Add a run of grpo whose answers are judged by functions of a file."""
    more = options.pop("more", None)
    given = {
        "method": "grpo",
        "model": "tiny-llama",
        "technique": "ddp",
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_target_length": 6,
        "profile_step": 0,
        "rewards": [f"judged.py:{function}" for function in functions],
        "method_options": {"num_generations": 4},
    }
    plan.add(name, ranks, more=more, **{**given, **options})
    job = plan.root / name / "job.json"
    sent = [
        {"path": "/notebook/judged.py", "function": function, "source": source}
        for function in functions
    ]
    job.write_text(json.dumps({**json.loads(job.read_text()), "rewards": sent}))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Do runs whose reward fails, the same from their checkpoints, and others on all kinds."""
    failing = Plan(tmp_path_factory.mktemp("failing"))
    write_prepared(failing, "grpo", train=4)
    for name, condition in FAILS.items():
        add(failing, name, 2, LATER.format(fails=condition), "judged")
    for step, name in ((2, "second"), (3, "third")):
        saved = str(failing.root / name / "checkpoints" / f"step-{step}")
        source = LATER.format(fails="False")
        add(failing, f"rest-{step}", 2, source, "judged", resume="b", more={"checkpoint": saved})
    others = Plan(tmp_path_factory.mktemp("others"))
    rows = [dict(row) for row in prompts(0, 16)]
    for number in range(0, 16, 4):
        del rows[number]["answer"]
    made = prepare(
        dataset_from(str(write_rows(others.root / "rows.jsonl", rows))),
        others.root,
        reader=method_of("grpo").rows,
    )
    assert made.train == others.root / "train.jsonl"
    add(others, "some", 1, SOME, "some", "later", technique="single", per_device_train_batch_size=8)
    done: dict[str, Ran] = {}
    for runs in run_all(failing, others, timeout_s=900):
        done |= runs
    return done


@pytest.mark.slow
def test_a_failing_reward_ends_the_run_and_loses_no_finished_step(ran: Mapping[str, Ran]) -> None:
    assert set(ran["whole"].exit_codes.values()) == {0}, ran["whole"].stderr()
    # Amid the training: the function, its line and the row are named, and the step is kept.
    for step, name in ((2, "second"), (3, "third")):
        failed = ran[name]
        assert 0 not in failed.exit_codes.values()
        error = failed.record(0, "error.json")
        assert "the reward function judged raised ValueError: no judge" in str(error["message"])
        assert "prompt" in str(error["message"])
        assert "judged.py" in str(error["traceback"])
        for rank in (0, 1):
            assert not problem_of(failed.folder / "checkpoints" / f"step-{step}" / f"rank-{rank}")
        # The last finished step is in the curve.
        assert [each["step"] for each in failed.data("step")] == [*range(1, step + 1)]
    # After the last step: the model is there, and only the figures are missing.
    last = ran["last"]
    assert set(last.exit_codes.values()) == {0}, last.stderr()
    assert (last.folder / "out" / "model" / "model.safetensors").is_file()
    assert any("the last evaluation failed" in note and "no judge" in note for note in last.notes())


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_a_run_continues_from_a_failed_reward_as_if_it_had_not_failed(
    ran: Mapping[str, Ran], step: int
) -> None:
    rest = ran[f"rest-{step}"]
    assert set(rest.exit_codes.values()) == {0}, rest.stderr()
    names = ("step", "loss", "grad_norm", "reward", "completions/mean_length", "entropy")
    figures = []
    for run in (ran["whole"], rest):
        figures.append([tuple(each[name] for name in names) for each in run.data("step")])
    whole, continued = figures
    assert continued == whole[step:] and len(continued) == STEPS - step
    assert len({each[3] for each in whole}) > 2


@pytest.mark.slow
def test_rows_without_a_column_and_rewards_that_do_not_apply(ran: Mapping[str, Ran]) -> None:
    some = ran["some"]
    assert set(some.exit_codes.values()) == {0}, some.stderr()
    steps = some.data("step")
    assert len(steps) == STEPS
    # The second function applies to no row, and the first not to the rows without an answer.
    assert not any("rewards/later/mean" in step for step in steps)
    for step in steps:
        assert step["reward"] == step["rewards/some/mean"]
    (unscored,) = [note for note in some.notes() if "no reward function applies" in note]
    assert "'answer': None" in unscored
    evaluation = some.data("eval")[-1]["metrics"]
    assert isinstance(evaluation, dict)
    assert evaluation["reward"] == evaluation["rewards/some/mean"]
    assert not any("later" in name or "applies" in name for name in evaluation)


def test_figures_of_an_evaluation_count_the_rows_to_which_a_function_applies() -> None:
    from workbench.finetune.methods.on_pods.evaluation import RowMeans
    from workbench.finetune.methods.on_pods.judged import weighed_rewards, with_deviations

    parts = [[[1.0, nan, 3.0], [nan, nan, 4.0]], [[nan, 5.0], [nan, nan]]]
    means = RowMeans()
    for judged in parts:
        for name, mean, share in weighed_rewards(["a", "b"], judged):
            means.add(name, mean, share * len(judged[0]))
    figures = with_deviations({"loss": 1.0, **means.of_all_ranks()}, 5)
    assert figures == pytest.approx(
        {
            "loss": 1.0,
            "reward": (1 + 7 + 5) / 3,
            "reward_std": statistics.stdev([1, 7, 5]),
            "rewards/a/mean": 3,
            "rewards/a/std": 2,
            "rewards/b/mean": 4,
            "rewards/b/std": 0,
        }
    )
