"""The batch job of a cluster: the script, and the options of `sbatch`. Pure."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.base import entries
from workbench.base.child import HOME
from workbench.pods.pod_spec import PodSpec
from workbench.pods.slurm.container import Container, Runner
from workbench.pods.slurm.notice import LEAVING

_NOTICE = "Slurm will end this job soon"
_WITH_REASON = " DUE TO "
_OF_JOB = re.compile(r"\*\*\* (JOB [^*\n]+) \*\*\*")
_OF_STEP = re.compile(r"\*\*\* (STEP (\d{1,20})\.[^*\n]+) \*\*\*")
_OF_NODE = re.compile(r"^srun: error: (Node failure on [^\n]+)$", re.M)
_SCRIPT = """\
#!/bin/sh
# Pods of a cluster of DeepSpeed Workbench: one step on each node of this job.
umask 077
export PYTHONPATH={home} PYTHONSAFEPATH=1
{before}
pod() {{
    srun --nodes=1 --ntasks=1 "$2" --job-name={name}-"$1" --cpus-per-task={cpus} \\
        --mpi=none --input=none --export=ALL {options}\\
        {worker} {folder}/"$1"{suffix} >>{folder}/"$1".log 2>&1
    echo "*** $1 has ended with exit code $? ***"
}}
# Slurm sends USR1 before the time limit. The pods read the file.
: >{folder}/{leaving}
notice() {{
    echo "*** {notice} ***"
    echo "{notice}" >{folder}/{leaving}
}}
trap notice USR1
# Slurm sends TERM to this script and to the pods, which may take the time to end.
trap : TERM
{pods}
until wait; do :; done
"""

_SETUP = """\
fail() {{
    trap - EXIT
    echo "the setup line $1 ended with exit code $2" >&2
    exit "$2"
}}
trap 'echo "the setup lines ended with exit code $?" >&2' EXIT
workbench_pod=$1
{before}
{lines}
trap - EXIT
{run}
"""
"""Program of a step with setup lines, which may end the shell."""
_BEFORE_FD = 3
_BEFORE = f"""\
exec {_BEFORE_FD}< <(env -0)
set -a  # the ranks have each variable that is set, as by NAME=VALUE alone"""
"""Commands before the lines. The worker reads the earlier variables from the descriptor."""


def config_of(folder: Path, pod: str, name: str) -> Path:
    """Return the file of a pod's configuration.

    Every job has other names: a node may have an earlier file of a name in its cache of NFS.
    """
    return folder / f"{pod}{_suffix(name)}"


def step_name(name: str, pod: str) -> str:
    """Return the name of a pod's step. Steps of several clusters may share a job."""
    return f"{name}-{pod}"


def _suffix(name: str) -> str:
    return f"-{name.rpartition('-')[2]}.json"


def script(
    name: str,
    pods: Sequence[str],
    folder: Path,
    cpus: float,
    setup: Sequence[str] = (),
    container: Container | None = None,
    package: Path = Path(HOME),
    nodes: Sequence[str] = (),
    step_options: Sequence[str] = (),
) -> str:
    """Return the batch script with a pod for every node.

    Args:
        name: Name of the job.
        pods: Names of the pods.
        folder: Folder with the pods' configurations.
        cpus: Processor cores of a pod.
        setup: Shell commands for every node before the pod.
        container: Container of each pod; None: pods run in the notebook's Python environment.
        package: This package inside the container: a folder or a zip file.
        nodes: Nodes of the pods. Default: the nodes of the job, in Slurm's order.
        step_options: More options of `srun` for each pod.
    """
    worker = f"{shlex.quote(sys.executable)} -P -m {entries.SLURM_WORKER}"
    # A login shell of bash has `module`. A command with an open quote ends only itself.
    quoted = [shlex.quote(line) for line in setup]
    lines = "\n".join(f'eval {line} || fail {line} "$?"' for line in quoted)
    if container is not None:
        # Python and its packages are the image's; this package comes with the job.
        inside = f"env PYTHONPATH={shlex.quote(str(package))} PYTHONSAFEPATH=1"
        worker = f"{inside} python3 -P -m {entries.SLURM_WORKER}"
        if container.runner is Runner.APPTAINER:
            run = container.around(f'{worker} "$workbench_pod"')
            program = _SETUP.format(before="", lines=lines, run=run)
            shell = "bash -l" if setup else "sh"
            worker = f"{shell} -c {shlex.quote(program)} sh"
    elif setup:
        inside = f"env -u PYTHONHOME PYTHONPATH={shlex.quote(HOME)}"
        run = f'exec {inside} {worker} "$workbench_pod" {_BEFORE_FD}'
        program = _SETUP.format(before=_BEFORE, lines=lines, run=run)
        worker = f"bash -l -c {shlex.quote(program)} bash"
    words = [*step_options, *([] if container is None else container.srun_words)]
    places = [f"--nodelist={node}" for node in nodes] or [
        f"--relative={number}" for number in range(len(pods))
    ]
    each = [shlex.join(["pod", *pair]) for pair in zip(pods, places, strict=True)]
    return _SCRIPT.format(
        home=shlex.quote(HOME),
        cpus=math.ceil(cpus),
        before="" if container is None else container.before,
        name=shlex.quote(name),
        options="".join(f"{word} " for word in map(shlex.quote, words)),
        worker=worker,
        folder=shlex.quote(str(folder)),
        leaving=LEAVING.format('"$SLURM_JOB_ID"'),
        notice=_NOTICE,
        pods="\n".join(f"{line} &" for line in each),
        suffix=_suffix(name),
    )


