"""Options for the OpenSSH client, pdsh and mpirun to use a cluster's identity, and no other.

Also runs a command through the client and keeps ssh's own words, for the doctor. The doctor meets
the refusals of the launchers, and works where the keeper's connections do not.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from workbench.base import entries
from workbench.base.child import child_environment
from workbench.base.errors import ConfigError
from workbench.base.files import write_text
from workbench.pods.hostfile import check_address
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity, nameless
from workbench.pods.ssh.login import Output, marked, why_no_command


def ssh_argv(
    pod: Pod, identity: Identity, command: Sequence[str] = (), options: Sequence[str] = ()
) -> list[str]:
    """Return the argument list of an `ssh` that logs in to the pod, or runs a command there.

    A user without a name runs a command by a client of our own, which takes no options.
    """
    if command and nameless("ssh"):
        path = child_environment()["PYTHONPATH"]
        client = ["env", f"PYTHONPATH={path}", sys.executable, "-P", "-m", entries.SSH]
        return [*client, str(identity.folder), json.dumps(pod.to_dict()), *command]
    remote = [shlex.join(command)] if command else []
    config = str(identity.ssh_config)
    return ["ssh", *options, "-F", config, "--", check_address(pod.address), *remote]


def pdsh_environment(identity: Identity) -> dict[str, str]:
    """Return the variables for pdsh to connect through OpenSSH with this identity."""
    _check_named("pdsh")
    path = str(identity.ssh_config)
    if any(c in path for c in "%'") or len(path.split()) != 1:
        raise ConfigError(
            f"pdsh cannot use the path {path!r}: set XDG_STATE_HOME to a folder without blanks,"
            ' quotes and % and start another cluster, or use launcher "ssh"'
        )
    return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": f"-F {path}"}


def ssh_wrapper(identity: Identity, pods: Sequence[Pod]) -> str:
    """Write an executable `ssh` with the identity and return its path.

    The path is the value of OpenMPI's `plm_rsh_agent`.
    """
    _check_named("mpirun")
    path = identity.folder / f"ssh-{pods[0].name}"  # a pod is in one run at a time
    if any(c in str(path) for c in ":,;'\"") or len(str(path).split()) != 1:
        raise ConfigError(
            f"mpirun cannot use the path {str(path)!r}: set XDG_STATE_HOME to a folder without"
            ' blanks, quotes and : , ; and start another cluster, or use launcher "ssh"'
        )
    # Two orteds of one machine that share a folder race to make the same subfolder. One orted may
    # end without a word, and mpirun then waits for that orted for ever. In /tmp another user may
    # have made the subfolder.
    cases = []
    for pod in pods:
        if pod.root:
            folder = shlex.quote(f"TMPDIR={pod.root}")
            # For an account with sh or ksh, mpirun's command is a list in brackets.
            export = f'"("*) set -- "$@" {shlex.quote(f"export {folder};")} ;;'
            other = f'*) set -- "$@" env {shlex.quote(folder)} ;;'
            cases.append(f"{shlex.quote(pod.address)}) case $1 in {export} {other} esac ;;")
    chosen = f"case $word in {' '.join(cases)} esac"
    words = f'for word do\n  shift\n  set -- "$@" "$word"\n  {chosen}\ndone\n'
    write_text(
        path,
        f'#!/bin/sh\n{words}exec ssh -F {shlex.quote(str(identity.ssh_config))} "$@"\n',
        mode=0o700,
    )
    return str(path)


def _check_named(launcher: str) -> None:
    """Refuse a launcher that starts OpenSSH's client for a user without a name."""
    if why := nameless(f"the ssh that {launcher} starts"):
        raise ConfigError(f'{why}. The launcher "ssh" needs no name')


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
) -> tuple[subprocess.Popen[str], str]:
    """Start a command on a pod, with pipes on its streams. Return it with its marker.

    The marker alone is the line before the command's output. The last line begins with it.
    """
    words, marker = marked(command)
    quick = [] if connect_s is None else ["-o", f"ConnectTimeout={max(1, round(connect_s))}"]
    process = subprocess.Popen(
        ssh_argv(pod, identity, words, quick),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt meant for the notebook
    )
    return process, marker.decode()


def run_over_openssh(
    pod: Pod,
    identity: Identity,
    command: Sequence[str],
    *,
    timeout_s: float,
    answered_s: Callable[[], float] = lambda: 0.0,
) -> CommandResult:
    """Give up `timeout_s` after the start, or after the last answer of another pod if later."""
    began_s = time.time()
    waits_from_s = time.monotonic()
    try:
        process, marker = start_ssh(pod, identity, command, connect_s=timeout_s - 1)
    except FileNotFoundError:
        return CommandResult(
            reached=False, exit_code=None, out="", words=NO_CLIENT, began_s=began_s, ended_s=began_s
        )
    while True:
        # A sign of life of the pod elsewhere extends the wait.
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
        return CommandResult(
            reached=False,
            exit_code=None,
            out=out,
            words=words,
            began_s=began_s,
            ended_s=time.time(),
        )
    # Without the marker, the login itself ended the command.
    code = process.returncode
    answer = Output(marker.encode())
    out = answer.strip(out.encode()).decode()
    if not answer.has_started and code != _SSH_FAILED:
        words = why_no_command(pod.login, code, words.strip() or answer.words)
    return CommandResult(
        reached=answer.has_started or code != _SSH_FAILED,
        exit_code=code if answer.exit_code is None else answer.exit_code,
        out=out,
        words=words.strip(),
        began_s=began_s,
        ended_s=time.time(),
    )
