"""What a person has chosen in the form of `compose()`: options and checks are the records' own. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from workbench.base.errors import ConfigError, one_of
from workbench.base.record import Option
from workbench.jobs.choices import Launcher, Technique
from workbench.jobs.data.sources.dataset import dataset_from
from workbench.jobs.deepspeed.config import resolve
from workbench.jobs.finetune import FineTune
from workbench.jobs.model import model_kind
from workbench.pods.backends import KINDS, backend_from_dict
from workbench.pods.guest.gpus import visible_gpus
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod import PodBackend
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.make.prepare import check_launcher
from workbench.rundir.spec import ClusterSpec

__all__ = ["DEFAULTS", "FIELDS", "Composition", "FormField", "find_problems"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FormField:
    """One field of the form."""

    name: str
    label: str
    default: str | int | float
    """What it holds before anything is chosen; `""` and 0 stand for an option that is None."""
    choices: Sequence[str] = ()
    proposals: Sequence[str] = ()
    hint: str = ""
    """What stands in the empty field."""


_OBJECT = TypeAdapter(dict[str, Any])
_OPTIONS: Mapping[str, Option] = {
    option.name: option for record in (ClusterSpec, PodSpec, FineTune) for option in record.options()
}


def _field(name: str, label: str = "", *, default: str | float | None = None, **more: Any) -> FormField:
    option = _OPTIONS[name]
    value: Any = option.default if default is None else default
    if option.allowed.startswith("a number"):
        value = float(value)
    label = label or name.replace("_", " ").capitalize()
    return FormField(**{"name": name, "label": label, "default": value, "choices": option.choices, **more})


FIELDS: Mapping[str, Sequence[FormField]] = {
    "Where": (
        _field("backend", "Pods from", default=LocalPods.kind, choices=KINDS),
        FormField(name="backend_options", label="Its options", default="", hint='none, or as {"port": 2222}'),
        _field("count", "Pods", default=3),  # one pod, the default elsewhere, would show nothing of a cluster
        _field("cpus", "Cores a pod"),
        _field("gpus", "GPUs a pod"),
    ),
    "What": (
        _field("model", proposals=("tiny-t5", "tiny-llama", "t5-small", "google/flan-t5-small")),
        _field("dataset", "Data", proposals=("wikisql-mini", "wikisql"), hint="a name or a path"),
    ),
    "How": (
        _field("technique"),
        _field("precision", "Precision (empty: chosen)", default=""),
        _field("optimizer"),
        _field("learning_rate", "Learning rate (0: chosen)", default=0),
        _field("per_device_train_batch_size", "Rows a rank"),
        _field("gradient_accumulation_steps", "Accumulate"),
        _field("max_steps", "Steps (0: epochs)", default=0),
        *map(_field, ("epochs", "launcher")),
        _field("deepspeed", "DeepSpeed file", default="", hint="empty: the technique's own"),
    ),
}
"""The fields by section, in the order in which a person meets them."""
DEFAULTS: Mapping[str, str | int | float] = {field.name: field.default for of in FIELDS.values() for field in of}


class Composition(Mapping[str, Any]):
    """The value of every field of the form."""

    def __init__(self, **choices: object):
        for name in choices:
            if name not in DEFAULTS:
                raise one_of("choice", name, DEFAULTS)
        self._values = {**DEFAULTS, **choices}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def replace(self, **choices: object) -> Composition:
        """Return it with some choices changed."""
        return Composition(**{**self._values, **choices})

    @property
    def pods(self) -> PodSpec:
        """What each pod needs."""
        return PodSpec(cpus=self["cpus"], gpus=self["gpus"])

    @property
    def ranks(self) -> int:
        """The number of ranks: one for `single`, else one per slot."""
        return 1 if self["technique"] == Technique.SINGLE else int(self["count"]) * max(1, int(self["gpus"]))

    @property
    def job_options(self) -> dict[str, Any]:
        """The options of the job that differ from `FineTune`'s own, and the three that say what it is."""
        chosen = {}
        for option in FineTune.options():
            if option.name in DEFAULTS:
                value = self[option.name]
                chosen[option.name] = None if option.default is None and not value else value
        if chosen["max_steps"]:
            del chosen["epochs"]
        always = ("model", "dataset", "technique")
        return {name: value for name, value in chosen.items() if name in always or value != _OPTIONS[name].default}

    def make_backend(self) -> PodBackend:
        """Make the place where pods come from; starts nothing."""
        text = self["backend_options"]
        try:
            options = _OBJECT.validate_json(text or "{}")
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise ConfigError(
                f'backend options {text!r} are not JSON of an object: {why}; write {{"name": value}}, or nothing'
            ) from error
        return backend_from_dict({**options, "kind": self["backend"]})

    def make_job(self) -> FineTune:
        """Make the job."""
        return FineTune(**self.job_options)

    def check(self) -> None:
        """Make everything that can be made before anything starts."""
        ClusterSpec(backend=self.make_backend().to_dict(), pods=self.pods, count=self["count"])
        if self["backend"] == LocalPods.kind and (refusal := _gpu_refusal(self["gpus"] * self["count"])):
            raise ConfigError(refusal)
        job = self.make_job()
        model_kind(job.model)
        dataset_from(job.dataset)
        resolve(job, gpus=self["gpus"], world_size=self.ranks)
        check_launcher(Launcher(job.launcher))


def find_problems(composition: Composition) -> dict[str, str]:
    """Explain what is wrong, at the fields where a change would cure it.

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
        current = current.replace(**{cures[0]: DEFAULTS[cures[0]]})
    return problems


def _refusal(composition: Composition) -> str | None:
    try:
        composition.check()
    except ConfigError as error:
        return str(error)
    return None


def _cures(composition: Composition, refusal: str) -> list[str]:
    """Name the changed fields whose default makes all well; if none does, those that make it another refusal."""
    after = {
        name: _refusal(composition.replace(**{name: default}))
        for name, default in DEFAULTS.items()
        if composition[name] != default
    }
    cured = [name for name, left in after.items() if left is None]
    return cured or [name for name, left in after.items() if left and _worded(left) != _worded(refusal)]


def _worded(refusal: str) -> str:
    """Return a refusal without its figures: "6 GPUs" and "2 GPUs" refuse the same."""
    return re.sub(r"\d+", "", refusal)


@lru_cache(maxsize=64)
def _gpu_refusal(count: int) -> str | None:
    # Asking the driver takes long; the machine's GPUs do not change while a form is open.
    try:
        visible_gpus(count)
    except ConfigError as error:
        return str(error)
    return None
