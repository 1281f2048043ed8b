"""The keeper's own log, with the secrets of the cluster and of its jobs masked."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from workbench.base.redact import Redactor

_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def log_to(path: Path) -> Redactor:
    """Write what this process logs into a file; return what masks it, to be told of more secrets."""
    redact = Redactor({name: os.environ.get(name, "") for name in _HUB_TOKENS})
    handler = logging.FileHandler(path)
    handler.setFormatter(_Masking(redact))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    for chatty in ("paramiko", "workbench.pods.ssh.transport"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return redact


class _Masking(logging.Formatter):
    def __init__(self, redact: Redactor):
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))
