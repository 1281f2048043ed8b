"""`RunResult`: record and card of a finished run. A job's kind adds more."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from pydantic.dataclasses import dataclass

from workbench.base.display_protocol import Displayable, as_page
from workbench.base.errors import RunError, RunFailed, WorkbenchError
from workbench.base.files import is_there, read_json, user_path, write_bytes
from workbench.base.json_values import as_float
from workbench.base.words import pluralize, printable, strip_controls
from workbench.client.kinds import class_for, missing_attribute, recipe_for
from workbench.rundir.figures.flight import communication
from workbench.rundir.figures.reported import facts_of_kinds
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord
from workbench.rundir.spec import stored
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

_T = TypeVar("_T")
_NOT_FOR_USERS = frozenset(("at", "derived", "of_kind", "read"))


class Recipe(Protocol):
    """Files and commands to repeat a run without this project."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files by name, all for a single folder."""

    @property
    def commands(self) -> str:
        """The shell commands."""

    @property
    def same(self) -> Sequence[str]:
        """Properties equal to the run's, a line per property."""

    @property
    def differs(self) -> Sequence[str]:
        """Properties that differ, or must come from elsewhere, a line per property."""

    @property
    def archive(self) -> bytes:
        """The files as a zip."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunResult(Displayable, ResultRecord):
    """The frozen facts of a run of any kind. An unmeasured figure is None."""

    @classmethod
    def at(cls, path: Path, raw: Mapping[str, Any]) -> Self:
        """Read the JSON form of the run in a directory, as the result class of its job kind.

        Raises:
            RunError: The form has no state, or this class belongs to another kind of job.
        """
        result_class = class_for(path, "result_class", cls)
        return result_class._read_at(path, raw)

    def raise_for_status(self) -> Self:
        """Return this result if the run succeeded.

        Raises:
            RunFailed: The run failed. The message has the first cause and the folder of the logs.
        """
        if self.state is RunState.SUCCEEDED:
            return self
        why = str(self.error) if self.error else printable(self.message)
        raise RunFailed(
            f"the run {self.state}: {why}\nIts logs are in {RunPaths(self.path).logs}", result=self
        )

    @property
    def derived(self) -> Mapping[str, float]:
        """Figures computed by the job's kind from the run's files, by name, if known."""
        return {}

    def to_html(self, path: str | Path) -> Path:
        """Write the run card: an HTML file about the whole run, without network access or scripts.

        Args:
            path: The file; an existing file is replaced.

        Returns:
            The file, absolute.

        Raises:
            RunError: The run directory is missing, or the file cannot be written.
        """
        target = user_path(path).absolute()
        card = card_of(self, target.name)
        replace_text(target, as_page(card))
        return target

    def _card(self, name: str) -> Card:
        """Collect the content of the card. A job kind adds its parts."""
        missing: list[str] = []
        view = readable("curves and logs", lambda: RunView(self.path), missing)
        spec = read_json(RunPaths(self.path).spec)
        recipe: Recipe | None = None
        write = recipe_for(self.path)
        if write:
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
        figures = {"steps": self.steps, "eval_loss": self.eval_loss}
        for name, fact in facts_of_kinds().items():
            if fact.title:
                figures[name] = as_float(self.of_kind.get(name))
        figures["samples_per_s"] = self.train_samples_per_s
        measured = "".join(f", {k}={v:.4g}" for k, v in figures.items() if v is not None)
        return strip_controls(
            f"{type(self).__name__}({self.state}, {self.technique} on "
            f"{pluralize(len(self.hosts), 'pod')}{measured})"
        )

    def __dir__(self) -> list[str]:
        """Return what an editor completes."""
        return [name for name in object.__dir__(self) if name not in _NOT_FOR_USERS]

    if not TYPE_CHECKING:  # a type checker must still find a misspelled name

        def __getattr__(self, name: str) -> object:
            if name.startswith("_") or name == "path":
                raise AttributeError(name)
            raise missing_attribute(self.path, type(self).__name__, "result_class", name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Content of a run card. An unreadable part is None, and `missing` has the reason."""

    result: RunResult
    view: RunView | None
    communication: Sequence[str]
    """Findings of torch's flight recorder and NCCL on the collectives, a line per finding."""
    recipe: Recipe | None
    """Recipe to repeat the run without this project; None if the job's kind has no recipe."""
    spec: str
    missing: tuple[str, ...]
    name: str
    """Name of the card's file."""


def card_of(result: RunResult, name: str = "card.html") -> Card:
    """Collect the content of a run's card. A broken part is left out and listed as missing."""
    if not result.path.is_dir():
        raise RunError(f"not a run directory: {result.path}")
    return result._card(name)


def readable(what: str, read: Callable[[], _T], missing: list[str]) -> _T | None:
    """Read a part of a card. On an error, add a line to `missing` and return None."""
    try:
        return read()
    except WorkbenchError as error:
        missing.append(f"no {what}: {error}")
        return None


def replace_text(target: Path, text: str) -> None:
    """Write a file atomically, in place of an existing file. A device or a pipe is refused."""
    if is_there(target) and not (target.is_file() or target.is_dir()):
        raise RunError(f"{target} is a device or a pipe; name a file")
    try:
        write_bytes(target, text.encode(errors="replace"), mode=0o644)
    except OSError as error:
        raise RunError(
            f"{target.name} cannot be written to {target.parent}: {error.strerror or error}"
        ) from error
