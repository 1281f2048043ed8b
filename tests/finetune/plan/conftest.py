"""Traces and looks at rows in forks of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def forked(forked_replies: Callable[..., Iterator[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork for every trace and every look at rows; other tests use the planner's processes."""
    for asks in ("tracing", "reading"):
        monkeypatch.setattr(f"workbench.finetune.plan.{asks}.replies", forked_replies)
