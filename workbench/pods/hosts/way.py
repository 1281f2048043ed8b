"""The words of `ssh` for a host: the options of `SSHPods` as options of OpenSSH's client."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from workbench.pods.hosts.names import Host
from workbench.pods.ssh.identity import CIPHERS, config_path

# What OpenSSH still offers of old digests, where no configuration decides on them.
_NOT_WEAK = "MACs=-hmac-sha1*,hmac-md5*"


def given(host: Host, config: bool | str) -> list[str]:
    """Return the user's values for a host as options, apart from host keys and a jump host.

    `config`: as `SSHPods.ssh_config`.
    """
    words = []
    pairs = []
    if config is False:
        words += ["-F", "none"]
        pairs += ["IdentityAgent=none", "PreferredAuthentications=publickey"]
        pairs += [_NOT_WEAK, f"Ciphers={CIPHERS}"]
    elif config is not True:
        words += ["-F", config]
    if host.user:
        words += ["-l", host.user]
    if host.port:
        words += ["-p", str(host.port)]
    if host.key:
        pairs += [f"IdentityFile={config_path(Path(host.key))}", "IdentitiesOnly=yes"]
    return words + [word for pair in pairs for word in ("-o", pair)]


def words_to(
    host: Host, *, config: bool | str, known_hosts: str, timeout_s: float, ssh: Path
) -> list[str]:
    """Return all words of `ssh` for a host.

    `ssh`: the program for the way through a jump host. `known_hosts`: a file; empty: as configured,
    or none.
    """
    words = given(host, config)
    words += ["-o", f"ConnectTimeout={max(1, math.floor(timeout_s))}"]
    file = known_hosts or ("/dev/null" if config is False else "")
    if file:
        words += ["-o", f"UserKnownHostsFile={config_path(Path(file))}"]
    if host.jump is not None:
        *options, _, hop = words_to(
            host.jump, config=config, known_hosts=known_hosts, timeout_s=timeout_s, ssh=ssh
        )
        # ProxyJump carries no options.
        words += [
            "-o",
            f"ProxyCommand={_command([str(ssh), *options])} -W [%h]:%p {_command(['--', hop])}",
        ]
    return [*words, "--", host.address]


def _command(words: Sequence[str]) -> str:
    return shlex.join(words).replace("%", "%%")
