"""State of a rank with DeepSpeed: the flat FP32 weights of its update, and their states."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch

from workbench.base.errors import RunError
from workbench.finetune.techniques.on_pods.cutting import Flats, span
from workbench.finetune.techniques.zero.nvme.state import files_of, load_files, uses_files

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class ZeroState:
    """Part of a training state on the rank under stage 1 or 2."""

    masters: ClassVar[tuple[str, ...]] = (
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    )
    """Attributes of DeepSpeed's optimizers for the FP32 weights.

    The first existing attribute counts.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.zero = engine.optimizer

    def capture(self) -> dict[str, object]:
        """Return the state of the rank. The tensors are live, not copies."""
        scaler = getattr(self.zero, "loss_scaler", None)
        numbers = {} if scaler is None else vars(scaler)
        return {
            "weights": [each.data for each in self.owned()],
            "optimizer": self.optimizer_state(),
            "scaler": None
            if scaler is None
            else {name: value for name, value in numbers.items() if isinstance(value, int | float)},
            "counters": {name: int(getattr(self.engine, name)) for name in _COUNTERS},
        }

    def put_back(self, state: Any) -> None:
        """Restore a return value of `capture` into an engine before its first step."""
        if [each.shape for each in self.owned()] != [each.shape for each in state["weights"]]:
            raise _another_model()
        if state["scaler"] is not None:
            vars(self.zero.loss_scaler).update(state["scaler"])
        self.load(state)
        for name, value in state["counters"].items():
            setattr(self.engine, name, value)

    def cut_anew(self, states: Sequence[Any], *, rank: int, ranks: int) -> dict[str, object]:
        """Return the rank's part, from the parts of another number of ranks."""
        first = states[0]
        kept = [state["optimizer"]["state"] for state in states]
        shape = first["weights"][0].shape
        like = kept[0].get(0, {})
        # States with the shape of the weights are cut in the same way. Others are equal on all
        # ranks.
        flat = {
            key for key, value in like.items() if torch.is_tensor(value) and value.shape == shape
        }
        if any(
            torch.is_tensor(value) and value.dim() and key not in flat
            for key, value in like.items()
        ):
            raise RunError(
                "the states of this optimizer cannot be cut up anew; resume on as many ranks as saved them"
            )
        parts = {
            key: self.cut([[each[n][key] for n in sorted(each)] for each in kept], rank, ranks)
            for key in flat
        }
        weights = self.cut([state["weights"] for state in states], rank, ranks)
        rest = {key: value for key, value in like.items() if key not in flat}
        # Every buffer needs a step counter of its own: a shared counter would be increased twice.
        of_buffer = {
            n: {**deepcopy(rest), **{key: parts[key][n] for key in flat}}
            for n in range(len(weights))
        }
        groups = zip(first["optimizer"]["param_groups"], self.numbered(), strict=True)
        counters = first["counters"]
        micro_steps = counters["global_steps"] * self.engine.gradient_accumulation_steps()
        return {
            **first,
            "weights": weights,
            "optimizer": {
                "state": of_buffer,
                "param_groups": [{**group, "params": own} for group, own in groups],
            },
            # The global batch stays the same, but not its number of micro-batches.
            "counters": {**counters, "micro_steps": micro_steps},
        }

    def owned(self) -> list[torch.Tensor]:
        """Return the flat FP32 weights that the rank updates."""
        for name in self.masters:
            if hasattr(self.zero, name):
                files = files_of(self.zero)
                return [files.get(id(each), each) for each in getattr(self.zero, name)]
        raise RunError(
            f"checkpoints of DeepSpeed's {type(self.zero).__name__} are not known here; leave `save_steps` out"
        )

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state of the optimizer beneath ZeRO's."""
        return dict(self.zero.optimizer.state_dict())

    def load(self, state: Any) -> None:
        """Restore weights and states."""
        self.zero.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for mine, saved in zip(self.owned(), state["weights"], strict=True):
                mine.data.copy_(saved)
        self.zero.update_lp_params()

    def cut(self, parts: Sequence[Flats], rank: int, ranks: int) -> list[torch.Tensor]:
        """Cut every group's flat buffer into equal parts, padded with zeros."""
        cut = []
        for number, mine in enumerate(self.owned()):
            size = mine.numel()
            before = [part[number] for part in parts]
            _check(abs(sum(map(len, before)) - size * ranks), 2 * (len(parts) + ranks))
            cut.append(span(before, rank * size, (rank + 1) * size).clone())
        return cut

    def numbered(self) -> list[list[int]]:
        """Return torch's numbers of the flat buffers of every group."""
        return [[number] for number in range(len(self.zero.optimizer.param_groups))]


class Stage3State(ZeroState):
    """State under stage 3: equal parts of every weight, concatenated, on all ranks."""

    masters: ClassVar[tuple[str, ...]] = ("fp32_partitioned_groups_flat",)

    def optimizer_state(self) -> dict[str, Any]:
        zero = self.zero
        # Between steps stage 3 leaves its optimizer without parameters.
        zero._set_fp32_optimizer_param_groups()
        try:
            state = super().optimizer_state()
            files = files_of(zero)
        finally:
            zero._clear_fp32_optimizer_param_groups()
        state["state"] = {
            number: {key: files.get(id(value), value) for key, value in each.items()}
            for number, each in state["state"].items()
        }
        return state

    def load(self, state: Any) -> None:
        zero = self.zero
        if uses_files(zero):
            load_files(zero, state)
            return
        # DeepSpeed's own way, with the content of its checkpoint files.
        scaling = {
            "loss_scaler": zero.loss_scaler,
            "dynamic_loss_scale": zero.dynamic_loss_scale,
            "overflow": False,
        }
        zero.checkpoint_event_prologue()
        kept = {"optimizer_state_dict": state["optimizer"], "fp32_flat_groups": state["weights"]}
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        zero.load_state_dict({rank: {**scaling, **kept}})
        zero.checkpoint_event_epilogue()

    def cut(self, parts: Sequence[Flats], rank: int, ranks: int) -> list[torch.Tensor]:
        """Cut every weight into equal parts for all ranks, the last part padded with zeros."""
        taken = []
        at = 0
        for elements in (weight.ds_numel for group in self.zero.fp16_groups for weight in group):
            before = -(-elements // len(parts))
            size = -(-elements // ranks)
            pieces = [span(part, at, at + before) for part in parts]
            mine = span(pieces, rank * size, min(elements, (rank + 1) * size))
            taken.append(span([mine], 0, size))
            at += before
        _check(abs(at - sum(map(len, parts[0]))), 1)
        own = torch.split(torch.cat(taken), [each.numel() for each in self.owned()])
        return [each.clone() for each in own]

    def numbered(self) -> list[list[int]]:
        # A large group has several buffers.
        groups: list[list[int]] = [[] for _ in self.zero.optimizer.param_groups]
        for number in range(len(self.zero.fp16_groups)):
            groups[self.zero.sub_group_to_group_id[number]].append(number)
        return groups


def _check(difference: int, limit: int) -> None:
    if difference >= limit:
        raise _another_model()


def _another_model() -> RunError:
    return RunError("the checkpoint is of another model; its weights do not fit this run")
