"""Words for the options that tell rows apart: short, and never the repr of a mapping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from workbench.base.words import UNKNOWN, middle_cut, plain

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


def different_options(
    jobs: Sequence[Mapping[str, object]], leave_out: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Return, by option, the value of every job, where jobs of a kind have different values.

    A part of a mapping is an option of its own.

    Example:
        >>> one = {"kind": "a", "seed": 1, "dataset": {"kind": "csv", "rows": 100}}
        >>> other = {"kind": "a", "seed": 1, "dataset": {"kind": "csv", "rows": 20}}
        >>> different_options([one, other, {"kind": "b", "path": "x.py"}])
        {'dataset.rows': ['100', '20', '–']}
    """
    left_out = {"kind", *leave_out}
    flat = []
    for job in jobs:
        kept = {name: value for name, value in job.items() if name not in left_out}
        flat.append(dict(_flat(kept)))
    kinds = [str(job.get("kind")) for job in jobs]
    names = dict.fromkeys(name for options in flat for name in options)
    different = {}
    for name in names:
        values = [options.get(name, UNKNOWN) for options in flat]
        # An option that a kind of job does not have is no difference.
        pairs = zip(kinds, values, strict=True)
        if len({*pairs}) > len({*kinds}):
            different[name] = values
    return different


def _flat(options: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, UNKNOWN if value is None else _short(value)


def _parts(value: object) -> Mapping[str, object]:
    """Return the parts of a mapping; a name stands for a mapping of this kind."""
    if isinstance(value, Mapping):
        return value
    return {"kind": value}


def _short(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return middle_cut(plain(" ".join(_short(each) for each in value)), _LONGEST) or UNKNOWN
    return middle_cut(plain(str(value)), _LONGEST) or UNKNOWN
