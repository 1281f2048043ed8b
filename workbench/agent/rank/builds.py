"""Name the lock for which torch waits before a rank loads a compiled op; torch itself is silent.

Only the standard library is imported: ranks of scripts run this file before their own code.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any


def changes() -> Mapping[str, Callable[[Any], None]]:
    """Tell of each wait. A wait for the lock of an aborted build has no end."""
    return {"torch.utils.file_baton": _tell}


def _tell(module: Any) -> None:
    original = module.FileBaton.wait

    @functools.wraps(original)
    def wait(self: Any) -> None:
        line = (
            f"waiting for the build of an op that holds {self.lock_file_path}. If no process "
            "builds the op, an aborted build left the lock: cancel the run, remove the lock on "
            "the pod, and submit the job again"
        )
        print(line, file=sys.stderr, flush=True)
        original(self)

    module.FileBaton.wait = wait
