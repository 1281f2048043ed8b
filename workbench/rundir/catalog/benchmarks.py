"""Keep the figures of benchmarks in the directory of the run whose model was evaluated.

The file is a list of evaluations, the newest last. A figure of an evaluation has `name`, `trained`,
and perhaps `base`; everything else is for the writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base.files import read_json, write_text
from workbench.base.json_values import as_float, as_objects, as_str, json_text
from workbench.rundir.paths import RunPaths

_BEFORE = "before"


def evaluations_of(paths: RunPaths) -> list[Mapping[str, Any]]:
    """Return the evaluations of a run's model, the newest last."""
    return list(as_objects(read_json(paths.benchmarks).get("evaluations")))


def add_evaluation(paths: RunPaths, evaluation: Mapping[str, Any]) -> None:
    """Add an evaluation to a run directory; the file is replaced whole."""
    every = [*evaluations_of(paths), evaluation]
    write_text(paths.benchmarks, json_text({"evaluations": every}))


def benchmark_figures(paths: RunPaths) -> dict[str, float]:
    """Return the last figures of a run's model by name, and of its base by name and `before`."""
    figures: dict[str, float] = {}
    for evaluation in evaluations_of(paths):
        for score in as_objects(evaluation.get("scores")):
            name = as_str(score.get("name"))
            for key, title in (("trained", name), ("base", f"{name} {_BEFORE}")):
                value = as_float(score.get(key))
                if name and value is not None:
                    figures[title] = value
    return figures
