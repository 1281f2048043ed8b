"""Checked records and the types of their options. Needs pydantic: never imported by the agent."""

from workbench.base.record.record import Option, Record, nested, read_kind
from workbench.base.record.types import (
    Allowed,
    Count,
    Environment,
    Exists,
    PathText,
    Positive,
    Size,
    Text,
    Unit,
)

__all__ = [
    "Allowed",
    "Count",
    "Environment",
    "Exists",
    "Option",
    "PathText",
    "Positive",
    "Record",
    "Size",
    "Text",
    "Unit",
    "nested",
    "read_kind",
]
