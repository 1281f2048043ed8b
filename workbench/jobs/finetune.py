"""The two kinds of job: `FineTune`, our trainer with typed options, and `Script`, any training script.

A job is a frozen record with a JSON form. Making one checks each field and the fields against each other; it
touches no file (`dataset.py` and `dsconfig.py` do, before a run is submitted).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar

from workbench.base.errors import ConfigError, one_of
from workbench.jobs.choices import Launcher, LossOn, Optimizer, Peft, Precision, Technique
from workbench.jobs.refusals import check_together

__all__ = ["PROMPTS", "TRACKERS", "FineTune", "Job", "Script", "job_from_dict"]

PROMPTS = ("plain", "alpaca", "llama2-chat")
"""The prompt forms that have names."""
TRACKERS = ("wandb", "mlflow")
"""The trackers that metrics can be handed to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTune:
    """Fine-tune an encoder-decoder or a causal model with the project's own trainer."""

    kind: ClassVar[str] = "finetune"

    model: str = "tiny-t5"
    """A hub id, a local folder, or one of the built-in `tiny-t5` and `tiny-llama` that need neither."""
    dataset: str | Mapping[str, object] = "wikisql-mini"
    """A name (`wikisql-mini`), a path, or an object with `kind` and its options."""
    technique: str = "zero1"
    """One of `Technique`."""
    peft: str = "none"
    """One of `Peft`: which weights are trained."""
    lora: Mapping[str, object] = field(default_factory=dict)
    """Options of the adapters, see `Lora`; only with `peft`."""
    fsdp: Mapping[str, object] = field(default_factory=dict)
    """Options of the sharding, see `Fsdp`; only with technique `fsdp`."""
    precision: str = "fp32"
    """One of `Precision`; fp16 is refused for T5, which overflows in it."""
    launcher: str = "ssh"
    """One of `Launcher`."""
    deepspeed: str | Mapping[str, object] | None = None
    """A DeepSpeed JSON of one's own, as a path or an object. Default None: the technique's in `dsconfig/`."""
    epochs: float = 1.0
    """Passes over the training rows, where `max_steps` is None."""
    max_steps: int | None = None
    """Optimizer steps. Default None: as many as `epochs` takes."""
    eval_steps: int | None = None
    """Steps between evaluations. Default None: before the first step and after the last."""
    logging_steps: int = 1
    """Steps between metrics."""
    per_device_train_batch_size: int = 8
    """Rows a rank takes in one forward pass (micro-batch)."""
    per_device_eval_batch_size: int = 16
    """The same when evaluating."""
    gradient_accumulation_steps: int = 1
    """Micro-batches summed before one optimizer step."""
    learning_rate: float = 1e-3
    """Peak learning rate; it decays linearly to 0."""
    optimizer: str = "adamw"
    """One of `Optimizer`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    max_source_length: int = 256
    """Tokens after which an input is cut."""
    max_target_length: int = 128
    """Tokens after which an output is cut."""
    prompt: str = "plain"
    """How a causal model is asked: `plain`, `alpaca`, `llama2-chat`, or a template with {instruction} and {input}."""
    system: str | None = None
    """The system block of `llama2-chat`."""
    loss_on: str = "answer"
    """One of `LossOn`; an encoder-decoder model always learns from the answer."""
    save_steps: int | None = None
    """Steps between checkpoints to resume from. Default None: none."""
    checkpoints: str = "pod"
    """Where checkpoints are kept: `pod` leaves them on the pods that wrote them, and the last one of a run that did not
    succeed comes back when its cluster closes; `bring` carries them here while the run goes on."""
    resume: str | None = None
    """A run directory whose last good checkpoint this run goes on from."""
    report_to: Sequence[str] = ()
    """Trackers that get the metrics too, where they are installed: `wandb`, `mlflow`."""
    profile_step: int = 5
    """The optimizer step on which the FLOPS profiler looks; 0 for never."""
    predict_rows: int = 64
    """Evaluation rows that the trained model answers at the end, for the exact match; 0 for none."""
    seed: int = 0
    """Seed of initial weights, order of rows and dropout."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed."""

    def __post_init__(self) -> None:
        """Refuse values outside their sets and combinations that cannot work."""
        for name, allowed in _SETS.items():
            if getattr(self, name) not in [str(a) for a in allowed]:
                raise one_of(name, getattr(self, name), allowed)
        for name in _POSITIVE:
            _at_least(name, getattr(self, name), 1)
        for name in ("profile_step", "predict_rows", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("max_steps", "eval_steps", "save_steps"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("epochs", "learning_rate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value!r}; it must be a number more than 0")
        if not isinstance(self.gradient_checkpointing, bool):
            raise ConfigError(f"gradient_checkpointing is {self.gradient_checkpointing!r}; it must be true or false")
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model is {self.model!r}; give a hub id, a folder or 'tiny-t5'")
        if isinstance(self.report_to, str) or not all(name in TRACKERS for name in self.report_to):
            raise ConfigError(f"report_to is {self.report_to!r}; give a list of {', '.join(TRACKERS)}")
        object.__setattr__(self, "report_to", tuple(self.report_to))  # JSON knows lists only
        _check_prompt(self.prompt, self.system)
        check_together(self)
        _check_env(self.env)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, with every default spelled out."""
        return {"kind": self.kind, **asdict(self), "report_to": list(self.report_to)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Run a training script of the user's, unchanged, as one process per slot.

    The script finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun.
    Its folder travels with it, at most 200 MiB. A file `.workbenchignore` there, in gitignore's syntax, names what
    stays here; version control, environments, caches and `runs/` do so anyway, unless a line such as `!runs/` takes
    them back.
    """

    kind: ClassVar[str] = "script"

    path: str
    """The script, a Python file."""
    args: Sequence[str] = ()
    """Its arguments, each passed as it stands."""
    launcher: str = "ssh"
    """One of `Launcher`."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed."""

    def __post_init__(self) -> None:
        """Refuse an unknown launcher and arguments that are no strings."""
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f"script path is {self.path!r}; give the path of a Python file")
        if self.launcher not in [str(a) for a in Launcher]:
            raise one_of("launcher", self.launcher, Launcher)
        if isinstance(self.args, str) or not all(isinstance(a, str) for a in self.args):
            raise ConfigError(f"script args are {self.args!r}; give a list of strings, one an argument")
        _check_env(self.env)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"kind": self.kind, **asdict(self), "args": list(self.args)}


