"""Rows that a thread reads ahead: the order, the end and the errors of reading in the step."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from workbench.finetune.train.ahead import Ahead

CPU = torch.device("cpu")


def test_all_micro_batches_come_in_order_and_two_are_ready() -> None:
    read: list[int] = []
    ready = threading.Semaphore(0)

    def batches() -> Iterator[int]:
        for number in range(7):
            read.append(number)
            ready.release()
            yield number

    ahead = Ahead(batches(), CPU)
    for _ in range(2):
        assert ready.acquire(timeout=60)
    assert read == [0, 1]
    assert ahead.take(3) == [0, 1, 2]
    assert ahead.take(3) == [3, 4, 5]
    assert ahead.take(3) == [6]
    assert ahead.take(3) == []
    ahead.close()


def test_an_error_of_reading_is_raised_in_its_step() -> None:
    def batches() -> Iterator[int]:
        yield 0
        raise OSError("the disk is gone")

    ahead = Ahead(batches(), CPU)
    assert ahead.take(1) == [0]
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.take(1)
    ahead.close()


def test_one_thread_reads_and_ends_when_the_rows_are_no_longer_wanted() -> None:
    readers: set[int] = set()

    def batches() -> Iterator[int]:
        number = 0
        while True:
            readers.add(threading.get_ident())
            yield number
            number += 1

    ahead = Ahead(batches(), CPU)
    assert ahead.take(20) == list(range(20))
    assert len(readers) == 1 and threading.get_ident() not in readers
    (thread,) = [each for each in threading.enumerate() if each.ident in readers]
    ahead.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
