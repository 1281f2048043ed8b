"""State of a rank with DeepSpeed: the flat FP32 weights of its update, and their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        scaling = None
        if scaler is not None:
            attributes = vars(scaler).items()
            scaling = {name: value for name, value in attributes if isinstance(value, int | float)}
        return {
            "weights": [each.data for each in self.owned()],
            "optimizer": self.optimizer_state(),
            "scaler": scaling,
            "counters": {name: int(getattr(self.engine, name)) for name in _COUNTERS},
        }

    def put_back(self, state: Any) -> None:
        """Restore a return value of `capture` into an engine before its first step."""
        own_shapes = [weights.shape for weights in self.owned()]
        saved_shapes = [weights.shape for weights in state["weights"]]
        if own_shapes != saved_shapes:
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
        # States with the shape of the weights are cut in the same way. Others are equal on all
        # ranks.
        flat = {}
        for number, values in kept[0].items():
            flat[number] = _flat_keys(values, first["weights"][number].shape)
        parts = {}
        for key in set().union(*flat.values()):
            of_ranks = []
            for each, state in zip(kept, states, strict=True):
                # Groups of Muon and of AdamW have states of different names.
                buffers = []
                for number, owned in enumerate(state["weights"]):
                    buffers.append(each[number].get(key, torch.zeros_like(owned)))
                of_ranks.append(buffers)
            parts[key] = self.cut(of_ranks, rank, ranks)
        weights = self.cut([state["weights"] for state in states], rank, ranks)
        of_buffer = {}
        for number in range(len(weights)) if flat else ():
            # Stage 3 can have more buffers than before, with the states of the first.
            like = number if number in flat else 0
            # Every buffer needs a step counter of its own: a shared counter would be increased
            # twice.
            rest = {key: value for key, value in kept[0][like].items() if key not in flat[like]}
            own = deepcopy(rest)
            for key in flat[like]:
                own[key] = parts[key][number]
            of_buffer[number] = own
        param_groups = []
        groups = zip(first["optimizer"]["param_groups"], self.numbered(), strict=True)
        for group, numbers in groups:
            param_groups.append({**group, "params": numbers})
        counters = first["counters"]
        micro_steps = counters["global_steps"] * self.engine.gradient_accumulation_steps()
        return {
            **first,
            "weights": weights,
            "optimizer": {"state": of_buffer, "param_groups": param_groups},
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
            f"checkpoints of DeepSpeed's {type(self.zero).__name__} "
            "are not known here; give the job save_steps=0"
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
        for number, owned in enumerate(self.owned()):
            size = owned.numel()
            before = [part[number] for part in parts]
            saved = sum(len(piece) for piece in before)
            padding = len(parts) + ranks
            _check(abs(saved - size * ranks), 2 * padding)
            mine = span(before, rank * size, (rank + 1) * size)
            cut.append(mine.clone())
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
        states = {}
        for number, values in state["state"].items():
            states[number] = {key: files.get(id(value), value) for key, value in values.items()}
        state["state"] = states
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
        kept = {
            "optimizer_state_dict": state["optimizer"],
            "fp32_flat_groups": state["weights"],
        }
        rank = 0
        if torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        zero.load_state_dict({rank: {**scaling, **kept}})
        zero.checkpoint_event_epilogue()

    def cut(self, parts: Sequence[Flats], rank: int, ranks: int) -> list[torch.Tensor]:
        """Cut every weight into equal parts for all ranks, the last part padded with zeros."""
        taken = []
        at = 0
        for group in self.zero.fp16_groups:
            for weight in group:
                elements = weight.ds_numel
                before = -(-elements // len(parts))
                size = -(-elements // ranks)
                pieces = [span(part, at, at + before) for part in parts]
                end = min(elements, (rank + 1) * size)
                mine = span(pieces, rank * size, end)
                taken.append(span([mine], 0, size))
                at += before
        saved = sum(len(flat) for flat in parts[0])
        _check(abs(at - saved), 1)
        sizes = [each.numel() for each in self.owned()]
        own = torch.split(torch.cat(taken), sizes)
        return [each.clone() for each in own]

    def numbered(self) -> list[list[int]]:
        # A large group has several buffers.
        groups: list[list[int]] = [[] for _ in self.zero.optimizer.param_groups]
        for number in range(len(self.zero.fp16_groups)):
            groups[self.zero.sub_group_to_group_id[number]].append(number)
        return groups


def _flat_keys(values: Mapping[str, Any], shape: torch.Size) -> set[str]:
    """Return the names of the states that have the shape of their weights."""
    keys = set()
    for key, value in values.items():
        if not torch.is_tensor(value):
            continue
        if value.shape == shape:
            keys.add(key)
        elif value.dim():
            raise RunError(
                "the states of this optimizer cannot be cut up "
                "anew; resume on as many ranks as saved them"
            )
    return keys


def _check(difference: int, limit: int) -> None:
    if difference >= limit:
        raise _another_model()


def _another_model() -> RunError:
    return RunError("the checkpoint is of another model; its weights do not fit this run")
