"""Local SGD on real ranks: what it computes and sends, and how near its losses come to ZeRO's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.forkedruns import Plan, Ran
from tests.support.measured import MEASURED
from workbench.finetune.checkpoint.tensor_tree import read_tree
from workbench.finetune.options.adapters import LocalSgd
from workbench.finetune.techniques.on_pods.averaging import ParameterAveraging

PATIENCE_S = 840
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(PATIENCE_S + 60)]
STEPS, SYNC = 16, 4
# Targets cut to one length give every rank as many tokens,
# so that the mean of the ranks' gradients is that of all.
EVEN = {
    "max_target_length": 4,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "max_grad_norm": 0.0,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "profile_step": 0,
}
PEAKED = (
    "SCORES = [0, 1, 3, 2, 1]\ndef score(_predictions, _references):\n    return SCORES.pop(0)\n"
)
BEST = 2


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("local-sgd"))
    every_step = {"sync_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0}
    plan.add("even-ddp", 2, technique="ddp", **EVEN)  # type: ignore[arg-type]
    plan.add("even", 2, technique="local-sgd", local_sgd=every_step, **EVEN)  # type: ignore[arg-type]
    plan.add(
        "best",
        2,
        sent={"metrics": [{"path": "/home/me/scores.py", "function": "score", "source": PEAKED}]},
        technique="local-sgd",
        local_sgd={"sync_steps": 3},
        eval_steps=1,
        metrics=["scores.py:score"],
        metric_rows=2,
        metric_for_best_model="score",
        load_best_model_at_end=True,
        **EVEN,
    )
    train = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "profile_step": 0,
    }
    plan.add("zero1", 3, technique="zero1", **train)
    plan.add("local", 3, technique="local-sgd", local_sgd={"sync_steps": SYNC}, **train)
    return plan.run(timeout_s=PATIENCE_S)


def test_an_average_of_every_step_is_ddp(ran: dict[str, Ran]) -> None:
    run, reference = ran["even"], ran["even-ddp"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("loss") == pytest.approx(reference.curve("loss"), rel=1e-5)
    assert run.data("end")[0]["eval_loss"] == pytest.approx(
        reference.data("end")[0]["eval_loss"], rel=1e-5
    )
    assert {event["engine"] for rank in range(2) for event in run.data("engine", rank)} == {
        "local-sgd"
    }


def test_its_loss_after_as_many_samples_is_that_of_zero1_within_2_percent(
    ran: dict[str, Ran],
) -> None:
    assert set(ran["local"].exit_codes.values()) == {0}, ran["local"].stderr()
    (local,), (zero1,) = ran["local"].data("end"), ran["zero1"].data("end")
    assert local["first_eval_loss"] == zero1["first_eval_loss"]
    loss, reference = float(str(local["eval_loss"])), float(str(zero1["eval_loss"]))
    MEASURED.append(
        f"local-sgd, {STEPS} steps, {SYNC} between "
        f"synchronisations: {loss:.4f}, zero1 {reference:.4f}"
    )
    assert loss < 1.02 * reference


def test_it_sends_no_gradients(ran: dict[str, Ran]) -> None:
    """A synchronisation is an all-reduce of the weights: 4/3 of a model from each of 3 ranks."""
    for rank in range(3):
        sent, zero1 = (
            int(str(ran[name].data("traffic", rank)[0]["sent_bytes"]))
            for name in ("local", "zero1")
        )
        assert sent == pytest.approx(zero1 / STEPS * 2 / 3 * STEPS / SYNC, rel=0.25)


def test_the_best_model_between_two_synchronisations_is_the_mean_of_the_ranks(
    ran: dict[str, Ran],
) -> None:
    run = ran["best"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    parts = [
        read_tree(run.folder / "checkpoints" / f"step-{BEST}" / f"rank-{rank}")["engine"]
        for rank in range(2)
    ]
    assert [part["averaging"]["apart"] for part in parts] == [True, True]
    saved = load_file(run.folder / "out" / "model" / "model.safetensors")
    apart = 0
    for name, weight in parts[0]["weights"].items():
        other = parts[1]["weights"][name]
        apart += not torch.equal(weight, other)
        assert torch.allclose(saved[name], (weight + other) / 2, atol=1e-7), name
    assert apart


def test_the_outer_step_is_nesterov_s(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        model = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(2.0)
        averaging = ParameterAveraging(
            model, LocalSgd(sync_steps=2, outer_learning_rate=0.5, outer_momentum=0.8)
        )
        after, anchor, velocity = [], 2.0, 0.0
        for step in range(1, 6):
            with torch.no_grad():
                model.weight.sub_(0.25)
            averaging.on_step_end(None, SimpleNamespace(global_step=step, max_steps=5), None)
            after.append(model.weight.item())
        expected, now = [], anchor
        for step in range(1, 6):
            now -= 0.25
            if step in (2, 4, 5):
                velocity = 0.8 * velocity + anchor - now
                now = anchor = anchor - 0.5 * (anchor - now + 0.8 * velocity)
            expected.append(now)
        assert after == pytest.approx(expected)
    finally:
        dist.destroy_process_group()
