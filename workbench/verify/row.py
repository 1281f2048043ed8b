"""A row of the table: a claim, the function that tries the claim, and the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from workbench.base.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.verify.turn import Turn


class Verdict(StrEnum):
    HELD = "held"
    FAILED = "failed"
    CANNOT = "cannot be tried here"


class Cannot(WorkbenchError):
    """The claim cannot be tried on these pods; the message has the reason."""


class Broken(WorkbenchError):
    """The claim was tried and is not true here; the message has the figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    """Name for `--only`, unique."""
    subject: str
    """Group of the row in the table."""
    claim: str
    """The claim in a short sentence."""
    check: Callable[[Turn], str]
    """Function that tries the claim and returns the measured figures in words.

    `Cannot` means that the claim cannot be tried on these pods. Any other error is a failure.
    """
    limit_s: float = 120.0
    """Seconds until the row counts as failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    name: str
    subject: str
    claim: str
    verdict: Verdict
    detail: str
    """Figures of a claim that held, or the reason."""
    ran_on: str = ""
    """Devices and ranks of the row. Empty: nothing ran."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "verdict": str(self.verdict)}
