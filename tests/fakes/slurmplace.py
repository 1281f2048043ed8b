"""A real Slurm on this machine: munged, slurmctld and a slurmd for each of three nodes.

A node has a network namespace and a host name of its own. The nodes share all files, as nodes with
NFS do. All state is in a folder of `/tmp`. One Slurm serves a session.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from tests.fakes.namespaces import Namespace, joined
from tests.support.poll import until
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.notes import note_of
from workbench.pods.pod import LaunchContext
from workbench.pods.slurm.pods import JOBS, SlurmPods

_NODES = 3
_SIZE = "CPUs=4 RealMemory=8000 Gres=gpu:a100:2"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_CONFIG = """\
ClusterName=test
SlurmctldHost=localhost({controller})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=20
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{limits}
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=1000
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobSubmitPlugins=lua
SchedulerParameters=bf_interval=1
ReturnToService=2
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=60 PriorityTier=1
PartitionName=urgent Nodes={names} MaxTime=60 PriorityTier=10
"""
_GROUPS = [Path("/sys/fs/cgroup", name) for name in ("freezer", "memory")]
_CGROUPS = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainRAMSpace=yes
"""
_SUBMIT = """\
-- Accounts and QOS need Slurm's database. This plugin refuses with the same codes.
function slurm_job_submit(job, partitions, user)
    if job.account == "nobody" then return 2045 end
    if job.qos == "nosuch" then return 2066 end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user)
    return slurm.SUCCESS
end
return slurm.SUCCESS
"""
"""Slurm's codes ESLURM_INVALID_ACCOUNT and ESLURM_INVALID_QOS."""


class Slurm:
    """The daemons, and what a person does with Slurm's commands."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.config = self.folder / "slurm.conf"
        # Control groups of nodes bear their names, and other sessions have nodes too.
        tag = self.folder.name.removeprefix("slurm-").replace("_", "x")
        self.nodes = [f"{tag}n{number}" for number in range(1, _NODES + 1)]
        self.limits_memory = all(os.access(folder, os.W_OK) for folder in _GROUPS)
        """Whether jobs have control groups: version 1, and this machine lets us make some."""
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._networks = ExitStack()

    def start(self) -> None:
        """Start all daemons and wait until the nodes are idle."""
        hosts = self._networks.enter_context(joined(_NODES))
        lines = [
            f"NodeName={node} NodeAddr={host.address} Port=6818 {_SIZE}"
            for node, host in zip(self.nodes, hosts, strict=True)
        ]
        controller = hosts[0].bridge
        limits = ["ProctrackType=proctrack/pgid", "TaskPlugin=task/none"]
        if self.limits_memory:
            limits = ["ProctrackType=proctrack/cgroup", "TaskPlugin=task/cgroup"]
            (self.folder / "cgroup.conf").write_text(_CGROUPS)
        text = _CONFIG.format(
            folder=self.folder,
            controller=controller,
            port=free_port([controller]),
            nodes="\n".join(lines),
            names=",".join(self.nodes),
            limits="\n".join(limits),
        )
        self.config.write_text(text)
        (self.folder / "job_submit.lua").write_text(_SUBMIT)
        # Slurm hands out any device as a GPU.
        (self.folder / "gres.conf").write_text(f"Name=gpu Type=a100 File={self.folder}/gpu[0-1]\n")
        for number in range(2):
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self._start_daemon("munged", "--foreground", "--force", *self._munge())
        until((self.folder / "munge.sock").exists, 20, why=self._logs)
        self._start_daemon("slurmctld", "-D", "-f", str(self.config))
        self.hosts = dict(zip(self.nodes, hosts, strict=True))
        for node in self.nodes:
            self.start_node(node)
        until(lambda: self._states() == {"idle"}, 60, every_s=0.2, why=self._logs)

    def end(self) -> None:
        """End the jobs and the daemons, by their ids."""
        if self.config.exists():
            self.cancel_all()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(300)
        for node in self.nodes:
            for group in _GROUPS:
                for folder, _, _ in os.walk(group / f"slurm_{node}", topdown=False):
                    Path(folder).rmdir()
        self._networks.close()
        shutil.rmtree(self.folder)

    def do(self, *words: str, text: str = "") -> str:
        """Run a command of Slurm and return its output."""
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=300, env=self.environment()
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def environment(self) -> dict[str, str]:
        """Return this process's variables, without those of an allocation."""
        own = {
            name: os.environ[name]
            for name in os.environ
            if not name.startswith(("SLURM", "SBATCH"))
        }
        return {**own, "SLURM_CONF": str(self.config)}

    def jobs(self) -> list[str]:
        """Return the ids of jobs with processes."""
        return self.do("squeue", "--noheader", "--format=%i").split()

    def cancel_all(self) -> None:
        """Cancel every job, and wait until its processes have ended."""
        if jobs := self.jobs():
            self.do("scancel", *jobs)
            until(lambda: not self.jobs(), 60, every_s=0.1)

    def start_node(self, node: str) -> None:
        host = _on_host(self.hosts[node], node)
        self._start_daemon(*host, "slurmd", "-D", "-f", str(self.config))

    def resume(self, node: str) -> bool:
        """Have a lost node back. Return whether the node takes jobs."""
        words = ["scontrol", "update", f"nodename={node}", "state=resume"]
        # Slurm refuses for a node that is back, and for a node with processes that still end.
        subprocess.run(words, timeout=300, env=self.environment(), capture_output=True)
        shown = self.do("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T")
        return set(shown.split()) <= {"idle", "mixed"}

    def _start_daemon(self, *words: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment()
            )
        self._daemons.append(daemon)

    def _munge(self) -> Iterator[str]:
        yield f"--socket={self.folder}/munge.sock"
        yield f"--key-file={self.folder}/munge.key"
        yield from (f"--{name}-file={self.folder}/munge.{name}" for name in ("log", "pid", "seed"))

    def _states(self) -> set[str]:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"],
            capture_output=True,
            text=True,
            timeout=300,
            env=self.environment(),
        )
        states = done.stdout.split()
        return set(states) if len(states) == _NODES else set()

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))


