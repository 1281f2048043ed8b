"""All rows, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from workbench.base.errors import one_of
from workbench.verify.claims import (
    adapters,
    collectives,
    kernels,
    memory,
    precision,
    processes,
    techniques,
)
from workbench.verify.row import Row

ROWS: Sequence[Row] = (
    *collectives.ROWS,
    *techniques.ROWS,
    *precision.ROWS,
    *kernels.ROWS,
    *adapters.ROWS,
    *memory.ROWS,
    *processes.ROWS,
)


def chosen(names: Sequence[str], rows: Sequence[Row] = ROWS) -> list[Row]:
    """Return the rows of some names, patterns or subjects, in the order of the table.

    Raise ConfigError for a name of no row. Without names, return all rows.
    """
    found = set()
    for name in names:
        matching = {row.name for row in rows if fnmatchcase(row.name, name) or row.subject == name}
        if not matching:
            raise one_of("verify --only", name, [row.name for row in rows])
        found |= matching
    return [row for row in rows if row.name in found or not names]
