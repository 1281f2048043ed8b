"""Rows of a dataset hub, loaded on the pod with `datasets`, which from version 4 on runs no code of a dataset."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.jobs.data.rows import row_from
from workbench.worker.data.rows import Example, Rows

__all__ = ["load_hub"]


def load_hub(options: Mapping[str, object]) -> Rows:
    """Load a hub dataset and turn its rows into examples."""
    return Rows(train=_split(options, "train_split"), eval=_split(options, "eval_split"))


def _split(options: Mapping[str, object], key: str) -> list[Example]:
    from datasets import load_dataset

    split = str(options[key])
    config, revision = options.get("config"), options.get("revision")
    loaded = load_dataset(str(options["name"]), name=config, revision=revision, split=split)
    rows = (row_from(raw, f"{options['name']}, split {split}, row {n}") for n, raw in enumerate(loaded))
    return [Example(source=r.source, target=r.target, input=r.input, table_id=r.table_id) for r in rows]
