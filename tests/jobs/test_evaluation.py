"""When and what a job evaluates, and what hangs on that: refusals say what to set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.evaluation import (
    answered_rows,
    best_metric,
    evaluates,
    greater_is_better,
)


def one(predictions: list[str]) -> float:
    return len(predictions)


def score(predictions: list[str], references: list[str]) -> float:
    return sum(map(str.__eq__, predictions, references)) / len(references)


BEST = {"eval_steps": 2, "load_best_model_at_end": True}
REFUSED = {
    sentence("and eval_steps is not set"): {"eval_strategy": "steps"},
    sentence("drop eval_strategy or eval_steps", "epoch", 3): {
        "eval_strategy": "epoch",
        "eval_steps": 3,
    },
    sentence("metrics is measured at evaluations"): {
        "eval_strategy": "no",
        "metrics": ["rouge"],
    },
    sentence("needs evaluations on the way", "load_best_model_at_end"): {
        "load_best_model_at_end": True
    },
    sentence("needs evaluations on the way", "early_stopping_patience"): {
        "eval_strategy": "no",
        "early_stopping_patience": 2,
    },
    sentence("set metric_rows to how many rows to answer"): {
        "metrics": ["rouge"],
        "predict_rows": 0,
    },
    sentence("metric_rows is for metrics of answers; set metrics to some of"): {
        "metric_rows": 4,
        "metrics": ["accuracy"],
    },
    re.escape(
        "Allowed: exact_match, execution_match, rouge, accuracy, perplexity, path.py:function"
    ): {"metrics": ["m.py"]},
    sentence("is not known", "job metrics 'rogue'", "rouge") + sentence(": did you mean '{}'?"): {
        "metrics": ["rogue"]
    },
    sentence("it must be", "exact_match, execution_match, rouge, accuracy, perplexity")
    + sentence("a list of {}, 'path.py:function' and functions"): {"metrics": [3]},
    sentence("must take two lists, predictions and references", "one", "too many positional"): {
        "metrics": [one]
    },
    sentence(": did you mean '{}'?", "rougeL"): {
        **BEST,
        "metrics": ["rouge"],
        "metric_for_best_model": "eval_rougel",
    },
    sentence("is not known", "perplexity"): {
        **BEST,
        "metric_for_best_model": "perplexity",
    },
    sentence("save_total_limit limits checkpoints"): {"save_total_limit": 3, "save_steps": 0},
    sentence("early_stopping_threshold is for early_stopping_patience"): {
        **BEST,
        "early_stopping_threshold": 0.1,
    },
    sentence("is for load_best_model_at_end and early_stopping_patience", "greater_is_better"): {
        "greater_is_better": True
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_with_what_to_set(words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FineTune(**REFUSED[words])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "metric", "greater"),
    [
        (None, "eval_loss", False),
        ("loss", "eval_loss", False),
        ("eval_rougeL", "rougeL", True),
        ("perplexity", "perplexity", False),
        ("eval_exact_match", "exact_match", True),
        ("my_loss", "my_loss", False),
        ("score", "score", True),
    ],
)
def test_which_figure_is_compared_and_how(name: str | None, metric: str, greater: bool) -> None:
    job = FineTune(
        model="tiny-llama",
        metrics=["rouge", "exact_match", "m.py:f"],
        eval_strategy="epoch",
        early_stopping_patience=3,
        metric_for_best_model=name,
    )
    assert (best_metric(job), greater_is_better(job)) == (metric, greater)
    assert greater_is_better(job.replace(greater_is_better=not greater)) is not greater


def test_answers_are_asked_for_where_a_metric_judges_them() -> None:
    assert [answered_rows(FineTune(metrics=m)) for m in ([], ["accuracy"], ["rouge"])] == [0, 0, 64]
    assert answered_rows(FineTune(metrics=["m.py:f"], metric_rows=5, predict_rows=0)) == 5
    assert evaluates(FineTune()) and not evaluates(FineTune(eval_strategy="no"))


def test_a_function_stands_in_json_as_the_file_that_a_run_makes_of_it(tmp_path: Path) -> None:
    (tmp_path / "m.py").touch()
    job = FineTune(
        metrics=["rouge", score, max, "m.py:f"], eval_steps=2, load_best_model_at_end=True
    )
    assert job.metrics == ("rouge", score, max, "m.py:f") and job == job.replace(
        metrics=list(job.metrics)
    )
    assert job.to_dict()["metrics"] == [
        "rouge",
        "score-metric.py:score",
        "max-metric.py:max",
        "m.py:f",
    ]
    assert FineTune.from_dict(job.to_dict()).metrics[1] == "score-metric.py:score"
    assert job.found_in(tmp_path).metrics == (
        "rouge",
        score,
        max,
        f"{tmp_path}/m.py:f",
    )
    assert answered_rows(job.replace(metrics=[score])) == 64
    # What a function's figures are called is known to it alone.
    assert best_metric(job.replace(metric_for_best_model="whatever")) == "whatever"
