"""Read values out of untrusted JSON; a value of the wrong type counts as missing."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

Json = Mapping[str, object]
_DEEPEST = 100  # objects and lists within one another
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MOST_NUMBERS = 50
_LARGEST = 2**63  # SQLite, TensorBoard and arrays take no larger whole number


def parse_json(text: str | bytes | bytearray, **hooks: Any) -> object:
    """Parse JSON, with hooks of `json.loads`.

    ValueError also for content that is nested too deeply to be walked.
    """
    text = _decoded(text)
    try:
        value: object = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > _DEEPEST:
        level = _nested([value])
        for _ in range(_DEEPEST - 1):
            level = [inner for each in level for inner in _nested(each)]
        if any(level):
            raise ValueError("it is nested too deeply")
    return value


def parse_record(text: str | bytes | bytearray) -> object:
    """Parse JSON for display and storage. ValueError also for text that no file can hold."""
    text = _decoded(text)
    value = parse_json(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half of a surrogate pair") from None
    return value


def try_record(text: str | bytes | bytearray) -> object:
    """Parse JSON as `parse_record`; None for any other text."""
    try:
        return parse_record(text)
    except ValueError:
        return None


def _decoded(text: str | bytes | bytearray) -> str:
    return text if isinstance(text, str) else text.decode()


def json_text(value: object) -> str:
    """Return the JSON of a record as `parse_record` takes it: half of a surrogate pair is `?`."""
    text = json.dumps(value, indent=1, default=str)
    if _SURROGATE.search(text):
        whole = json.dumps(value, indent=1, default=str, ensure_ascii=False)
        text = whole.encode(errors="replace").decode()
    return text


def problem_in(value: object) -> str:
    """Return why no file, process or record can hold a value, or "" if all can."""
    level = [value]
    for _ in range(_DEEPEST):
        for each in level:
            match each:
                case str() if "\0" in each:
                    return "holds a NUL character"
                case str() if not each.isascii() and each.encode(errors="ignore").decode() != each:
                    return "holds half of a surrogate pair, which is not a letter"
                case int() if abs(each) >= _LARGEST:
                    return "holds a whole number of more than 64 bits"
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return ""
    return "is nested too deeply"


def get_object(data: Json, name: str) -> Json:
    """Return an object within an object; an empty object for other types."""
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> list[object]:
    """Return the entries of a list; nothing for other types."""
    match value:
        case [*several]:
            return several
    return []


def as_objects(value: object) -> list[Json]:
    """Return the objects of a list; [] for another type."""
    return [one for one in as_list(value) if isinstance(one, Mapping)]


def as_str(value: object) -> str:
    """Return a text; an empty text for other types."""
    return value if isinstance(value, str) else ""


def as_float(value: object) -> float | None:
    """Return a finite number; None for any other value."""
    match value:
        case bool():
            return None
        case int() if abs(value) < _LARGEST:
            return float(value)
        case float() if math.isfinite(value):
            return value
    return None


def numbers_of(value: object) -> dict[str, float]:
    """Return the finite numbers of an object, the first of very many; {} for another type."""
    pairs = itertools.islice(value.items(), _MOST_NUMBERS) if isinstance(value, Mapping) else ()
    return {str(name): its for name, each in pairs if (its := as_float(each)) is not None}


def as_int(value: object) -> int | None:
    """Return a whole number of 64 bits; None for any other value."""
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST
        else None
    )


def _nested(value: Any) -> list[Any]:
    """Return the objects and lists in parsed JSON: most values are neither."""
    values = value.values() if isinstance(value, dict) else value
    return [each for each in values if isinstance(each, (dict, list))]


def _inside(value: object) -> Iterator[object]:
    match value:
        case Mapping():
            yield from value
            yield from value.values()
        case [*several]:
            yield from several
