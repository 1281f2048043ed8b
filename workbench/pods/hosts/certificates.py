"""Certificates that ssh offers to a host, in files and in an agent, and the hours of their ends."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from workbench.base.words import strip_controls
from workbench.pods.hosts.names import with_hops

_CERTIFICATE = re.compile(r"Type: \S+ (?:user|host) certificate")
_USERS = re.compile(r"Type: \S+ user certificate")
_NAME = re.compile(r'Key ID: "(.*)"')
_ENDS = re.compile(r"Valid: (?:from \S+ to|before) (\d\S+)")  # or "to forever"
_KIND = "-cert-v01@openssh.com"
_LOOK_S = 5.0
_DAY = timedelta(days=1)


def ends(ways: Sequence[Sequence[str]]) -> dict[str, datetime | None]:
    """Return the certificates for hosts and their ends, local time; none without an end.

    `ways`: arguments of `ssh` for each host. Hosts on the way count too. A file is named by its
    path, and a certificate of an agent by its key id. None: ssh cannot read the certificate.
    """
    offered: dict[str, tuple[str, str]] = {}
    agents = []
    found: dict[str, datetime | None] = {}
    # Certificates in files, those that the ssh configuration names and those beside keys.
    for words, told in with_hops(ways):
        whose = "" if words in ways else f" for the jump host {words[-1]}"
        for path, lines in _files(told):
            if not lines:
                found[f"{path}{whose}"] = None
            for line in lines:
                offered.setdefault(_text_of(line), (f"{path}{whose}", line))
        agents.append(_agent_of(told))
    # Certificates of agents. A certificate that a file has too is named by the file.
    for agent in dict.fromkeys(filter(None, agents)):
        held = _output(["ssh-add", "-L"], "", agent=agent) or ""
        for line in filter(_is_certificate, held.splitlines()):
            offered.setdefault(_text_of(line), ("", line))

    # ssh-keygen reads the end of each. A host's own certificate is passed over.
    for path, line in offered.values():
        shown = _output(["ssh-keygen", "-L", "-f", "-"], f"{line}\n")
        if shown is None:
            continue
        key_id = _NAME.search(shown)
        name = path or f"{strip_controls(key_id[1] if key_id else '')[:100]!r} of the agent"
        end = _ENDS.search(shown)
        if not _CERTIFICATE.search(shown):
            found[name] = None
        elif end is not None and _USERS.search(shown):
            found[name] = datetime.fromisoformat(end[1])
    return found


def ending_soon(ways: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per certificate with an end within a day, or damaged. `ways`: as for `ends`."""
    lines = []
    for name, end in ends(ways).items():
        if end is None:
            lines.append(_damaged(name))
        elif end < datetime.now() + _DAY:
            lines.append(
                f"the certificate {name} ends at {end:%Y-%m-%d %H:%M}: no host can be logged in to"
                " again after that"
            )
    return lines


def ended(words: Sequence[str]) -> str:
    """Return the sentence on a host's certificates that ended or are damaged, if any."""
    found = ends([words])
    ended_ones = [
        f"the certificate {name} ended at {end:%Y-%m-%d %H:%M}"
        for name, end in found.items()
        if end is not None and end < datetime.now()
    ]
    lines = [f"{'; '.join(ended_ones)}: renew the certificate"] if ended_ones else []
    lines += [_damaged(name) for name, end in found.items() if end is None]
    return "; ".join(lines)


def _damaged(name: str) -> str:
    return (
        f"ssh cannot read the certificate {name} and does not offer it: copy the whole file there"
        " again, or remove the file"
    )


def _files(told: Mapping[str, Sequence[str]]) -> list[tuple[str, list[str]]]:
    """Return the files of certificates that are configured, or lie beside a key, with the lines.

    A file without a certificate, or that cannot be read, has no lines.
    """
    beside = [f"{key}-cert.pub" for key in told.get("identityfile", [])]
    found = []
    for name in [*told.get("certificatefile", []), *beside]:
        try:
            path = Path(name).expanduser()
            if not path.is_file():  # a pipe would wait
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
        except RuntimeError:  # no such account
            continue
        except (OSError, UnicodeDecodeError):
            lines = []
        found.append((str(path), list(filter(_is_certificate, lines))))
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


def _output(argv: Sequence[str], given: str, agent: str = "") -> str | None:
    """Return what a program prints; None if the program does not run or end."""
    environment = {**os.environ, **({"SSH_AUTH_SOCK": agent} if agent else {})}
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, input=given, timeout=_LOOK_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout
