"""What a person has chosen in the form of `compose()`, and all that follows from it. Pure: no widget, nothing starts.

The checks are those of `FineTune`, the dataset and the DeepSpeed JSON themselves, made before anything starts; here
each refusal is only led back to the fields that would cure it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from workbench.base.errors import ConfigError
from workbench.jobs.choices import Launcher, Optimizer, Precision, Technique
from workbench.jobs.data.sources.dataset import dataset_from
from workbench.jobs.deepspeed.config import resolve
from workbench.jobs.finetune import FineTune
from workbench.jobs.model import model_kind
from workbench.pods.backends import KINDS, backend_from_dict
from workbench.pods.guest.gpus import visible_gpus
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod import PodBackend, PodSpec
from workbench.rundir.make.prepare import check_launcher
from workbench.rundir.spec import ClusterSpec

__all__ = ["FIELDS", "Composition", "FormField", "find_problems"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """The choices, as the form holds them. The defaults are the quickstart's."""

    backend: str = "local"
    """Where pods come from: a word of `pods/registry.py`."""
    backend_options: str = ""
    """The options of that place as a JSON object; empty for none."""
    count: int = 3
    """Number of pods."""
    cpus: float = 1.0
    """Processor cores of a pod."""
    gpus: int = 0
    """GPUs of a pod."""
    model: str = "tiny-t5"
    """As in `FineTune`."""
    dataset: str = "wikisql-mini"
    """A name or a path, as in `FineTune`."""
    technique: str = "zero1"
    """As in `FineTune`."""
    precision: str = "fp32"
    """As in `FineTune`."""
    optimizer: str = "adamw"
    """As in `FineTune`."""
    learning_rate: float = 3e-3
    """As in `FineTune`."""
    per_device_train_batch_size: int = 16
    """As in `FineTune`."""
    gradient_accumulation_steps: int = 1
    """As in `FineTune`."""
    max_steps: int = 200
    """As in `FineTune`; 0 for as many as `epochs` takes."""
    epochs: float = 1.0
    """As in `FineTune`."""
    launcher: str = "ssh"
    """As in `FineTune`."""
    deepspeed: str = ""
    """Path of a DeepSpeed JSON of one's own; empty for the technique's."""

    @property
    def pods(self) -> PodSpec:
        """What each pod needs."""
        return PodSpec(cpus=self.cpus, gpus=self.gpus)

    @property
    def ranks(self) -> int:
        """Return the number of ranks: one for `single`, else one per slot."""
        return 1 if self.technique == Technique.SINGLE else self.count * max(1, self.gpus)

    @property
    def job_options(self) -> Mapping[str, object]:
        """The options of the job that differ from `FineTune`'s own, and the three that say what it is."""
        chosen = {name: getattr(self, name) for name in FineTune.model_fields if hasattr(self, name)}
        chosen |= {"deepspeed": self.deepspeed or None, "max_steps": self.max_steps or None}
        if self.max_steps:
            del chosen["epochs"]
        defaults = {option.name: option.default for option in FineTune.options()}
        always = ("model", "dataset", "technique")
        return {name: value for name, value in chosen.items() if name in always or value != defaults[name]}

    def make_backend(self) -> PodBackend:
        """Make the place where pods come from; starts nothing."""
        try:
            options = json.loads(self.backend_options or "{}")
        except ValueError as error:
            raise ConfigError(f'backend options are no JSON: {error}; write {{"name": value}}, or nothing') from error
        if not isinstance(options, dict):
            raise ConfigError(f'backend options are {self.backend_options!r}; write {{"name": value}}, or nothing')
        return backend_from_dict({**options, "kind": self.backend})

    def make_job(self) -> FineTune:
        """Make the job."""
        return FineTune(**self.job_options)  # type: ignore[arg-type]

    def check(self) -> None:
        """Make everything that can be made before anything starts."""
        ClusterSpec(backend=self.make_backend().to_dict(), pods=self.pods, count=self.count)
        if self.backend == LocalPods.kind:
            _check_gpus(self.gpus * self.count)
        job = self.make_job()
        model_kind(job.model)
        dataset_from(job.dataset)
        resolve(job, gpus=self.gpus, world_size=self.ranks)
        check_launcher(Launcher(job.launcher))


