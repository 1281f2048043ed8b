"""A Slurm job around the notebook: pods start as steps of the job, beside the notebook's own."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.child import ended_within
from workbench.base.errors import BackendError, ConfigError
from workbench.base.words import pluralize
from workbench.pods.pod_spec import PodSpec
from workbench.pods.slurm import commands
from workbench.pods.slurm.gres import gpus_of

_OF_NODES = re.compile(r"\bNodes=([^\s=]+) CPU_IDs=([\d,-]+) Mem=(\d+) GRES=([^\s=]*)")
_LIVES = "JobState=RUNNING"
_STARTS_S = 30.0
_PAUSE_S = 0.2
_NEW = "or submit a job for the pods: SlurmPods(new_job=True)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Nodes of a running job, with the smallest share that the job has of a node."""

    id: str
    nodes: Sequence[str]
    cores: int
    memory_mib: int
    gpus: int

    def check(self, spec: PodSpec, count: int, cores: int) -> None:
        """Refuse pods that the job has no room for."""
        if count > len(self.nodes):
            raise ConfigError(
                f"count is {count}, and the Slurm job {self.id} around this notebook has"
                f" {pluralize(len(self.nodes), 'node')}; a pod takes a node. Give"
                f" count={len(self.nodes)}, {_NEW}"
            )
        asked = {
            "gpus": (spec.gpus, self.gpus, "GPUs"),
            "cpus": (cores, self.cores, "cores"),
            "memory_gib": (spec.memory_gib or 0, self.memory_mib / 1024, "GiB"),
        }
        for name, (wanted, there, unit) in asked.items():
            if wanted > there:
                raise ConfigError(
                    f"a pod takes {wanted:g} {unit} (PodSpec.{name}), and the Slurm job {self.id}"
                    f" around this notebook has {there:g} on a node. Give a smaller pod, {_NEW}"
                )

    def free(self, taken: Collection[str]) -> list[str]:
        """Return the nodes without pods."""
        return [node for node in self.nodes if node not in taken]


def around(own: Mapping[str, str] = os.environ) -> str:
    """Return the id of the Slurm job that this process belongs to; empty outside a job."""
    return own.get("SLURM_JOB_ID", "")


def read(number: str, gpu_type: str) -> Allocation:
    """Return what a running job has; GPUs of another type do not count.

    Raises:
        ConfigError: The job does not run, as in a shell that outlived its job.
    """
    try:
        answer = commands.call("scontrol", "--details", "--oneliner", "show", "job", number)
    except BackendError as error:
        if not commands.is_gone(error):
            raise
        answer = ""
    if _LIVES not in answer:
        raise ConfigError(
            f"SLURM_JOB_ID is {number!r}, and Slurm runs no such job. Start this notebook outside"
            f" the ended job, {_NEW}"
        )
    shares = _OF_NODES.findall(answer)
    if not shares:
        raise BackendError(f"scontrol shows no nodes of job {number}")
    listed = ",".join(share[0] for share in shares)
    return Allocation(
        id=number,
        nodes=commands.call("scontrol", "show", "hostnames", listed).split(),
        cores=min(_count(ids) for _, ids, _, _ in shares),
        memory_mib=min(int(memory) for _, _, memory, _ in shares),
        gpus=min(gpus_of(gres, gpu_type)[1] for _, _, _, gres in shares),
    )


def _count(ids: str) -> int:
    """Return how many numbers a list such as `0-3,8` has."""
    ends = [each.partition("-") for each in ids.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def start(
    allocation: str, name: str, node: str, script: Path
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a script as a step of the job; return the process and the id of the step.

    The process of `srun` outlives this one. Its log is beside the script.
    """
    log = script.with_suffix(".log")
    words = [
        f"--jobid={allocation}",
        f"--job-name={name}",
        f"--nodelist={node}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        "--gres=none",
        "--chdir=/",
        "--mpi=none",
        "--input=none",
        "--export=ALL",
    ]
    with log.open("wb") as output:
        srun = subprocess.Popen(
            ["srun", *words, "sh", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=commands.environment(os.environ),
            start_new_session=True,
        )
    deadline = time.monotonic() + _STARTS_S
    while time.monotonic() < deadline and not ended_within(srun, _PAUSE_S):
        if step := commands.steps(allocation).get(name):
            return srun, step.id
    srun.terminate()
    srun.wait()
    words_there = commands.words_of(log.read_text(errors="replace"))
    raise BackendError(f"Slurm started no step in job {allocation}: {words_there}")
