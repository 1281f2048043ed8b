"""Figures of an evaluation and decisions on them, without ranks; test_best.py has real ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy
import pytest

from tests.support.sentences import sentence
from workbench.agent.rank.collectives import FailedAlike, alike
from workbench.base.errors import ConfigError, RunError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.train.best import BestModel
from workbench.finetune.train.evaluation import _function, _raised, rouge, rouge_of
from workbench.finetune.train.guests import figures as guests
from workbench.finetune.train.guests.figures import (
    PRODUCT_NAMES,
    OwnFigures,
    named_figure,
    unknown_figure,
)
from workbench.finetune.train.with_trl import _named
from workbench.rundir.figures.metrics import curve_name, tag_of

STOPS = {"eval_steps": 1, "early_stopping_patience": 2}


def test_rouge_by_hand() -> None:
    # 3 of 4 and 3 of 5 words, 1 of 3 and 1 of 4 pairs;
    # in order: "police kill gunman" without its middle.
    score = rouge_of("Police ended the gunman", "police killed the gunman today")
    assert score == pytest.approx({"rouge1": 2 * 3 / 9, "rouge2": 2 * 1 / 7, "rougeL": 2 * 3 / 9})
    assert rouge_of("the gunman police", "police the gunman")["rougeL"] == pytest.approx(2 * 2 / 6)
    assert rouge_of("a a a", "a")["rouge1"] == pytest.approx(2 * 1 / 4), (
        "a word counts as often as both have it"
    )
    assert set(rouge_of("", "a b").values()) == {0.0} == set(rouge_of("", "").values())
    assert rouge_of("Straße über", "straße ÜBER")["rougeL"] == 1.0
    assert rouge(["a b", "c"], ["a b", "d"]) == {"rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}
    assert rouge([], []) == {}


def test_the_best_evaluation_and_the_end_of_patience() -> None:
    best = BestModel(FineTune(**STOPS, early_stopping_threshold=0.5))  # type: ignore[arg-type]
    losses = [1.0, 9.0, 6.0, 5.8, 5.5, 5.6]
    seen = [best.see(step, {"eval_loss": loss}) for step, loss in enumerate(losses)]
    assert seen == [False, True, True, True, True, False], "the untrained model does not count"
    assert best.step == 4
    assert best.exhausted == (
        "eval_loss 5.5 of step 4 was not bettered by more than 0.5 in 3 evaluations in a row"
    ), "gains below the threshold are no reason to go on"
    assert not BestModel(FineTune(**STOPS)).exhausted  # type: ignore[arg-type]


def test_a_figure_that_is_missing_is_no_better() -> None:
    best = BestModel(FineTune(**STOPS))  # type: ignore[arg-type]
    assert not best.see(1, {}) and not best.see(2, {"eval_loss": math.nan})
    assert best.exhausted == "no evaluation had the figure eval_loss, 2 in a row"


def test_a_resumed_search_goes_on_where_the_best_model_is_at_hand() -> None:
    job = FineTune(**STOPS)  # type: ignore[arg-type]
    before = BestModel(job)
    before.see(1, {"eval_loss": 2.0})
    before.see(2, {"eval_loss": 3.0})
    on = BestModel(job)
    assert not on.restore(before.state(), at_step=2)
    assert (on.step, on.see(3, {"eval_loss": 2.5}), bool(on.exhausted)) == (1, False, True)
    keeps = BestModel(job.replace(load_best_model_at_end=True))
    assert not keeps.restore(before.state(), at_step=2)
    assert keeps.step is None, "its checkpoint lies with the run before"
    assert keeps.restore(before.state(), at_step=1) and keeps.step == 1
    assert not BestModel(job).restore({}, at_step=1)


def test_a_function_is_imported_from_its_source_and_must_return_numbers() -> None:
    source = "def score(p, r):\n    return {'n': len(p)}\n"
    metric = _function({"path": "/nowhere/m.py", "function": "score", "source": source})
    assert taken(metric(["a"], ["b"])) == {"n": 1.0}
    with pytest.raises(
        ConfigError,
        match=sentence(
            "cannot be imported on rank 0's pod",
            "ModuleNotFoundError",
            "m.py line 1: import",
        ),
    ):
        _function(
            {"path": "/nowhere/m.py", "function": "f", "source": "import no_such_package_here\n"}
        )
    with pytest.raises(ConfigError, match=sentence("is not a function")):
        _function({"path": "/nowhere/m.py", "function": "f", "source": "f = 3\n"})
    assert taken(numpy.float32(0.5)) == {"m": 0.5}
    for wrong in ("0.5", None, [0.5], numpy.ones(2), {str(n): n for n in range(51)}):
        with pytest.raises(RunError, match=sentence("it must return a number")):
            taken(wrong)


def taken(
    returned: object, notes: list[str] | None = None, *, others: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the figures of a function `m` at step 4 of a new training."""
    own = OwnFigures()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guests, "note", [].append if notes is None else notes.append)
        return own.take((0, "m"), returned, step=4, others=others or {"eval_loss": 2.0})


