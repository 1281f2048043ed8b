"""Read and write `SPEC.json`, a cluster and a job in a file that starts the run again.

Values of environment variables are never written. `${NAME}` stands for the variable of the user who
submits the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.files import read_bytes
from workbench.base.json_values import Json, get_object, parse_json
from workbench.base.process import LEASE_S
from workbench.base.record import Allowed, Positive, Record, Size, Text, Unit, nested
from workbench.base.redact import NAMES, Redactor
from workbench.jobs.job import Job
from workbench.jobs.registry import job_class, job_from_dict
from workbench.pods.backends import has_queue, runs_here
from workbench.pods.pod_spec import PodSpec

Seconds = Annotated[Positive, Unit("s")]
_WithEnv = TypeVar("_WithEnv", Job, PodSpec)
_J = TypeVar("_J", bound=Job)
_START_S = 120.0
_YEAR_S = 365 * 86400.0  # a number, as waits of Python refuse infinity
_REFERENCE = re.compile(r"\$\{(\w+)\}")
_ONLY_REFERENCES = re.compile(r"(?:Bearer |Basic )?(?:\$\{\w+\})+")


class ClusterSpec(Record):
    label: ClassVar[str] = "cluster"

    backend: Mapping[str, object] = Field(default_factory=lambda: {"kind": "local"})
    """JSON form of a `Place`."""
    pods: Annotated[PodSpec, nested(PodSpec.from_dict)] = Field(default_factory=PodSpec)
    """Resources of every pod."""
    count: Size = 1
    """Number of pods."""
    idle_timeout_s: Seconds | None = 600.0
    """Seconds without a run or a message from a notebook until the pods are stopped.

    None: never.
    """
    lease_s: Seconds = LEASE_S
    """Seconds that ranks continue without a sign of life from the keeper."""
    start_timeout_s: Annotated[
        Positive | Literal["auto"] | None, Unit("s"), Allowed("a number above 0, 'auto' or None")
    ] = "auto"
    """Seconds to wait for pods to start. None: no limit.

    `auto`: no limit where a queue may keep the pods waiting for hours (Slurm, and Kubernetes with
    `queue`), otherwise 120.
    """
    warm: bool = True
    """Whether every pod keeps a process with torch and DeepSpeed imported.

    A `FineTune` then starts in a second. The process needs about 0.5 GiB per pod. A `Script` does
    not use the process.
    """
    shared: Annotated[bool | Text | None, Allowed("true, false, null or the path of a folder")] = (
        None
    )
    """Whether to check if pods see the cluster's directory, and use its files in place.

    The pods must see the directory under the same path. Default None: check all pods except local
    pods. A path names a further folder to check.
    """

    def chosen(self, job: _J, *, world_size: int | None = None) -> _J:
        """Return a job with every open option decided for the pods of the cluster."""
        apart = not self.is_local and self.count > 1
        return job.chosen(
            gpus=self.pods.gpus,
            ranks=world_size,
            apart=apart,
        )

    @property
    def has_queue(self) -> bool:
        return has_queue(self.backend)

    @property
    def start_limit_s(self) -> float:
        """Seconds to wait for the pods of a start. A year stands for no limit."""
        unlimited = self.start_timeout_s is None or (
            self.start_timeout_s == "auto" and self.has_queue
        )
        return _YEAR_S if unlimited else self.step_limit_s

    @property
    def step_limit_s(self) -> float:
        """Seconds for a part of a start outside a queue, and for a replacement of a lost pod."""
        return self.start_timeout_s if isinstance(self.start_timeout_s, float | int) else _START_S

    @property
    def is_local(self) -> bool:
        return runs_here(self.backend.get("kind"))

    def pod_memory_gib(self, pods: int) -> float | None:
        """Return the memory per pod in GiB.

        Without a limit, local pods share the machine's memory equally. None: a remote pod without a
        limit.
        """
        if self.pods.memory_gib is not None:
            return float(self.pods.memory_gib)
        if not self.is_local:
            return None
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        pages = os.sysconf("SC_PHYS_PAGES")
        machine_gib = page_bytes * pages / 2**30
        return machine_gib / pods

    def resolved(self) -> ClusterSpec:
        """Return a copy with every `${NAME}` filled in from the environment; see `expand_env`."""
        pods = resolved(self.pods)
        return self.replace(pods=pods)


class RunSpec(Record):
    label: ClassVar[str] = "spec"

    cluster: Annotated[ClusterSpec, nested(ClusterSpec.from_dict)] = Field(
        default_factory=ClusterSpec
    )
    """Cluster of the run."""
    job: Annotated[Job, nested(job_from_dict)]
    """Job of the run."""
    pods: Size | None = None
    """Number of pods for the job.

    Default None: all pods of the cluster (1 for technique `single`).
    """

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, without a value of an environment variable."""
        spec = {
            "cluster": self.cluster.to_dict(),
            "job": self.job.to_dict(),
            "pods": self.pods,
        }
        return stored(spec)

    def resolved(self) -> RunSpec:
        """Return a copy with every `${NAME}` filled in from the environment; see `expand_env`."""
        cluster = self.cluster.resolved()
        job = resolved(self.job)
        return self.replace(cluster=cluster, job=job)

    @property
    def world_size(self) -> int:
        pods = self.pods or self.cluster.count
        slots = self.cluster.pods.slots * pods
        return self.job.rules.capped(slots)

    def chosen(self) -> RunSpec:
        """Return a copy with every open option of the job decided."""
        job = self.cluster.chosen(self.job, world_size=self.world_size)
        return self.replace(job=job)

    @classmethod
    def load(cls, path: Path, *, of_run: bool = False) -> RunSpec:
        """Read a spec file.

        Relative paths are resolved against the file's folder, and `${NAME}` stays. The spec of a
        run must not be a link; a user's own may be a link.
        """
        try:
            # A user's own file may be a link. Reading from a pipe would wait for a writer.
            named = path if of_run else Path(os.path.realpath(path))
            content = read_bytes(named)
            spec = cls.from_dict(parse_json(content))
        except OSError as error:
            raise ConfigError(f"cannot read the spec {path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"the spec {path} is not JSON: {error}") from error
        job = spec.job.found_in(path.parent)
        return spec.replace(job=job)


def hide_values(env: Mapping[str, object]) -> dict[str, str]:
    """Replace every value by a reference.

    A value of only references stays.

    Example:
        >>> hide_values({"NCCL_DEBUG": "INFO", "LOGIN": "me:${PW}", "HEADER": "Bearer ${HF_TOKEN}"})
        {'NCCL_DEBUG': '${NCCL_DEBUG}', 'LOGIN': '${LOGIN}', 'HEADER': 'Bearer ${HF_TOKEN}'}
    """
    hidden = {}
    for name, value in env.items():
        written = str(value)
        if _ONLY_REFERENCES.fullmatch(written):
            hidden[name] = written
        else:
            hidden[name] = f"${{{name}}}"
    return hidden


def stored(spec: Json) -> dict[str, object]:
    """Return the JSON form of a spec of any version without secrets, for files and display."""
    cluster = get_object(spec, "cluster")
    pods = get_object(cluster, "pods")
    job = get_object(spec, "job")
    # Values of the environment may also stand in other options.
    pod_values = _texts(get_object(pods, "env"))
    job_values = _texts(get_object(job, "env"))
    redact = Redactor(pod_values, job_values)
    if pods:
        cluster = {**cluster, "pods": _without_values(pods)}
    shown = {
        **spec,
        "cluster": cluster,
        "job": _without_values(job),
    }
    return redact.json(shown, _options_of(job))


def _options_of(job: Json) -> set[str]:
    """Return the options whose values a loaded spec must have unchanged."""
    names = {*NAMES, *ClusterSpec.model_fields, *PodSpec.model_fields, *RunSpec.model_fields}
    with suppress(WorkbenchError):  # a kind that is not installed here
        names |= {*job_class(job.get("kind")).model_fields}
    # Texts that a user writes. `cluster`, `job` and `pods` are records with options of their own.
    return names - {"args", "env", "cluster", "job", "pods"}


def _without_values(record: Json) -> Json:
    if "env" not in record:
        return record
    hidden = hide_values(get_object(record, "env"))
    return {**record, "env": hidden}


def resolved(record: _WithEnv) -> _WithEnv:
    """Return a job or a pod with every `${NAME}` of its `env` filled in; see `expand_env`."""
    env = expand_env(record.env)
    return record.replace(env=env)


def expand_env(env: Mapping[str, str]) -> dict[str, str]:
    """Replace `${NAME}` in values by the process's variable.

    Raise ConfigError with all unset variables.
    """
    wanted: set[str] = set()
    for value in env.values():
        wanted.update(_REFERENCE.findall(value))
    absent = sorted(wanted - set(os.environ))
    if absent:
        raise ConfigError(
            f"env takes the values of {', '.join(absent)} from the environment, and the "
            "environment has no such variables (a run directory holds no values): export "
            f"the variables, or give the values anew, as in env={{{absent[0]!r}: …}}"
        )
    return {name: _REFERENCE.sub(_value_of, value) for name, value in env.items()}


def _value_of(reference: re.Match[str]) -> str:
    return os.environ[reference[1]]


def _texts(env: Json) -> dict[str, str]:
    """Return the values of an environment that are more than references."""
    texts = {}
    for name, value in env.items():
        text = str(value)
        if not _ONLY_REFERENCES.fullmatch(text):
            texts[name] = text
    return texts
