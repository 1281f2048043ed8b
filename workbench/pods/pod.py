"""The nouns of a place to run: `PodSpec`, `Pod`, and `PodBackend`, the protocol of four verbs.

Nothing here starts anything; `local/pods.py` and its siblings do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Protocol

from pydantic import Field

from workbench.base.record import Count, Environment, Positive, Record, Unit

__all__ = ["Jump", "LaunchContext", "Phase", "Pod", "PodBackend", "PodSpec"]


class Phase(StrEnum):
    """Where a pod is in its life; the words of Kubernetes."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"

    @property
    def is_terminal(self) -> bool:
        """Whether the pod will never run again."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class PodSpec(Record):
    """What one worker needs. All pods of a cluster are alike."""

    label: ClassVar[str] = "pods"

    cpus: Annotated[Positive, Unit("cores")] = 1
    """Processor cores; ranks of the pod share this many threads. Default 1."""
    memory_gib: Annotated[Positive, Unit("GiB")] | None = None
    """Memory in GiB; None leaves it to the place. Default None."""
    gpus: Count = 0
    """GPUs; each becomes one slot. Without any, the pod has one slot. Default 0."""
    image: str | None = None
    """Container image, where the place runs containers. Default None: the place's own."""
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed. Default none."""

    @property
    def slots(self) -> int:
        """Return the number of ranks a pod carries: its GPUs, or 1."""
        return max(1, self.gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Jump:
    """A host that the way to a pod leads through; its SSH daemon must allow forwarding."""

    address: str
    """IP address or host name of it."""
    port: int = 22
    """Port of its SSH daemon."""
    user: str
    """User to log in there as."""
    key: str
    """Path, on this machine, of the private key to log in there with."""
    host_key: str
    """Its SSH host key, `ssh-ed25519 AAAA…`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A snapshot of one worker; a later look gives another snapshot."""

    name: str
    """Its name within the cluster: `pod-0`, `pod-1`, …"""
    phase: Phase = Phase.PENDING
    """Where it is in its life."""
    address: str = ""
    """IP address or host name by which the pods call each other; empty until known."""
    ssh_port: int = 22
    """Port that reaches its SSH daemon from this machine."""
    ssh_address: str = ""
    """Address that reaches its SSH daemon from this machine, such as that of a port-forward; empty: `address`."""
    user: str = ""
    """User to log in as."""
    key: str = ""
    """Path, on this machine, of the private key to log in with; empty: the cluster's own."""
    jump: Jump | None = None
    """The host to go through; None: straight."""
    slots: int = 1
    """Ranks that it carries."""
    host_key: str = ""
    """Its SSH host key, `ssh-ed25519 AAAA…`; empty until known."""
    root: str = ""
    """The folder on the pod that is this cluster's own, `…/<pod name>`; the part before the name is the same on all."""
    python: str = ""
    """The Python on the pod that has torch and DeepSpeed installed."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions on the pod, by package: python, torch, deepspeed, transformers, workbench, …"""
    message: str = ""
    """Why it is in this phase, in the platform's words; for people."""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Pod:
        """Read the JSON form."""
        raw = dict(data)
        jump = raw.get("jump")
        made = cls(**{**raw, "jump": Jump(**jump) if isinstance(jump, Mapping) else None})  # type: ignore[arg-type]
        return replace(made, phase=Phase(str(raw["phase"])))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchContext:
    """What the keeper hands a backend: where the cluster lives and the key that pods must accept."""

    cluster_id: str
    """Unique id of the cluster; labels what the backend makes."""
    directory: Path
    """The cluster's directory on this machine, absolute."""
    public_key: str
    """OpenSSH public key line that every pod must accept."""
    lease_s: float = 120.0
    """Seconds a pod outlives a keeper that fell silent."""
    timeout_s: float = 120.0
    """Seconds until pods that have not come are given up."""
    report: Callable[[str], None] = lambda _line: None
    """Takes one line of progress for people ("2 of 3 pods are up")."""


class PodBackend(Protocol):
    """A place where pods come from. Instances are cheap, hold only configuration, and start nothing when made."""

    kind: str
    """The word for it in `SPEC.json`: local, ssh, kubernetes, cml."""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form `{"kind": …, option: …}`, without secrets."""
        ...

    def launch(self, spec: PodSpec, count: int, context: LaunchContext) -> Sequence[Pod]:
        """Start pods and wait until each can be reached; return them in rank order."""
        ...

    def refresh(self) -> Sequence[Pod]:
        """Look again and return the pods as they are now, in rank order. Does not block for long."""
        ...

    def logs(self, name: str, tail: int = 50) -> str:
        """Return the last lines of the pod's own log (its SSH daemon, its start)."""
        ...

    def stop(self) -> None:
        """Stop all pods and remove all that `launch` made. Idempotent; also after a `launch` that failed half way."""
        ...