@pytest.mark.parametrize("name", sorted(PRODUCT_NAMES | {"rouge1", "rewards/margins"}))
@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_a_function_that_returns_a_name_of_the_product_has_a_figure_of_its_own(
    name: str, prefix: str
) -> None:
    notes: list[str] = []
    product = dict.fromkeys(sorted(PRODUCT_NAMES), 0.25)
    own = taken({prefix + name: 9.0}, notes, others=product)
    assert list(own.values()) == [9.0] and not {*own} & {*product}
    (figure,) = own
    assert figure.startswith("m.") and name in figure
    curves = {curve_name(each, "eval") for each in product}
    tags = {tag_of(each, "eval") for each in product}
    assert curve_name(figure, "eval") not in curves and tag_of(figure, "eval") not in tags
    assert len(notes) == 1 and figure in notes[0]
    best = BestModel(FineTune(**STOPS))  # type: ignore[arg-type]
    assert [best.see(step, {**product, **own, "eval_loss": step}) for step in (1, 2)] == [True, 0]


def test_figures_of_two_functions_and_of_like_names_are_all_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(guests, "note", notes.append)
    own = OwnFigures()
    long = "n" * 63
    first = own.take((0, "m"), {"f1": 1, "eval_f1": 2, f"{long}12": 3, f"{long}13": 4}, **AT)
    second = own.take((1, "m"), {"f1": 5}, **AT)
    assert sorted([*first.values(), *second.values()]) == [1, 2, 3, 4, 5]
    assert len({*first} | {*second}) == 5 and all(len(each) <= 64 for each in first)
    assert [note.count(" is named ") for note in notes] == [3, 1]
    assert own.take((1, "m"), {"f1": 6}, **AT) == dict.fromkeys(second, 6.0), "the name stays"
    assert len(notes) == 2


AT: dict[str, Any] = {"step": 4, "others": ("eval_loss",)}


def test_a_value_that_is_no_number_loses_itself_alone_and_is_named() -> None:
    import torch

    notes: list[str] = []
    returned = {
        "f1": 0.5,
        "precisions": [0.5, 0.25],
        "tensor": torch.tensor([0.75]),
        "array": numpy.array([[0.25]]),
        "both": numpy.ones(2),
        "text": "much",
        "exact": Decimal("0.5"),
        "recall": math.nan,
        "undefined": None,
    }
    figures = taken(returned, notes)
    numbers = {name: value for name, value in figures.items() if math.isfinite(value)}
    assert numbers == {"f1": 0.5, "tensor": 0.75, "array": 0.25, "exact": 0.5}
    assert [name for name in figures if name not in numbers] == ["recall", "undefined"]
    (note,) = notes
    remarks = note.removeprefix("metric m: ").split("; ")
    named = [remark.split()[0] for remark in remarks]
    assert named == ["precisions", "both", "text", "recall", "undefined"]
    assert remarks[3] == "recall at step 4 is nan"


def test_reward_functions_of_one_name_are_two_figures() -> None:
    named = _named([("f", len), ("g", max), ("f", min), ("f", sum)])
    assert named == [("f", len), ("g", max), ("f-2", min), ("f-3", sum)]


def test_an_error_ends_in_the_line_of_the_user_or_in_none() -> None:
    source = "def score(p, r):\n    return {'a': 1 / len(p)}\n"
    metric = _function({"path": "/nowhere/m.py", "function": "score", "source": source})
    with pytest.raises(ZeroDivisionError) as raised:
        metric([], [])
    assert "m.py line 2: return" in _raised(raised.value)
    with pytest.raises(RunError) as returned:
        taken([0.5])
    assert "guests" not in _raised(returned.value)


@pytest.mark.parametrize("wanted", ["eval_f1", "f1"])
@pytest.mark.parametrize("returned", ["eval_f1", "f1"])
def test_the_figure_that_compares_models_is_found_with_and_without_its_prefix(
    wanted: str, returned: str
) -> None:
    job = FineTune(**STOPS, metrics=[_score], metric_for_best_model=wanted)  # type: ignore[arg-type]
    best = BestModel(job)
    assert best.see(2, taken({returned: 0.5})) and best.metric == "f1"


def test_a_function_s_own_accuracy_is_found_by_its_short_name_unless_the_product_has_one() -> None:
    options = {**STOPS, "metric_for_best_model": "accuracy"}
    best = BestModel(FineTune(**options, metrics=[_score]))  # type: ignore[arg-type]
    assert best.see(1, {"eval_loss": 1.0, "m.accuracy": 0.5}) and best.metric == "m.accuracy"
    on = BestModel(FineTune(**options, metrics=[_score]))  # type: ignore[arg-type]
    on.restore(best.state(), at_step=1)
    assert on.step == 1
    both = BestModel(FineTune(**options, metrics=["accuracy", _score]))  # type: ignore[arg-type]
    assert not both.see(1, {"m.accuracy": 0.5}) and both.metric == "accuracy"


def _score(predictions: list[str], references: list[str]) -> float:
    return float(predictions == references)


def test_a_name_that_no_evaluation_has_is_refused_with_the_nearest_first() -> None:
    assert named_figure("F1", ["f1", "eval_loss"]) is None
    with pytest.raises(
        ConfigError, match=sentence("is no figure of the first evaluation", "F1")
    ) as refused:
        raise unknown_figure("F1", ["eval_loss", "perplexity", "f1"])
    assert "f1, " in str(refused.value)


def test_a_failure_of_one_rank_is_one_of_all() -> None:
    with pytest.raises(FailedAlike, match="rank 0: ValueError: no"), alike(collective=False):
        raise ValueError("no")
    with pytest.raises(ValueError, match="no"), alike(collective=True):
        raise ValueError("no")
    with alike(collective=False):
        pass
