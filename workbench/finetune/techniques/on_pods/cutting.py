"""Rows of a tensor whose parts are on several ranks, for a checkpoint of another number of ranks.

DeepSpeed's universal checkpoint and torch's DCP need their own file formats first. Here saved
shards are read directly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Flats = Sequence[torch.Tensor]
"""Flat buffers of a rank."""


def span(parts: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Return rows of the concatenated parts.

    A view if one part has all rows, zeros past the end.

    Example:
        >>> span([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], 2, 6)
        tensor([3, 4, 5, 0])
    """
    taken = []
    at = 0
    for part in parts:
        first = max(0, start - at)
        end = max(0, stop - at)
        taken.append(part[first:end])
        at += len(part)
    # Rows past the end of all parts.
    missing = max(0, stop - max(start, at))
    row_shape = parts[0].shape[1:]
    taken.append(parts[0].new_zeros(missing, *row_shape))
    filled = [piece for piece in taken if len(piece)]
    if len(filled) == 1:
        return filled[0]
    return torch.cat(filled or taken)
