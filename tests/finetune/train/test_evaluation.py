"""Figures of an evaluation and decisions on them, without ranks; test_best.py has real ones."""

from __future__ import annotations

import math

import numpy
import pytest

from tests.support.sentences import sentence
from workbench.agent.rank.collectives import FailedAlike, alike
from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.train.best import BestModel
from workbench.finetune.train.evaluation import _function, _numbers, rouge, rouge_of

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


def test_a_function_that_an_earlier_version_wrote_finds_its_reader() -> None:
    source = (
        "from workbench.worker.call import load\n"
        "def score(said, right): return float(callable(load))"
    )
    metric = _function({"path": "/nowhere/old.py", "function": "score", "source": source})
    assert metric([], []) == 1.0


def test_a_function_is_imported_from_its_source_and_must_return_numbers() -> None:
    source = "def score(p, r):\n    return {'n': len(p)}\n"
    metric = _function({"path": "/nowhere/m.py", "function": "score", "source": source})
    assert _numbers(metric(["a"], ["b"])) == {"n": 1.0}
    with pytest.raises(
        ConfigError,
        match=sentence(
            "finetune.evaluation._function.metric-imported-rank",
            "ModuleNotFoundError",
            "m.py line 1: import",
        ),
    ):
        _function(
            {"path": "/nowhere/m.py", "function": "f", "source": "import no_such_package_here\n"}
        )
    with pytest.raises(
        ConfigError, match=sentence("finetune.evaluation._function.metric-function")
    ):
        _function({"path": "/nowhere/m.py", "function": "f", "source": "f = 3\n"})
    assert _numbers({"a": 1, "b": math.nan}) == {"a": 1.0}
    assert (
        _numbers(numpy.float32(0.5), "score") == {"score": 0.5}
        and _numbers(math.nan, "score") == {}
    )
    for wrong in ("0.5", None, {"a": "much"}, {"a": None}):
        with pytest.raises(Exception, match=r"must return|could not|float"):
            _numbers(wrong)


def test_a_failure_of_one_rank_is_one_of_all() -> None:
    with pytest.raises(FailedAlike, match="rank 0: ValueError: no"), alike(collective=False):
        raise ValueError("no")
    with pytest.raises(ValueError, match="no"), alike(collective=True):
        raise ValueError("no")
    with alike(collective=False):
        pass
