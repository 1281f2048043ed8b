"""The stacks of a rank's threads, written by this process on the agent's signals."""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.agent.ranks.stacks import AT_ONCE, SIGNAL, STACKS, write_on_signal


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Take the handlers away at the end."""
    yield
    signal.signal(SIGNAL, signal.SIG_DFL)
    faulthandler.unregister(AT_ONCE)


@pytest.fixture
def waiting() -> Iterator[threading.Thread]:
    """A second thread, which waits."""
    begun = threading.Event()
    ended = threading.Event()

    def wait_for_the_end() -> None:
        begun.set()
        ended.wait()

    thread = threading.Thread(target=wait_for_the_end)
    thread.start()
    begun.wait()  # a thread counts as started before it runs its function
    yield thread
    ended.set()
    thread.join()


def line_of_caller() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_the_stacks_of_all_threads_are_written(tmp_path: Path, waiting: threading.Thread) -> None:
    write_on_signal(tmp_path)
    assert (tmp_path / STACKS).read_text() == ""
    signal.raise_signal(SIGNAL)
    line = line_of_caller() - 1
    text = (tmp_path / STACKS).read_text()
    *others, own = text.split("\n\n")
    (other,) = (stack for stack in others if "in wait_for_the_end\n" in stack)
    assert other.startswith(f"Thread 0x{waiting.ident:016x} (most recent call first):\n")
    # The interrupted thread comes last, with its own line first.
    here = f'  File "{__file__}", line {line} in test_the_stacks_of_all_threads_are_written'
    heading = f"Current thread 0x{threading.get_ident():016x} (most recent call first):"
    assert own.splitlines()[:2] == [heading, here]
    assert text.endswith("\n") and "write_on_signal" not in text


def test_every_signal_writes_again(tmp_path: Path) -> None:
    write_on_signal(tmp_path)
    for _ in range(2):
        signal.raise_signal(SIGNAL)
    assert (tmp_path / STACKS).read_text().count("Current thread") == 2


def test_a_deep_stack_is_cut(tmp_path: Path) -> None:
    def deeper(left: int) -> None:
        if left:
            deeper(left - 1)
        else:
            signal.raise_signal(SIGNAL)

    write_on_signal(tmp_path)
    deeper(300)
    _, own = (tmp_path / STACKS).read_text().split("Current thread ")
    assert own.count("in deeper\n") == 100 == own.count("  File ")
    assert own.endswith("\n  ...\n")


def test_a_process_that_waits_is_read_as_it_is(tmp_path: Path, waiting: threading.Thread) -> None:
    write_on_signal(tmp_path)
    signal.raise_signal(AT_ONCE)  # to this thread: another one would write while this one reads
    text = (tmp_path / STACKS).read_text()
    assert f"Thread 0x{waiting.ident:016x}" in text and "in wait_for_the_end" in text
    assert "in test_a_process_that_waits_is_read_as_it_is" in text


def test_the_first_process_of_a_rank_keeps_the_file(tmp_path: Path) -> None:
    write_on_signal(tmp_path)
    signal.signal(SIGNAL, signal.SIG_IGN)
    write_on_signal(tmp_path)
    assert signal.getsignal(SIGNAL) is signal.SIG_IGN
    assert [path.name for path in tmp_path.iterdir()] == [STACKS]


def test_a_call_of_a_library_is_not_interrupted(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    main = threading.get_ident()

    def disturb() -> None:
        time.sleep(0.1)
        signal.pthread_kill(main, SIGNAL)
        time.sleep(0.1)
        os.write(writing, b"x")

    write_on_signal(tmp_path)
    thread = threading.Thread(target=disturb)
    thread.start()
    # Python would repeat an interrupted call; C code returns the error.
    count = ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
    thread.join()
    for pipe in (reading, writing):
        os.close(pipe)
    assert count == 1 and "Current thread" in (tmp_path / STACKS).read_text()
