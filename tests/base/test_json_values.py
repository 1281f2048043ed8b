"""Values of foreign JSON: what counts as a number, a text or a list, and what no file can hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workbench.base.json_values import (
    as_float,
    as_int,
    as_list,
    as_objects,
    as_str,
    get_object,
    json_text,
    numbers_of,
    parse_json,
    parse_record,
    problem_in,
    try_record,
)

LARGEST = 2**63
HALF = "\ud83d"


@pytest.mark.parametrize(
    ("value", "as_whole", "as_number"),
    [
        (3, 3, 3.0),
        (-3, -3, -3.0),
        (2.5, None, 2.5),
        (True, None, None),
        (LARGEST - 1, LARGEST - 1, float(LARGEST - 1)),
        (LARGEST, None, None),
        (-LARGEST, None, None),
        (float("nan"), None, None),
        (float("inf"), None, None),
        ("3", None, None),
        (None, None, None),
    ],
)
def test_a_number_is_finite_and_a_whole_number_has_64_bits(
    value: object, as_whole: int | None, as_number: float | None
) -> None:
    assert as_int(value) == as_whole and not isinstance(as_int(value), bool)
    assert as_float(value) == as_number


def test_values_of_another_type_count_as_missing() -> None:
    assert get_object({"a": {"b": 1}, "c": [1]}, "a") == {"b": 1}
    assert get_object({"c": [1]}, "c") == get_object({}, "c") == {}
    assert (
        as_list([1, "a"]) == [1, "a"] and as_list("ab") == as_list({"a": 1}) == as_list(None) == []
    )
    assert as_objects([{"a": 1}, 2, [{"b": 1}]]) == [{"a": 1}]
    assert as_str("a") == "a" and as_str(3) == as_str(None) == ""
    assert numbers_of({"a": 1, "b": "2", "c": float("nan"), 4: 2.5}) == {"a": 1.0, "4": 2.5}
    assert numbers_of([1]) == {}


def test_a_value_with_many_numbers_gives_the_first() -> None:
    many = {str(n): n for n in range(1000)}
    assert list(numbers_of(many)) == [str(n) for n in range(50)]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def deepest() -> int:
    return next(depth for depth in range(1000) if problem_in(nested(depth)))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("plain", ""),
        ("größer", ""),
        ({"a": [1, 2.5, None, True]}, ""),
        ("a\0b", "NUL"),
        ({"a": [{"b\0": 1}]}, "NUL"),
        (["größer" + HALF], "surrogate"),
        (LARGEST - 1, ""),
        (LARGEST, "64 bits"),
        ({"a": -LARGEST}, "64 bits"),
    ],
)
def test_what_no_file_can_hold_is_named_wherever_it_is(value: object, why: str) -> None:
    assert why in problem_in(value) and bool(why) == bool(problem_in(value))


def test_values_and_texts_are_nested_as_deeply_as_each_other_and_no_deeper() -> None:
    limit = deepest()
    assert limit > 20 and "deeply" in problem_in(nested(limit))
    # Brackets side by side are not deep.
    assert parse_json(json.dumps([[]] * 10 * limit)) == [[]] * 10 * limit
    assert parse_json(json.dumps(nested(limit - 1))) == nested(limit - 1)
    for depth in (limit + 1, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json("[" * depth + "]" * depth)
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json('{"a":' * depth + "1" + "}" * depth)


def test_half_of_a_surrogate_pair_is_refused_when_read_and_replaced_when_written() -> None:
    whole_letter = "\U0001f600"
    assert parse_record(json.dumps({"a": whole_letter})) == {"a": whole_letter}
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        parse_record(json.dumps({"a": HALF}).encode())
    assert json.loads(json_text({"a": HALF, "b": whole_letter})) == {"a": "?", "b": whole_letter}
    assert json_text({"b": 1}) == '{\n "b": 1\n}'
    assert json_text({"b": HALF}) == '{\n "b": "?"\n}'


def test_a_text_that_is_no_record_has_no_value() -> None:
    assert try_record('{"a": [1]}') == {"a": [1]}
    for text in ("", "{", "[" * 200 + "]" * 200, '"\\ud800"', b"\xff"):
        assert try_record(text) is None
