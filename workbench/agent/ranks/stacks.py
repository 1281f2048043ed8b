"""Have a process write down the Python stacks of all its threads when the agent sends a signal that no library uses."""

import faulthandler
import signal
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 9
STACKS = "stacks.txt"
"""In a rank's folder. Only who has made it is sent the signal: without a handler it would end the process."""

_kept: list[object] = []
"""Open for as long as the process lives: faulthandler knows only the descriptor."""


def write_on_signal(folder: Path) -> None:
    """Do so from now on; nothing where another process of the rank, or this one, does so already."""
    if (folder / STACKS).exists():
        return
    part = folder / f".{STACKS}"
    file = part.open("w", encoding="utf-8")
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    _kept.append(file)
    part.rename(folder / STACKS)
