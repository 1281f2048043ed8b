"""Records of another version or edited by hand: what is wrong in a record counts as missing."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from workbench.base.record.tolerant import Number, TolerantRecord, Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Log(TolerantRecord):
    name: str
    lines: Whole = 7
    seconds: Number | None = 2.5
    tags: list[str] = field(default_factory=lambda: ["new"])


@pytest.mark.parametrize("lines", ["3", 2.5, None, True, [3]])
def test_a_wrong_value_counts_as_missing_and_the_others_stay(lines: object) -> None:
    read = Log.read({"name": "a", "lines": lines, "seconds": 1, "color": "red"})
    assert read == Log(name="a", lines=7, seconds=1.0)


def test_a_key_that_is_no_text_is_ignored_as_any_unknown_key() -> None:
    assert Log.read({"name": "a", "lines\ud800": 3}) == Log(name="a")


def test_a_wrong_value_gets_a_default_of_its_own() -> None:
    one, other = (Log.read({"name": "a", "tags": 3}) for _ in range(2))
    assert one.tags == other.tags == ["new"] and one.tags is not other.tags


@pytest.mark.parametrize("raw", [{}, {"name": 3}, {"name": None, "lines": 1}])
def test_a_field_without_a_default_must_be_there(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Log.read(raw)


def test_a_record_that_is_made_by_the_program_has_right_values() -> None:
    wrong: Any = "3"
    with pytest.raises(ValidationError):
        Log(name="a", lines=wrong)
