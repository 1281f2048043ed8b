"""Build the command that starts the ranks of a run, for every launcher.

No user input passes through a shell.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from workbench.base import entries
from workbench.base.child import HOME, kill_group
from workbench.base.display_protocol import Displayable
from workbench.base.errors import ConfigError
from workbench.base.files import records
from workbench.base.process import (
    POD_MARK,
    RUN_MARK,
    Process,
    RankPlace,
    activity,
    marks,
    process_table,
    with_mark,
)
from workbench.jobs.launcher import Launcher
from workbench.pods.pod import Pod

_SHELL = ["sh", "-c"]
# DeepSpeed and pdsh pass paths unquoted through shells on both sides.
_PLAIN_PATH = re.compile(r"[\w@+=:,./-]+")
# Variables of the caller's environment needed by the launcher. No secret is among them.
_PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
)

# Read by `agent/launcher_site/deepspeed`.
_PODS_PYTHON = "WORKBENCH_PODS_PYTHON"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    run_id: str
    launcher: Launcher
    pods: Sequence[Pod]
    """Pods of the run in rank order."""
    places: Sequence[RankPlace]
    master_port: int
    """TCP port of torch's rendezvous on the first pod."""
    master_addr: str = ""
    """Address of the first pod for the other pods. Empty: the pod's own."""
    interface: str
    """Network interface of the pods' addresses, for MPI."""
    network: str
    """Network of this machine and the pods, for MPI: interfaces have other names on other hosts.
    Empty: unknown."""
    package: str
    """Path of the zipped workbench package on the pods."""
    hostfile: Path
    ssh_argv: Mapping[str, Sequence[str]]
    """OpenSSH command line to a pod, by pod name."""
    pdsh_env: Mapping[str, str]
    """Environment variables that select the cluster's key and port for pdsh."""
    rsh_wrapper: Path
    """Program called by mpirun instead of ssh."""
    quiet: bool = False
    """Whether the output of ranks goes only to the pods' logs, not to the launcher's output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand(Displayable):
    """Launch command. `str()` returns a line to paste into a terminal."""

    argv: Sequence[str]
    """Program and arguments. For launcher `ssh`: a shell that runs one ssh per rank."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the caller's environment."""

    # Also used by the keeper, which loads no view.
    def __str__(self) -> str:
        if [*self.argv[:2]] == _SHELL and not self.env:
            return f"({self.argv[2]})"
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*assignments, shlex.join(self.argv)])


def place_ranks(pods: Sequence[Pod]) -> list[RankPlace]:
    """Number the slots of pods as DeepSpeed and MPI do: pod by pod.

    Example:
        >>> [p.pod for p in place_ranks([Pod(name="pod-0", slots=2), Pod(name="pod-1")])]
        ['pod-0', 'pod-0', 'pod-1']
    """
    slots = [(pod.name, local) for pod in pods for local in range(pod.slots)]
    return [
        RankPlace(rank=rank, local_rank=local, pod=name) for rank, (name, local) in enumerate(slots)
    ]


def check_launcher_fits(launcher: Launcher, pods: Sequence[Pod]) -> None:
    """Raise ConfigError if the launcher cannot start ranks on the pods."""
    pythons = {pod.python: pod.name for pod in pods}
    if launcher is Launcher.PDSH and len(pythons) > 1:
        paths = ", ".join(f"{name} has {python}" for python, name in pythons.items())
        raise ConfigError(
            "launcher 'pdsh' starts Python by the same path on all pods, "
            f"and {paths}. Make the paths equal, or use launcher 'ssh'"
        )
    forwarded = [pod.name for pod in pods if pod.ssh_address]
    if launcher is Launcher.OPENMPI and forwarded:
        raise ConfigError(
            "launcher 'openmpi' needs pods with a connection to this machine, "
            f"but only a port-forward or an outer address leads to {', '.join(forwarded[:3])}. Use "
            "launcher 'ssh' or 'pdsh', or a notebook in the cluster"
        )


def build_command(plan: LaunchPlan) -> LaunchCommand:
    if plan.launcher is Launcher.SSH:
        return _ssh(plan)
    client = _rank_client(plan, plan.pods[0])
    for path in (
        sys.executable,
        *client,
        _launcher_site(plan),
        str(plan.hostfile),
        str(plan.rsh_wrapper),
    ):
        if not _PLAIN_PATH.fullmatch(path):
            raise ConfigError(
                f"launcher {plan.launcher.value!r} cannot take the path "
                f"{path!r}: DeepSpeed passes it through a shell unquoted; use a "
                "folder without blanks and shell characters, or launcher 'ssh'"
            )
    return _deepspeed(plan, client)


def _rank_client(plan: LaunchPlan, pod: Pod) -> list[str]:
    pods_root = str(PurePosixPath(pod.root).parent)
    program = [f"PYTHONPATH={plan.package}", pod.python, "-P", "-m", entries.AGENT]
    return ["env", *program, "rank", pods_root, plan.run_id, *(["--quiet"] if plan.quiet else [])]


