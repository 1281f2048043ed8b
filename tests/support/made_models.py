"""Run a test's code that makes models, in a fork of a process that has imported what it needs."""

from __future__ import annotations

import contextlib
import json
import sys

# Imported before the fork, for all forks.
from workbench.finetune.model import adapters, load  # noqa: F401


def main() -> None:
    """Run the code with the arguments that come on the standard input, and answer `true`."""
    asked = json.load(sys.stdin)
    sys.argv = ["-c", *asked["argv"]]
    with contextlib.redirect_stdout(sys.stderr):
        exec(asked["code"], {"__name__": "__main__"})
    print("true")
