"""Options of LoRA, of FSDP, of local SGD and the memory of GPUs: what a job holds as objects of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from workbench.base.errors import ConfigError
from workbench.base.record import (
    Allowed,
    Choice,
    Count,
    PathText,
    Positive,
    Record,
    Size,
    Text,
    Unit,
)
from workbench.finetune.options.choices import Shard
from workbench.finetune.options.instead import LORA

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
    if host := next((name for name in sizes if name in ("cpu", "disk")), None):
        raise ConfigError(
            f"max_memory names {host!r}: weights that accelerate keeps there get no gradients; name GPUs alone, or use "
            "technique 'fsdp' with fsdp={'offload': True}"
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


class Lora(Record):
    """How adapters are made; the names are those of peft's LoraConfig, without its `lora_`."""

    label: ClassVar[str] = "lora"

    r: Size = 8
    """Rank of the two small matrices."""
    alpha: Positive = 16
    """Their product is scaled by alpha / r."""
    dropout: Annotated[int | float, Field(ge=0, lt=1)] = 0.0
    """Dropout before them while training; runs on other numbers of ranks follow one curve only without it."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead, which keeps large ranks learning."""
    use_dora: bool = False
    """Learn the length of each column of a weight apart from its direction (DoRA); slower."""
    bias: Annotated[str, Choice(["none", "all", "lora_only"])] = "none"
    """Which biases of the model are trained too: `none`, `all`, or `lora_only`, those of modules with adapters."""
    target_modules: Annotated[
        Annotated[str, Choice([ALL_LINEAR])] | Annotated[Sequence[Text], Field(min_length=1)],
        Allowed(f"{ALL_LINEAR!r} or a list of module names"),
    ] = ALL_LINEAR
    """Names of the modules that get one; default: every linear layer but the output's."""
    resume_from: PathText | None = None
    """A folder of adapters to go on training; they keep the options they were made with. The same as the folder as the
    job's `model`."""

    @classmethod
    def _hint(cls, name: str, value: object = None) -> str:
        """Return what to use instead of an option of peft's LoraConfig."""
        return LORA.get(name, "") if value is None else ""


class Fsdp(Record):
    """How `fsdp` shards."""

    label: ClassVar[str] = "fsdp"

    shard: Annotated[str, Choice(Shard)] = "full"
    """One of `Shard`."""
    layers: Annotated[Sequence[Text], Allowed("a list of class names")] = ()
    """Class names of the layers that are sharded each by itself; default: the transformer layers of the model."""
    layer_parameters: Size | None = None
    """In place of `layers`: shard each part of the model by itself that has at least so many parameters."""
    group: Annotated[Size | None, Unit("ranks")] = None
    """Neighbouring ranks that `hybrid` shards over. Default None: those of a pod."""
    prefetch: Count = 1
    """Layers whose parameters are gathered ahead of their turn; 0 leaves it to torch."""
    reduce_in_fp32: bool = True
    """Whether gradients are summed in FP32 where the arithmetic is bf16 or fp16."""
    offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory and update them there; a GPU holds the layers that
    are gathered for their turn. On CPUs nothing changes."""


class LocalSgd(Record):
    """How `local-sgd` brings the ranks together."""

    label: ClassVar[str] = "local_sgd"

    sync_steps: Annotated[Size, Unit("steps")] = 10
    """Optimizer steps that each rank takes by itself between two synchronisations; after the last step there is one."""
    outer_learning_rate: Positive = 1.0
    """Learning rate of the outer step, from the weights of the last synchronisation towards the mean of the ranks'; 1
    without momentum is plain averaging. DiLoCo, with hundreds of steps between synchronisations, takes 0.7."""
    outer_momentum: Annotated[int | float, Field(ge=0, lt=1)] = 0.5
    """Nesterov momentum of the outer step. DiLoCo takes 0.9."""
