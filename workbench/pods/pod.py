"""`Pod`, a snapshot of a worker, and `LaunchContext`.

The module avoids pydantic, so a guardian starts in half the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from workbench.base.errors import BackendError
from workbench.base.process import LEASE_S

Report = Callable[[str], None]
"""Function that takes one line of progress for people ("2 of 3 pods are up")."""


def no_report(_line: str) -> None:
    """Drop a line of progress."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A snapshot of one worker; a later look gives another snapshot."""

    name: str
    """Its name within the cluster: `pod-0`, `pod-1`, …"""
    phase: Phase = Phase.PENDING
    address: str = ""
    """IP address or host name for the other pods; empty until known."""
    ssh_port: int = 22
    """Port of the SSH daemon, as seen from this machine."""
    ssh_address: str = ""
    """Address of the SSH daemon from this machine, such as a port-forward's. Empty: `address`."""
    user: str = ""
    key: str = ""
    """Path, on this machine, of the private key to log in with; empty: the cluster's own."""
    control: str = ""
    """Path, on this machine, of the socket of OpenSSH's standing connection to the pod's host.
    Empty: each connection logs in."""
    connect_timeout_s: float = 5.0
    """Time limit per step of a new connection, in seconds. A login has at least ten seconds."""
    slots: int = 1
    """Number of ranks."""
    host_key: str = ""
    """Its SSH host key, `ssh-ed25519 AAAA…`; empty until known."""
    root: str = ""
    """The cluster's own folder on the pod, `…/<pod name>`. The part before the name is equal on all
    pods."""
    python: str = ""
    """The Python on the pod that has torch and DeepSpeed installed."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions on the pod, by package: python, torch, deepspeed, transformers, workbench, …"""
    message: str = ""
    """Reason for the phase in the platform's words, for people."""
    ends_s: float | None = None
    """Time at which the platform ends the pod in any case, in seconds since the epoch. None:
    unknown, or never."""
    leave_s: float | None = None
    """Seconds that ranks have for a checkpoint after the notice of the pod's end, where an option
    of the place sets the time."""

    @property
    def login(self) -> str:
        """Account and host, for messages on the login."""
        return f"{self.user}@{self.address}" if self.user else self.address

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Pod:
        """Read the JSON form."""
        return cls(**{**data, "phase": Phase(str(data["phase"]))})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchContext:
    """Data from the keeper for a place: the cluster's directory and the key for its pods."""

    cluster_id: str
    directory: Path
    public_key: str
    """OpenSSH public key line that every pod must accept."""
    lease_s: float = LEASE_S
    timeout_s: float = 120.0
    """Seconds to wait for the pods; a year where the user waits without a limit."""
    report: Report = no_report
    arrived: Callable[[Sequence[Pod]], None] = lambda _pods: None
    """Receives the running pods before the next line of progress. A pod without an address is still
    awaited; its message holds the reason."""
    warm: bool = False
    """Whether the pods' agents will keep a process with torch imported; pods of one machine can
    share the import."""

    @contextmanager
    def reporting_unstopped(self) -> Iterator[None]:
        """Report pods that cannot be stopped. The error before the stop matters more."""
        try:
            yield
        except BackendError as error:
            self.report(f"pods that were asked for may still run: {error}")


def interface_variables(names: Sequence[str]) -> dict[str, str]:
    """Return the variables by which gloo and NCCL use these network interfaces. Empty for none.

    NCCL reads a name as a prefix: `eth1` also means eth10. With `=` all names are exact.

    Example:
        >>> interface_variables(["ib0", "ib1"])
        {'GLOO_SOCKET_IFNAME': 'ib0,ib1', 'NCCL_SOCKET_IFNAME': '=ib0,ib1'}
    """
    if not names:
        return {}
    listed = ",".join(names)
    return {"GLOO_SOCKET_IFNAME": listed, "NCCL_SOCKET_IFNAME": f"={listed}"}
