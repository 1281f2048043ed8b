"""`SPEC.json`: what a cluster is asked to be and the job to run on it, in one file that starts the run again.

Reading one checks every key; it touches nothing else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from workbench.base.errors import ConfigError
from workbench.base.record import Allowed, Positive, Record, Size, Text, Unit, nested
from workbench.jobs.finetune import Job, job_from_dict
from workbench.pods.pod_spec import PodSpec

__all__ = ["ClusterSpec", "RunSpec", "expand_env", "hide_secrets"]

Seconds = Annotated[Positive, Unit("s")]
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{(\w+)\}")


class ClusterSpec(Record):
    """What a cluster is asked to be."""

    label: ClassVar[str] = "cluster"

    backend: Mapping[str, object] = Field(default_factory=lambda: {"kind": "local"})
    """The JSON form of a `PodBackend`."""
    pods: Annotated[PodSpec, nested(PodSpec.from_dict)] = Field(default_factory=PodSpec)
    """What each pod needs."""
    count: Size = 1
    """Number of pods."""
    idle_timeout_s: Seconds | None = 600.0
    """Seconds without a run or a word from a notebook after which the pods are stopped; None for never."""
    lease_s: Seconds = 120.0
    """Seconds that ranks outlive a keeper that fell silent."""
    start_timeout_s: Seconds = 120.0
    """Seconds until pods that have not come are given up."""
    warm: bool = True
    """Whether each pod keeps a process with torch and DeepSpeed imported, so that a `FineTune` starts in a second: some
    0.5 GiB a pod. A `Script` has no use for it."""
    shared: Annotated[bool | Text | None, Allowed("true, false, null or the path of a folder")] = None
    """Whether pods are asked if they see the cluster's directory under its path, and use what is there in place.
    Default None: all but local pods are. A path names a further folder to ask for."""


class RunSpec(Record):
    """A whole `SPEC.json`."""

    label: ClassVar[str] = "spec"

    cluster: Annotated[ClusterSpec, nested(ClusterSpec.from_dict)] = Field(default_factory=ClusterSpec)
    """Where it runs."""
    job: Annotated[Job, nested(job_from_dict)]
    """What runs."""
    pods: Size | None = None
    """How many of the cluster's pods the job takes. Default None: all (one for technique `single`)."""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form with secrets replaced by references; see `hide_secrets`."""
        pods = self.cluster.pods.replace(env=hide_secrets(self.cluster.pods.env))
        job = self.job.replace(env=hide_secrets(self.job.env))
        return {"cluster": self.cluster.replace(pods=pods).to_dict(), "job": job.to_dict(), "pods": self.pods}

    @classmethod
    def load(cls, path: Path) -> RunSpec:
        """Read a file; relative paths in it are relative to its folder."""
        try:
            spec = cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"cannot read the spec {path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"the spec {path} is not JSON: {error}") from error
        pods = spec.cluster.pods
        cluster = spec.cluster.replace(pods=pods.replace(env=expand_env(pods.env)))
        job = spec.job.replace(env=expand_env(spec.job.env))
        return cls(cluster=cluster, job=_relative_to(job, path.parent), pods=spec.pods)


def hide_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Replace the values of variables that look secret by a reference to the reader's own environment.

    Example:
        >>> hide_secrets({"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "INFO"})
        {'HF_TOKEN': '${HF_TOKEN}', 'NCCL_DEBUG': 'INFO'}
    """
    return {name: f"${{{name}}}" if _SECRET.search(name) else value for name, value in env.items()}


def expand_env(env: Mapping[str, str]) -> dict[str, str]:
    """Replace `${NAME}` in values by the variable of this process."""

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"the spec refers to ${{{match[1]}}}, but {match[1]} is not set in this environment")
        return os.environ[match[1]]

    return {name: _REFERENCE.sub(value_of, value) for name, value in env.items()}


def _relative_to(job: Job, folder: Path) -> Job:
    def absolute(value: object) -> object:
        match value:
            case [*several]:
                return [absolute(part) for part in several]
            case str() if (folder / value).exists():
                return str(folder / value)
        return value

    return job.moved(absolute)