def _ssh(plan: LaunchPlan) -> LaunchCommand:
    by_name = {pod.name: pod for pod in plan.pods}
    lines = []
    for place in plan.places:
        flags = {
            "--rank": place.rank,
            "--local-rank": place.local_rank,
            "--world-size": len(plan.places),
            "--master-addr": _master(plan),
            "--master-port": plan.master_port,
        }
        remote = [
            *_rank_client(plan, by_name[place.pod]),
            *(str(x) for pair in flags.items() for x in pair),
        ]
        # Plain words need no quotes and are easier to read.
        plain = all(_PLAIN_PATH.fullmatch(word) for word in remote)
        lines.append(
            shlex.join([*plan.ssh_argv[place.pod], *(remote if plain else [shlex.join(remote)])])
        )
    # A bare `wait` loses exit codes. Waiting for every process keeps the last failure.
    script = "".join(f"{line} & p{n}=$!\n" for n, line in enumerate(lines))
    waits = " ".join(f"wait $p{n} || code=$?;" for n in range(len(lines)))
    return LaunchCommand(argv=[*_SHELL, f"{script}code=0; {waits} exit $code"])


def _deepspeed(plan: LaunchPlan, client: Sequence[str]) -> LaunchCommand:
    program = Path(sys.executable).with_name("deepspeed")
    argv = (
        [str(program)]
        if program.exists()
        else [sys.executable, "-P", "-m", "deepspeed.launcher.runner"]
    )
    argv += ["--hostfile", str(plan.hostfile), "--master_addr", _master(plan)]
    argv += ["--master_port", str(plan.master_port), "--launcher", plan.launcher.value]
    # Without --force_multi, a hostfile with one host trains on this machine. DeepSpeed's ssh check
    # calls plain ssh.
    argv += ["--force_multi", "--no_ssh_check", "--no_python", "--no_local_rank"]
    # DeepSpeed sends the values in this file through remote shells. A missing file disables the
    # feature.
    env = {"DS_ENV_FILE": ".workbench-no-env-file", "PYTHONPATH": _launcher_site(plan)}
    if plan.launcher is Launcher.OPENMPI:
        argv.append(f"--launcher_args={shlex.join(_mpi_args(plan))}")
        # Use a variable, not an argument: mpirun passes its arguments to the daemons. A daemon
        # looks for the program on its own pod and ends silently if it is missing. `_mpi_args` keeps
        # mpirun from passing the variable on.
        env |= {"OMPI_MCA_plm_rsh_agent": str(plan.rsh_wrapper)}
    else:
        # DeepSpeed would use this machine's path of Python on the pods.
        env |= {**plan.pdsh_env, _PODS_PYTHON: plan.pods[0].python}
    return LaunchCommand(argv=[*argv, *client], env=env)


def _master(plan: LaunchPlan) -> str:
    return plan.master_addr or plan.pods[0].address


def _launcher_site(plan: LaunchPlan) -> str:
    """Return the launcher's import path, which DeepSpeed also sends to the pods."""
    return f"{HOME}/{entries.LAUNCHER_SITE}:{plan.package}/{entries.LAUNCHER_SITE}"


def _mpi_args(plan: LaunchPlan) -> list[str]:
    settings = {
        "plm_rsh_no_tree_spawn": "1",  # Pods have no keys for each other.
        "plm_rsh_pass_environ_mca_params": "0",
        # Another user may own the default folder in /tmp, and two mpiruns would race there.
        "orte_local_tmpdir_base": f"{plan.rsh_wrapper}.tmp",
    }
    # Without a setting, DeepSpeed would choose the interface `eth0` for messages between ranks.
    settings["btl_tcp_if_include"] = plan.network or plan.interface
    if plan.network:
        settings["oob_tcp_if_include"] = plan.network
    args = [x for name, value in settings.items() for x in ("--mca", name, value)]
    exports = [f"MASTER_ADDR={_master(plan)}", f"MASTER_PORT={plan.master_port}"]
    return [*args, "--allow-run-as-root", *(x for export in exports for x in ("-x", export))]


class LauncherProcess:
    """Launcher process in its own session. Its exit code does not decide the run's success."""

    def __init__(self, process: subprocess.Popen[bytes] | Process, log: Path):
        self._process = process
        self._log = log

    @classmethod
    def start(cls, command: LaunchCommand, run_id: str, log: Path) -> LauncherProcess:
        """Start the launcher with the run id as a mark, so that another keeper can find it."""
        ours = {name: os.environ[name] for name in _PASSED if name in os.environ}
        with records.open_to_append(log) as out:
            process = subprocess.Popen(
                list(command.argv),
                env={**ours, **command.env, RUN_MARK: run_id},
                cwd="/",  # DeepSpeed runs `cd` to this folder on every pod.
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, log)

    @classmethod
    def left_by_another(cls, run_id: str, log: Path) -> LauncherProcess | None:
        """Find the launcher started by a dead keeper for a run. Return None if it has ended."""
        marked = [
            p
            for p in with_mark(RUN_MARK, [run_id])
            if p.pid == p.session and not marks(p.pid, [POD_MARK])
        ]
        return cls(min(marked, key=lambda process: process.start_time), log) if marked else None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the launcher, negative for a signal. None while running.

        The exit code of a launcher started by another keeper is unknown and reported as 0.
        """
        match self._process:
            case Process():
                return None if self._process.is_alive() else 0
            case _:
                return self._process.poll()

    @property
    def halted(self) -> bool:
        session = (p.pid for p in process_table().values() if p.session == self._process.pid)
        return any(activity(pid)[1] for pid in session)

    def tail(self, lines: int = 20) -> str:
        text = records.read_end(self._log).decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def end(self, grace_s: float = 3.0) -> None:
        """Wait up to `grace_s` for the launcher to end, then kill its process group."""
        deadline = time.monotonic() + grace_s
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        match self._process:
            case Process():
                if self._process.is_alive():
                    members = [
                        p for p in process_table().values() if p.session == self._process.session
                    ]
                    for process in members:
                        process.send(signal.SIGKILL)
            case _:
                kill_group(self._process)
                self._process.wait()
