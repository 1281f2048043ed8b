"""Helpers: processes of no rank, forked from the warm server, that work something out; no run waits for them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from workbench.base import entries
from workbench.base.process import look_up
from workbench.worker.agent.warm_link import WarmLink

ENTRY = entries.INQUIRY
"""What a helper runs: it reads `inquiry.json` in its folder and leaves `answer.json` there."""


class Helpers:
    """The helpers of one pod; every inquiry has one."""

    def __init__(self, folder: Path, warm: WarmLink) -> None:
        self._folder = folder
        self._warm = warm
        self._asked: dict[int, str] = {}
        self._pids: dict[int, str] = {}
        self._refused: set[str] = set()
        self._token = 0
        self._closed = False

    @property
    def asked(self) -> bool:
        return bool(self._asked)

    @property
    def pids(self) -> set[int]:
        return set(self._pids)

    def ask(self, name: str, inquiry: Mapping[str, object]) -> dict[str, object]:
        """Have an inquiry answered; asked again, it tells how that stands, and the answer once."""
        folder = self._folder / name
        if name in self._asked.values() or name in self._pids.values():
            return {"state": "busy"}
        if (folder / "answer.json").exists():
            answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
            shutil.rmtree(folder, ignore_errors=True)
            return {"state": "done", "answer": answer}
        if folder.exists() or name in self._refused or self._closed or not self._warm.serves({}):
            return {"state": "none"}
        folder.mkdir(mode=0o700, parents=True)
        (folder / "inquiry.json").write_text(json.dumps(inquiry), encoding="utf-8")
        self._token -= 1  # below zero: ranks have the others
        self._asked[self._token] = name
        message = {
            "agent": os.getpid(),
            "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            "cwd": str(folder),
            "folder": str(folder),
            "entry": ENTRY,
            "threads": 1,
        }
        self._warm.fork(self._token, message)
        return {"state": "busy"}

    def forked(self, token: int, pid: int) -> bool:
        name = self._asked.pop(token, None)
        if name is not None:
            self._pids[pid] = name
            if self._closed:
                self.close()
        return name is not None

    def refused(self, token: int) -> None:
        if (name := self._asked.pop(token, None)) is not None:
            self._refused.add(name)

    def reaped(self, pid: int) -> None:
        self._pids.pop(pid, None)

    def close(self) -> None:
        self._closed = True
        for pid in self._pids:
            if (process := look_up(pid)) is not None:
                with contextlib.suppress(OSError):
                    process.send(signal.SIGKILL)
