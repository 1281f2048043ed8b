"""Number the format of a run's records, in its directory and in a store."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.base.errors import RunError, shortened

FORMAT = 2
"""Format that this version writes and reads.

A change of the records that an older reader would misread raises the number.
"""


def check_format(record: Mapping[str, object], place: str) -> None:
    """Raise RunError if a run's first record names another format."""
    number = record.get("format", FORMAT)
    if number != FORMAT:
        raise RunError(
            f"{place} has records of format {shortened(number)}, and this version of "
            f"deepspeed-workbench reads format {FORMAT}; "
            "read the run with the version of its writer"
        )
