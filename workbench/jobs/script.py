"""`Script`: any training script as a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field

from workbench.base.record import Allowed, Choice, Environment, Record, Text
from workbench.jobs.choices import Launcher

__all__ = ["Script"]


class Script(Record):
    """Run a training script of the user's, unchanged, as one process per slot.

    The script finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun.
    Its folder travels with it, at most 200 MiB. A file `.workbenchignore` there, in gitignore's syntax, names what
    stays here; version control, environments, caches and `runs/` do so anyway, unless a line such as `!runs/` takes
    them back.
    """

    label: ClassVar[str] = "job"
    kind: ClassVar[str] = "script"

    path: Annotated[Text, Allowed("the path of a Python file")]
    """The script, a Python file."""
    args: Annotated[Sequence[str], Allowed("a list of strings, one an argument")] = ()
    """Its arguments, each passed as it stands."""
    launcher: Annotated[str, Choice(Launcher)] = "ssh"
    """One of `Launcher`."""
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed."""

    @property
    def word(self) -> str:
        """What runs, as a word for a file name."""
        return "".join(c for c in Path(self.path).stem if c.isalnum()) or "script"

    @property
    def facts(self) -> Mapping[str, object]:
        """What a result says of the job."""
        return {"technique": "script", "model": "", "launcher": self.launcher}

    def moved(self, move: Callable[[object], object]) -> Self:
        """Return the job with `move` done to every option that may be a path."""
        return self.replace(path=move(self.path))
