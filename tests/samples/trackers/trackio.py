"""Stands for trackio: the documented interface that a Trainer uses, kept as JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.43.0"
context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None))
_active: list[str] = []


class _Config(dict):
    def update(self, values: dict[str, object], **_: object) -> None:
        _note(params={name: str(value) for name, value in values.items()})


config = _Config()


def _note(**what: object) -> None:
    with (Path(os.environ["WORKBENCH_RUN_DIR"]) / "trackio.jsonl").open("a") as file:
        file.write(json.dumps({"rank": os.environ.get("RANK", "0"), **what}) + "\n")


def init(project: str, name: str | None = None, space_id: str | None = None, **_: object) -> None:
    _active.append(project)
    _note(started=name, space=space_id)


def log(metrics: dict[str, float], step: int | None = None) -> None:
    assert _active, "metrics after the end would open another run"
    _note(metrics=metrics, step=step)


def finish() -> None:
    _active.pop()
    _note(ended=True)
