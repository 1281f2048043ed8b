"""Keys of DeepSpeed without effect in the trainer, with reasons and remedies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workbench.base.errors import ConfigError, shortened
from workbench.base.json_values import get_object

_OWN_CHECKPOINTS = "checkpoints are the workbench's own: use save_steps and resume"
_OWN_ROWS = (
    "the trainer deals out the rows itself: remove the "
    "key, or use a Script with DeepSpeed's data loader"
)

NOT_DONE: Mapping[str, str] = {
    "activation_checkpointing": "models recompute by torch: use gradient_checkpointing=True",
    "autotuning": (
        "it starts runs of its own: ask plan(job) for the largest micro-batch, or use a Benchmark"
    ),
    "checkpoint": _OWN_CHECKPOINTS,
    "compile": "the trainer does not call engine.compile(): use torch_compile=True, or a Script",
    "data_efficiency": (
        "random-LTD and curriculum sampling need their own training loop: use a Script"
    ),
    "dataloader_drop_last": _OWN_ROWS,
    "datastates_ckpt": _OWN_CHECKPOINTS,
    "disable_allgather": "DeepSpeed 0.19.8 reads the key and never uses its value: remove the key",
    "expert_parallel": (
        "AutoEP needs another order of rows, and fails with transformers 5.23: use a Script"
    ),
    "flops_profiler.output_file": "the profile is a file of the run directory: read result.profile",
    "flops_profiler.recompute_fwd_factor": (
        "the trainer measures what is recomputed: remove the key"
    ),
    "hybrid_engine": (
        "it generates text between steps, and this training has no such step: use a Script"
    ),
    "managed_gradient_accumulation": (
        "the trainer lets DeepSpeed count micro-batches: remove the key"
    ),
    "optimizer.legacy_fusion": "DeepSpeed uses it without ZeRO alone: remove the key",
    "pipeline": (
        "ranks hold different rows and not different layers: use a Script with PipelineModule"
    ),
    "seq_parallel_communication_data_type": (
        "ranks hold whole rows: remove the key, or use a Script"
    ),
    "sequence_parallel_size": "remove the key, and use FineTune(sequence_parallel=N)",
    "tensor_parallel": "remove the section, and use FineTune(tensor_parallel=N)",
    "use_data_before_expert_parallelism": "there is no expert parallelism here: remove the key",
    "vocabulary_size": "DeepSpeed 0.19.8 reads the key and never uses its value: remove the key",
    "weight_quantization": (
        "it quantizes for inference: use peft='qlora' to train over 4-bit weights"
    ),
    "zero_optimization.allgather_partitions": "DeepSpeed 0.19.8 always gathers: remove the key",
    "zero_optimization.elastic_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.legacy_stage1": "DeepSpeed 0.19.8 has one stage 1: remove the key",
    "zero_optimization.load_from_fp32_weights": _OWN_CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.save_muon_momentum_buffer_in_memory": (
        "DeepSpeed uses it under stage 3, where 'muon' is refused: remove the key"
    ),
    "zero_optimization.zenflow": (
        "checkpoints and the audit do not know its optimizer: use a Script"
    ),
}
"""Reason and remedy by key, or by section for all keys of the section."""

_DEFAULTS: Mapping[str, object] = {
    "managed_gradient_accumulation": True,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.load_from_fp32_weights": True,
}
"""Values without effect, where the default is not the usual value for 'off'."""


def check_done(config: Mapping[str, object], source: str) -> None:
    """Raise ConfigError for a key of a feature that the trainer lacks. A key that is off passes.

    Raises:
        ConfigError: The message names the key, its value, the reason and a remedy.

    Example:
        >>> check_done({"compile": {"deepcompile": False}}, "my.json")
    """
    for path, reason in NOT_DONE.items():
        *sections, name = path.split(".")
        within = config
        for section in sections:
            within = get_object(within, section)
        if name not in within:
            continue
        asked = next(_asked(within[name], path), None)
        if asked is not None:
            key, value = asked
            raise ConfigError(
                f"{source}: {key} is {shortened(value)}, which FineTune does not do; {reason}"
            )


def own_keys(config: Mapping[str, object], where: str = "") -> Iterator[str]:
    """Yield the keys of a configuration; keys of sections as `section.key`."""
    for key in config:
        inner = get_object(config, key)
        if inner:
            yield from own_keys(inner, f"{where}{key}.")
        else:
            yield f"{where}{key}"


def _asked(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield each key below a path whose value turns a feature on, with the value."""
    match value:
        case {"enabled": False}:
            return
        case {**section}:
            for key, inner in section.items():
                yield from _asked(inner, f"{path}.{key}")
        case _:
            is_usual = value in (None, "auto") or (
                value is _DEFAULTS[path] if path in _DEFAULTS else _is_off(value)
            )
            if not is_usual:
                yield path, value


def _is_off(value: object) -> bool:
    """Return whether a value means 'off' in the libraries: also a single rank or stage."""
    return value is False or value in ("none", "") or (value is not True and value in (0, 1))
