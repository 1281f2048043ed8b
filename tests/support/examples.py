"""Settings of hypothesis for tests that must try the same examples in every run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def repeatable(examples: int) -> settings:
    """Return settings for a number of examples, without a time limit and without a database."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
