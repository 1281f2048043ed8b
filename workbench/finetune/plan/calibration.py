"""Compare a plan with measured steps of shallow copies of the model. Pure.

The copies have the real width, random weights, and the job's micro-batch at the planned lengths.
The memory of a copy with two layers is planned in the same way as the job's. The times of copies
with one and two layers lie on a line, which continues to the layers of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.errors import ConfigError
from workbench.base.json_values import part
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.choices import Optimizer, Peft
from workbench.finetune.plan.memory import Need
from workbench.finetune.techniques.sizes import Memory, Parameters

LAYERS = 2
"""Layers per stack of the copy whose memory is measured."""
_DEPTH_KEYS = (
    "num_layers",
    "num_decoder_layers",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
)
_TEXT = "text_config"
"""Key of the language model in the configuration of a model of several media."""
_MEASURED = (Optimizer.ADAMW, Optimizer.SGD)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTime:
    """Time of an optimizer step of a copy with one micro-batch, on one rank without sharding."""

    layers: int
    """Layers per stack."""
    micro_batch_s: float
    """Median seconds of the forward and backward pass of a micro-batch."""
    update_s: float
    """Median seconds of the rest of a step."""

    @property
    def step_s(self) -> float:
        """Seconds of a step with one micro-batch."""
        return self.micro_batch_s + self.update_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Steps of shallow copies: the memory as planned and as measured, and the times."""

    planned_gib: float = 0.0
    """GiB of a copy with two layers as planned, without the runtime's own memory."""
    measured_gib: float = 0.0
    """GiB of the same copy as measured."""
    why: str = ""
    """Reason why no memory was measured. The plan's memory is then not scaled."""
    rounds: Sequence[Sequence[CopyTime]] = ()
    """Times of the copies, a round after another. Empty: no step was timed."""
    untimed: str = ""
    """Reason why no step was timed."""
    layers: int = 0
    """Layers per stack of the whole model."""
    rows: int = 0
    """Rows of the timed micro-batch."""
    lengths: tuple[int, int] = (0, 0)
    """Tokens of the timed rows: source and target."""

    @property
    def scale(self) -> float:
        """Measured share of the planned memory; 1 if nothing was measured.

        Example:
            >>> Calibration(planned_gib=2.0, measured_gib=2.5).scale, Calibration(why="QLoRA").scale
            (1.25, 1.0)
        """
        return 1.0 if self.why else self.measured_gib / self.planned_gib

    @property
    def whole(self) -> list[CopyTime]:
        """Times of the whole model by round.

        Example:
            >>> one = CopyTime(layers=1, micro_batch_s=0.5, update_s=0.25)
            >>> two = CopyTime(layers=2, micro_batch_s=0.75, update_s=0.375)
            >>> Calibration(why="QLoRA", rounds=[(one, two)], layers=12).whole
            [CopyTime(layers=12, micro_batch_s=3.25, update_s=1.625)]
        """
        return [continued(times, self.layers) for times in self.rounds]


def continued(times: Sequence[CopyTime], layers: int) -> CopyTime:
    """Return the time at a number of layers, on the line through the least and the most layers.

    A copy with more layers takes at least as long: noise gives no layer less than 0 seconds.
    """
    least = min(times, key=lambda time: time.layers)
    most = max(times, key=lambda time: time.layers)
    share = 0.0
    if most.layers > least.layers:
        share = (layers - most.layers) / (most.layers - least.layers)
    micro_batch_s = max(0.0, most.micro_batch_s - least.micro_batch_s)
    update_s = max(0.0, most.update_s - least.update_s)
    return CopyTime(
        layers=layers,
        micro_batch_s=most.micro_batch_s + share * micro_batch_s,
        update_s=most.update_s + share * update_s,
    )


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


def depth_of(config: Mapping[str, object]) -> int | None:
    """Return the number of layers per stack, or None if unknown or if the stacks differ."""
    config = part(config, _TEXT) or config
    depths = {config[key] for key in _DEPTH_KEYS if isinstance(config.get(key), int)}
    return int(str(depths.pop())) if len(depths) == 1 else None


def shallow_config(config: Mapping[str, object], layers: int) -> dict[str, object]:
    """Return a configuration with so many layers per stack, or as many as there are if fewer.

    Example:
        >>> shallow_config({"num_layers": 24, "d_model": 512, "kinds": ["a"] * 24}, 2)
        {'num_layers': 2, 'd_model': 512, 'kinds': ['a', 'a']}
    """
    if text := part(config, _TEXT):
        # A model of several media: text rows pass through its language model alone.
        return {**config, _TEXT: shallow_config(text, layers)}
    depth = depth_of(config)
    shallow = dict(config)
    for key, value in config.items():
        if key in _DEPTH_KEYS and value:
            shallow[key] = min(layers, depth or layers)
        elif isinstance(value, list) and len(value) == depth:
            # Lists with an entry for every layer.
            shallow[key] = value[:layers]
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


def untimed(job: FineTune, layers: Sequence[Parameters], depth: int) -> str:
    """Return why times of copies do not predict the whole model; empty if they predict the model.

    `layers` has the layers of all stacks, stack by stack.
    """
    if job.torch_compile or job.training.get("use_liger_kernel"):
        return "the copies run without torch_compile and without Liger's kernels"
    for first in range(0, len(layers), depth):
        # The first layer of a stack may have more, such as T5's positions.
        stack = layers[first + 1 : first + depth]
        if any(layer != stack[0] for layer in stack):
            return "the model has layers of several kinds, and a copy has only the first"
    return ""


def scaled(need: Need, scale: float) -> Need:
    """Return a need with its tensors scaled, on the device that computes."""
    if need.gpu is not None:
        return replace(need, gpu=_scaled(need.gpu, scale))
    return replace(need, host=_scaled(need.host, scale))


def _scaled(memory: Memory, scale: float) -> Memory:
    return replace(memory.times(scale), overhead=memory.overhead, files=memory.files)
