"""A fine-tuning job that is over soon."""

from __future__ import annotations

from typing import Any

from workbench import FineTune


def small_job(train_rows: int, eval_rows: int, **options: Any) -> FineTune:
    """Make a job on so many bundled rows, without answers or profiles unless asked for."""
    rows = {"kind": "wikisql-mini", "train_rows": train_rows, "eval_rows": eval_rows}
    return FineTune(**{"dataset": rows, "predict_rows": 0, "profile_step": 0, **options})
