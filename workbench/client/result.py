"""`RunResult`: what the notebook gets of a run that has ended: the record, what can be read beside it, and its card."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic.dataclasses import dataclass

from workbench.base.errors import RunError, RunFailed, WorkbenchError
from workbench.base.files import read_json, write_bytes
from workbench.base.shown import Shown, as_page
from workbench.base.table import Grid
from workbench.base.words import counted, plain, printable
from workbench.jobs.choices import Peft
from workbench.results import speed
from workbench.results.answers.predictions import Predictions, read_predictions
from workbench.results.profile.parse import Profile, read_profile
from workbench.results.profile.trace import read_trace
from workbench.results.recipe import Recipe, recipe_of
from workbench.rundir.figures.flight import communication
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord
from workbench.rundir.spec import stored
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunResult(Shown, ResultRecord):
    """The frozen facts of a run, its profile and its answers. A figure that was not measured is None."""

    def raise_for_status(self) -> RunResult:
        """Return this result if the run succeeded.

        Raises:
            RunFailed: It did not; the message is the first cause, and says where the logs are.
        """
        if self.state is RunState.SUCCEEDED:
            return self
        why = str(self.error) if self.error else printable(self.message)
        raise RunFailed(
            f"the run {self.state}: {why}\nIts logs are in {RunPaths(self.path).logs}", result=self
        )

    @property
    def tflops_per_device(self) -> float | None:
        """10^12 floating-point operations a second that training needed of each device; see `results/speed.py`."""
        return speed.tflops_per_device(
            forward_flops=speed.forward_flops(RunPaths(self.path).profile),
            profiled_tokens=self.profiled_tokens,
            padded_tokens_per_s=self.padded_tokens_per_s,
            devices=self.devices or 0,
            adapters=self.peft not in ("", Peft.NONE),
        )

    @property
    def mfu(self) -> float | None:
        """That over the device's peak at this precision, 0 to 1; None where the peak is not known, as of CPUs."""
        return speed.mfu(self.tflops_per_device, self.device, self.precision)

    @property
    def profile(self) -> Profile | None:
        """The FLOPS profile, parsed; None where the profiler did not run."""
        path = RunPaths(self.path).profile
        return read_profile(path, self.train_samples_per_s) if path.exists() else None

    @property
    def trace(self) -> Grid | None:
        """The costliest operators of the steps that `trace_steps` had traced; None where none were."""
        return read_trace(RunPaths(self.path))

    @property
    def predictions(self) -> Predictions | None:
        """The answers to the evaluation rows beside the expected ones; None where there are none."""
        paths = RunPaths(self.path)
        tables = paths.tables if paths.tables.exists() else None
        return read_predictions(paths.predictions, tables) if paths.predictions.exists() else None

    def to_html(self, path: str | Path) -> Path:
        """Write the run card: one HTML file with everything about the run, that needs no network and no script.

        Args:
            path: The file; one that is there is replaced.

        Returns:
            The file, absolute.

        Raises:
            RunError: The run directory is gone, or the file cannot be written.
        """
        return write_card(self, path)

    def __repr__(self) -> str:
        figures = {
            "steps": self.steps,
            "eval_loss": self.eval_loss,
            "exact_match": self.exact_match,
            "samples_per_s": self.train_samples_per_s,
        }
        measured = "".join(f", {k}={v:.4g}" for k, v in figures.items() if v is not None)
        return plain(
            f"RunResult({self.state}, {self.technique} on {counted(len(self.hosts), 'pod')}{measured})"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
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
        raise RunError(
            f"{target.name} cannot be written to {target.parent}: {error.strerror or error}"
        ) from error
