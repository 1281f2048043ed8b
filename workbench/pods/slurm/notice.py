"""The file in the shared folder that announces the end of a job to the pods."""

from __future__ import annotations

from pathlib import Path

LEAVING = "leaving-{}"
"""Name of the file, in the folder of the pods' configurations, by the id of the job."""


def notice_in(file: Path) -> str:
    """Return the announcement in a job's file; empty before the announcement.

    The file exists from the job's start: NFS shows new content at once, and a new file late.
    """
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def leaving_file(folder: Path, job: str) -> Path:
    """Return the path of a job's file."""
    return folder / LEAVING.format(job)
