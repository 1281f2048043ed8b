"""When losses are read, and when ranks meet: counted on real ranks over gloo."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.forkedruns import Plan, Ran
from tests.support.sentences import sentence
from workbench.agent.rank.records import EndedWithAnother, write_error
from workbench.base.errors import RunError
from workbench.finetune.train.losses import EndedStep, HostCopy, StepLosses
from workbench.finetune.train.measure.meter import StepMeter
from workbench.finetune.train.measure.pace import Pace

PATIENCE_S = 840
SYNC, STEPS, POISONED = 100, 8, 3


def real_ranks(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.timeout(PATIENCE_S + 60)(test))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("losses"))
    for name in ("train", "eval"):
        path = plan.root / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:24]))
    small = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_target_length": 8,
    }
    small |= {"profile_step": 0, "max_steps": STEPS}
    apart = {"technique": "local-sgd", "local_sgd": {"sync_steps": SYNC}}
    plan.add("local-sgd", 2, more={"watched": {}}, **apart, **small)  # type: ignore[arg-type]
    plan.add("ddp", 2, more={"watched": {}}, technique="ddp", **small)  # type: ignore[arg-type]
    short = {**small, "max_steps": 5, "gradient_accumulation_steps": 1}
    stopped = {
        "ddp-stopped": {"technique": "ddp"},
        "local-sgd-stopped": {**apart, "local_sgd": {"sync_steps": 3}},
    }
    for name, how in stopped.items():
        plan.add(name, 2, **how, **short)  # type: ignore[arg-type]
        (plan.root / name / "stop").touch()
    for name, how in {"ddp-poisoned": {"technique": "ddp"}, "local-sgd-poisoned": apart}.items():
        watched = {"watched": {"poisoned": POISONED, "rank": 1}}
        plan.add(name, 2, more=watched, save_steps=POISONED, **how, **short)  # type: ignore[arg-type]
    return plan.run(timeout_s=PATIENCE_S)


def calls_of(run: Ran, rank: int = 0) -> list[dict[str, object]]:
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    # The first step has what is done once, and the last the end of training.
    calls = json.loads((run.folder / f"rank-{rank}" / "calls.json").read_text())
    return [call for call in calls if 2 <= call["step"] < STEPS]


@pytest.mark.long
@real_ranks
def test_ranks_that_train_apart_do_not_meet_before_a_synchronisation(ran: dict[str, Ran]) -> None:
    for rank in range(2):
        assert [call for call in calls_of(ran["local-sgd"], rank) if call["meets"]] == []


@pytest.mark.long
@real_ranks
def test_beside_the_gradients_ranks_meet_once_a_step(ran: dict[str, Ran]) -> None:
    """The one sum has the tokens of the step, the loss of the step before, and the wish to stop."""
    for rank in range(2):
        calls = [call for call in calls_of(ran["ddp"], rank) if call["meets"]]
        # The sum is made before the first micro-batch, so that it counts for the step before.
        assert Counter(call["step"] for call in calls) == dict.fromkeys(range(2, STEPS), 1)
        assert {call["call"] for call in calls} == {"allreduce"}


@pytest.mark.long
@real_ranks
@pytest.mark.parametrize("technique", ["ddp", "local-sgd"])
def test_no_micro_batch_waits_for_its_loss(ran: dict[str, Ran], technique: str) -> None:
    inside = [call for call in calls_of(ran[technique]) if call["inside"]]
    assert [call for call in inside if call["is_float"]] == []
    # Outside of it the host reads one tensor of losses
    # a step, and the gradient norm of the same step.
    outside = [call for call in calls_of(ran[technique]) if call["is_float"] and not call["inside"]]
    assert len(outside) <= 3 * STEPS


@pytest.mark.long
@real_ranks
@pytest.mark.parametrize("technique", ["ddp", "local-sgd"])
def test_every_step_is_told_once_and_in_order(ran: dict[str, Ran], technique: str) -> None:
    run = ran[technique]
    assert [step["step"] for step in run.data("step")] == list(range(1, STEPS + 1))
    events = [event for event in run.events() if event.kind == "step"]
    # A step has the time at which it ended, also where it is told later.
    times = [event.time_s for event in events]
    assert times == sorted(times) and len(set(times)) > STEPS / 2
    assert all(math.isfinite(loss) for loss in run.curve("loss"))
    (end,) = run.data("end")
    assert end["train_loss"] == pytest.approx(sum(run.curve("loss")) / STEPS, rel=1e-5)


@pytest.mark.long
@real_ranks
@pytest.mark.parametrize(("technique", "step"), [("ddp", 1), ("local-sgd", 3)])
def test_a_run_that_is_asked_to_stop_ends_when_ranks_meet_next(
    ran: dict[str, Ran], technique: str, step: int
) -> None:
    run = ran[f"{technique}-stopped"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert [event["step"] for event in run.data("stopped")] == [step]
    assert [event["step"] for event in run.data("checkpoint")] == [step]
    assert [event["step"] for event in run.data("step")] == list(range(1, step + 1))
    assert [event["steps"] for event in run.data("end")] == [step]
    assert (run.folder / "out" / "model").exists()


@pytest.mark.long
@real_ranks
@pytest.mark.parametrize("technique", ["ddp", "local-sgd"])
def test_a_loss_that_is_no_number_names_step_and_rank_and_spoils_no_checkpoint(
    ran: dict[str, Ran], technique: str
) -> None:
    run = ran[f"{technique}-poisoned"]
    assert set(run.exit_codes.values()) != {0}
    record = run.record(1, "error.json")
    assert f"loss is nan on rank 1 at step {POISONED}" in str(record["message"])
    assert record["echo"] is False
    other = run.folder / "rank-0" / "error.json"
    assert not other.exists() or json.loads(other.read_text())["echo"] is True
    assert not run.data("checkpoint")
    assert all(math.isfinite(loss) for loss in run.curve("loss"))


def ended(step: int, loss: float) -> EndedStep:
    norm = HostCopy(torch.tensor(float(step)))
    return EndedStep(step=step, epoch=0.1, loss=torch.tensor(loss), grad_norm=norm, due=True)


def losses_of(apart: bool, asked: Any) -> StepLosses:
    cpu = torch.device("cpu")
    pace = Pace(StepMeter(causal=True), cpu, forward_is_own=True)
    return StepLosses(device=cpu, apart=apart, pace=pace, stop=SimpleNamespace(is_there=asked))


@pytest.mark.parametrize("apart", [False, True])
def test_a_loss_is_read_one_step_later_or_when_ranks_meet(apart: bool) -> None:
    asked: list[bool] = [False]
    losses = losses_of(apart, lambda: asked[0])
    read: list[list[int]] = []
    for step in (1, 2, 3):
        assert int(losses.count(7)) == 7
        losses.keep(ended(step, loss=step / 2))
        read.append([each.ended.step for each in losses.read()])
    assert read == ([[], [], []] if apart else [[], [1], [2]])
    asked[0] = True
    met = losses.meet()
    assert [(each.ended.step, each.loss) for each in met] == [
        (n, n / 2) for n in ((1, 2, 3) if apart else (3,))
    ]
    assert losses.stop
    assert losses.meet() == []


@pytest.mark.parametrize("apart", [False, True])
def test_a_loss_that_is_no_number_ends_the_run_one_step_later(apart: bool) -> None:
    losses = losses_of(apart, lambda: False)
    losses.count(1)
    losses.keep(ended(1, loss=math.inf))
    assert losses.read() == []
    losses.count(1)
    losses.keep(ended(2, loss=1.0))
    with pytest.raises(
        RunError, match=sentence("loss is {} on rank {} at step {}; try", "inf", 0, 1)
    ):
        losses.read()


def test_a_rank_that_ends_with_another_one_is_not_the_cause(tmp_path: Path) -> None:
    for error, echo in (
        (EndedWithAnother("loss is nan on rank 1"), True),
        (RunError("loss is nan on rank 0"), False),
    ):
        write_error(tmp_path, 0, error)
        assert json.loads((tmp_path / "error.json").read_text())["echo"] is echo
