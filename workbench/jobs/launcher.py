"""Name the launchers that start the ranks of a run, for any kind of job."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class Launcher(StrEnum):
    SSH = "ssh"
    """The agents, over SSH: the default and the fastest."""
    PDSH = "pdsh"
    """DeepSpeed's own command line through pdsh."""
    OPENMPI = "openmpi"
    """DeepSpeed's own command line through mpirun."""


LauncherName = Literal["ssh", "pdsh", "openmpi"]
"""Values of `Launcher`, which an editor completes."""
