"""Count, in a rank of forkrun.py, what makes ranks wait for each other or the host for a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLLECTIVES = (
    *(
        "allreduce",
        "allreduce_coalesced",
        "allgather",
        "_allgather_base",
        "allgather_coalesced",
        "gather",
    ),
    *(
        "allgather_into_tensor_coalesced",
        "broadcast",
        "reduce",
        "reduce_scatter",
        "_reduce_scatter_base",
        "scatter",
    ),
    *("alltoall", "alltoall_base", "barrier", "monitored_barrier", "send", "recv"),
)
READS = ("item", "tolist", "__float__", "__int__", "__bool__")


def watch(folder: Path, options: dict[str, Any]) -> None:
    """Write all calls to calls.json when training ends; a `poisoned` step's loss is NaN on `rank`.

    DDP sums gradients below Python, so its own collectives are not among the calls.
    """
    import torch

    from workbench.agent.rank import collectives as ranks
    from workbench.finetune.train.trainer import FineTuner

    calls: list[dict[str, object]] = []
    now: dict[str, Any] = {"step": 0, "inside": False}

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **given: Any) -> Any:
            is_float = isinstance(self, torch.Tensor) and self.is_floating_point()
            calls.append({"call": name, "meets": name in COLLECTIVES, "is_float": is_float, **now})
            return original(self, *args, **given)

        setattr(owner, name, call)

    for name in COLLECTIVES:
        noted(torch.distributed.ProcessGroup, name)
    for name in READS:
        noted(torch.Tensor, name)
    training_step, train = FineTuner.training_step, FineTuner.train

    def in_step(self: Any, *args: Any, **given: Any) -> Any:
        now.update(step=self.state.global_step + 1, inside=True)
        loss = training_step(self, *args, **given)
        now.update(inside=False)
        if (now["step"], ranks.rank()) == (options.get("poisoned"), options.get("rank")):
            return loss * float("nan")
        return loss

    def in_training(self: Any, *args: Any, **given: Any) -> Any:
        try:
            return train(self, *args, **given)
        finally:
            (folder / "calls.json").write_text(json.dumps(calls))

    FineTuner.training_step, FineTuner.train = in_step, in_training
