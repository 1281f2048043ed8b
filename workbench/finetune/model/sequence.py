"""Sequence parallelism: a group of ranks shares the tokens of each row.

A rank computes its part of a row everywhere but in the attention. There DeepSpeed's Ulysses
attention exchanges the parts for all tokens of some heads (https://arxiv.org/abs/2309.14509).
Gradients need no further group: a rank has the loss of its own tokens, and the technique sums over
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workbench.agent.rank import collectives as ranks
from workbench.finetune.recipe.order import IGNORED
from workbench.finetune.recipe.standalone import without_shm_op

_ULYSSES = "ulysses"
Collator = Callable[[Sequence[Mapping[str, Sequence[int]]]], dict[str, torch.Tensor]]


class SequenceParallel:
    """Parts of rows for a rank, and the attention of a model over the parts.

    Every rank must create the object, after the process group is open.
    """

    def __init__(self, model: Any, size: int) -> None:
        """Replace the attention of a loaded model, which passed the checks of a job."""
        config = model.config.get_text_config()
        self.size = size
        self.place = ranks.rank() % size
        """Place of the rank in its group."""
        self._model = model
        self._core = str(model.config._attn_implementation)
        if self._core not in ("sdpa", "flash_attention_2"):
            self._core = "sdpa"
        self._config = config
        self._group = _group_of(size)
        self._attentions: dict[int, Any] = {}
        AttentionInterface.register(_ULYSSES, self._attend)
        model.set_attn_implementation(_ULYSSES)

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Compute whole rows on each rank, as answering does."""
        self._model.set_attn_implementation(self._core)
        try:
            yield
        finally:
            self._model.set_attn_implementation(_ULYSSES)

    def cutting(self, collator: Collator) -> Collator:
        """Return a collator for the rank's part of a batch."""

        def cut(rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
            return part_of(collator(rows), self.place, self.size)

        return cut

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
        # Padding is on the right, where the causal order alone hides it from all other tokens.
        del mask
        rows = query.shape[0]
        if rows not in self._attentions:
            self._attentions[rows] = self._attention(rows)
        return self._attentions[rows](module, query, key, value, None, **kw)

    def _attention(self, rows: int) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        config = self._config
        heads = config.num_attention_heads
        return UlyssesSPAttentionHF(
            attn=ALL_ATTENTION_FUNCTIONS[self._core],
            batch_size=rows,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=self._group,
            seq_length_is_variable=True,
        )


def part_of(batch: Mapping[str, torch.Tensor], place: int, size: int) -> dict[str, torch.Tensor]:
    """Return the part of a batch for a place in a group of `size` ranks.

    Labels are shifted first: a label stands where the logits for it are. All parts have the same
    width, and tokens keep their positions in the row.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[-100, 6, 7]]),
        ...          "attention_mask": torch.tensor([[1, 1, 1]])}
        >>> {name: part.tolist() for name, part in part_of(batch, 1, 2).items()}
        {'input_ids': [[7, 0]], 'labels': [[-100, -100]], 'attention_mask': [[1, 0]], \
'position_ids': [[2, 3]]}
    """
    count, width = batch["input_ids"].shape
    each = -(-width // size)  # rounded up
    end = torch.full((count, 1), IGNORED)
    whole = {**batch, "labels": torch.cat([batch["labels"][:, 1:], end], dim=1)}
    parts = {}
    for name, value in whole.items():
        fill = IGNORED if name == "labels" else 0
        padded = torch.nn.functional.pad(value, (0, each * size - width), value=fill)
        parts[name] = padded[:, place * each : (place + 1) * each].contiguous()
    positions = torch.arange(place * each, (place + 1) * each)
    parts["position_ids"] = positions.expand(count, each).contiguous()
    return parts


def _group_of(size: int) -> Any:
    """Return the rank's group of `size` neighbours. A collective."""
    import deepspeed

    without_shm_op()
    deepspeed.comm.init_distributed(
        dist_backend=str(dist.get_backend()), auto_mpi_discovery=False, verbose=False
    )
    own = None
    for first in range(0, ranks.world_size(), size):
        members = list(range(first, first + size))
        # All ranks create all groups.
        group = dist.new_group(members)
        if ranks.rank() in members:
            own = group
    return own
