"""Host memory of an offload to disks, for the planner."""

from __future__ import annotations

from workbench.finetune.techniques.sizes import FP32, Setting, Trace, weights_of


def optimizer_in_memory(setting: Setting, trace: Trace) -> float | None:
    """Return the bytes of a rank's buffers for optimizer states; None without a disk for them."""
    if not setting.swap_buffers:
        return None
    shard = trace.trained / setting.shards
    return setting.swap_buffers * FP32 * min(shard, setting.sub_group)


def weights_in_memory(setting: Setting, trace: Trace) -> float:
    """Return the bytes of a rank's offloaded weights that stay in host memory."""
    if not setting.weight_buffers:
        return weights_of(setting, trace) / setting.shards
    # This number of trained elements stays in memory anyway (`max_in_cpu`).
    shard = trace.trained / setting.shards
    elements = setting.weight_buffers + min(setting.weights_kept, shard)
    return setting.weight_bytes * elements
