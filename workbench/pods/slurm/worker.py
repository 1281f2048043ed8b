"""The program of a Slurm step: run the pod's guardian until the pod, its lease or the job ends."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.base.errors import PodError
from workbench.pods.bootstrap.guardian import WorkerConfig
from workbench.pods.bootstrap.process import is_session_variable
from workbench.pods.bootstrap.worker import PlatformWorker
from workbench.pods.route import is_loopback, own_address_to
from workbench.pods.slurm.notice import leaving_file, notice_in

_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Variables by which Slurm names the GPUs of a step."""
_NOT_PASSED_ON = ("_", "LC_CTYPE", "OLDPWD", "PWD", "PYTHONHOME", "PYTHONPATH", "SHLVL")
"""Variables of bash and Python themselves. A module's `PYTHONPATH` would replace the packages of
the environment."""


class SlurmWorker(PlatformWorker):
    """The pod at the node's address."""

    def __init__(self, folder: Path, before: bytes = b"") -> None:
        """Read the step's variables.

        Args:
            folder: Folder of the pods' configurations.
            before: Variables before the job's setup lines, as of `env -0`; empty without setup
                lines.
        """
        self._notice = leaving_file(folder, os.environ["SLURM_JOB_ID"])
        self.environment = {name: os.environ[name] for name in _GPUS if name in os.environ}
        if before:
            self.environment |= set_by_setup(before, os.environ)

    def address(self, config: WorkerConfig) -> str:
        return node_address(config)

    def leaving(self) -> str:
        return notice_in(self._notice)


def _before_setup(descriptors: Sequence[str]) -> bytes:
    return b"".join(Path(f"/dev/fd/{number}").read_bytes() for number in descriptors)


def set_by_setup(before: bytes, own: Mapping[str, str]) -> dict[str, str]:
    r"""Return the variables that setup lines set, beside the variables that every session has.

    Example:
        >>> set_by_setup(b"A=1\0B=2\0", {"A": "1", "B": "3", "LAB": "/lab", "PATH": "/x"})
        {'B': '3', 'LAB': '/lab'}
    """
    pairs = (os.fsdecode(each).partition("=") for each in before.split(b"\0"))
    earlier = {name: value for name, _, value in pairs}
    return {
        name: value
        for name, value in own.items()
        if name.isidentifier()
        and not is_session_variable(name)
        and name not in _NOT_PASSED_ON
        and earlier.get(name) != value
    }


def node_address(config: WorkerConfig, own: Mapping[str, str] = os.environ) -> str:
    """Return the node's IP address, as Slurm's controller reaches the node.

    A node may resolve its own name to a loopback address. The address of the route to the keeper
    is then the node's, unless the keeper has a loopback address too.
    """
    name = own["SLURMD_NODENAME"]
    keeper = config.rendezvous[0]
    address = ""
    with contextlib.suppress(OSError):
        address = _resolved(_slurm_address(name) or name)
    if not address or (is_loopback(address) and not is_loopback(keeper)):
        address = own_address_to(keeper)
    if not address:
        raise PodError(f"node {name} has no address, and no route to the keeper at {keeper}")
    return address


def _slurm_address(name: str) -> str:
    """Return the node's NodeAddr in Slurm's configuration; empty if the node cannot ask."""
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", name],
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found else ""


def _resolved(name: str) -> str:
    addresses = [
        str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    ]
    return next((address for address in addresses if "." in address), addresses[0])


if __name__ == "__main__":
    file, *setup = sys.argv[1:]
    config = Path(file)
    sys.exit(SlurmWorker(config.parent, _before_setup(setup)).run(config))