type_of_kind: Mapping[str, type[FineTune] | type[Script]] = {"finetune": FineTune, "script": Script}
Job = FineTune | Script


def job_from_dict(data: Mapping[str, object]) -> Job:
    """Read the JSON form of a job."""
    kind = data.get("kind", "finetune")
    if kind not in type_of_kind:
        raise one_of("job kind", kind, type_of_kind)
    cls = type_of_kind[str(kind)]
    allowed = [f.name for f in fields(cls)]
    for key in data:
        if key != "kind" and key not in allowed:
            raise one_of("job key", key, ["kind", *allowed])
    if cls is Script and "path" not in data:
        raise ConfigError("a script job needs the key 'path': the Python file to run")
    return cls(**{k: v for k, v in data.items() if k != "kind"})  # type: ignore[arg-type]


_SETS: Mapping[str, Sequence[str]] = {
    "technique": list(Technique),
    "precision": list(Precision),
    "launcher": list(Launcher),
    "optimizer": list(Optimizer),
    "peft": list(Peft),
    "loss_on": list(LossOn),
    "checkpoints": ["pod", "bring"],
}
_POSITIVE = (
    "logging_steps",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "max_source_length",
    "max_target_length",
)


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more")


def _check_prompt(prompt: object, system: object) -> None:
    if not isinstance(prompt, str) or (prompt not in PROMPTS and "{instruction}" not in prompt):
        allowed = ", ".join(PROMPTS)
        raise ConfigError(f"prompt is {prompt!r}; allowed: {allowed}, or a template that holds {{instruction}}")
    if system is not None and (not isinstance(system, str) or prompt != "llama2-chat"):
        raise ConfigError("system is the system block of prompt 'llama2-chat'; choose that prompt, or drop it")


def _check_env(env: Mapping[str, str]) -> None:
    if not isinstance(env, Mapping):
        raise ConfigError("env must be an object of strings, NAME: value")
    for name, value in env.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"env has the name {name!r}; a name is letters, digits and _, no digit first")
        if not isinstance(value, str):
            raise ConfigError(f"env {name} is no string; quote it")
