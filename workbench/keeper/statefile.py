"""The file that says how a cluster stands and who its keeper is; written by the keeper alone, and mended by it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from workbench.base.clock import now_s
from workbench.base.files import KeptFile
from workbench.base.process import boot_id, process_start_time
from workbench.base.redact import Redactor

logger = logging.getLogger(__name__)


class StateFile:
    def __init__(self, path: Path, redact: Redactor, lock: int):
        pid = os.getpid()
        self._file, self._redact = KeptFile(path), redact
        self._keeper = {"pid": pid, "start_time": process_start_time(pid), "boot": boot_id()}
        self._keeper |= {"host": socket.gethostname(), "lock": lock}

    def write(self, state: Mapping[str, object]) -> None:
        """Replace the file; a full disk is logged, and stops nothing."""
        try:
            self._file.write(self._redact.json({**state, **self._keeper, "time_s": now_s()}))
        except OSError as error:
            logger.warning("cannot write the state: %s", error)

    def mend(self) -> None:
        """Write it again where somebody removed or changed it, or a full disk did not take it. Raises OSError."""
        self._file.mend()
