"""Write the Python stacks of all threads when the agent sends a signal that no library uses.

A process that runs Python code writes the stacks between two instructions. A process that waits in
compiled code has no next instruction, so `faulthandler` reads the frames as they are. In a process
that runs Python code, `faulthandler` may read an unfinished frame, and crash.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

SIGNAL = signal.SIGRTMIN + 9
"""Asks for the stacks between two instructions of the main thread."""
AT_ONCE = signal.SIGRTMIN + 10
"""Asks for the stacks at once. Only for the main thread of a process that waits."""
STACKS = "stacks.txt"
"""Name of the file in a rank's folder.

The agent sends a signal only if the file exists: without a handler the signal ends the process.
"""
_MOST_FRAMES = 100  # of a thread, as with faulthandler


def write_on_signal(folder: Path) -> None:
    """Write the stacks on every signal from now on, unless a process of the rank already does."""
    if (folder / STACKS).exists():
        return
    part = folder / f".{STACKS}"
    # A descriptor, open for the life of the process: a file object would be a ResourceWarning of
    # the user's program at its end.
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(_number: int, frame: FrameType | None) -> None:
        text = "\n\n".join(_stack_texts(frame)) + "\n"
        with suppress(OSError):  # a full disk must not end the training
            os.write(file, text.encode(errors="backslashreplace"))

    signal.signal(SIGNAL, write)
    signal.siginterrupt(SIGNAL, False)  # no call of a library in compiled code is interrupted
    faulthandler.register(AT_ONCE, file=file, all_threads=True)
    part.rename(folder / STACKS)


def _stack_texts(interrupted: FrameType | None) -> Iterator[str]:
    """Yield the stack of every thread in faulthandler's form, the interrupted thread last."""
    own = threading.get_ident()
    frames = sys._current_frames()
    frames.pop(own)
    for thread, frame in frames.items():
        yield _stack(f"Thread 0x{thread:016x}", frame)
    yield _stack(f"Current thread 0x{own:016x}", interrupted)


def _stack(thread: str, frame: FrameType | None) -> str:
    lines = [f"{thread} (most recent call first):"]
    while frame is not None:
        if len(lines) > _MOST_FRAMES:
            lines.append("  ...")
            break
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
