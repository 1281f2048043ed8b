"""A plugin of pytest: time limits also for what pytest-timeout leaves without one.

pytest-timeout interrupts a test once, and drops its limit when a test fails. The teardown of a test
that failed could wait for ever, and so could a test that swallows the interruption.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from pytest_timeout import Settings

TEARDOWN_S = 600.0
AGAIN_S = 60.0
"""Time between two interruptions of a test that does not end."""


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Settings) -> Iterator[None]:
    """Interrupt a test again and again."""
    result = yield
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Give each teardown a limit of its own."""
    item.config.hook.pytest_timeout_set_timer(
        item=item, settings=Settings(TEARDOWN_S, "signal", False, False)
    )
    return (yield)
