"""Outcome of a row: the claim held, failed, or cannot be tried on these pods."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from workbench.base.errors import WorkbenchError


class Verdict(StrEnum):
    HELD = "held"
    FAILED = "failed"
    CANNOT = "cannot be tried here"


class Cannot(WorkbenchError):
    """The claim cannot be tried on these pods; the message has the reason."""


class Broken(WorkbenchError):
    """The claim was tried and is not true here; the message has the figures."""


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
