"""Checkpoints and evaluations by time, for jobs that name no steps, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.forkedruns import Plan, Ran
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.train.callbacks import SaveTimer
from workbench.rundir.checkpoints import problem_of

STEPS = 8
COMMON = {"max_steps": STEPS, "per_device_train_batch_size": 2, "profile_step": 0}
ADAPTERS = {"peft": "lora", "lora": {"dropout": 0.2}}
CASES: dict[str, tuple[int, dict[str, object]]] = {
    "single-lora": (1, {"technique": "single", **ADAPTERS}),
    "zero1": (2, {"technique": "zero1"}),
    "local-sgd": (2, {"technique": "local-sgd", "local_sgd": {"sync_steps": 3}}),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ran]]:
    runs: dict[str, Ran] = {}
    # Every step is due, and the clock does not decide.
    for every_s in ("1e-9", "600"):
        plan = Plan(tmp_path_factory.mktemp("timed"))
        for name, (count, options) in CASES.items():
            plan.add(f"{name}-{every_s}", count, **{**COMMON, **options})  # type: ignore[arg-type]
        plan.add(f"off-{every_s}", 2, technique="ddp", save_steps=0, eval_steps=0, **COMMON)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORKBENCH_SAVE_EVERY_S", every_s)
            runs |= plan.run()
    yield runs


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_job_without_steps_saves_and_evaluates_and_trains_alike(
    ran: dict[str, Ran], name: str
) -> None:
    often, never = ran[f"{name}-1e-9"], ran[f"{name}-600"]
    for run in (often, never):
        assert set(run.exit_codes.values()) == {0}, run.stderr()
    for figure in ("step", "loss", "grad_norm"):
        assert often.curve(figure) == pytest.approx(never.curve(figure), rel=1e-6), figure
    assert not never.data("checkpoint"), "a run of under ten minutes writes none"
    assert [event["step"] for event in never.data("eval")] == [0, STEPS]
    saved = [int(str(event["step"])) for event in often.data("checkpoint")]
    evaluated = [event["step"] for event in often.data("eval")]
    assert saved and STEPS not in saved, "a checkpoint after the last step serves nobody"
    assert evaluated == [0, *saved, STEPS]
    ranks = CASES[name][0]
    for rank in range(ranks):
        part = often.folder / "checkpoints" / f"step-{saved[-1]}" / f"rank-{rank}"
        assert problem_of(part) == ""


@pytest.mark.slow
def test_zero_turns_both_off(ran: dict[str, Ran]) -> None:
    run = ran["off-1e-9"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert not run.data("checkpoint")
    assert [event["step"] for event in run.data("eval")] == [0, STEPS]


def test_the_later_of_time_and_share_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    timer = SaveTimer(FineTune())
    timer.on_train_begin(None, SimpleNamespace(max_steps=200), None)
    asked = {}
    for step in range(1, 31):
        timer.on_step_begin()
        # Ten steps take as long as the default between two checkpoints.
        now[0] += 60
        timer.on_step_end()
        if not timer.is_there():
            continue
        control = SimpleNamespace(should_save=False, should_evaluate=False)
        timer.obey(control)
        assert control.should_save and control.should_evaluate
        asked[step] = now[0]
        # A pause longer than a tenth of the default makes the next one rarer.
        now[0] += 90
    assert list(asked) == [10, 25], "ten steps are 5 %; then 15 steps are ten times the pause"


@pytest.mark.parametrize(
    ("options", "saves", "evaluates"),
    [
        ({}, True, True),
        ({"save_steps": 5}, False, True),
        ({"save_steps": 0}, False, True),
        ({"eval_steps": 5}, True, False),
        ({"eval_steps": 0}, True, False),
        ({"eval_strategy": "epoch"}, True, False),
        ({"eval_strategy": "no"}, True, False),
        ({"model": "tiny-llama", "method": "grpo", "rewards": ["rewards.py:score"]}, True, False),
    ],
)
def test_options_of_the_job_turn_the_clock_off(
    options: dict[str, object], saves: bool, evaluates: bool
) -> None:
    timer = SaveTimer(FineTune(**options))  # type: ignore[arg-type]
    control = SimpleNamespace(should_save=False, should_evaluate=False)
    timer.obey(control)
    assert (control.should_save, control.should_evaluate) == (saves, evaluates)
