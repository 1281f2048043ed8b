"""Slurm's commands, with their errors in Slurm's own words."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from workbench.base.errors import BackendError, ConfigError
from workbench.pods.bootstrap.process import is_session_variable
from workbench.pods.slurm.gres import gpus_of

_NODE = "node:"  # a site's own sinfo may print more lines
_LIMIT_S = 60.0  # sbatch itself waits for a busy controller for some ten seconds
_DEFAULTS = frozenset(
    f"SBATCH_{name}"
    for name in ("ACCOUNT", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION", "TIMELIMIT")
)
"""Variables with a user's defaults for `sbatch`."""
_OTHERS = frozenset(("HOME", "USER", "LOGNAME", "SHELL", "SLURM_CONF", *_DEFAULTS))
_SPEAKER = re.compile(r"^(?:\w+: )?(?:error: |fatal: )?")
# A site's own sbatch may print more lines, or ignore --parsable.
_SUBMITTED = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S*| on cluster \S+)?\s*$", re.M)
_GONE = ("Invalid job id", "already completing or completed")
_LIVES = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "SUSPENDED",
        "STOPPED",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A Slurm job in the list of `squeue`."""

    id: str
    state: str
    """Slurm's word: PENDING, RUNNING, TIMEOUT or another."""
    reason: str
    """Slurm's reason for the state, for example Priority; empty without a reason."""
    start: str
    """Start of the job, expected for a pending job; empty if unknown."""
    nodes: str
    """Nodes in Slurm's short form: n[1-2]. Empty for a pending job."""
    ends_s: float | None = None
    """Time at which the job's time limit ends the job, in seconds since the epoch. None: never, or
    the job does not run."""

    @property
    def is_pending(self) -> bool:
        """Whether Slurm has not started the job yet."""
        return self.state in ("PENDING", "CONFIGURING")

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended or is ending."""
        return self.state not in _LIVES

    @property
    def is_gone(self) -> bool:
        """Whether no process of the job is left."""
        return self.has_ended and self.state != "COMPLETING"

    def words(self) -> str:
        """Return the state for people, with Slurm's reason.

        Example:
            >>> job = Job(id="7", state="PENDING", reason="Priority", start="", nodes="")
            >>> job.words()
            'job 7 is PENDING (Priority)'
        """
        reason = f" ({self.reason})" if self.reason else ""
        expected = f", expected to start at {self.start}" if self.is_pending and self.start else ""
        return f"job {self.id} is {self.state}{reason}{expected}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A running step of a job."""

    id: str
    nodes: str
    """Nodes of the step in Slurm's short form."""


def submit(argv: Sequence[str], script: str) -> str:
    """Submit a batch job and return its id."""
    answer = call("sbatch", "--parsable", *argv, text=script)
    found: list[str] = _SUBMITTED.findall(answer)
    if not found:
        raise BackendError(f"sbatch printed no id of a job: {words_of(answer)}")
    return found[-1]


def jobs(ids: Sequence[str]) -> dict[str, Job]:
    """Return the jobs in Slurm's memory by id. Slurm forgets ended jobs after minutes.

    For the id of a step, as `7.3`, return the step's job, unless only the step has ended.
    """
    if not ids:  # squeue would list all jobs
        return {}
    form = "%A|%T|%r|%S|%N|%e|%l"  # %i of a job of an array is no number
    numbers = ",".join(sorted({job_of(each) for each in ids}))
    try:
        answer = call(
            "squeue", "--noheader", "--states=all", f"--jobs={numbers}", f"--format={form}"
        )
    except BackendError as error:
        if is_gone(error):
            return {}
        raise
    listed = {job.id: job for job in map(_job, answer.splitlines())}
    found = {each: listed[job_of(each)] for each in ids if job_of(each) in listed}
    for each, job in list(found.items()):
        if each != job.id and not job.has_ended:
            running = {step.id for step in steps(job.id).values()}
            if each not in running:
                del found[each]
    return found


def job_of(number: str) -> str:
    """Return the id of the job of a step, or of the job itself."""
    return number.partition(".")[0]


def named(number: str) -> str:
    """Return the words for a job or a step.

    Example:
        >>> named("7.3")
        'step 7.3'
    """
    return f"{'step' if '.' in number else 'job'} {number}"


def is_gone(error: BackendError) -> bool:
    """Whether Slurm no longer knows the job."""
    return _GONE[0] in str(error)


