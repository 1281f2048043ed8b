"""Stands for MLflow: the documented interface that a Trainer uses, kept as JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

__version__ = "3.18.0"
utils = SimpleNamespace(
    validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
)
_active: list[SimpleNamespace] = []


def _note(**what: object) -> None:
    with (Path(os.environ["WORKBENCH_RUN_DIR"]) / "mlflow.jsonl").open("a") as file:
        file.write(json.dumps({"rank": os.environ.get("RANK", "0"), **what}) + "\n")


def is_tracking_uri_set() -> bool:
    return False


def active_run() -> SimpleNamespace | None:
    return _active[-1] if _active else None


def start_run(run_name: str | None = None, nested: bool = False) -> None:
    _active.append(SimpleNamespace(info=SimpleNamespace(run_id="1")))
    _note(started=run_name)


def log_params(params: dict[str, object], synchronous: bool = True) -> None:
    _note(params={name: str(value) for name, value in params.items()})


def log_metrics(metrics: dict[str, float], step: int, synchronous: bool = True) -> None:
    assert _active, "metrics after the end would open another run"
    _note(metrics=metrics, step=step)


def end_run() -> None:
    _active.pop()
    _note(ended=True)
