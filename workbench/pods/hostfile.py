"""The hostfile: the addresses of a run and the number of ranks per address.

Launchers interpret some names: `-oProxyCommand=…` runs a command, `exec:x` runs locally, `^file`
and `n[1-3]` expand. `check_address` is the single rule for addresses, and every address passes the
check.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.base.errors import ConfigError
from workbench.pods.pod import Pod

MAX_SLOTS = 4096
"""Largest number of ranks on a host; a larger number is taken for a typing error."""

_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
# Directories have accounts such as 47470001, ada@corp.example, CORP\ada and gpu-1$.
_USER = re.compile(r"(?!-)(?:[^\s'\"`;&|<>(){}%$\\]|\\(?=[^\\])){1,255}\$?")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_OPTION = re.compile(r"(slots|max[_-]slots)=([0-9]{1,9}|-[0-9]{1,9})")


def check_address(text: str) -> str:
    """Return the address unchanged if it is an IP address or an RFC 1123 host name."""
    shown = repr(text if len(text) <= 60 else text[:60] + "…")
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        if not (text.isascii() and _is_host_name(text)):
            why = ": no _ stands in a host name. Give its IP address" if "_" in text else ""
            why = ": leave out the dot at its end" if _is_host_name(text.rstrip(".")) else why
            raise ConfigError(f"{shown} is not an IP address or a host name{why}") from None
        return text
    match parsed:
        case ipaddress.IPv6Address(scope_id=str()):
            raise ConfigError(
                f"{shown} has a zone, an interface of this machine alone. Give an address without a"
                " zone"
            )
    if parsed.is_unspecified or parsed.is_multicast or text == "255.255.255.255":
        raise ConfigError(f"{shown} is not the address of a host")
    return text


def check_port(port: int) -> int:
    """Return the port unchanged if it is a TCP port."""
    if not _is_whole(port, 65535):
        raise ConfigError(f"{port!r} is not a port; it must be a whole number, 1 to 65535")
    return port


def _is_whole(value: object, most: int) -> bool:
    match value:
        case bool():  # which Python takes for a number
            return False
        case int():
            return 1 <= value <= most
    return False


def check_user(user: str) -> str:
    """Return the user name unchanged; refuse a name that a shell or OpenSSH could misread."""
    if not user.isprintable() or not _USER.fullmatch(user):
        raise ConfigError(
            f"{user[:60]!r} is not a user name that SSH can carry: a name does not begin with -,"
            " and has no blanks, quotes, control characters or ; & | < > ( ) { } %, and $ or \\"
            " only as in gpu-1$ or CORP\\ada"
        )
    return user


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEntry:
    address: str
    slots: int = 1

    def __post_init__(self) -> None:
        check_address(self.address)
        _check_slots(self.address, self.slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hostfile:
    """The hosts of a cluster or a run, in rank order. Prints as the file that DeepSpeed reads."""

    entries: tuple[HostEntry, ...]
    """At least one host; no address twice."""

    def __post_init__(self) -> None:
        if not self.entries:
            raise ConfigError("a hostfile needs at least one host")
        seen: dict[object, str] = {}
        for entry in self.entries:
            key = _identity_of(entry.address)
            if key in seen:
                raise ConfigError(
                    f"host {entry.address} stands twice in the hostfile (first as {seen[key]})"
                )
            seen[key] = entry.address

    @classmethod
    def parse(cls, text: str, source: str = "hostfile") -> Hostfile:
        """Read a hostfile in the form of DeepSpeed or OpenMPI.

        A line of DeepSpeed is `host slots=N`. OpenMPI also allows `max_slots` and a bare host.
        """
        hosts = read_hosts(text, source)
        return cls(entries=tuple(HostEntry(address=name, slots=slots) for name, slots in hosts))

    @classmethod
    def from_pods(cls, pods: Iterable[Pod]) -> Hostfile:
        """Make the hostfile of pods, in their order."""
        return cls(entries=tuple(HostEntry(address=pod.address, slots=pod.slots) for pod in pods))

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(entry.address for entry in self.entries)

    @property
    def world_size(self) -> int:
        return sum(entry.slots for entry in self.entries)

    @property
    def sha256(self) -> str:
        """Return the hash of the file's text, by which a launch detects edits."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def format(self, form: Literal["deepspeed", "openmpi"] = "deepspeed") -> str:
        """Return the text of the file.

        The form of OpenMPI also forbids more ranks on a host than the host's slots.
        """
        limit = "" if form == "deepspeed" else " max_slots={0}"
        return "".join(
            f"{e.address} slots={e.slots}{limit.format(e.slots)}\n" for e in self.entries
        )

    def __str__(self) -> str:
        return self.format()


def read_hosts(text: str, source: str, *, any_name: bool = False) -> list[tuple[str, int]]:
    """Return the hosts and slots of a hostfile: addresses, or names of the ssh configuration."""
    hosts = []
    lines: dict[object, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = _COMMENT.sub("", line).split()
        if not words:
            continue
        try:
            if not any_name:
                check_address(words[0])
            slots = _slots_of(words)
        except ConfigError as error:
            raise ConfigError(f"{source}, line {number}: {error}") from None
        key = _identity_of(words[0])
        if key in lines:
            raise ConfigError(
                f"{source}, line {number}: host {words[0]} stands on line {lines[key]} already"
            )
        lines[key] = number
        hosts.append((words[0], slots))
    if not hosts:
        raise ConfigError(f"{source} names no host; write a line `address slots=N` for every pod")
    return hosts


def _check_slots(host: str, slots: int) -> None:
    if not _is_whole(slots, MAX_SLOTS):
        raise ConfigError(
            f"slots of {host} is {slots!r}; it must be a whole number, 1 to {MAX_SLOTS}"
        )


def _slots_of(words: Sequence[str]) -> int:
    options: dict[str, int] = {}
    for word in words[1:]:
        match = _OPTION.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"{word!r} is not `slots=N`; write `address slots=N`, with no blank in the address"
            )
        name = match[1].replace("-", "_")
        if name in options:
            raise ConfigError(f"{name} is given twice")
        options[name] = int(match[2])
    slots = options.get("slots", 1)
    _check_slots(words[0], slots)
    if options.get("max_slots", slots) < slots:
        raise ConfigError(f"max_slots={options['max_slots']} is less than slots={slots}")
    return slots


def _is_host_name(text: str) -> bool:
    """Return whether a name conforms to RFC 1123 and is no number (`127.1`, `0x7f000001`)."""
    labels = text.split(".")
    well_formed = len(text) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
    return well_formed and not _NUMERIC_LABEL.fullmatch(labels[-1])


def _identity_of(address: str) -> object:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address.lower()
    match parsed:
        case ipaddress.IPv6Address(ipv4_mapped=ipaddress.IPv4Address() as mapped):
            return mapped
    return parsed
