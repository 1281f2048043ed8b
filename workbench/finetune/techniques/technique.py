"""Base class `Technique`: the interface for the planner, the checks, the trainer and checkpoints.

A technique is one file in this folder and a line in `registry`. Functions on pods import torch
locally, so a notebook reads the modules in milliseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from workbench.base.errors import ConfigError
from workbench.finetune.options.adapters import Fsdp
from workbench.finetune.options.choices import BITSANDBYTES
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.sizes import Memory, Moment, Setting, Trace
from workbench.finetune.techniques.step_hooks import TechniquePoints

Parts = Callable[[Any, Fsdp], Sequence[Any]]
"""Function that finds the parts of a model to shard separately."""
UPDATE = ("gradients", "updated", "states")
"""Data of an optimizer: gradients, the weights to update, and the optimizer's states."""


class Technique(ABC):
    """How a training state is spread over the ranks.

    A subclass without a required member fails when the class is created. A shared base class, not a
    technique itself, passes `shared=True`.
    """

    # Identity.
    name: ClassVar[str]
    """Name of the technique in a job: `FineTune(technique=…)`."""
    engine: ClassVar[str]
    """Name of the technique's engine in the audit."""
    words: ClassVar[str]
    """Words for the engine in messages."""
    engine_of_one: ClassVar[str] = ""
    """Other name of the engine in the audit, if a single rank may run without it. Empty: none."""
    options: ClassVar[str] = ""
    """Option of `FineTune` that only the technique reads; empty for none."""
    alone: ClassVar[bool] = False
    """Whether a single rank on the first pod runs the job, however many pods there are."""

    apart: ClassVar[bool] = False
    """Whether ranks step independently, so their weights differ between two exchanges."""

    # What each rank holds.
    spreads: ClassVar[tuple[str, ...]]
    """Parts of the state to spread over the ranks: `trained`, `gradients`, `updated`, `states`.

    All other parts are whole on each rank.
    """
    offloads: ClassVar[bool] = False
    """Whether the name promises optimizer states in host memory."""

    # DeepSpeed.
    config: ClassVar[str | None] = None
    """File in `dsconfig/`; None without DeepSpeed."""
    zero_stage: ClassVar[int] = 0
    """Stage of ZeRO; 0 without DeepSpeed."""

    # Number formats and loading.
    autocasts: ClassVar[bool] = True
    """Whether the Trainer computes half formats under autocast.

    Else the engine converts the weights.
    """
    half_weights: ClassVar[bool] = False
    """Whether trained weights are kept in the half format, beside an FP32 copy for the update."""
    places_weights: ClassVar[bool] = False
    """Whether the engine chooses device and format of the weights for training."""
    reads_whole: ClassVar[bool] = False
    """Whether the engine takes part in reading a pretrained model, so ranks share no pages."""
    gathers_packed: ClassVar[bool] = False
    """Whether weights in 4 bits are stored in the format of the gathered weights."""
    scales_on_cpus: ClassVar[bool] = False
    """Whether fp16 trains on CPUs as well."""

    # Optimizers.
    no_muon: ClassVar[str] = ""
    """Why optimizer `muon` cannot train under the technique; empty if it can."""

    # The planner.
    preference: ClassVar[int]
    """Position in `plan`'s order of choice among fitting techniques, the lowest first.

    Techniques with the least traffic for a step come first, then techniques with waits for the
    host. Measured with 3 ranks and gloo, in units of the FP32 model: DDP 1.33, ZeRO-1 2.00 for any
    number of micro-batches, ZeRO-2, ZeRO-3 and FSDP 2.00 or more for each micro-batch.
    """
    same_losses: ClassVar[bool] = True
    """Whether losses follow the losses of `single` at the same global batch."""
    recipe: ClassVar[bool] = True
    """Whether a run can be repeated with the files of a recipe, without this project."""

    def __init_subclass__(cls, *, shared: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if shared:
            return
        there = {name: getattr(cls, name, None) for name in dir(cls)}
        missing = [name for name in Technique.__annotations__ if name not in there]
        for name, member in there.items():
            if getattr(member, "__isabstractmethod__", False):
                missing.append(name)
        if missing:
            raise TypeError(f"technique {cls.__name__} has no {', '.join(sorted(missing))}")

    @property
    def description(self) -> str:
        """Effect of the technique, in one sentence."""
        return (type(self).__doc__ or "").partition("\n")[0]

    @property
    def uses_deepspeed(self) -> bool:
        return self.config is not None

    @property
    def replicates(self) -> bool:
        """Whether every rank holds the whole training state."""
        return not self.spreads

    # Checks of a job, before anything starts.

    def refuse(self, job: FineTuneOptions) -> None:
        """Refuse options that contradict the technique.

        Raises:
            ConfigError: An option has no use or cannot work; the message names an alternative.
        """
        if job.deepspeed is not None and not self.uses_deepspeed:
            raise ConfigError(
                f"technique '{self.name}' runs without DeepSpeed: "
                "drop `deepspeed`, or choose zero1, zero2 or zero3"
            )
        if job.optimizer == "muon" and self.no_muon:
            raise ConfigError(
                f"optimizer 'muon' needs whole matrices, and technique '{self.name}' "
                f"{self.no_muon}; use 'single', 'ddp', 'zero1' or 'zero2', or optimizer 'adamw'"
            )
        if job.device_map and not self.alone:
            raise ConfigError(
                "device_map spreads layers over the GPUs that one process sees, and "
                f"technique '{self.name}' takes a process for each; use 'single', or 'fsdp' "
                "without device_map, which spreads weights over the GPUs of all pods"
            )
        alone = self.alone or self.apart
        if job.sequence_parallel > 1 and alone:
            raise ConfigError(
                f"sequence_parallel shares a row among ranks, and ranks of technique '{self.name}' "
                "train alone; use 'ddp', 'zero1', 'zero2', 'zero3' or 'fsdp'"
            )
        if job.tensor_parallel > 1 and alone:
            raise ConfigError(
                "tensor_parallel shares the weights of layers among ranks, and ranks of technique "
                f"'{self.name}' train alone; use 'ddp', 'zero1' or 'zero2'"
            )
        if job.tensor_parallel > 1 and "trained" in self.spreads:
            raise ConfigError(
                "tensor_parallel shares the weights of layers among ranks, and technique "
                f"'{self.name}' shards the weights already; drop tensor_parallel, or use 'ddp', "
                "'zero1' or 'zero2'"
            )

    def refuse_on_pods(self, job: FineTuneOptions, *, gpus: int, on_pod: int) -> None:
        """Refuse a job that cannot run on pods with `gpus` GPUs and `on_pod` ranks each."""
        del on_pod
        if job.precision == "fp16" and not gpus and not self.scales_on_cpus:
            raise ConfigError("precision 'fp16' needs GPUs, but under 'fsdp'; use 'bf16' on CPUs")

    def refuse_ranks(self, job: FineTuneOptions, ranks: int) -> None:
        """Refuse a number of ranks that the technique does not support."""
        del job, ranks

    def refuse_config(self, config: Mapping[str, object], source: str) -> None:
        """Refuse a DeepSpeed JSON that contradicts the technique.

        Args:
            config: The JSON.
            source: Name of the JSON in messages.
        """
        del config, source

    def fill_config(self, config: dict[str, Any]) -> None:
        """Add the values to a DeepSpeed JSON that the technique needs."""
        del config

    def is_of(self, zero: Mapping[str, object]) -> bool:
        """Return whether the section `zero_optimization` of a JSON selects the technique."""
        del zero
        return False

    def bound_to_ranks(self, job: FineTuneOptions) -> str:
        """Return why checkpoints need the same number of ranks.

        Empty if any number can continue.
        """
        if job.optimizer in BITSANDBYTES:
            return f"the states of {job.optimizer} are in blocks of a rank's shard"
        return ""

    def ranks_of(self, pods: int, on_pod: int) -> int:
        """Return the number of ranks on `pods` pods with `on_pod` slots per pod."""
        return 1 if self.alone else pods * on_pod

    def shards(self, job: FineTuneOptions, *, ranks: int, on_pod: int) -> int:
        """Return the number of ranks over which the state is spread."""
        del job, on_pod
        return 1 if self.replicates else ranks

    def sync_steps(self, job: FineTuneOptions) -> int:
        """Return the number of steps between two exchanges of the ranks."""
        del job
        return 1

    # Training, on the ranks.

    def config_of_run(self, config: dict[str, Any] | None, run: str) -> dict[str, Any] | None:
        """Return the DeepSpeed JSON for the ranks of one run; None without DeepSpeed."""
        del run
        return config

    def prepare_pod(self, config: Mapping[str, Any] | None) -> None:
        """Prepare the pod before the model is loaded; every rank calls the method.

        Raises:
            ConfigError: The pod lacks something that the technique needs.
        """
        del config

    def clean_pod(self, config: Mapping[str, Any] | None) -> None:
        """Remove what training leaves on the pod; every rank calls the method at its end."""
        del config

    def wrap(self, model: Any, job: FineTuneOptions, *, gpus: int, parts: Parts) -> None:
        """Prepare a loaded model for training, in place; every rank calls the method.

        Args:
            model: The model, adapters included.
            job: The job.
            gpus: GPUs of a pod; 0 for CPUs.
            parts: Finds the parts of a model to shard separately.
        """
        del model, job, gpus, parts

    def training_options(self, job: FineTuneOptions, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the Trainer's options.

        `options` are for a job whose model the Trainer itself wraps.
        """
        del job
        return dict(options)

    def points(self, job: FineTuneOptions) -> TechniquePoints:
        """Return the hooks of a training step."""
        del job
        return TechniquePoints()

    @abstractmethod
    def runs(self, trainer: Any) -> bool:
        """Return whether the technique's engine runs the trainer's model, by its objects."""

    def tensors_in_files(self, trainer: Any) -> dict[int, Any]:
        """Return tensors that the engine keeps in files, by the ids of its empty tensors."""
        del trainer
        return {}

    # Checkpoints: state of a rank for an exact continuation of training.

    @abstractmethod
    def snapshot(self, trainer: Any, *, rank: int) -> dict[str, object] | None:
        """Return a rank's part as a tree of live tensors and numbers.

        None if rank 0 keeps the state.
        """

    @abstractmethod
    def restore(self, trainer: Any, state: Any) -> None:
        """Restore a part into a trainer before its first step; every rank calls the method.

        Args:
            trainer: The trainer.
            state: Return value of `snapshot`; rank 0's for every rank with `one_part`.
        """

    def one_part(self, trainer: Any) -> bool:
        """Return whether rank 0's part equals the part of every rank."""
        del trainer
        return False

    @abstractmethod
    def resharded(self, trainer: Any, states: Sequence[Any], *, rank: int, ranks: int) -> Any:
        """Return the part of a rank, from the parts of another number of ranks.

        Raises:
            RunError: The parts belong to another model, or cannot be cut.
        """

    # Memory, for the planner.

    def setting(self, plain: Setting, job: FineTuneOptions, config: Mapping[str, Any]) -> Setting:
        """Return the numbers of a job under the technique.

        Args:
            plain: The numbers of a rank that holds everything and computes under autocast.
            job: The job.
            config: Its DeepSpeed JSON; empty without DeepSpeed.
        """
        del job, config
        return plain

    @abstractmethod
    def kept(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        """Return the memory of a rank between two steps, on its device and on the host."""

    @abstractmethod
    def backward(self, setting: Setting, trace: Trace, moment: Moment) -> tuple[float, float]:
        """Return the bytes of gradients and of communication at a moment of a step."""

    def entering(self, setting: Setting, trace: Trace) -> float:
        """Return the bytes of weights gathered at the start of a step, before any activation."""
        del setting, trace
        return 0.0

    def arriving(self, setting: Setting, trace: Trace) -> float:
        """Return the bytes of a temporary copy of the output layer, before any scores."""
        del setting, trace
        return 0.0

    @abstractmethod
    def update(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        """Return the memory of a rank during the update, on its device and on the host."""

    @abstractmethod
    def loading(self, setting: Setting, trace: Trace, gpu_bytes: float | None) -> Memory:
        """Return the host memory of a rank while the model is loaded.

        Args:
            setting: The numbers of the job.
            trace: A step of the job's model.
            gpu_bytes: Memory of a GPU; None if unknown.
        """

    @abstractmethod
    def saving(self, setting: Setting, trace: Trace) -> Memory:
        """Return the host memory of rank 0 while the model is saved."""
