"""Mark the options that decide whether losses, or the steps of runs, may be compared.

A benchmark's groups and `compare` read the marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

What = Literal["loss", "work"]
"""Facts of a run that an option changes.

- `loss`: meaning of the loss: its formula, or the tokens over which it is a mean.
- `work`: rows and tokens of a step.
"""


@dataclass(frozen=True, slots=True)
class Changes:
    """Mark of an option, in its annotation."""

    what: What


def marked(fields: Mapping[str, Any], what: What) -> Mapping[str, object]:
    """Return the marked options among the fields of a record, with their defaults."""
    found = {}
    for name, field in fields.items():
        if Changes(what) in field.metadata:
            found[name] = field.get_default(call_default_factory=True)
    return found
