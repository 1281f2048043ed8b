"""Convert rows and tables, line by line, into the files that the trainer and the predictions' reader take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.jobs.data.lines import read_lines
from workbench.jobs.data.rows import row_from, table_from
from workbench.jobs.data.sources.archive import unpack
from workbench.jobs.data.sources.mini import mini_rows, mini_tables
from workbench.jobs.data.tables import SqlTable

__all__ = ["read_tables", "write_files", "write_mini", "write_release"]


def read_tables(path: Path, run: Path | None = None) -> Iterator[SqlTable]:
    """Read a tables file, one table at a time; of a run's directory, no link is followed in it.

    Raises:
        ConfigError: A line is broken; names it and the field.
    """
    for where, data in read_lines(path, run):
        yield table_from(data, where)


def write_mini(folder: Path, *, seed: int, train: int, evaluation: int) -> tuple[int, int]:
    """Write `wikisql-mini`, with so many rows to train and to evaluate on."""
    rows = mini_rows(seed, train + evaluation)
    # Evaluation first: it then stays the same whatever number of rows is trained on.
    evaluated = _write(folder / "eval.jsonl", (row.to_json() for row in islice(rows, evaluation)))
    trained = _write(folder / "train.jsonl", (row.to_json() for row in rows))
    _write(folder / "tables.jsonl", (table.to_json() for table in mini_tables()))
    return trained, evaluated


def write_files(
    folder: Path,
    *,
    train: Path,
    evaluation: Path,
    tables: Sequence[Path],
    kept: Sequence[Path] | None = None,
    plain_text: bool = True,
) -> tuple[int, int]:
    """Convert files of questions and their tables."""
    # Headers alone: the rows of the release's tables would take hundreds of megabytes.
    headers = {table.id: replace(table, rows=()) for path in tables for table in read_tables(path)} or None
    trained = _convert(train, folder / "train.jsonl", headers, plain_text)
    evaluated = _convert(evaluation, folder / "eval.jsonl", headers, plain_text)
    if kept := tables if kept is None else kept:
        _write(folder / "tables.jsonl", (table.to_json() for path in kept for table in read_tables(path)))
    return trained, evaluated


def write_release(folder: Path, archive: Path) -> tuple[int, int]:
    """Unpack and convert the original release of WikiSQL."""
    names = ("train.jsonl", "train.tables.jsonl", "dev.jsonl", "dev.tables.jsonl")
    files = unpack(archive, folder / "unpacked", names)
    for name in names:
        if name not in files:
            raise ConfigError(f"{archive} has no {name}; the release of WikiSQL has: {', '.join(names)}")
    tables = [files["train.tables.jsonl"], files["dev.tables.jsonl"]]
    # Only dev's tables go on: those of train are large, and nothing is run on them.
    return write_files(
        folder, train=files["train.jsonl"], evaluation=files["dev.jsonl"], tables=tables, kept=tables[1:]
    )


def _convert(source: Path, target: Path, tables: Mapping[str, SqlTable] | None, plain_text: bool) -> int:
    def lines() -> Iterator[str]:
        for where, data in read_lines(source):
            row = row_from(data, where, tables)
            if row.is_plain and not plain_text:
                raise ConfigError(
                    f"{where} is plain text, and the model answers a source: "
                    "use a causal model such as 'tiny-llama', or rows with a source"
                )
            yield row.to_json()

    count = _write(target, lines())
    if count == 0:
        raise ConfigError(f"the dataset file {source} has no row; it needs one JSON object a line")
    return count


def _write(target: Path, lines: Iterable[str]) -> int:
    count = 0
    # The newline is fixed so that the same options give the same bytes on every platform.
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(line + "\n")
            count += 1
    return count
