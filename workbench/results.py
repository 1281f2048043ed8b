"""Results and answers of a run: classes, and functions for comparing answers."""

from __future__ import annotations

from workbench.client.result import RunResult
from workbench.finetune.answers.ask import compare_predictions
from workbench.finetune.answers.predictions import Predictions, judge_answers
from workbench.finetune.notebook.result import FineTuneResult
from workbench.finetune.notebook.run import FineTuneRun

__all__ = [
    "FineTuneResult",
    "FineTuneRun",
    "Predictions",
    "RunResult",
    "compare_predictions",
    "judge_answers",
]
