"""The program of a Cloudera ML worker: run the pod's guardian until the pod or its lease ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from workbench.pods.bootstrap import worker

ADDRESS = "CDSW_IP_ADDRESS"


def main(path: Path) -> int:
    """Be the pod at the session's address until the pod ends; return the exit code."""
    return worker.run(path, lambda _config: own_address())


def own_address() -> str:
    return os.environ[ADDRESS]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
