"""Words for the options that tell rows apart: short, and never the repr of a mapping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from workbench.base.words import UNKNOWN, middle_cut, strip_controls

_LONGEST = 40  # letters of a value


def differing_options(
    job: Mapping[str, object],
    others: Sequence[Mapping[str, object]],
    leave_out: Iterable[str] = (),
) -> list[str]:
    """Return name and value of every option of a job that another job has otherwise.

    Example:
        >>> one = {"seed": 1, "dataset": {"kind": "csv", "rows": 100}}
        >>> other = {"seed": 1, "dataset": {"kind": "csv", "rows": 20}}
        >>> differing_options(one, [other])
        ['dataset.rows 100']
    """
    words = []
    for name, value in job.items():
        values = [other.get(name) for other in others]
        if name not in leave_out and any(each != value for each in values):
            words += option_words(name, value, values)
    return words


def option_words(name: str, value: object, values: Sequence[object]) -> list[str]:
    """Return an option and its value; of a mapping, the parts that differ from other values.

    Example:
        >>> option_words("per_device_train_batch_size", 8, [16])
        ['train_batch_size 8']
        >>> option_words("dataset", {"kind": "csv", "rows": 100}, ["csv"])
        ['dataset.rows 100']
    """
    option = name.removeprefix("per_device_")
    if not isinstance(value, Mapping):
        return [f"{option} {_short(value)}"]
    words = []
    for inner, part in value.items():
        parts = [_parts(other).get(inner) for other in values]
        if any(each != part for each in parts):
            words += option_words(f"{option}.{inner}", part, parts)
    return words or [f"{option} {UNKNOWN}"]


def _parts(value: object) -> Mapping[str, object]:
    """Return the parts of a mapping; a name stands for a mapping of this kind."""
    if isinstance(value, Mapping):
        return value
    return {"kind": value}


def _short(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (
            middle_cut(strip_controls(" ".join(_short(each) for each in value)), _LONGEST)
            or UNKNOWN
        )
    return middle_cut(strip_controls(str(value)), _LONGEST) or UNKNOWN
