"""`Moving`: a large file on its way, as the line that carries it says of itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Moving"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moving:
    """A large file on its way."""

    name: str
    """Its name."""
    done: int
    """Bytes that are over."""
    size: int
    """Bytes in all."""
    begun: int
    """Bytes that an earlier try had brought over."""
    began_at: float
    """When this one began, on the clock of `time.monotonic`."""
