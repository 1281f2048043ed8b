"""Results and answers of runs: classes, and functions for waiting and for comparing answers."""

from __future__ import annotations

from workbench.client.result import RunResult
from workbench.client.run import as_completed
from workbench.finetune.answers.ask import compare_predictions
from workbench.finetune.answers.predictions import Predictions, judge_answers
from workbench.finetune.notebook.result import FineTuneResult
from workbench.finetune.notebook.run import FineTuneRun

__all__ = [
    "FineTuneResult",
    "FineTuneRun",
    "Predictions",
    "RunResult",
    "as_completed",
    "compare_predictions",
    "judge_answers",
]
