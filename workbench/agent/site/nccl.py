"""Names that the site sets in NCCL's own files. NCCL lets a variable win over a line of a file."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_SITE = Path("/etc/nccl.conf")
_LARGEST = 1 << 20


def left_open(defaults: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults without the names that NCCL's files set.

    Args:
        defaults: Variables that only count where the site says nothing.
        env: Environment of the process that will load NCCL.
    """
    names = _names_in(_SITE) | _names_in(_users_file(env))
    return {name: value for name, value in defaults.items() if name not in names}


def own_interfaces(env: Mapping[str, str]) -> dict[str, str]:
    """Return the interfaces that a pod names for NCCL and gloo, by variable.

    A variable of NCCL's files alone has the value "…", as NCCL reads the files by itself.
    """
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    in_files = {name: "…" for name in names if name not in left_open({name: ""}, env)}
    return {**in_files, **{name: env[name] for name in names if env.get(name)}}


def _users_file(env: Mapping[str, str]) -> Path | None:
    """Return the user's file, as NCCL finds it: the home folder is the account's, not `HOME`."""
    if env.get("NCCL_CONF_FILE"):
        return Path(env["NCCL_CONF_FILE"])
    with suppress(KeyError):  # the image has no name for the user id
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf"
    return None


def _names_in(file: Path | None) -> set[str]:
    """Return the names of the lines `NAME=value`; none for a file that cannot be read."""
    if file is None or not file.is_file():
        return set()
    try:
        with file.open("rb") as opened:
            lines = opened.read(_LARGEST).decode("utf-8", "replace").splitlines()
    except OSError:
        return set()
    return {line.partition("=")[0].strip() for line in lines if "=" in line}
