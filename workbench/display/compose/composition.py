"""The choices in the form of `compose()`. Options and checks come from the records. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

from workbench.base.errors import ConfigError, one_of
from workbench.base.record import Record
from workbench.display.compose.fields import FIELDS, INNER, FormField, in_labels
from workbench.finetune.data.sources.dataset import dataset_from, written_out
from workbench.finetune.data.sources.files import RowFiles
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import check, known
from workbench.finetune.techniques.registry import runs_alone
from workbench.jobs.launcher import Launcher
from workbench.pods.backends import backend_from_dict
from workbench.pods.bootstrap.machine import check_gpus
from workbench.pods.cml.api import WorkersApi
from workbench.pods.cml.pods import CMLPods
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.local.pods import LocalPods
from workbench.pods.place import Place
from workbench.pods.pod_spec import PodSpec
from workbench.pods.slurm.commands import check_here
from workbench.pods.slurm.pods import SlurmPods
from workbench.rundir.make.prepare import check_launcher
from workbench.rundir.spec import ClusterSpec

_ALWAYS = ("model", "dataset", "technique", "count")
"""Fields that the cell states even at their defaults."""


class Composition(Mapping[str, Any]):
    def __init__(self, **choices: object):
        self._values = {name: field.default for name, field in FIELDS.items()}
        for name, value in _flat(choices):
            if name not in FIELDS:
                raise one_of("choice", name, FIELDS)
            self._values[name] = FIELDS[name].written(value)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def replace(self, **choices: object) -> Composition:
        return Composition(**{**self._values, **choices})

    @property
    def fields(self) -> list[FormField]:
        """The fields that have a meaning with the current choices."""
        fields = []
        for field in FIELDS.values():
            if not field.needs or self[field.needs] in field.values:
                fields.append(field)
        return fields

    def options(self, record: type[Record]) -> dict[str, Any]:
        """Return a record's options that differ from the defaults, or are always stated."""
        options = {}
        for field in self.fields:
            if field.record is not record:
                continue
            value = self.value(field.name)
            if value != field.option.default or field.name in _ALWAYS:
                options[field.option.name] = value
        return options

    def value(self, name: str) -> Any:
        """Return the value of an option, by the name of its field."""
        return FIELDS[name].read(self[name])

    @property
    def pods(self) -> PodSpec:
        return PodSpec(**self.options(PodSpec))

    @property
    def ranks(self) -> int:
        """The number of ranks: 1 for `single`, else the number of slots."""
        if runs_alone(self["technique"]):
            return 1
        return int(self.value("count")) * self.pods.slots

    @property
    def place_options(self) -> dict[str, Any]:
        for field in self.fields:
            if field.needs == "backend":
                return self.options(field.record)
        return {}

    @property
    def cluster_options(self) -> dict[str, Any]:
        """The options of `Cluster`, besides place and pods."""
        options = self.options(ClusterSpec)
        return {name: value for name, value in options.items() if name != "backend"}

    @property
    def job_options(self) -> dict[str, Any]:
        """The job's options that differ from `FineTune`'s defaults, or are always stated."""
        options = self.options(FineTune)
        for name, (record, _, _) in INNER.items():
            inner = self.options(record)
            if inner:
                options[name] = inner
        if columns := self.options(RowFiles):
            options["dataset"] = {**written_out(options["dataset"]), **columns}
        unused = set()
        if options.get("max_steps"):
            unused.add("epochs")
        if options.get("deepspeed") and self["technique"] == FIELDS["technique"].default:
            unused.add("technique")  # without the option, the JSON's stage determines the technique
        # The order is that of `FineTune`'s own options.
        ordered = {}
        for option in FineTune.options():
            if option.name in options and option.name not in unused:
                ordered[option.name] = options[option.name]
        return ordered

    def make_backend(self) -> Place:
        """Make the place of the pods without starting any."""
        return backend_from_dict({**self.place_options, "kind": self["backend"]})

    def make_cluster(self) -> ClusterSpec:
        """Make the specification of the cluster without starting it."""
        return ClusterSpec(
            backend=self.make_backend().to_dict(),
            pods=self.pods,
            **self.cluster_options,
        )

    def make_job(self) -> FineTune:
        return FineTune(**self.job_options)

    def check(self) -> None:
        """Make and check all records and files that can be made before the start."""
        cluster = self.make_cluster()
        backend = self.make_backend()
        if isinstance(backend, SSHPods):
            backend.hosts_for(cluster.count)
        elif isinstance(backend, CMLPods):
            WorkersApi().find()
        elif isinstance(backend, SlurmPods):
            check_here()
        elif isinstance(backend, LocalPods):
            refusal = _gpu_refusal(cluster.pods.gpus * cluster.count)
            if refusal:
                raise ConfigError(refusal)
        job = self.make_job()
        dataset_from(job.dataset)
        check_launcher(Launcher(job.launcher))
        gpus = cluster.pods.gpus
        job = choose(job, gpus=gpus, world_size=self.ranks)
        check(job, known(job, gpus=gpus, ranks=self.ranks, sends=True, outlines=True))


def find_problems(composition: Composition) -> dict[str, str]:
    """Return the reasons of refusals, at the fields where a change would help.

    Example:
        >>> sorted(find_problems(Composition(technique="single", launcher="pdsh", count=0)))
        ['count', 'launcher', 'technique']
    """
    problems: dict[str, str] = {}
    current = composition
    while True:
        refusal = _refusal(current.check)
        if refusal is None:
            return problems
        cures = _cures(current, refusal)
        words, named = in_labels(refusal, current.fields)
        for name in _where(current, cures, named) or ("",):
            problems.setdefault(name, words)
        if not cures:
            return problems
        # Behind a refusal there may be another: repeat with the first cure.
        cured = cures[0]
        current = current.replace(**{cured: FIELDS[cured].default})


def _flat(choices: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the fields of whole objects: a place, and options of adapters or of FSDP."""
    for name, value in choices.items():
        match value:
            case Place() if name == "backend":
                yield from _flat({name: value.to_dict()})
            case Mapping() if name == "backend":
                yield name, value.get("kind", LocalPods.kind)
                for key, part in value.items():
                    if key != "kind":
                        yield f"{value.get('kind')}.{key}", part
            case Mapping() if name in INNER:
                for key, part in value.items():
                    yield f"{name}.{key}", part
            case _:
                yield name, value


def _where(composition: Composition, cures: list[str], named: list[str]) -> list[str]:
    """Return the fields to show a refusal at: a place's fields rather than its choice."""
    parents = set()
    for field in composition.fields:
        if field.needs and (field.name in cures or field.name in named):
            parents.add(field.needs)
    inner = []
    for field in composition.fields:
        if field.needs in parents and field.name in named:
            inner.append(field.name)
    candidates = dict.fromkeys([*cures, *inner])
    places = [name for name in candidates if name not in parents]
    return places or named


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


def _cures(composition: Composition, refusal: str) -> list[str]:
    """Return the changed fields whose default removes the refusal, or else changes the refusal."""
    after = {}
    for field in composition.fields:
        if composition[field.name] != field.default:
            with_default = composition.replace(**{field.name: field.default})
            after[field.name] = _refusal(with_default.check)
    cured = [name for name, left in after.items() if left is None]
    if cured:
        return cured
    return [name for name, left in after.items() if left and _worded(left) != _worded(refusal)]


def _worded(refusal: str) -> str:
    """Return a refusal without its figures: "6 GPUs" and "2 GPUs" refuse the same."""
    return re.sub(r"\d+", "", refusal)


@lru_cache(maxsize=64)
def _gpu_refusal(count: int) -> str | None:
    # The driver answers slowly, and the machine's GPUs do not change while a form is open.
    return _refusal(partial(check_gpus, count))
