"""`Technique`: all that the planner, the checks, the trainer and checkpoints ask of a technique.

A technique is one file beside this one and a line in `registry`. What runs on pods imports torch inside
its functions, so that a notebook reads these modules in milliseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from workbench.base.errors import ConfigError
from workbench.finetune.options.adapters import Fsdp
from workbench.finetune.options.choices import Optimizer, Precision
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.points import TechniquePoints
from workbench.finetune.techniques.sizes import Exchanges, Memory, Moment, Setting, Trace

Parts = Callable[[Any, Fsdp], Sequence[Any]]
"""Finds the parts of a model that are sharded each by itself."""
UPDATE = ("gradients", "updated", "states")
"""What an optimizer works on: gradients, the weights that it updates, and its states."""


class Technique(ABC):
    """How a training state is spread over the ranks.

    A class below this one that leaves out a member without a default fails when the class is made.
    A class that others share, and that is no technique itself, says `shared=True`.
    """

    # Identity.
    name: ClassVar[str]
    """Name that a job gives: `FineTune(technique=…)`."""
    engine: ClassVar[str]
    """Name by which the audit calls what runs the model."""
    words: ClassVar[str]
    """Words of a message for that."""
    options: ClassVar[str] = ""
    """Option of `FineTune` that this technique alone reads; empty for none."""
    alone: ClassVar[bool] = False
    """Whether one rank on the first pod runs the job, however many pods there are."""

    apart: ClassVar[bool] = False
    """Whether ranks step by themselves, and their weights differ between two exchanges."""

    # What each rank holds.
    spreads: ClassVar[tuple[str, ...]]
    """Parts of the state that are spread over the ranks: `trained`, `gradients`, `updated`, `states`.
    All other parts are whole on each rank."""
    offloads: ClassVar[bool] = False
    """Whether the name promises that optimizer states are kept in host memory."""

    # DeepSpeed.
    config: ClassVar[str | None] = None
    """File in `dsconfig/`; None without DeepSpeed."""
    zero_stage: ClassVar[int] = 0
    """Stage of ZeRO; 0 without DeepSpeed."""

    # Number formats and loading.
    autocasts: ClassVar[bool] = True
    """Whether the Trainer computes half formats under autocast; else the engine turns the weights."""
    half_weights: ClassVar[bool] = False
    """Whether trained weights are held in the half format, beside an FP32 copy that is updated."""
    places_weights: ClassVar[bool] = False
    """Whether the engine puts the weights where and in the format in which they are trained."""
    reads_whole: ClassVar[bool] = False
    """Whether the engine takes part in reading a pretrained model, so that no page is shared."""
    gathers_packed: ClassVar[bool] = False
    """Whether weights in 4 bits are stored in the format in which they are gathered."""
    scales_on_cpus: ClassVar[bool] = False
    """Whether fp16 trains on CPUs as well."""

    # Forecasts and advice.
    preference: ClassVar[int]
    """Place in the order in which `plan` chooses among techniques that fit, the lowest first: from the
    least that goes over the network for a step to the most, then what waits for the host. Measured with 3
    ranks and gloo, in units of the FP32 model: DDP 1.33, ZeRO-1 2.00 however many micro-batches, ZeRO-2,
    ZeRO-3 and FSDP 2.00 or more each micro-batch."""
    timed_as: ClassVar[str] = ""
    """Technique whose timed step on one pod is as good as this one's; empty: its own is timed."""
    same_losses: ClassVar[bool] = True
    """Whether losses follow those of `single` at the same global batch."""
    leaner: ClassVar[str] = ""
    """What makes it need less memory than those before it in the registry, for advice; empty where
    advice does not name it."""
    recipe: ClassVar[bool] = True
    """Whether a run can be repeated with the files of a recipe, without this project."""

    def __init_subclass__(cls, *, shared: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if shared:
            return
        there = {name: getattr(cls, name, None) for name in dir(cls)}
        missing = [name for name in Technique.__annotations__ if name not in there]
        missing += [n for n, each in there.items() if getattr(each, "__isabstractmethod__", False)]
        if missing:
            raise TypeError(f"technique {cls.__name__} has no {', '.join(sorted(missing))}")

    @property
    def description(self) -> str:
        """What the technique does, in one sentence."""
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
        """Refuse options that contradict this technique.

        Raises:
            ConfigError: An option has no use, or cannot work; the message says what to use instead.
        """
        if job.deepspeed is not None and not self.uses_deepspeed:
            raise ConfigError(
                f"technique '{self.name}' runs without DeepSpeed: drop `deepspeed`, or choose zero1, "
                "zero2 or zero3"
            )
        if job.device_map and not self.alone:
            raise ConfigError(
                "device_map spreads layers over the GPUs that one process sees, and technique "
                f"'{self.name}' takes a process for each; use 'single', or 'fsdp' without device_map, "
                "which spreads weights over the GPUs of all pods"
            )

    def refuse_on_pods(self, job: FineTuneOptions, *, gpus: int) -> None:
        """Refuse what pods with so many GPUs cannot do under this technique."""
        if job.precision == Precision.FP16 and not gpus and not self.scales_on_cpus:
            raise ConfigError("precision 'fp16' needs GPUs, but under 'fsdp'; use 'bf16' on CPUs")

    def refuse_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that this technique cannot take."""
        del ranks

    def refuse_config(self, zero: Mapping[str, object], source: str) -> None:
        """Refuse a DeepSpeed JSON that says something else than this technique.

        Args:
            zero: Section `zero_optimization` of the JSON.
            source: Name of the JSON in messages.
        """
        del zero, source

    def is_of(self, zero: Mapping[str, object]) -> bool:
        """Return whether the section `zero_optimization` of a DeepSpeed JSON means this technique."""
        del zero
        return False

    def bound_to_ranks(self, job: FineTuneOptions) -> str:
        """Return why checkpoints are of use only to as many ranks; empty where any number can continue."""
        if Optimizer(job.optimizer).uses_bitsandbytes:
            return f"the states of {job.optimizer} are in blocks of a rank's shard"
        return ""

    def ranks_of(self, pods: int, on_pod: int) -> int:
        """Return how many ranks run on so many pods with so many slots each."""
        return 1 if self.alone else pods * on_pod

    def shards(self, job: FineTuneOptions, *, ranks: int, on_pod: int) -> int:
        """Return over how many ranks the state is spread."""
        del job, on_pod
        return 1 if self.replicates else ranks

    def sync_steps(self, job: FineTuneOptions) -> int:
        """Return the steps from one exchange between the ranks to the next."""
        del job
        return 1

    # Training, on the ranks.

    def wrap(self, model: Any, job: FineTuneOptions, *, gpus: int, parts: Parts) -> None:
        """Change a loaded model in place into the one that is trained; every rank calls it.

        Args:
            model: The model, adapters included.
            job: The job.
            gpus: GPUs of a pod; 0 for CPUs.
            parts: Finds the parts of a model that are sharded each by itself.
        """
        del model, job, gpus, parts

    def training_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the Trainer's options, given those of a job whose model the Trainer itself wraps."""
        return dict(options)

    def points(self, job: FineTuneOptions) -> TechniquePoints:
        """Return the answers that the trainer asks for during a step."""
        del job
        return TechniquePoints()

    @abstractmethod
    def runs(self, trainer: Any) -> bool:
        """Return whether this technique's engine runs the model of a trainer, by its objects."""

    # Checkpoints: what a rank must keep to continue training as if it had not stopped.

    @abstractmethod
    def snapshot(self, trainer: Any, *, rank: int) -> dict[str, object] | None:
        """Return a rank's part as a tree of living tensors and numbers; None if rank 0 keeps it."""

    @abstractmethod
    def restore(self, trainer: Any, state: Any, *, share: Callable[[Any], Any]) -> None:
        """Put a part back into a trainer that is ready for its first step; every rank calls it.

        Args:
            trainer: The trainer.
            state: What `snapshot` returned.
            share: Gives every rank what rank 0 has.
        """

    @abstractmethod
    def resharded(self, trainer: Any, states: Sequence[Any], *, rank: int, ranks: int) -> Any:
        """Return the part of a rank, from the parts of another number of ranks.

        Raises:
            RunError: The parts are of another model, or cannot be cut.
        """

    # Memory and speed, for the planner.

    def setting(self, plain: Setting, job: FineTuneOptions, config: Mapping[str, Any]) -> Setting:
        """Return the numbers of a job under this technique.

        Args:
            plain: The numbers of a rank that holds everything and computes under autocast.
            job: The job.
            config: Its DeepSpeed JSON; empty without DeepSpeed.
        """
        del job, config
        return plain

    @abstractmethod
    def kept(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        """Return what a rank holds between two steps, on its device and on the host."""

    @abstractmethod
    def backward(self, setting: Setting, trace: Trace, moment: Moment) -> tuple[float, float]:
        """Return the bytes of gradients and of communication at a moment of a step."""

    @abstractmethod
    def update(self, setting: Setting, trace: Trace) -> tuple[Memory, Memory]:
        """Return what a rank holds during the update, on its device and on the host."""

    @abstractmethod
    def loading(self, setting: Setting, trace: Trace, gpu_bytes: float | None) -> Memory:
        """Return what a rank needs in host memory while the model is loaded.

        Args:
            setting: The numbers of the job.
            trace: A step of its model.
            gpu_bytes: Memory of a GPU; None where that is unknown.
        """

    @abstractmethod
    def saving(self, setting: Setting, trace: Trace) -> Memory:
        """Return what rank 0 needs in host memory while the model is saved."""

    @abstractmethod
    def sending_s(self, exchanges: Exchanges, accumulation: int) -> float:
        """Return the seconds that a step of so many micro-batches takes for the exchange between ranks."""