def _on_host(host: Namespace, name: str) -> Iterator[str]:
    """Return the words before those of a daemon on a host; the daemon keeps its process id.

    `ip netns exec` would hide the control groups, which are below `/sys`.
    """
    yield from ("nsenter", f"--net=/run/netns/{host.name}", "unshare", "--uts")
    yield from ("sh", "-c", 'hostname "$0" && exec "$@"', name)


_RUNNING: list[Slurm] = []
_FAILED: list[str] = []


def slurm() -> Slurm:
    """Return the session's Slurm; skip the test where there can be none."""
    if _FAILED:  # each test would wait for its end
        raise RuntimeError(f"Slurm did not start in this session: {_FAILED[0]}")
    if not _RUNNING:
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if missing:
            pytest.skip(f"Slurm is not installed here: {', '.join(missing)} is missing")
        if os.geteuid() != 0:
            pytest.skip("Slurm's daemons need root here")
        made = Slurm()
        _RUNNING.append(made)
        try:
            made.start()
        except pytest.skip.Exception:  # this machine has no network namespaces
            end_slurm()
            raise
        except Exception as error:
            _FAILED.append(str(error)[:2000])
            raise
    return _RUNNING[0]


def end_slurm() -> None:
    """End the session's Slurm, if one was started."""
    while _RUNNING:
        _RUNNING.pop().end()


@contextmanager
def variables(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class SlurmPlace:
    """A login node of the session's Slurm."""

    owns_daemons = True
    launchers = ("ssh",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Self:
        self.slurm = slurm()
        self.folder.mkdir()
        # A notebook inside an allocation has variables that would change a job or a step.
        inside = {"SLURM_NTASKS": "9", "SLURM_MEM_PER_NODE": "9", "SLURM_NNODES": "9"}
        own = {"SLURM_CONF": str(self.slurm.config), **inside, "SBATCH_ARRAY_INX": "1-9"}
        self._variables = variables(own)
        self._variables.__enter__()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._variables.__exit__(None, None, None)
        self.slurm.cancel_all()

    def backend(self, **options: Any) -> SlurmPods:
        return SlurmPods(**{"root": str(self.folder), **options})

    def state_of(self, job: str) -> str:
        return self.slurm.do("squeue", "--noheader", f"--jobs={job}", "--format=%T")

    def fill(self, *words: str) -> str:
        """Start a job of another user on every node, and return its id."""
        words = ("--parsable", "--nodes=3", "--output=/dev/null", *(words or ("--exclusive",)))
        job = self.slurm.do("sbatch", *words, text="#!/bin/sh\nsleep 6000\n")
        until(lambda: self.state_of(job) == "RUNNING", 60, every_s=0.1)
        return job

    def left(self, context: LaunchContext) -> list[str]:
        folders = self.folder.glob("workbench-*")
        files = [path for path in (context.directory / "pods").glob("*") if path.suffix != ".log"]
        notes = [note for note in [note_of(context.directory, JOBS)] if note.exists()]
        return [*self.slurm.jobs(), *map(str, [*folders, *files, *notes])]

    def node_of(self, pod: str) -> str:
        """Return the node of a pod's running step."""
        listed = self.slurm.do("squeue", "--noheader", "--steps", "--format=%j|%N")
        (node,) = re.findall(rf"^\S+-{pod}\|(\S+)$", listed, re.M)
        return str(node)

    @contextmanager
    def lost(self, node: str) -> Iterator[None]:
        """Take a node off the network with all of its processes, and tell Slurm."""
        host = self.slurm.hosts[node]
        with host.silent():
            host.end_what_is_left()
            self.slurm.do("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
            yield
        self.slurm.start_node(node)
        until(lambda: self.slurm.resume(node), 60, every_s=0.2)

    def end_step(self, pod: str) -> None:
        """Tell a pod's process to end."""
        listed = self.slurm.do("squeue", "--noheader", "--steps", "--format=%i|%j")
        (step,) = re.findall(rf"^\s*([\d.]+)\|\S+-{pod}$", listed, re.M)
        # Slurm 22.05 signals the step, and then reports that there is no such job.
        subprocess.run(
            ["scancel", "--quiet", "--signal=TERM", step],
            env=self.slurm.environment(),
            timeout=300,
            stderr=subprocess.DEVNULL,
        )


class InsidePlace(SlurmPlace):
    """A notebook inside a job of three nodes, which must outlive the pods."""

    def __enter__(self) -> Self:
        super().__enter__()
        resources = ("--ntasks-per-node=1", "--cpus-per-task=3", "--gpus-per-node=2", "--mem=2000")
        # Without the option, Slurm ends a job that loses a node.
        self.job = self.fill("--no-kill", *resources)
        self._around = variables({"SLURM_JOB_ID": self.job})
        self._around.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._around.__exit__(None, None, None)
        assert self.slurm.jobs() == [self.job]
        super().__exit__(*exc)

    def steps(self) -> list[str]:
        """Return the names of running steps, apart from the job's own script."""
        listed = self.slurm.do("squeue", "--noheader", "--steps", "--format=%j")
        return [name for name in listed.split() if name not in ("batch", "extern")]

    def left(self, context: LaunchContext) -> list[str]:
        others = [each for each in super().left(context) if each != self.job]
        return [*self.steps(), *others]
