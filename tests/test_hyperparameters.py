"""The search of docs/hyperparameters.md, as on the page: Optuna reports, prunes and finds."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from workbench import Cluster
from workbench.rundir.state import RunState

PAGE = Path(__file__).parents[1] / "docs" / "hyperparameters.md"


@pytest.mark.slow
@pytest.mark.long
def test_the_page_s_search_reports_evaluations_and_prunes_a_run(cluster: Cluster) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    code = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    before, optimize, _ = code.partition("study.optimize(")
    names: dict[str, object] = {"cluster": cluster}
    # One trial to compare with instead of four, and two learning rates that are known.
    exec(before.replace("n_startup_trials=4", "n_startup_trials=1"), names)
    assert optimize
    study = names["study"]
    known = {run.id for run in cluster.runs}
    for rate in (1e-2, 1e-4):
        study.enqueue_trial({"learning_rate": rate})  # type: ignore[attr-defined]
    study.optimize(names["objective"], n_trials=2)  # type: ignore[attr-defined]
    good, bad = study.trials  # type: ignore[attr-defined]
    first, second = [run for run in cluster.runs if run.id not in known]
    assert good.state is optuna.trial.TrialState.COMPLETE
    assert good.value == first.result.eval_loss
    assert list(good.intermediate_values) == [0, 10, 20, 30, 40, 50, 60]
    assert bad.state is optuna.trial.TrialState.PRUNED and second.state is RunState.CANCELLED
    reported = bad.intermediate_values
    assert 10 in reported and 60 not in reported
    assert reported[max(reported)] > good.intermediate_values[max(reported)]
    assert study.best_params == {"learning_rate": 1e-2}  # type: ignore[attr-defined]
