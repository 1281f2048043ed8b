"""Settings of hypothesis for tests whose examples are slow, large or share a fixture."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def tries(examples: int) -> settings:
    """Return settings for a number of examples. The profile in conftest chooses the examples."""
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))
