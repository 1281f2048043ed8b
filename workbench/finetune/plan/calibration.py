"""Compare a plan with a measured step of a shallow copy of the model. Pure.

The copy has two layers of the real width, random weights, and the job's micro-batch at the planned
lengths. Its step without sharding is planned in the same way as the job's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.choices import Optimizer, Peft
from workbench.finetune.plan.memory import Need
from workbench.finetune.techniques.sizes import Memory

LAYERS = 2
"""Layers of the copy, per stack."""
_DEPTH_KEYS = ("num_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers")
_MEASURED = (Optimizer.ADAMW, Optimizer.SGD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Memory of a shallow copy's step as planned and as measured, without the runtime's own."""

    planned_gib: float = 0.0
    measured_gib: float = 0.0
    step_s: float = 0.0
    """Median seconds of a step of the copy, with its update."""
    why: str = ""
    """Reason why nothing was measured. The plan is then not scaled."""

    @property
    def scale(self) -> float:
        """Measured share of the planned memory; 1 if nothing was measured.

        Example:
            >>> Calibration(planned_gib=2.0, measured_gib=2.5).scale, Calibration(why="QLoRA").scale
            (1.25, 1.0)
        """
        return 1.0 if self.why else self.measured_gib / self.planned_gib


def check(calibration: Calibration | None) -> float:
    """Return the scale of a calibration, 1 without one.

    Raises:
        ConfigError: The object is no calibration, or its figures allow no scale.
    """
    if calibration is None:
        return 1.0
    if not isinstance(calibration, Calibration):
        raise ConfigError(
            f"calibration is a {type(calibration).__name__}. "
            "Pass calibration=table.calibration of table = cluster.plan(job, measure=True)"
        )
    figures = (calibration.planned_gib, calibration.measured_gib)
    if not calibration.why and not all(0 < figure < float("inf") for figure in figures):
        raise ConfigError(
            f"the calibration has {figures[0]} GiB planned and {figures[1]} GiB measured; "
            "both must be more than 0"
        )
    return calibration.scale


def shallow_config(config: Mapping[str, object]) -> dict[str, object] | None:
    """Return a configuration with two layers per stack, or None if the depth is unknown.

    Example:
        >>> shallow_config({"num_layers": 24, "d_model": 512, "kinds": ["a"] * 24})
        {'num_layers': 2, 'd_model': 512, 'kinds': ['a', 'a']}
        >>> shallow_config({"depth": 24}) is None
        True
    """
    depths = {config[key] for key in _DEPTH_KEYS if isinstance(config.get(key), int)}
    if len(depths) != 1:
        return None
    (depth,) = depths
    shallow = dict(config)
    for key, value in config.items():
        if key in _DEPTH_KEYS and value:
            shallow[key] = min(LAYERS, int(str(depth)))
        elif isinstance(value, list) and len(value) == depth:
            # Lists with an entry for every layer.
            shallow[key] = value[:LAYERS]
    return shallow


def unmeasured(job: FineTune) -> str:
    """Return why the copy's step would not be the job's step; empty if it is."""
    if job.method != "sft":
        return f"the step of method {job.method!r} is not measured on a copy"
    if job.peft == Peft.QLORA:
        return "weights in 4 bits are not measured on a copy"
    if job.optimizer not in _MEASURED:
        return f"optimizer {str(job.optimizer)!r} is not measured on a copy"
    if job.sequence_parallel > 1 or job.tensor_parallel > 1 or job.device_map:
        return "a step of several ranks is not measured on a copy"
    return ""


def scaled(need: Need, scale: float) -> Need:
    """Return a need with its tensors scaled, on the device that computes."""
    if need.gpu is not None:
        return replace(need, gpu=_scaled(need.gpu, scale))
    return replace(need, host=_scaled(need.host, scale))


def _scaled(memory: Memory, scale: float) -> Memory:
    return replace(memory.times(scale), overhead=memory.overhead, files=memory.files)
