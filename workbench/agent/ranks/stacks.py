"""Write the Python stacks of all threads when the agent sends a signal that no library uses."""

import faulthandler
import signal
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 9
STACKS = "stacks.txt"
"""Name of the file in a rank's folder.

The agent sends the signal only if the file exists: without a handler the signal ends the process.
"""

_kept: list[object] = []
"""Files kept open for the life of the process: faulthandler knows only the descriptor."""


def write_on_signal(folder: Path) -> None:
    """Write the stacks on every signal from now on, unless a process of the rank already does."""
    if (folder / STACKS).exists():
        return
    part = folder / f".{STACKS}"
    file = part.open("w", encoding="utf-8")
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    _kept.append(file)
    part.rename(folder / STACKS)
