"""Which rows each rank takes, and when: of the seed alone. A run card carries this file beside `standalone.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.utils.data import Sampler


class GlobalBatchSampler(Sampler[list[int]]):
    """Deal out shuffled rows so that a step's global batch does not depend on the number of ranks.

    With `lengths`, those of each row's sequences, a batch has rows of like length, and every rank its equal share.
    """

    def __init__(
        self,
        *,
        rows: int,
        micro_batch: int,
        accumulation: int,
        rank: int,
        world_size: int,
        seed: int,
        lengths: torch.Tensor | None = None,
    ) -> None:
        self.rows, self.micro_batch, self.rank, self.world_size, self.seed = rows, micro_batch, rank, world_size, seed
        self.epoch, self.lengths, self.global_batch = 0, lengths, micro_batch * accumulation * world_size
        self.micro_batches = -(-rows // self.global_batch) * accumulation

    def __len__(self) -> int:
        return self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.epoch += 1
        at_once = self.micro_batch * self.world_size
        order = torch.randperm(self.rows, generator=generator)
        order = order[torch.arange(self.micro_batches * at_once) % self.rows]
        if self.lengths is None:
            yield from order.view(-1, self.world_size, self.micro_batch)[:, self.rank].tolist()
            return
        steps = _alike(order, self.global_batch, self.lengths)
        for step in torch.randperm(len(steps), generator=generator):
            for rows in _alike(steps[step], at_once, self.lengths):
                order = self.lengths[rows].sum(1).argsort(stable=True)
                yield rows[order][self.rank :: self.world_size].tolist()


def _alike(rows: torch.Tensor, size: int, lengths: torch.Tensor) -> torch.Tensor:
    """Sort rows by what is read, in as many parts as there are batches in each of them by what is learned."""
    part = round((len(rows) / size) ** 0.5) * size
    rows = rows[lengths[rows, 0].argsort(stable=True)]
    parts = (rows[start : start + part] for start in range(0, len(rows), part))
    return torch.cat([some[lengths[some, 1].argsort(stable=True)] for some in parts]).view(-1, size)


def eval_batches(
    rows: Sequence[Mapping[str, Sequence[int]]], *, size: int, rank: int, world_size: int
) -> Iterator[tuple[list[Mapping[str, Sequence[int]]], bool]]:
    """Deal out rows for evaluation, longest first, so that batches need little padding."""
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]["input_ids"]))
    for start in range(0, len(order), size * world_size):
        mine = order[start + rank * size : start + (rank + 1) * size]
        yield [rows[number] for number in mine or order[-1:]], bool(mine)
