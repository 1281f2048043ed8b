"""Note the text that a script gives to `sys.exit`, since no other line of stderr is its reason.

Only the standard library is imported: ranks of scripts run this file before their own code.
"""

import functools
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn


def changes() -> Mapping[str, object]:
    """Write the text of `sys.exit` for the agent; empty for a number. Children write their own."""
    folder = os.environ.get("WORKBENCH_RANK_DIR")
    original = sys.exit

    @functools.wraps(original)
    def leave(status: Any = None, /) -> NoReturn:
        with suppress(Exception):  # a full disk, or a status without a text
            text = "" if status is None or isinstance(status, int) else str(status)
            Path(folder or "", f"exit-{os.getpid()}.json").write_text(json.dumps({"text": text}))
        original(status)

    if folder:
        sys.exit = leave
    return {}
