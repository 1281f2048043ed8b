"""`SPEC.json`: what a cluster is asked to be and the job to run on it, in one file that starts the run again.

Values of environment variables are never written into one: `${NAME}` stands for the variable of whoever submits it.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

from pydantic import Field

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, read_bytes
from workbench.base.json_values import Json, parse_json, part
from workbench.base.process import LEASE_S
from workbench.base.record import Allowed, Positive, Record, Size, Text, Unit, nested
from workbench.base.redact import Redactor
from workbench.jobs.job import Job
from workbench.jobs.registry import job_from_dict
from workbench.pods.backends import runs_here
from workbench.pods.pod_spec import PodSpec

Seconds = Annotated[Positive, Unit("s")]
_WithEnv = TypeVar("_WithEnv", Job, PodSpec)
_J = TypeVar("_J", bound=Job)
_REFERENCE = re.compile(r"\$\{(\w+)\}")
_ONLY_REFERENCES = re.compile(r"(?:Bearer |Basic )?(?:\$\{\w+\})+")


class ClusterSpec(Record):
    label: ClassVar[str] = "cluster"

    backend: Mapping[str, object] = Field(default_factory=lambda: {"kind": "local"})
    """The JSON form of a `Place`."""
    pods: Annotated[PodSpec, nested(PodSpec.from_dict)] = Field(default_factory=PodSpec)
    """What each pod needs."""
    count: Size = 1
    """Number of pods."""
    idle_timeout_s: Seconds | None = 600.0
    """Seconds without a run or a word from a notebook after which the pods are stopped; None for never."""
    lease_s: Seconds = LEASE_S
    """Seconds that ranks outlive a keeper that fell silent."""
    start_timeout_s: Seconds = 120.0
    """Seconds until pods that have not come are given up."""
    warm: bool = True
    """Whether each pod keeps a process with torch and DeepSpeed imported, so that a `FineTune` starts in a second: some
    0.5 GiB a pod. A `Script` has no use for it."""
    shared: Annotated[bool | Text | None, Allowed("true, false, null or the path of a folder")] = (
        None
    )
    """Whether pods are asked if they see the cluster's directory under its path, and use what is there in place.
    Default None: all but local pods are. A path names a further folder to ask for."""

    def chosen(self, job: _J, *, world_size: int | None = None) -> _J:
        """Return a job with every option decided that was left open, for the pods of this cluster."""
        apart = not self.is_local and self.count > 1
        return job.chosen(gpus=self.pods.gpus, ranks=world_size, apart=apart)

    @property
    def is_local(self) -> bool:
        return runs_here(self.backend.get("kind"))

    def pod_memory_gib(self, pods: int) -> float | None:
        """Return the memory that each of so many pods is given; of local ones without a limit, a share of it all."""
        if self.pods.memory_gib is not None:
            return float(self.pods.memory_gib)
        machine_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return machine_gib / pods if self.is_local else None

    def resolved(self) -> ClusterSpec:
        """Return it with every `${NAME}` filled in from this process's environment; see `expand_env`."""
        return self.replace(pods=resolved(self.pods))


class RunSpec(Record):
    label: ClassVar[str] = "spec"

    cluster: Annotated[ClusterSpec, nested(ClusterSpec.from_dict)] = Field(
        default_factory=ClusterSpec
    )
    """Where it runs."""
    job: Annotated[Job, nested(job_from_dict)]
    """What runs."""
    pods: Size | None = None
    """How many of the cluster's pods the job takes. Default None: all (one for technique `single`)."""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, without a value of an environment variable."""
        return stored(
            {"cluster": self.cluster.to_dict(), "job": self.job.to_dict(), "pods": self.pods}
        )

    def resolved(self) -> RunSpec:
        """Return it with every `${NAME}` filled in from this process's environment; see `expand_env`."""
        return self.replace(cluster=self.cluster.resolved(), job=resolved(self.job))

    @property
    def world_size(self) -> int:
        return self.job.ranks(self.cluster.pods.slots * (self.pods or self.cluster.count))

    def chosen(self) -> RunSpec:
        """Return it with every option of its job decided that was left open."""
        return self.replace(job=self.cluster.chosen(self.job, world_size=self.world_size))

    @classmethod
    def load(cls, path: Path, *, of_run: bool = False) -> RunSpec:
        """Read a file; paths in it are relative to its folder, and `${NAME}` stays. Only a user's own may be a link."""
        try:
            spec = cls.from_dict(parse_json(read_bytes(path) if of_run else path.read_bytes()))
        except OSError as error:
            raise ConfigError(f"cannot read the spec {path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"the spec {path} is not JSON: {error}") from error
        return spec.replace(job=_relative_to(spec.job, path.parent))


def hide_values(env: Mapping[str, object]) -> dict[str, str]:
    """Replace every value by a reference; one that is nothing but references stays.

    Example:
        >>> hide_values({"NCCL_DEBUG": "INFO", "LOGIN": "me:${PW}", "HEADER": "Bearer ${HF_TOKEN}"})
        {'NCCL_DEBUG': '${NCCL_DEBUG}', 'LOGIN': '${LOGIN}', 'HEADER': 'Bearer ${HF_TOKEN}'}
    """
    return {
        name: str(value) if _ONLY_REFERENCES.fullmatch(str(value)) else f"${{{name}}}"
        for name, value in env.items()
    }


def stored(spec: Json) -> dict[str, object]:
    """Return the JSON form of a spec, of whatever version, as it may be written or shown: without a secret."""
    cluster = part(spec, "cluster")
    both = part(cluster, "pods"), part(spec, "job")
    redact = Redactor(*(_texts(part(each, "env")) for each in both))
    pods, job = (
        {**each, "env": hide_values(part(each, "env"))} if "env" in each else each for each in both
    )
    return redact.json(
        {**spec, "cluster": {**cluster, "pods": pods} if pods else cluster, "job": job}
    )


def resolved(record: _WithEnv) -> _WithEnv:
    """Return a job or a pod with every `${NAME}` of its `env` filled in; see `expand_env`."""
    return record.replace(env=expand_env(record.env))


def expand_env(env: Mapping[str, str]) -> dict[str, str]:
    """Replace `${NAME}` in values by the variable of this process; a ConfigError names all that are not set."""
    wanted = sorted({name for value in env.values() for name in _REFERENCE.findall(value)})
    if absent := [name for name in wanted if name not in os.environ]:
        raise ConfigError(
            f"env takes the values of {', '.join(absent)} from this environment, where they are not set (a run "
            f"directory holds no values): export them, or give them anew, as in env={{{absent[0]!r}: …}}"
        )
    return {
        name: _REFERENCE.sub(lambda match: os.environ[match[1]], value)
        for name, value in env.items()
    }


def _texts(env: Json) -> dict[str, str]:
    return {
        name: str(value)
        for name, value in env.items()
        if not _ONLY_REFERENCES.fullmatch(str(value))
    }


def _relative_to(job: Job, folder: Path) -> Job:
    def absolute(value: object) -> object:
        match value:
            case [*several]:
                return [absolute(part) for part in several]
            case str() if is_there(folder / value) or _matches(value, folder):
                return str(folder / value)
        return value

    return job.moved(absolute)


def _matches(pattern: str, folder: Path) -> bool:
    """Whether a pattern with `*` names files of a folder; an absolute pattern counts as well."""
    return "*" in pattern and bool(glob.glob(pattern, root_dir=folder))  # noqa: PTH207
