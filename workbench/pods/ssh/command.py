"""Run a command on a pod through the OpenSSH client, as pdsh and mpirun do, and keep ssh's own words.

For the doctor, which is to meet the launchers' refusals, and to work where the keeper's own connections do not.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import ssh_argv

NO_CLIENT = "no ssh program here"
_SSH_FAILED = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    reached: bool
    exit_code: int | None
    """Its exit code; None where it did not end in time."""
    out: str
    words: str
    """What ssh, or the command, wrote to standard error."""
    began_s: float
    """Seconds since the epoch on this machine."""
    ended_s: float


def start_ssh(
    pod: Pod,
    identity: Identity,
    command: Sequence[str],
    *,
    connect_s: float | None = None,
    stderr: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start a command on a pod, with pipes on its streams."""
    argv = ssh_argv(pod, identity, command)
    quick = [] if connect_s is None else ["-o", f"ConnectTimeout={max(1, round(connect_s))}"]
    return subprocess.Popen(
        [argv[0], *quick, *argv[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt meant for the notebook
    )


def run_over_openssh(
    pod: Pod,
    identity: Identity,
    command: Sequence[str],
    *,
    timeout_s: float,
    answered_s: Callable[[], float] = lambda: 0.0,
) -> CommandResult:
    """Give up after `timeout_s`, counted from the last answer of another pod (`time.monotonic`) where that is later."""
    began_s, waits_from_s = time.time(), time.monotonic()
    try:
        process = start_ssh(pod, identity, command, connect_s=timeout_s - 1)
    except FileNotFoundError:
        return CommandResult(reached=False, exit_code=None, out="", words=NO_CLIENT, began_s=began_s, ended_s=began_s)
    while True:
        left_s = max(waits_from_s, answered_s()) + timeout_s - time.monotonic()
        try:
            out, words = process.communicate(timeout=max(0.0, left_s))
            break
        except subprocess.TimeoutExpired:
            if left_s > 0:
                continue
        process.kill()
        out, words = process.communicate()
        words = words or f"no answer in {timeout_s:g} s"
        return CommandResult(reached=False, exit_code=None, out=out, words=words, began_s=began_s, ended_s=time.time())
    code = process.returncode
    return CommandResult(
        reached=code != _SSH_FAILED, exit_code=code, out=out, words=words.strip(), began_s=began_s, ended_s=time.time()
    )
