"""Files of an offload to disks as tensors, for checkpoints and the audit."""

from __future__ import annotations

from typing import Any

import torch


def files_of(zero: Any) -> dict[int, torch.Tensor]:
    """Return the files as tensors, by the ids of DeepSpeed's empty tensors.

    Without an offload to a disk there are none.
    """
    swapper = getattr(zero, "optimizer_swapper", None)
    if not swapper:
        return {}
    files: dict[int, torch.Tensor] = {}
    for info in swapper.swap_params_info.values():
        for each in info.tensors:
            file = torch.from_file(
                each.swap_path,
                shared=True,
                size=info.numel(),
                dtype=info.dtype(),
            )
            files[id(each.compute_tensor)] = file
    return files


def uses_files(zero: Any) -> bool:
    """Return whether DeepSpeed's optimizer keeps weights or states in files."""
    in_files = getattr(zero, "swap_optimizer", False)
    return bool(in_files or getattr(zero, "params_in_nvme_and_cpu", False))


def load_files(zero: Any, state: Any) -> None:
    """Restore weights and states of a rank, and write them to the files."""
    # DeepSpeed's own way copies into empty tensors. Proceed as after a step, so that the files
    # are written.
    saved = state["optimizer"]
    timers = set[str]()
    groups = zip(zero.optimizer.param_groups, saved["param_groups"], strict=True)
    for group, options in groups:
        for key, value in options.items():
            if key != "params":
                group[key] = value
    for number, weights in enumerate(zero.fp32_partitioned_groups_flat):
        zero._prepare_sub_group(number, timers)
        weights.data.copy_(state["weights"][number])
        zero.optimizer.state[weights] = saved["state"][number]
        zero._reassign_or_swap_out_partitioned_parameters(number)
        zero._release_sub_group(number, timers)
