"""Whether a run failed for want of memory, and how much it asked for and had, in GiB. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from workbench.results.advice.rules import advise
from workbench.rundir.result import RunFault

_BYTES = {"k": 1024.0, "m": 1024.0**2, "g": 1024.0**3, "t": 1024.0**4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Memory that ran out. What the error does not say is None."""

    wanted_gib: float | None = None
    free_gib: float | None = None
    limit_gib: float | None = None
    """GiB that there are in all: of the GPU, or what the pod may use."""


def shortage_of(fault: RunFault) -> Shortage | None:
    """Read the figures off a fault.

    Example:
        >>> shortage_of(RunFault(kind="OutOfMemoryError", message="CUDA out of memory. Tried to allocate 512.00 MiB. "
        ...     "GPU 0 has a total capacity of 79.25 GiB of which 256.00 MiB is free."))
        Shortage(wanted_gib=0.5, free_gib=0.25, limit_gib=79.25)
        >>> shortage_of(RunFault(kind="ValueError", message="no memory of that")) is None
        True
    """
    advice = advise(fault)
    if not advice.title.startswith("Out of"):
        return None
    return Shortage(wanted_gib=gib_of(advice.asked), free_gib=gib_of(advice.free), limit_gib=gib_of(advice.limit))


def gib_of(size: str) -> float | None:
    """Read a size as allocators and the kernel write it; KB and KiB both mean 1024 bytes, as they do there.

    Example:
        >>> gib_of("1.50 GiB"), gib_of("268435456 bytes"), gib_of("much")
        (1.5, 0.25, None)
    """
    match = re.fullmatch(r"(\d[\d.,]*)\s?([kmgt]?)(?:i?b|bytes)", size.strip(), re.IGNORECASE)
    if not match:
        return None
    try:
        return float(match[1].replace(",", "")) * _BYTES.get(match[2].lower(), 1.0) / _BYTES["g"]
    except ValueError:
        return None