@dataclass(frozen=True, kw_only=True, slots=True)
class FormField:
    """One field of the form."""

    name: str
    """The field of `Composition`."""
    label: str
    """What stands beside it."""
    choices: Sequence[str] = ()
    """What it may be; empty where it is typed."""
    proposals: Sequence[str] = ()
    """What is offered to someone who types."""
    hint: str = ""
    """What stands in the empty field."""


FIELDS: Mapping[str, Sequence[FormField]] = {
    "Where": (
        FormField(name="backend", label="Pods from", choices=KINDS),
        FormField(name="backend_options", label="Its options", hint='none, or as {"port": 2222}'),
        FormField(name="count", label="Pods"),
        FormField(name="cpus", label="Cores a pod"),
        FormField(name="gpus", label="GPUs a pod"),
    ),
    "What": (
        FormField(name="model", label="Model", proposals=("tiny-t5", "tiny-llama", "t5-small", "google/flan-t5-small")),
        FormField(name="dataset", label="Data", proposals=("wikisql-mini", "wikisql"), hint="a name or a path"),
    ),
    "How": (
        FormField(name="technique", label="Technique", choices=tuple(map(str, Technique))),
        FormField(name="precision", label="Precision", choices=tuple(map(str, Precision))),
        FormField(name="optimizer", label="Optimizer", choices=tuple(map(str, Optimizer))),
        FormField(name="learning_rate", label="Learning rate"),
        FormField(name="per_device_train_batch_size", label="Rows a rank"),
        FormField(name="gradient_accumulation_steps", label="Accumulate"),
        FormField(name="max_steps", label="Steps (0: epochs)"),
        FormField(name="epochs", label="Epochs"),
        FormField(name="launcher", label="Launcher", choices=tuple(map(str, Launcher))),
        FormField(name="deepspeed", label="DeepSpeed file", hint="empty: the technique's own"),
    ),
}
"""The fields by section, in the order in which a person meets them."""


def find_problems(composition: Composition) -> dict[str, str]:
    """Explain what is wrong, at the fields where a change would mend it.

    Example:
        >>> sorted(find_problems(Composition(technique="single", launcher="pdsh", count=0)))
        ['count', 'launcher', 'technique']
    """
    problems: dict[str, str] = {}
    current = composition
    while (refusal := _refusal(current)) is not None:
        cures = _cures(current, refusal)
        for name in cures or ("",):
            problems.setdefault(name, refusal)
        if not cures:
            break
        current = replace(current, **{cures[0]: getattr(_DEFAULT, cures[0])})
    return problems


_DEFAULT = Composition()


def _refusal(composition: Composition) -> str | None:
    try:
        composition.check()
    except ConfigError as error:
        return str(error)
    return None


def _cures(composition: Composition, refusal: str) -> list[str]:
    """Name the changed fields whose default makes all well; if none does, those that make it another refusal."""
    after: dict[str, str | None] = {}
    for field in fields(Composition):
        default = getattr(_DEFAULT, field.name)
        if getattr(composition, field.name) != default:
            after[field.name] = _refusal(replace(composition, **{field.name: default}))
    whole = [name for name, left in after.items() if left is None]
    return whole or [name for name, left in after.items() if left and _worded(left) != _worded(refusal)]


def _worded(refusal: str) -> str:
    """Return a refusal without its figures: "6 GPUs" and "2 GPUs" refuse the same."""
    return re.sub(r"\d+", "", refusal)


@lru_cache(maxsize=64)
def _gpu_refusal(count: int) -> str | None:
    try:
        visible_gpus(count)
    except ConfigError as error:
        return str(error)
    return None


def _check_gpus(count: int) -> None:
    # Asking the driver takes long; the machine's GPUs do not change while a form is open.
    refusal = _gpu_refusal(count)
    if refusal:
        raise ConfigError(refusal)
