"""Effect of a user's DeepSpeed JSON, read from the engine and its optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ZERO = "zero_optimization."
_STAGE_3 = (
    "enable_sanity_checks",
    "leaf_module",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "override_module_apply",
    "stage3_",
    "sub_group_size",
)
_STAGES_1_AND_2 = (
    "allgather_bucket_size",
    "compute_grad_norm",
    "ignore_unused_parameters",
    "parameter_alignment",
    "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
)


def in_effect(engine: Any, keys: Iterable[str]) -> dict[str, object]:
    """Return the engine's value of every key; None if the engine exposes no value."""
    return {key: _held(engine, key) for key in keys}


def without_effect(engine: Any, keys: Iterable[str]) -> list[str]:
    """Return the keys that DeepSpeed 0.19.8 reads only for another ZeRO stage."""
    unused = _STAGES_1_AND_2 if engine.zero_optimization_stage() == 3 else _STAGE_3
    return [
        key for key in keys if key.startswith(ZERO) and key.removeprefix(ZERO).startswith(unused)
    ]


def _held(engine: Any, key: str) -> object:
    """Return a key's value from the optimizer, where its first use is, or else from the engine."""
    name = key.removeprefix(ZERO)
    if key == f"{ZERO}stage":
        return int(engine.zero_optimization_stage())
    if name.startswith(("offload_optimizer.", "offload_param.")):
        section, field = name.split(".")
        return _plain(getattr(getattr(engine, f"zero_{section}")(), field, None))
    short = name.removeprefix("stage3_")
    optimizer = engine.optimizer
    for holder in (optimizer, getattr(optimizer, "parameter_offload", None)):
        for attribute in (name, short):
            if hasattr(holder, attribute):
                return _plain(getattr(holder, attribute))
    for attribute in (name, f"zero_{short}"):
        if hasattr(engine, attribute):
            value = getattr(engine, attribute)
            return _plain(value() if callable(value) else value)
    return None


def _plain(value: object) -> object:
    """Return a value of a JSON type."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)
