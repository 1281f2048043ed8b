"""`RunResult`: what the notebook gets of a run that has ended: the record, and its card. A job's kind adds more."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from pydantic.dataclasses import dataclass

from workbench.base.errors import RunError, RunFailed, WorkbenchError
from workbench.base.files import read_json, write_bytes
from workbench.base.shown import Shown, as_page
from workbench.base.words import counted, plain, printable
from workbench.client.kinds import class_for, missing_attribute, recipe_for
from workbench.rundir.figures.flight import communication
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord
from workbench.rundir.spec import stored
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

_T = TypeVar("_T")


class Recipe(Protocol):
    """How to repeat a run without this project."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files, by name; all belong into one folder."""

    @property
    def commands(self) -> str:
        """The shell commands."""

    @property
    def same(self) -> Sequence[str]:
        """What is the same as in the run, a line each."""

    @property
    def differs(self) -> Sequence[str]:
        """What is not the same, or must come from elsewhere, a line each."""

    @property
    def archive(self) -> bytes:
        """The files as a zip."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunResult(Shown, ResultRecord):
    """The frozen facts of a run of any kind. A figure that was not measured is None."""

    @classmethod
    def at(cls, path: Path, raw: Mapping[str, Any]) -> Self:
        """Read the JSON form of the run in a directory, as the class that the kind of its job names.

        Raises:
            RunError: The form says no state, or this class belongs to another kind of job.
        """
        return class_for(path, "result_class", cls)._read_at(path, raw)

    def raise_for_status(self) -> Self:
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
    def derived(self) -> Mapping[str, float]:
        """Figures that the job's kind computes from files of the run, by name; unknown figures are left out."""
        return {}

    def to_html(self, path: str | Path) -> Path:
        """Write the run card: one HTML file with everything about the run, that needs no network and no script.

        Args:
            path: The file; one that is there is replaced.

        Returns:
            The file, absolute.

        Raises:
            RunError: The run directory is gone, or the file cannot be written.
        """
        target = Path(path).expanduser().absolute()
        replace_text(target, as_page(card_of(self, target.name)))
        return target

    def _card(self, name: str) -> Card:
        """Gather what the card states; a kind adds its parts."""
        missing: list[str] = []
        view = readable("curves and logs", lambda: RunView(self.path), missing)
        spec = read_json(RunPaths(self.path).spec)
        recipe: Recipe | None = None
        if write := recipe_for(self.path):
            recipe = write(self)
        return Card(
            result=self,
            view=view,
            communication=communication(RunPaths(self.path)),
            recipe=recipe,
            spec=json.dumps(stored(spec), indent=1) if spec else "",
            missing=tuple(missing),
            name=name,
        )

    def __repr__(self) -> str:
        figures = {
            "steps": self.steps,
            "eval_loss": self.eval_loss,
            "exact_match": self.exact_match,
            "samples_per_s": self.train_samples_per_s,
        }
        measured = "".join(f", {k}={v:.4g}" for k, v in figures.items() if v is not None)
        return plain(
            f"{type(self).__name__}({self.state}, {self.technique} on "
            f"{counted(len(self.hosts), 'pod')}{measured})"
        )

    if not TYPE_CHECKING:  # a type checker must still find a misspelled name

        def __getattr__(self, name: str) -> object:
            if name.startswith("_") or name == "path":
                raise AttributeError(name)
            raise missing_attribute(self.path, type(self).__name__, "result_class", name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """All that a run card states. A part that cannot be read is None, and `missing` says why."""

    result: RunResult
    view: RunView | None
    communication: Sequence[str]
    """What torch's flight recorder and NCCL say of its collectives, a line each."""
    recipe: Recipe | None
    """How to repeat the run without this project; None where the job's kind has no recipe."""
    spec: str
    missing: tuple[str, ...]
    name: str
    """The file that it is written to."""


def card_of(result: RunResult, name: str = "card.html") -> Card:
    """Gather what a run's card states; a broken part is left out, and named."""
    if not result.path.is_dir():
        raise RunError(f"not a run directory: {result.path}")
    return result._card(name)


def readable(what: str, read: Callable[[], _T], missing: list[str]) -> _T | None:
    """Read a part of a card; where that fails, add a line to `missing` and return None."""
    try:
        return read()
    except WorkbenchError as error:
        missing.append(f"no {what}: {error}")
        return None


def replace_text(target: Path, text: str) -> None:
    """Write a file whole, in place of one that is there; a reader never sees half of it."""
    try:
        write_bytes(target, text.encode(errors="replace"), mode=0o644)
    except OSError as error:
        raise RunError(
            f"{target.name} cannot be written to {target.parent}: {error.strerror or error}"
        ) from error
