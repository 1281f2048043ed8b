"""The program of a Cloudera ML worker: run the pod's guardian until the pod or its lease ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from workbench.pods.bootstrap.guardian import WorkerConfig
from workbench.pods.bootstrap.worker import PlatformWorker

ADDRESS = "CDSW_IP_ADDRESS"


class CMLWorker(PlatformWorker):
    """The pod at the session's address."""

    def address(self, config: WorkerConfig) -> str:
        del config
        return own_address()


def own_address() -> str:
    return os.environ[ADDRESS]


if __name__ == "__main__":
    sys.exit(CMLWorker().run(Path(sys.argv[1])))
