"""Read the pods of a run from its hostfile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_text
from workbench.pods.hostfile import Hostfile
from workbench.pods.pod import Pod
from workbench.rundir.result import HostSlots


def hosts_in(hostfile: Path, pods: Sequence[Pod] = ()) -> list[HostSlots]:
    """Read a run's hostfile with the pods' names; return an empty list if it cannot be read."""
    try:
        content = read_text(hostfile)
        parsed = Hostfile.parse(content, source=str(hostfile))
    except (OSError, ValueError, WorkbenchError):
        return []
    names = {pod.address: pod.name for pod in pods}
    hosts = []
    for entry in parsed.entries:
        host = HostSlots(
            address=entry.address,
            slots=entry.slots,
            pod=names.get(entry.address, ""),
        )
        hosts.append(host)
    return hosts
