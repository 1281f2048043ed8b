"""The job of a script as the file of a run has it: the script need not be on this machine."""

from __future__ import annotations

from workbench.jobs.script import Script


def script_job(path: str = "/home/me/train.py", **options: object) -> Script:
    return Script.from_dict({"path": path, **options})
