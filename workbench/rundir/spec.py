"""`SPEC.json`: what a cluster is asked to be and the job to run on it, in one file that starts the run again.

Reading one checks every key; it touches nothing else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from workbench.base.errors import ConfigError, one_of
from workbench.jobs.finetune import Job, Script, job_from_dict
from workbench.pods.pod import PodSpec

__all__ = ["ClusterSpec", "RunSpec", "expand_env", "hide_secrets"]

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """What a cluster is asked to be."""

    backend: Mapping[str, object] = field(default_factory=lambda: {"kind": "local"})
    """The JSON form of a `PodBackend`."""
    pods: PodSpec = field(default_factory=PodSpec)
    """What each pod needs."""
    count: int = 1
    """Number of pods."""
    idle_timeout_s: float | None = 600.0
    """Seconds without a run or a word from a notebook after which the pods are stopped; None for never."""
    lease_s: float = 120.0
    """Seconds that ranks outlive a keeper that fell silent."""
    start_timeout_s: float = 120.0
    """Seconds until pods that have not come are given up."""

    warm: bool = True
    """Whether each pod keeps a process with torch and DeepSpeed imported, so that a `FineTune` starts in a second: some
    0.5 GiB a pod. A `Script` has no use for it."""
    shared: bool | str | None = None
    """Whether pods are asked if they see the cluster's directory under its path, and use what is there in place.
    Default None: all but local pods are. A path names a further folder to ask for."""

    def __post_init__(self) -> None:
        """Refuse counts and times that cannot be."""
        if not isinstance(self.warm, bool):
            raise ConfigError(f"warm is {self.warm!r}; it must be true or false")
        if not (self.shared is None or isinstance(self.shared, bool | str)) or self.shared == "":
            raise ConfigError(f"shared is {self.shared!r}; it must be true, false, null or the path of a folder")
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ConfigError(f"count is {self.count!r}; it must be a whole number, 1 or more")
        for name in ("idle_timeout_s", "lease_s", "start_timeout_s"):
            value = getattr(self, name)
            if value is None and name == "idle_timeout_s":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name} is {value!r}; it must be a number of seconds, more than 0")

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form; `from_dict` reads it back."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "backend": dict(self.backend), "pods": self.pods.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> ClusterSpec:
        """Read the JSON form."""
        known = _known("cluster key", data, cls)
        if "pods" in known:
            known["pods"] = PodSpec.from_dict(_mapping("cluster.pods", known["pods"]))
        if "backend" in known:
            known["backend"] = _mapping("cluster.backend", known["backend"])
        return cls(**known)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A whole `SPEC.json`."""

    cluster: ClusterSpec
    """Where it runs."""
    job: Job
    """What runs."""
    pods: int | None = None
    """How many of the cluster's pods the job takes. Default None: all (one for technique `single`)."""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form with secrets replaced by references; see `hide_secrets`."""
        cluster = self.cluster.to_dict()
        cluster["pods"] = {**self.cluster.pods.to_dict(), "env": hide_secrets(self.cluster.pods.env)}
        job = {**self.job.to_dict(), "env": hide_secrets(self.job.env)}
        return {"cluster": cluster, "job": job, "pods": self.pods}

    @classmethod
    def load(cls, path: Path) -> RunSpec:
        """Read a file; relative paths in it are relative to its folder."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the spec {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"the spec {path} is no JSON: {error}") from error
        data = _known("spec key", _mapping(str(path), raw), cls)
        if "job" not in data:
            raise ConfigError(f"the spec {path} has no key 'job'")
        job = job_from_dict(_mapping("job", data["job"]))
        cluster = ClusterSpec.from_dict(_mapping("cluster", data.get("cluster", {})))
        cluster = replace(cluster, pods=replace(cluster.pods, env=expand_env(cluster.pods.env)))
        job = replace(job, env=expand_env(job.env))
        pods = data.get("pods")
        if pods is not None and (isinstance(pods, bool) or not isinstance(pods, int) or pods < 1):
            raise ConfigError(f"pods is {pods!r}; it must be a whole number, 1 or more, or null")
        return cls(cluster=cluster, job=_relative_to(job, path.parent), pods=pods)


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
        if isinstance(value, list):
            return [absolute(part) for part in value]
        return str(folder / value) if isinstance(value, str) and (folder / value).exists() else value

    if isinstance(job, Script):
        return replace(job, path=str(absolute(job.path)))
    dataset = job.dataset
    moved = {k: absolute(v) if k != "kind" else v for k, v in dataset.items()} if isinstance(dataset, Mapping) else None
    return replace(
        job,
        dataset=moved or str(absolute(dataset)),
        deepspeed=absolute(job.deepspeed),  # type: ignore[arg-type]
        model=str(absolute(job.model)),
        resume=absolute(job.resume),  # type: ignore[arg-type]
    )


def _known(what: str, data: Mapping[str, object], cls: type[ClusterSpec] | type[RunSpec]) -> dict[str, object]:
    allowed = [f.name for f in fields(cls)]
    for key in data:
        if key not in allowed:
            raise one_of(what, key, allowed)
    return dict(data)


def _mapping(what: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value
