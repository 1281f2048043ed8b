"""The run card: one HTML file with all that is known of a run, without network, script or run directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from workbench.base.errors import RunError, WorkbenchError
from workbench.base.files import read_json, write_bytes
from workbench.base.shown import as_page
from workbench.base.table import Grid
from workbench.client.result import RunResult
from workbench.results.answers.predictions import Predictions
from workbench.results.profile.parse import Profile
from workbench.results.recipe import Recipe, recipe_of
from workbench.rundir.figures.flight import communication
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import stored
from workbench.rundir.view import RunView

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """All that a run card states. A part that cannot be read is None, and `missing` says why."""

    result: RunResult
    view: RunView | None
    profile: Profile | None
    trace: Grid | None
    predictions: Predictions | None
    communication: Sequence[str]
    """What torch's flight recorder and NCCL say of its collectives, a line each."""
    recipe: Recipe
    spec: str
    missing: tuple[str, ...]
    name: str
    """The file that it is written to."""


def card_of(result: RunResult, name: str = "card.html") -> Card:
    """Gather what a run's card states; a broken part is left out, and named."""
    if not result.path.is_dir():
        raise RunError(f"not a run directory: {result.path}")
    missing: list[str] = []

    def readable(what: str, read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except WorkbenchError as error:
            missing.append(f"no {what}: {error}")
            return None

    spec = read_json(RunPaths(result.path).spec)
    return Card(
        result=result,
        view=readable("curves and logs", lambda: RunView(result.path)),
        profile=readable("FLOPS profile", lambda: result.profile),
        trace=result.trace,
        predictions=readable("answers", lambda: result.predictions),
        communication=communication(RunPaths(result.path)),
        recipe=recipe_of(result),
        spec=json.dumps(stored(spec), indent=1) if spec else "",
        missing=tuple(missing),
        name=name,
    )


def write_card(result: RunResult, path: str | Path) -> Path:
    """Write a run's card; a file that is there is replaced whole."""
    target = Path(path).expanduser().absolute()
    text = as_page(card_of(result, target.name))
    replace_text(target, text)
    return target


def replace_text(target: Path, text: str) -> None:
    """Write a file whole, in place of one that is there; a reader never sees half of it."""
    try:
        write_bytes(target, text.encode(errors="replace"), mode=0o644)
    except OSError as error:
        raise RunError(f"{target.name} cannot be written to {target.parent}: {error.strerror or error}") from error