def sbatch_options(
    name: str,
    comment: str,
    folder: Path,
    spec: PodSpec,
    count: int,
    *,
    cores: float,
    gpu_type: str,
    notice_s: int,
    requeue: bool = False,
) -> list[str]:
    """Return the package's own options of `sbatch`, with the resources.

    A lost node does not end the job.
    """
    options = [
        f"--job-name={name}",
        f"--comment={comment}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={math.ceil(cores)}",
        "--no-kill",
        "--requeue" if requeue else "--no-requeue",
        f"--signal=B:USR1@{notice_s}",
        "--export=ALL",
        "--input=/dev/null",
        "--chdir=/",
        f"--output={_literal(folder)}/job-%j.log",
        f"--error={_literal(folder)}/job-%j.log",
    ]
    return [*options, *resource_options(spec, gpu_type)]


def resource_options(spec: PodSpec, gpu_type: str) -> list[str]:
    """Return the options of `sbatch` for the memory and the GPUs of a node."""
    options = []
    if spec.memory_gib is not None:
        options.append(f"--mem={math.ceil(spec.memory_gib * 1024)}M")
    if spec.gpus:
        kind = f"{gpu_type}:" if gpu_type else ""
        options.append(f"--gpus-per-node={kind}{spec.gpus}")
    return options


def _literal(folder: Path) -> str:
    """Return a path without patterns of `sbatch`."""
    return str(folder).replace("%", "%%")


def log_of(folder: Path, job: str) -> Path:
    """Return the log of a job: the output of its script, and Slurm's own lines."""
    return folder / f"job-{job}.log"


def why_job_ended(log: str) -> str:
    """Return Slurm's line on the end of a job in its log, and the notice; empty without both.

    Example:
        >>> why_job_ended("slurmstepd: error: *** JOB 7 ON n1 CANCELLED DUE TO TIME LIMIT ***")
        'JOB 7 ON n1 CANCELLED DUE TO TIME LIMIT'
    """
    lines: list[str] = _OF_JOB.findall(log)
    said = lines[-1:]
    # A job that is cancelled after the notice has a line without a reason.
    if f"*** {_NOTICE} ***" in log and _WITH_REASON not in "".join(said):
        said.insert(0, _NOTICE)
    return "; ".join(said)


def why_step_ended(log: str, job: str) -> str:
    """Return Slurm's line on the end of a job's step in the log of the pod, or nothing.

    Example:
        >>> why_step_ended("srun: error: Node failure on n2", "7")
        'Node failure on n2'
    """
    lines: list[str] = [line for line, number in _OF_STEP.findall(log) if number == job]
    lines += _OF_NODE.findall(log)
    return lines[-1] if lines else ""


def ended_pods(log: str) -> dict[str, str]:
    """Return the exit codes of ended pods, by name, from the log of a job.

    Example:
        >>> ended_pods("*** pod-1 has ended with exit code 1 ***")
        {'pod-1': '1'}
    """
    return dict(re.findall(r"^\*\*\* (pod-\d+) has ended with exit code (\d+) \*\*\*$", log, re.M))
