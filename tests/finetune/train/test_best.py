"""Best model, early stop and metrics on real forked ranks; figures are made to peak amid it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from tests.support.forkedruns import Plan, Ran
from workbench.finetune.checkpoint.tensor_tree import read_tree
from workbench.rundir.totals import RunTotals

pytestmark = [pytest.mark.long]
BEST, LAST = 2, 4
# By the number of its call, so of evaluations before the first step and after steps 1 to 4.
PEAKED = """
calls = 0
SCORES = [0.9, 0.1, 0.8, 0.2, 0.3]

def score(predictions, references):
    global calls
    calls += 1
    assert len(predictions) == len(references) == 2
    assert all(isinstance(text, str) for text in references)
    return {"score": SCORES[calls - 1]}
"""
RAISES = """
def score(predictions, references):
    return {"score": 1 / 0}
"""
NAMES = ("eval_loss", "loss", "perplexity", "accuracy", "rouge1", "rougeL", "exact_match")
# The best evaluation by a figure of the function would be the first.
NAMED = f"""
calls = 0

def score(predictions, references):
    global calls
    calls += 1
    return dict.fromkeys({NAMES}, -1.0 / calls)
"""
COMMON: dict[str, object] = {
    "max_steps": LAST,
    "per_device_train_batch_size": 2,
    "profile_step": 0,
    "eval_steps": 1,
    "metric_rows": 2,
    "max_target_length": 4,
    "metric_for_best_model": "eval_score",
    "metrics": ["scores.py:score"],
}
KEEP = {"load_best_model_at_end": True}
CASES: dict[str, tuple[int, dict[str, object]]] = {
    "single": (1, {"per_device_train_batch_size": 4}),
    "ddp": (2, {}),
    "zero1": (2, {"save_steps": 1, "save_total_limit": 1}),
    "zero2": (2, {}),
    "zero3": (2, {}),
    "fsdp": (2, {}),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("best"))
    for name, rows in {"train": 20, "eval": 4}.items():
        path = plan.root / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    for name, (ranks, options) in CASES.items():
        plan.add(name, ranks, sent=sent(PEAKED), technique=name, **{**COMMON, **KEEP, **options})
    on = sent(PEAKED.replace("[0.9, 0.1, 0.8,", "["))  # after step 3 and after step 4
    plan.add("on", 2, sent=on, technique="zero1", resume="a run", **{**COMMON, **KEEP})
    plan.runs[-1]["checkpoint"] = str(plan.root / "zero1" / "checkpoints" / f"step-{BEST}")
    early = {
        **COMMON,
        "early_stopping_patience": 2,
        "max_steps": 9,
        "metrics": ["rouge", "accuracy", "scores.py:score", "exact_match"],
    }
    plan.add("early", 2, sent=sent(PEAKED), technique="zero1", model="tiny-llama", **early)
    plan.add(
        "raises", 1, sent=sent(RAISES), technique="single", **{**COMMON, **KEEP, "predict_rows": 2}
    )
    loss = {**KEEP, "metric_for_best_model": None, "max_steps": 2}
    for name, functions in {"plain": [], "named": ["scores.py:score"]}.items():
        own = {**COMMON, **loss, "metrics": ["rouge", *functions]}
        plan.add(name, 1, sent=sent(NAMED) if functions else {}, technique="single", **own)
    misspelt = {**COMMON, **KEEP, "metric_for_best_model": "Score"}
    misspelt["metrics"] = ["accuracy", "scores.py:score"]
    plan.add("misspelt", 1, sent=sent(PEAKED), technique="single", **misspelt)
    (plan.root / "raises" / "out" / "predictions.jsonl").mkdir(
        parents=True
    )  # so that it cannot be written
    return plan.run(timeout_s=1100)


def sent(source: str) -> dict[str, object]:
    return {"metrics": [{"path": "/home/me/scores.py", "function": "score", "source": source}]}


def weights(run: Ran) -> dict[str, numpy.ndarray]:
    return dict(load_file(run.folder / "out" / "model" / "model.safetensors"))


@pytest.mark.parametrize("name", CASES)
def test_the_model_of_the_best_evaluation_is_saved_and_its_figures_are_stated(
    ran: dict[str, Ran], name: str
) -> None:
    run = ran[name]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    evaluations = {event["step"]: event for event in run.data("eval")}
    assert list(evaluations) == [*range(LAST + 1)]
    assert evaluations[BEST]["metrics"] == {"score": 0.8}
    facts = RunTotals.of(run.events()).facts(0.0)
    assert (facts["steps"], facts["eval_step"], facts["metrics"]) == (LAST, BEST, {"score": 0.8})
    assert facts["eval_loss"] == evaluations[BEST]["eval_loss"] != evaluations[LAST]["eval_loss"]
    (note,) = run.notes()
    assert note == f"the model is that of step {BEST}, the best by score (0.8)"
    saved, whole = weights(run), weights(ran["single"])
    assert saved.keys() == whole.keys()
    for key, value in saved.items():
        numpy.testing.assert_allclose(value, whole[key], rtol=1e-3, atol=1e-4, err_msg=key)


def test_those_weights_are_those_of_the_checkpoint_of_that_step(ran: dict[str, Ran]) -> None:
    run = ran["single"]
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == [
        "step-1",
        "step-2",
    ]
    kept = read_tree(run.folder / "checkpoints" / f"step-{BEST}" / "rank-0")["engine"]["weights"]
    before = read_tree(run.folder / "checkpoints" / "step-1" / "rank-0")["engine"]["weights"]
    saved = weights(run)
    moved = 0.0
    for key, value in saved.items():
        assert (value == kept[key].numpy()).all()
        moved = max(moved, float(abs(before[key].numpy() - value).max()))
    assert moved > 1e-3, "two steps whose weights are alike would show nothing"


def test_the_best_checkpoint_outlives_the_limit(ran: dict[str, Ran]) -> None:
    run = ran["zero1"]
    assert [event["step"] for event in run.data("checkpoint")] == [1, 2, 3, 4]
    kept = [
        step
        for step in range(1, 5)
        if (run.folder / "checkpoints" / f"step-{step}" / "rank-1").exists()
    ]
    assert kept == [BEST, LAST]


def test_a_run_resumed_from_its_best_checkpoint_goes_back_to_it(ran: dict[str, Ran]) -> None:
    run = ran["on"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert [(event["step"], event["metrics"]) for event in run.data("eval")] == [
        (3, {"score": 0.2}),
        (4, {"score": 0.3}),
    ]
    facts = RunTotals.of(run.events()).facts(0.0)
    assert (facts["steps"], facts["eval_step"]) == (LAST, BEST)
    assert facts["eval_loss"] == ran["zero1"].data("eval")[BEST]["eval_loss"]
    saved, whole = weights(run), weights(ran["zero1"])
    assert all((saved[key] == value).all() for key, value in whole.items())  # type: ignore[attr-defined]


def test_training_that_gets_no_better_ends_early_and_says_so(ran: dict[str, Ran]) -> None:
    run = ran["early"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    facts = RunTotals.of(run.events()).facts(0.0)
    assert (facts["steps"], facts["eval_step"]) == (4, 4), (
        "without load_best_model_at_end the last model stays"
    )
    (note,) = run.notes()
    assert note == (
        "stopped early after step 4 of 9: score 0.8 of "
        "step 2 was not bettered in 2 evaluations in a row"
    )
    for event in run.data("eval"):
        assert set(event["metrics"]) == {
            "rouge1",
            "rouge2",
            "rougeL",
            "accuracy",
            "exact_match",
            "score",
        }  # type: ignore[call-overload]
        assert 0 <= event["metrics"]["accuracy"] <= 1  # type: ignore[index]
        assert event["perplexity"] == pytest.approx(math.exp(float(str(event["eval_loss"]))))


def test_names_of_the_product_in_a_function_change_no_figure_and_no_decision(
    ran: dict[str, Ran],
) -> None:
    plain, named = ran["plain"], ran["named"]
    assert set(named.exit_codes.values()) == {0}, named.stderr()
    for before, after in zip(plain.data("eval"), named.data("eval"), strict=True):
        own = {name: value for name, value in after["metrics"].items() if "." in name}  # type: ignore[attr-defined]
        assert sorted(own) == sorted(f"score.{name}" for name in NAMES)
        metrics = {**after["metrics"]}  # type: ignore[dict-item]
        for name in own:
            del metrics[name]
        assert {**after, "metrics": metrics} == before
    assert named.data("saved") == plain.data("saved")
    saved, whole = weights(named), weights(plain)
    assert all((saved[key] == value).all() for key, value in whole.items())  # type: ignore[attr-defined]
    notes = named.notes()
    assert notes[0].count(" is named ") == len(NAMES)


def test_a_best_metric_that_no_evaluation_has_ends_the_run_before_its_first_step(
    ran: dict[str, Ran],
) -> None:
    run = ran["misspelt"]
    assert 0 not in run.exit_codes.values()
    message = str(run.record(0, "error.json")["message"])
    assert message.endswith("Choose one of score, accuracy, eval_loss")
    assert not run.data("step")


def test_what_fails_after_the_training_is_told_and_costs_neither_model_nor_losses(
    ran: dict[str, Ran],
) -> None:
    run = ran["raises"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    metric, best, predictions = run.notes()
    assert metric == (
        "the metric score is missing at step 0: ZeroDivisionError: division by zero "
        '(/home/me/scores.py line 3: return {"score": 1 / 0})'
    )
    assert best == f"no evaluation had the figure score: the model is that of the last step, {LAST}"
    assert predictions.startswith("the predictions failed, and the model is saved: [Errno 21]")
    assert [event["step"] for event in run.data("saved")] == [LAST]
    facts = RunTotals.of(run.events()).facts(0.0)
    assert facts["eval_step"] == LAST and "metrics" not in facts
    assert weights(run)
    assert Path(run.folder / "out" / "model" / "config.json").exists()
