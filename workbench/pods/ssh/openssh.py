"""How the OpenSSH client, pdsh and mpirun are told to use a cluster's identity and nothing of the user's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from workbench.base.errors import ConfigError
from workbench.base.files import write_text
from workbench.pods.hostfile import check_address
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity


def ssh_argv(pod: Pod, identity: Identity, command: Sequence[str] = ()) -> list[str]:
    """Return the argument list of an `ssh` that logs in to the pod, or runs a command there."""
    remote = [shlex.join(command)] if command else []
    return ["ssh", "-F", str(identity.ssh_config), "--", check_address(pod.address), *remote]


def pdsh_environment(identity: Identity) -> dict[str, str]:
    """Return the variables that make pdsh connect through OpenSSH with this identity."""
    path = str(identity.ssh_config)
    if any(c in path for c in "%'") or len(path.split()) != 1:
        raise ConfigError(f"pdsh cannot use the path {path!r}; choose a cluster folder without blanks, quotes and %")
    return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": f"-F {path}"}


def ssh_wrapper(identity: Identity, pods: Sequence[Pod]) -> str:
    """Write an executable that is `ssh` with this identity; return its path: OpenMPI's `plm_rsh_agent`."""
    path = identity.folder / f"ssh-{pods[0].name}"  # a pod is in one run at a time
    if any(c in str(path) for c in ":,;'\"") or len(str(path).split()) != 1:
        raise ConfigError(f"mpirun cannot use the path {str(path)!r}; choose a cluster folder without blanks and : , ;")
    # Two orteds of one machine that share a folder race to make the same one in it; one of them may end without a word,
    # and mpirun then waits for it for ever. In /tmp another user may have made it.
    own = {pod.address: shlex.quote(shlex.quote(f"TMPDIR={pod.root}")) for pod in pods if pod.root}
    cases = " ".join(f'{shlex.quote(address)}) set -- "$@" env {folder} ;;' for address, folder in own.items())
    words = f'for word do\n  shift\n  set -- "$@" "$word"\n  case $word in {cases} esac\ndone\n'
    write_text(path, f'#!/bin/sh\n{words}exec ssh -F {shlex.quote(str(identity.ssh_config))} "$@"\n', mode=0o700)
    return str(path)
