"""Rows and rewards from which a method learns nothing are noted once, with their number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forkedruns import Plan, Ran, run_all
from tests.support.methodruns import rows_of, write_rows
from workbench.finetune.data.sources.dataset import dataset_from, prepare
from workbench.finetune.methods.registry import method_of
from workbench.rundir.events import parse_event

pytestmark = pytest.mark.slow
ALIKE = "def alike(completions):\n    return [1] * len(completions)\n"
ROWS, STEPS = 12, 2


def plan_of(root: Path, method: str, rows: list[dict[str, Any]], **options: Any) -> Plan:
    """Return a plan of one run, named as its method, with the rows as submit prepares them."""
    plan = Plan(root)
    path = write_rows(root / "rows.jsonl", rows)
    prepared = prepare(dataset_from(str(path)), root, reader=method_of(method).rows)
    given = {"technique": "single", "max_steps": STEPS, "profile_step": 0, "max_target_length": 6}
    plan.add(method, 1, method=method, model="tiny-llama", **{**given, **options})
    job = root / method / "job.json"
    sent = [{"path": "a.py", "function": "alike", "source": ALIKE}]
    beside = {"remarks": prepared.remarks, "empty_answers": 0, "rewards": sent}
    job.write_text(json.dumps({**json.loads(job.read_text()), **beside}))
    return plan


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Do a run of each kind without a signal."""
    folder = tmp_path_factory.mktemp
    answers = {
        "rewards": ["a.py:alike"],
        "method_options": {"num_generations": 2},
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
    }
    labelled = [{**row, "label": True} for row in rows_of("kto", 0, ROWS)]
    # All answers begin with the same word.
    pairs = [dict(row) for row in rows_of("dpo", 0, ROWS)]
    plans = [
        plan_of(folder("grpo"), "grpo", [dict(row) for row in rows_of("grpo", 0, ROWS)], **answers),
        plan_of(folder("kto"), "kto", labelled),
        plan_of(folder("dpo"), "dpo", pairs, max_target_length=1),
        plan_of(folder("orpo"), "orpo", pairs),
    ]
    done: dict[str, Ran] = {}
    for runs in run_all(*plans, timeout_s=600):
        done |= runs
    return done


NOTES = {
    "grpo": "in 4 of 4 groups of 2 steps, all answers to the prompt have the same reward",
    "kto": "11 of 12 rows have the label true for training, where no row has the label false",
    "dpo": "11 of 11 training pairs have the same tokens in both answers",
}


@pytest.mark.parametrize("method", NOTES)
def test_a_run_without_a_signal_notes_it_once(ran: Mapping[str, Ran], method: str) -> None:
    run = ran[method]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert [NOTES[method] in note for note in run.notes()] == [True], run.notes()


def test_a_run_with_a_signal_notes_nothing(ran: Mapping[str, Ran]) -> None:
    assert set(ran["orpo"].exit_codes.values()) == {0}, ran["orpo"].stderr()
    assert not ran["orpo"].notes()
    assert ran["grpo"].curve("loss") == [0] * STEPS


def told(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return the notes that were printed since the last call."""
    events = map(parse_event, capfd.readouterr().out.splitlines())
    return [event.text("message") for event in events if event is not None]


@pytest.mark.slow
def test_equal_rewards_are_noted_early_or_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    from workbench.finetune.methods.on_pods.judged import Groups

    equal = torch.tensor([[1.0, nan], [1.0, nan], [2.0, nan], [1.0, 1.0]])
    lost = torch.tensor([[nan], [nan], [1.0], [2.0]])
    groups = Groups()
    for _ in range(10):
        assert not told(capfd)
        groups.see(equal, 2)
    (note,) = told(capfd)
    assert "in 20 of 20 groups of 10 steps" in note
    groups.tell()
    assert not told(capfd)
    # Half of the groups: at the end. Fewer: never.
    groups = Groups()
    for _ in range(12):
        groups.see(lost, 2)
    assert not told(capfd)
    groups.tell()
    (note,) = told(capfd)
    assert "in 12 of 24 groups of 12 steps" in note
    groups.see(torch.tensor([[1.0], [2.0]]), 2)
    fresh = Groups()
    fresh.see(torch.tensor([[1.0], [2.0], [1.0], [3.0], [4.0], [4.0]]), 2)
    fresh.tell()
    assert not told(capfd)
