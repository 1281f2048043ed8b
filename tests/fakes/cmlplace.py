"""A session of Cloudera ML, by its documented interface: `cmlworkers.py` in the place of `cml`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Self

from tests.fakes.cmlworkers import WorkersV1, install_cml
from workbench.pods.cml.pods import IDS, CMLPods
from workbench.pods.notes import note_of
from workbench.pods.place import Place
from workbench.pods.pod import LaunchContext

_REPOSITORY = str(Path(__file__).resolve().parents[2])


class CMLPlace:
    """A session whose project folder is the folder of the test."""

    owns_daemons = True
    launchers = ("ssh",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder.parent

    def __enter__(self) -> Self:
        install_cml(self.folder)
        self._before = {name: os.environ.get(name) for name in ("PYTHONPATH", "CDSW_IP_ADDRESS")}
        os.environ.update(
            PYTHONPATH=f"{self.folder}{os.pathsep}{_REPOSITORY}", CDSW_IP_ADDRESS="127.0.0.1"
        )
        sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()
        self.api: WorkersV1 = importlib.import_module("cml.workers_v1").FAKE
        return self

    def __exit__(self, *_exc: object) -> None:
        sys.path.remove(str(self.folder))
        for name in ("cml.workers_v1", "cml"):
            sys.modules.pop(name, None)
        for name, value in self._before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        left = [number for number, process in self.api.processes.items() if process.poll() is None]
        if left:
            self.api.stop_workers(*left)

    @property
    def options(self) -> dict[str, str]:
        """What every backend here is made with."""
        return {"project": str(self.project), "root": str(self.folder)}

    def backend(self) -> Place:
        return CMLPods(**self.options)

    def left(self, context: LaunchContext) -> list[str]:
        running = [
            f"worker {number}"
            for number, process in self.api.processes.items()
            if process.poll() is None
        ]
        folders = self.folder.glob("workbench-*")
        files = [path for path in (context.directory / "pods").glob("*") if path.suffix != ".log"]
        notes = [note for note in [note_of(context.directory, IDS)] if note.exists()]
        return [*running, *map(str, folders), *map(str, files), *map(str, notes)]
