"""The clock that stands still while this machine sleeps."""

from __future__ import annotations

import time

import pytest

from workbench.keeper.awake import AwakeClock


class Hand:
    """A clock that a test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hand() -> Hand:
    return Hand()


def test_time_that_is_looked_at_counts(hand: Hand) -> None:
    clock = AwakeClock(hand)
    began = clock()
    for _ in range(30):
        hand.now_s += 2
        clock()
    assert clock() - began == 60
    assert clock.slept() == ""


def test_time_in_which_nobody_looked_does_not_count_and_is_told_for_a_minute(hand: Hand) -> None:
    clock = AwakeClock(hand)
    began = clock()
    hand.now_s += 3600
    assert clock() == began
    assert clock.slept() == "this machine slept for 3600 s"
    hand.now_s += 4
    assert clock() == began + 4
    for _ in range(15):
        hand.now_s += 4
        clock()
    assert clock.slept() == ""
    assert clock() == began + 64


def test_a_sleep_that_is_too_short_to_explain_anything_is_not_told(hand: Hand) -> None:
    clock = AwakeClock(hand)
    hand.now_s += 30
    assert clock.slept(within_s=300, at_least_s=31) == ""
    assert clock.slept(within_s=300, at_least_s=30) == "this machine slept for 30 s"


def test_a_clock_has_the_seconds_since_boot(hand: Hand) -> None:
    clock = AwakeClock(hand)
    assert clock() == 100.0
    hand.now_s += 5.0
    assert (clock(), clock.slept()) == (105.0, ""), "a busy machine may look so late"


def test_a_sleep_is_told_for_a_whole_minute(hand: Hand) -> None:
    clock = AwakeClock(hand)
    hand.now_s += 30.0
    clock()
    for _ in range(12):
        hand.now_s += 5.0
        clock()
    assert clock.slept() == "this machine slept for 30 s"
    assert clock.slept(within_s=59.0) == ""


def test_a_suspended_machine_counts_as_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    read = time.clock_gettime
    clock = AwakeClock()
    began = clock()

    def after_a_suspension(number: int) -> float:
        return read(number) + (3600 if number == time.CLOCK_BOOTTIME else 0)

    # Linux adds the time of a suspension to this clock, and not to the monotonic one.
    monkeypatch.setattr(time, "clock_gettime", after_a_suspension)
    assert clock() - began < 3600
    assert clock.slept().startswith("this machine slept for 360")
