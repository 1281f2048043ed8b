"""Checks of the options of `SlurmPods`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from workbench.base.errors import ConfigError

_INSTEAD = {
    "partition": "SlurmPods(partition=…)",
    "time": "SlurmPods(time=…)",
    "account": "SlurmPods(account=…)",
    "nodes": "Cluster(…, count=…)",
    "cpus-per-task": "PodSpec(cpus=…)",
    "cpus-per-gpu": "PodSpec(cpus=…)",
    "mem": "PodSpec(memory_gib=…)",
    "mem-per-gpu": "PodSpec(memory_gib=…)",
    "gpus": "PodSpec(gpus=…)",
    "gpus-per-task": "PodSpec(gpus=…)",
    "gpus-per-socket": "PodSpec(gpus=…)",
    "tres-per-node": "PodSpec(cpus=…, gpus=…)",
    "tres-per-socket": "PodSpec(cpus=…, gpus=…)",
    "tres-per-task": "PodSpec(cpus=…, gpus=…)",
    "gpus-per-node": "PodSpec(gpus=…) and SlurmPods(gpu_type=…)",
    "signal": "SlurmPods(notice_s=…)",
    "requeue": "SlurmPods(requeue=…)",
}
"""Options of `sbatch` with a counterpart in this package."""
_OURS = (
    "array",
    "batch",
    "chdir",
    "clusters",
    "comment",
    "error",
    "export",
    "export-file",
    "help",
    "hold",
    "input",
    "job-name",
    "kill-on-invalid-dep",
    "no-kill",
    "no-requeue",
    "ntasks",
    "ntasks-per-core",
    "ntasks-per-gpu",
    "ntasks-per-node",
    "ntasks-per-socket",
    "output",
    "parsable",
    "quiet",
    "test-only",
    "usage",
    "version",
    "wait",
    "wrap",
)
"""Options of `sbatch` set by the package itself, and options without a new job."""
_WHOLE = frozenset(("mem-per-cpu", "mem-bind", "time-min", "wait-all-nodes", "gpu-bind"))
"""Options of `sbatch` with the first letters of a refused option."""
_CONTAINER = "container"
_GRES = "gres"
"""Option of `sbatch` for devices of all kinds; GPUs among them are the PodSpec's."""


def check_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options unchanged. Refuse a word with another meaning for `sbatch`."""
    for word in options:
        name, _, value = word.removeprefix("--").partition("=")
        is_one_word = name and " " not in name
        if not word.startswith("--") or not is_one_word or not word.isprintable():
            raise ConfigError(
                f"SlurmPods options has {word!r}. Write each option of sbatch as one text in the"
                ' long form, such as "--qos=high" or "--exclusive"'
            )
        if name in _WHOLE:
            continue
        # sbatch accepts an abbreviation, such as --part for --partition.
        instead = next((field for each, field in _INSTEAD.items() if each.startswith(name)), "")
        if _GRES.startswith(name) and re.search(r"\bgpu\b", value):
            instead = f"{_INSTEAD['gpus-per-node']} for GPUs"
        if instead:
            raise ConfigError(f"SlurmPods options has {word!r}. Use {instead}")
        # `--cons` is the beginning of --constraint.
        plain = name.removeprefix("no-")
        if plain.startswith(_CONTAINER) or (_CONTAINER.startswith(plain) and len(plain) > 3):
            raise ConfigError(
                f"SlurmPods options has {word!r}. The job's script would run in the container,"
                " where Slurm's commands are missing. Use PodSpec.image instead"
            )
        if any(each.startswith(name) for each in _OURS):
            raise ConfigError(
                f"SlurmPods options has {word!r}, which the workbench sets itself. Leave"
                " the option out"
            )
    return tuple(options)


def check_root(root: str) -> str:
    """Return the folder unchanged if the path is absolute."""
    path = PurePosixPath(root)
    if not path.is_absolute() or ".." in path.parts or "$" in root:
        raise ConfigError(
            f"SlurmPods root is {root!r}; it must be an absolute path on the nodes, without .. and"
            " without variables"
        )
    return root
