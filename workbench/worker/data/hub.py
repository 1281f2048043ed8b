"""Rows of a dataset hub, loaded on the pod with `datasets`, which from version 4 on runs no code of a dataset."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.base.errors import ConfigError
from workbench.jobs.data.rows import Example
from workbench.jobs.data.sources.hub import Hub
from workbench.worker.data.rows import Rows
from workbench.worker.data.stream import open_hub


def load_hub(options: Mapping[str, object]) -> Rows:
    hub = Hub.from_dict(options)
    train = _examples(hub, hub.train_split, hub.split.most)
    if hub.eval_share is None:
        return Rows(train=train, eval=_examples(hub, hub.eval_split))
    held = list(hub.split.held_out(len(train), hub.name))
    return Rows(
        train=[example for example, out in zip(train, held, strict=True) if not out],
        eval=[example for example, out in zip(train, held, strict=True) if out],
    )


def _examples(hub: Hub, split: str, most: int | None = None) -> list[Example]:
    try:
        loaded = open_hub(hub.to_dict(), split)
    except ValueError as error:  # `datasets` names the splits that there are
        raise ConfigError(
            f"the hub dataset {hub.name} cannot be read: {error}; eval_share=0.05 needs one split"
        ) from error
    loaded = loaded if most is None else loaded.select(range(min(most, len(loaded))))
    return [hub.row(raw, split, number) for number, raw in enumerate(loaded)]
