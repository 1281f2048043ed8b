"""The file in the shared folder that announces the end of a job to the pods."""

from __future__ import annotations

from pathlib import Path

LEAVING = "leaving-{}"
"""Name of the file, in the folder of the pods' configurations, by the id of the job."""


def leaving_file(folder: Path, job: str) -> Path:
    """Return the path of a job's file."""
    return folder / LEAVING.format(job)
