"""A row of the table: a claim, and the function that tries the claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.verify.pods import Pods


@dataclass(frozen=True, slots=True)
class Row:
    subject: str
    """Group of the row in the table."""
    name: str
    """Name for `--only`, unique."""
    claim: str
    """The claim in a short sentence."""
    check: Callable[[Pods], str]
    """Function that tries the claim and returns the measured figures in words.

    `Cannot` means that the claim cannot be tried on these pods. Any other error is a failure.
    """
    limit_s: float = 120.0
    """Seconds until the row counts as failed."""
