"""Options of LoRA and of FSDP: the two objects inside a job that have keys of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from workbench.base.errors import ConfigError, one_of
from workbench.jobs.choices import Shard

__all__ = ["Fsdp", "Lora", "fsdp_from", "lora_from"]

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """How adapters are made; the names are those of peft's LoraConfig, without its `lora_`."""

    r: int = 8
    """Rank of the two small matrices."""
    alpha: float = 16
    """Their product is scaled by alpha / r."""
    dropout: float = 0.0
    """Dropout before them while training; runs on other numbers of ranks follow one curve only without it."""
    target_modules: str | Sequence[str] = ALL_LINEAR
    """Names of the modules that get one; default: every linear layer but the output's."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ConfigError(f"lora r is {self.r!r}; it must be a whole number, 1 or more")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not self.alpha > 0:
            raise ConfigError(f"lora alpha is {self.alpha!r}; it must be a number more than 0")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ConfigError(f"lora dropout is {self.dropout!r}; it must be 0 or more and less than 1")
        names = self.target_modules
        listed = isinstance(names, list | tuple) and names and all(isinstance(n, str) and n for n in names)
        if names != ALL_LINEAR and not listed:
            raise ConfigError(f"lora target_modules is {names!r}; give {ALL_LINEAR!r} or a list of module names")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fsdp:
    """How `fsdp` shards."""

    shard: str = "full"
    """One of `Shard`."""
    layers: Sequence[str] = ()
    """Class names of the layers that are sharded each by itself; default: the transformer layers of the model."""
    prefetch: int = 1
    """Layers whose parameters are gathered ahead of their turn; 0 leaves it to torch."""
    reduce_in_fp32: bool = True
    """Whether gradients are summed in FP32 where the arithmetic is bf16."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.shard not in [str(s) for s in Shard]:
            raise one_of("fsdp shard", self.shard, list(Shard))
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ConfigError(f"fsdp prefetch is {self.prefetch!r}; it must be a whole number, 0 or more")
        if not isinstance(self.layers, list | tuple) or not all(isinstance(n, str) and n for n in self.layers):
            raise ConfigError(f"fsdp layers is {self.layers!r}; give a list of class names")
        if not isinstance(self.reduce_in_fp32, bool):
            raise ConfigError(f"fsdp reduce_in_fp32 is {self.reduce_in_fp32!r}; it must be true or false")


def lora_from(data: Mapping[str, object]) -> Lora:
    """Read the `lora` object of a job."""
    return Lora(**_known("lora", data, Lora))  # type: ignore[arg-type]


def fsdp_from(data: Mapping[str, object]) -> Fsdp:
    """Read the `fsdp` object of a job."""
    return Fsdp(**_known("fsdp", data, Fsdp))  # type: ignore[arg-type]


def _known(name: str, data: object, cls: type[Lora] | type[Fsdp]) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name} is {data!r}; it must be an object")
    allowed = [f.name for f in fields(cls)]
    for key in data:
        if key not in allowed:
            raise one_of(f"{name} key", key, allowed)
    return data
