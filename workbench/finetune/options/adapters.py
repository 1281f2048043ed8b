"""Option records of a job: LoRA, FSDP, local SGD and the memory of GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from workbench.base.errors import ConfigError
from workbench.base.record import (
    Allowed,
    Count,
    PathText,
    Positive,
    Record,
    Size,
    Text,
    Unit,
)
from workbench.finetune.options.choices import Reduce, Shard
from workbench.finetune.options.renamed_options import LORA

ALL_LINEAR = "all-linear"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([GM]i?B)")
_BYTES = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


def _gib(value: object) -> object:
    match value:
        case str() if size := _SIZE.fullmatch(value):
            return float(size[1]) * _BYTES[size[2]] / 2**30
    return value


def _by_gpu(value: object) -> object:
    match value:
        case Mapping():
            sizes = {str(gpu): _gib(size) for gpu, size in value.items()}
        case _:
            return value
    host = next((name for name in sizes if name in ("cpu", "disk")), None)
    if host:
        raise ConfigError(
            f"max_memory names {host!r}: weights that accelerate keeps there get no gradients; "
            "name GPUs alone, or use technique 'fsdp' with fsdp={'offload': True}"
        )
    if not all(name.isdecimal() for name in sizes):
        raise ValueError(value)
    return sizes


GpuMemory = Annotated[
    Mapping[str, Positive],
    BeforeValidator(_by_gpu),
    Unit("GiB"),
    Allowed("an object of GPU numbers and GiB, such as {0: 20, 1: '20GiB'}"),
]

_Bias = Literal["none", "all", "lora_only"]


class Lora(Record):
    """Options of LoRA adapters. Names are peft's LoraConfig names without the `lora_` prefix."""

    label: ClassVar[str] = "lora"

    r: Size = 8
    """Rank of the two small matrices."""
    alpha: Positive = 16
    """Scale of the product of the two matrices: alpha / r."""
    dropout: Annotated[int | float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapter while training.

    The loss curve is the same for any number of ranks only at 0.
    """
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r, so that large ranks keep learning."""
    use_dora: bool = False
    """Learn the length of each weight column apart from its direction (DoRA). Slower."""
    bias: _Bias = "none"
    """Biases of the model to train: `none`, `all`, or `lora_only`.

    `lora_only` trains biases of modules with adapters.
    """
    target_modules: Annotated[
        Literal["all-linear"] | Sequence[Text],
        Allowed(f"{ALL_LINEAR!r} or a list of module names"),
    ] = ALL_LINEAR
    """Names of the modules with an adapter. Default: every linear layer except the output layer.

    The stacked experts of a mixture and its routers count as linear layers. A name that fits no
    module is refused. A list may be empty beside `target_parameters`.
    """
    target_parameters: Annotated[
        Sequence[Text], AfterValidator(tuple), Allowed("a list of weight names")
    ] = ()
    """Names of further weights with an adapter, such as `["experts.gate_up_proj"]`. Default none.

    The adapters of these weights have no dropout and no DoRA.
    """
    modules_to_save: Annotated[
        Sequence[Text], AfterValidator(tuple), Allowed("a list of module names")
    ] = ()
    """Names of modules to train as a whole beside the adapters, such as `["lm_head"]`.

    The modules are saved with the adapters, and need the memory of trained weights. Default none.
    """
    resume_from: PathText | None = None
    """Folder of adapters to continue training.

    The adapters keep the options of their first training. The same as the folder as the job's
    `model`.
    """

    @classmethod
    def _hint(cls, name: str, value: object = None) -> str:
        """Return the option to use instead of an option of peft's LoraConfig."""
        return LORA.get(name, "") if value is None else ""


class Fsdp(Record):
    """Sharding options of technique `fsdp`."""

    label: ClassVar[str] = "fsdp"

    shard: Shard = "full"
    """One of `Shard`."""
    layers: Annotated[Sequence[Text], Allowed("a list of class names")] = ()
    """Class names of the layers to shard separately.

    Default: the transformer layers of the model.
    """
    layer_parameters: Size | None = None
    """Smallest number of parameters of a module to shard separately. Replaces `layers`."""
    group: Annotated[Size | None, Unit("ranks")] = None
    """Number of neighbouring ranks that `hybrid` shards over. Default None: the ranks of a pod."""
    prefetch: Count = 1
    """Number of layers whose parameters are gathered ahead of time.

    0 leaves prefetching to torch.
    """
    reduce_in_fp32: bool = True
    """Whether to sum gradients in FP32 if the arithmetic is bf16 or fp16."""
    reduce: Reduce = "micro_batch"
    """One of `Reduce`: when the ranks add up their gradients."""
    offload: bool = False
    """Keep and update parameters, gradients and optimizer states in host memory.

    A GPU holds only the gathered layers. No effect on CPUs.
    """


class LocalSgd(Record):
    """Synchronisation options of technique `local-sgd`."""

    label: ClassVar[str] = "local_sgd"

    sync_steps: Annotated[Size, Unit("steps")] = 10
    """Optimizer steps of a rank between two synchronisations.

    The last step is always followed by a synchronisation.
    """
    outer_learning_rate: Positive = 1.0
    """Learning rate of the outer step.

    The outer step moves the last synchronised weights towards the mean of the ranks' weights. 1
    without momentum is plain averaging. DiLoCo uses 0.7, with hundreds of steps between
    synchronisations.
    """
    outer_momentum: Annotated[int | float, Field(ge=0, lt=1)] = 0.5
    """Nesterov momentum of the outer step. DiLoCo uses 0.9."""
