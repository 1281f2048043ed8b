"""Rows, order and padding of every rank's batches. Run cards include this file.

The seed alone determines the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch.utils.data import Sampler

# torch's cross entropy ignores labels of this value.
IGNORED = -100

_STEPS = 8
"""Number of global batches that are distributed together."""

_SMALL = 32
"""Smallest number of rows of a global batch without mixed lengths.

Few rows of similar length teach less.
"""

_PARTS = 4
"""Number of target length groups in a global batch.

Fewer groups need less padding, but make the steps more different.
"""


class GlobalBatchSampler(Sampler[list[int]]):
    """Distribute shuffled rows so a global batch is the same for any number of ranks.

    `lengths` group rows of similar length, unless rows are joined to lines.
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
        collator: object = None,
    ) -> None:
        """Set up the sampler. `collator` has `joins` if it joins rows to lines without padding."""
        self.rows = rows
        self.micro_batch = micro_batch
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.lengths = lengths
        self.global_batch = micro_batch * accumulation * world_size
        self.micro_batches = -(-rows // self.global_batch) * accumulation
        self.mixes = self.global_batch < _SMALL
        self._collator = collator

    def __len__(self) -> int:
        return self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.epoch += 1
        at_once = self.micro_batch * self.world_size
        order = torch.randperm(self.rows, generator=generator)
        order = order[torch.arange(self.micro_batches * at_once) % self.rows]
        if self.lengths is None:
            by_rank = order.view(-1, self.world_size, self.micro_batch)
            yield from by_rank[:, self.rank].tolist()
            return
        # A check of the model may turn joining off before the first batch.
        if getattr(self._collator, "joins", False):
            yield from self._even(order, self.lengths.sum(1))
            return
        if self.mixes:
            steps = torch.cat(list(self._mixed(order, self.lengths, generator)))
        else:
            steps = torch.cat(list(self._alike(order, self.lengths)))
        for step in torch.randperm(len(steps), generator=generator):
            by_target = _sorted(steps[step], self.lengths[:, 1])
            for rows in by_target.view(-1, at_once):
                # Every rank gets rows of all lengths.
                total_lengths = self.lengths[rows].sum(1)
                by_length = rows[total_lengths.argsort(stable=True)]
                yield by_length[self.rank :: self.world_size].tolist()

    def _even(self, order: torch.Tensor, totals: torch.Tensor) -> Iterator[list[int]]:
        """Yield micro-batches of random steps, with about as many tokens on every rank."""
        parts = self.global_batch // self.micro_batch
        for rows in order.view(-1, self.global_batch):
            dealt = _sorted(rows, totals).view(-1, parts)
            # Back and forth, so that no part gets the longest row of every round.
            dealt[1::2] = dealt[1::2].flip(1)
            yield from dealt[:, self.rank :: self.world_size].t().tolist()

    def _mixed(
        self,
        order: torch.Tensor,
        lengths: torch.Tensor,
        generator: torch.Generator,
    ) -> Iterator[torch.Tensor]:
        """Yield steps of shuffled rows. One step of every few collects the longest rows.

        The longest rows would lengthen the other steps.
        """
        size = _STEPS * self.global_batch
        totals = lengths.sum(1)
        for first in range(0, len(order), size):
            rows = _sorted(order[first : first + size], totals)
            rest = rows[: -self.global_batch]
            longest = rows[-self.global_batch :]
            rest = rest[torch.randperm(len(rest), generator=generator)]
            yield torch.cat([rest, longest]).view(-1, self.global_batch)

    def _alike(self, order: torch.Tensor, lengths: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the steps of every block of the epoch's rows, sorted by source length."""
        order = _sorted(order, lengths[:, 0])
        size = _STEPS * self.global_batch
        for first in range(0, len(order), size):
            block = _sorted(order[first : first + size], lengths[:, 1])
            yield self._dealt(block)

    def _dealt(self, block: torch.Tensor) -> torch.Tensor:
        """Distribute the target lengths of a block evenly over its steps."""
        # The block's rows have similar source lengths, and are sorted by target length. Steps with
        # rows of only one target length would teach less about all other lengths.
        steps = len(block) // self.global_batch
        bounds = [self.global_batch * part // _PARTS for part in range(_PARTS + 1)]
        parts = []
        for begin, end in pairwise(bounds):
            part = block[steps * begin : steps * end]
            parts.append(part.view(steps, end - begin))
        return torch.cat(parts, dim=1)


def _sorted(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return rows[lengths[rows].argsort(stable=True)]


def eval_batches(
    rows: Sequence[Mapping[str, Sequence[int]]],
    *,
    lengths: torch.Tensor,
    size: int,
    rank: int,
    world_size: int,
) -> Iterator[tuple[list[Mapping[str, Sequence[int]]], bool]]:
    """Distribute rows for evaluation, longest first, so batches need little padding."""
    order = lengths[:, 0].argsort(descending=True, stable=True).tolist()
    for start in range(0, len(order), size * world_size):
        begin = start + rank * size
        mine = order[begin : begin + size]
        # A rank without rows repeats the shortest one.
        batch = [rows[number] for number in mine or order[-1:]]
        yield batch, bool(mine)


def padded(lists: Sequence[Sequence[int]], value: int, *, left: bool = False) -> torch.Tensor:
    """Return lists as one tensor, filled up with a value to the longest list."""
    # Tensor cores need a multiple of 8.
    multiple = 8 if torch.cuda.is_available() else 1
    longest = max(len(ids) for ids in lists)
    width = -(-longest // multiple) * multiple  # rounded up
    filled = []
    for ids in lists:
        fill = [value] * (width - len(ids))
        filled.append([*fill, *ids] if left else [*ids, *fill])
    return torch.tensor(filled, dtype=torch.long)


def pad(
    rows: Sequence[Mapping[str, Sequence[int]]],
    pad_id: int,
    start_id: int | None = None,
    *,
    left: bool = False,
) -> dict[str, torch.Tensor]:
    """Make a batch, padded to the longest row (on GPUs to a multiple of 8).

    No loss counts padding.
    """
    inputs = [row["input_ids"] for row in rows]
    batch = {
        "input_ids": padded(inputs, pad_id, left=left),
        "attention_mask": padded([[1] * len(ids) for ids in inputs], 0, left=left),
    }
    for name, value in (("position_ids", 0), ("labels", IGNORED)):
        if all(name in row for row in rows):
            batch[name] = padded([row[name] for row in rows], value, left=left)
    labels = batch.get("labels")
    if start_id is not None and labels is not None:
        # The decoder reads the labels, shifted to the right.
        before = labels[:, :-1]
        shifted = labels.new_full(labels.shape, start_id)
        shifted[:, 1:] = before.masked_fill(before == IGNORED, pad_id)
        batch["decoder_input_ids"] = shifted
    return batch
