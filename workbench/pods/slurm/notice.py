"""The file that tells a job's pods of the end of the job."""

from __future__ import annotations

from pathlib import Path

LEAVING = "leaving-{}"
"""Name of the file, in the folder of the pods' configurations, by the id of the job."""


def leaving_file(folder: Path, job: str) -> Path:
    """Return the path of a job's file."""
    return folder / LEAVING.format(job)