def _job(line: str) -> Job:
    number, state, reason, start, nodes, end, limit = (*line.split("|"), *[""] * 6)[:7]
    ends_s = None
    # A job without a limit has an end too, in a year.
    if state == "RUNNING" and limit.strip()[:1].isdecimal():
        with contextlib.suppress(ValueError):  # N/A
            ends_s = datetime.fromisoformat(end.strip()).timestamp()
    return Job(
        id=number.strip(),
        state=state,
        reason="" if reason == "None" else reason,
        start="" if start == "N/A" else start,
        nodes=nodes,
        ends_s=ends_s,
    )


def jobs_named(name: str) -> list[str]:
    """Return the ids of the user's live jobs of a name."""
    answer = call("squeue", "--noheader", "--me", f"--name={name}", "--format=%i")
    return [line for line in answer.split() if line.isdecimal()]


def steps(job: str) -> dict[str, Step]:
    """Return a job's running steps by name."""
    try:
        answer = call("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i|%j|%N")
    except BackendError as error:
        if is_gone(error):
            return {}
        raise
    found = {}
    for line in answer.splitlines():
        number, name, nodes = (*line.strip().split("|"), "", "")[:3]
        # A step of a job of an array is listed by the number in the array.
        found[name] = Step(id=f"{job}.{number.rpartition('.')[2]}", nodes=nodes)
    return found


def cancel(ids: Sequence[str], *options: str) -> None:
    """End jobs or steps; an ended id is no error."""
    for number in ids:
        try:
            call("scancel", *options, number)
        except BackendError as error:
            if not any(words in str(error) for words in _GONE):
                raise BackendError(f"{error}; end the job with: scancel {number}") from error


def node_addresses(partition: str = "") -> list[str]:
    """Return addresses or names of the cluster's nodes, as Slurm reaches the nodes."""
    limits = [f"--partition={partition}"] if partition else []
    answer = call("sinfo", "--noheader", "--Node", f"--format={_NODE}%o", *limits)
    lines = answer.splitlines()
    return [line.removeprefix(_NODE).strip() for line in lines if line.startswith(_NODE)]


def gpu_nodes(partition: str | None, gpu_type: str) -> list[tuple[int, int]]:
    """Return the cores and the GPUs of each node of a partition; None: Slurm's default partition.

    A node whose cores are unknown is left out.
    """
    answer = call(
        "sinfo", "--noheader", "--Node", "--Format=Partition:500|,CPUsState:500|,Gres:500|"
    )
    found = []
    for line in answer.splitlines():
        name, states, gres, *_ = (*(text.strip() for text in line.split("|")), "", "", "")
        # sinfo marks the default partition.
        is_ours = name.endswith("*") if partition is None else name.rstrip("*") == partition
        cores = states.rpartition("/")[2]
        if is_ours and cores.isdecimal():
            found.append((int(cores), gpus_of(gres, gpu_type)[1]))
    return found


def check_here() -> None:
    """Refuse a machine without Slurm's commands."""
    if shutil.which("sbatch") is None:
        raise _missing("sbatch")


def _missing(command: str) -> ConfigError:
    return ConfigError(
        f"Slurm's command {command} is not on this machine. SlurmPods works on a login node or"
        " inside an allocation; use LocalPods, SSHPods or KubernetesPods elsewhere"
    )


def call(command: str, *words: str, text: str = "") -> str:
    """Run a command of Slurm and return its output.

    Raises:
        ConfigError: Slurm's commands are missing.
        BackendError: Slurm refused, or did not answer in time.
    """
    try:
        done = subprocess.run(
            [command, *words],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            env=environment(os.environ),
        )
    except FileNotFoundError as error:
        raise _missing(command) from error
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"Slurm did not answer {command} in {_LIMIT_S:.0f} s; try again"
        ) from error
    if done.returncode != 0:
        raise BackendError(f"Slurm refused {command}: {words_of(done.stderr)}")
    return done.stdout


def words_of(text: str) -> str:
    """Return Slurm's words without the name of the command.

    Example:
        >>> words_of("sbatch: error: Batch job submission failed: Invalid qos specification")
        'Batch job submission failed: Invalid qos specification'
    """
    lines = [_SPEAKER.sub("", line.strip()) for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or "it gives no reason"


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for Slurm's commands. `sbatch` passes the variables to the nodes.

    The variables of an allocation around the notebook would change the new job. Tokens and
    other variables of the login are left out, because Slurm keeps the environment on its disk.
    """
    passed = {}
    for name, value in own.items():
        # TMPDIR is a folder of this machine alone, and SLURM_TMPDIR one of the job around.
        if (is_session_variable(name) or name in _OTHERS) and "TMPDIR" not in name:
            passed[name] = value
    return passed
