"""Certificates that ssh offers to a host, in files and in an agent, and the hours of their ends."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from workbench.base.words import plain
from workbench.pods.hosts.names import with_hops

_USERS = re.compile(r"Type: \S+ user certificate")
_NAME = re.compile(r'Key ID: "(.*)"')
_ENDS = re.compile(r"Valid: (?:from \S+ to|before) (\d\S+)")  # or "to forever"
_KIND = "-cert-v01@openssh.com"
_LOOK_S = 5.0
_DAY = timedelta(days=1)


def ends(ways: Sequence[Sequence[str]]) -> dict[str, datetime]:
    """Return the certificates for hosts and their ends, local time; none without an end.

    `ways`: arguments of `ssh` for each host. Hosts on the way count too. A file is named by its
    path, and a certificate of an agent by its key id.
    """
    offered: dict[str, tuple[str, str]] = {}
    agents = []
    for words, told in with_hops(ways):
        whose = "" if words in ways else f" for the jump host {words[-1]}"
        for path, line in _in_files(told):
            offered.setdefault(_text_of(line), (f"{path}{whose}", line))
        agents.append(_agent_of(told))
    for agent in dict.fromkeys(filter(None, agents)):
        held = _output(["ssh-add", "-L"], "", agent=agent).splitlines()
        for line in filter(_is_certificate, held):
            offered.setdefault(_text_of(line), ("", line))

    found = {}
    for path, line in offered.values():
        shown = _output(["ssh-keygen", "-L", "-f", "-"], f"{line}\n")
        end = _ENDS.search(shown)
        if end is None or not _USERS.search(shown):
            continue
        key_id = _NAME.search(shown)
        name = path or _of_agent(key_id[1] if key_id else "")
        found[name] = datetime.fromisoformat(end[1])
    return found


def ending_soon(ways: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per certificate with an end within a day. `ways`: as for `ends`."""
    return [
        f"the certificate {name} ends at {end:%Y-%m-%d %H:%M}: no host can be logged in to again"
        " after that"
        for name, end in ends(ways).items()
        if end < datetime.now() + _DAY
    ]


def ended(words: Sequence[str]) -> str:
    """Return the sentence on a host's certificates that have ended; empty: there is none."""
    lines = [
        f"the certificate {name} ended at {end:%Y-%m-%d %H:%M}"
        for name, end in ends([words]).items()
        if end < datetime.now()
    ]
    return f"{'; '.join(lines)}: renew the certificate" if lines else ""


def _in_files(told: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return the certificates that are configured, or lie beside a key: path and line."""
    beside = [f"{key}-cert.pub" for key in told.get("identityfile", [])]
    found = []
    for name in [*told.get("certificatefile", []), *beside]:
        try:
            path = Path(name).expanduser()
            if not path.is_file():  # a pipe would wait
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError, RuntimeError):  # the last: no such account
            continue
        found += [(str(path), line) for line in lines if _is_certificate(line)]
    return found


def _agent_of(told: Mapping[str, Sequence[str]]) -> str:
    """Return the socket of the agent whose certificates ssh offers; empty: of none."""
    # With IdentitiesOnly, ssh offers no other keys of an agent than those of the files.
    if told.get("identitiesonly", ["no"])[0] == "yes":
        return ""
    agent = told.get("identityagent", ["SSH_AUTH_SOCK"])[0]
    if agent == "SSH_AUTH_SOCK":
        return os.environ.get(agent, "")
    return "" if agent == "none" else agent


def _is_certificate(line: str) -> bool:
    words = line.split()
    return len(words) > 1 and words[0].endswith(_KIND)


def _text_of(certificate: str) -> str:
    """Return a line's certificate without the comment: a file and an agent may hold the same."""
    return certificate.split()[1]


def _of_agent(key_id: str) -> str:
    return f"{plain(key_id)[:100]!r} of the agent"


def _output(argv: Sequence[str], given: str, agent: str = "") -> str:
    """Return what a program prints; empty if the program does not run or end."""
    environment = {**os.environ, **({"SSH_AUTH_SOCK": agent} if agent else {})}
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, input=given, timeout=_LOOK_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
