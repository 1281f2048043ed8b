"""The Slurm job of a run without a keeper, from `run.sbatch()`."""

from __future__ import annotations

import re
from pathlib import Path

from workbench.base.errors import BackendError, ConfigError, RunError
from workbench.base.files import read_known
from workbench.base.json_values import as_str
from workbench.pods.slurm import commands
from workbench.rundir.paths import RunPaths
from workbench.rundir.status import no_keeper

_COMMAND = re.compile(r"\bCommand=(\S+)")


def end_job(run: RunPaths) -> None:
    """Have Slurm end the job of a run. Return at once; an ended job is unchanged.

    The author of the run directory chose the number, so only a job of the directory's own script is
    ended.

    Raises:
        RunError: The run has no job in this machine's Slurm. The message has what to do.
    """
    words = no_keeper(run)
    number = as_str(read_known(run.info).get("job"))
    if not number.isdecimal():
        raise RunError(words)
    try:
        shown = commands.call("scontrol", "--oneliner", "show", "job", number)
        scripts = [Path(each).resolve() for each in _COMMAND.findall(shown)]
        if (run.root.parent / "job.sh").resolve() not in scripts:
            raise RunError(f"{words}. Slurm's job {number} here is of another script")
        commands.cancel([number])
    except ConfigError as error:
        raise RunError(f"{words}, on a machine of that Slurm") from error
    except BackendError as error:
        if not commands.is_gone(error):
            raise RunError(f"{words}. {error}") from error
