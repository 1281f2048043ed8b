"""Existing hosts as a user names them. `~/.ssh` is read only on request, and only by `ssh -G`."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from workbench.base.errors import ConfigError
from workbench.base.record import Record, Size
from workbench.pods.hostfile import check_address, check_user, read_hosts
from workbench.pods.place import LocalPath, Port, absolute
from workbench.pods.ssh.identity import nameless
from workbench.pods.ssh.master import run

_FORM = re.compile(r"(?:(?P<user>.*)@)?(?P<address>\[[^]]*\]|[^:@]*)(?::(?P<port>[0-9]{1,5}))?")
# A key of the configuration. OpenSSH reads the word before @ as a user.
_ALIAS = re.compile(r"[^@\x00-\x20\x7f\ud800-\udfff]+")
_CONFIG_S = 10.0
_ITSELF = ("localhost", "127.0.0.1", "::1")


def _check_name(name: str) -> str:
    """Refuse a name that is no word for `ssh`, which refuses further names itself."""
    return name if _ALIAS.fullmatch(name) else check_address(name)


class NamedHost(Record):
    """A machine as a user names it. Omitted fields are filled in later."""

    label: ClassVar[str] = "host"

    address: Annotated[str, AfterValidator(_check_name)]
    """IP address or name, or a name in your ssh configuration."""
    user: Annotated[str, AfterValidator(check_user)] = ""
    """User to log in as; empty: the default of all hosts."""
    port: Port = 0
    """Port of its SSH daemon; 0: the default of all hosts."""
    key: LocalPath = ""
    """Path of the private key to log in with; empty: the default of all hosts."""
    slots: Size = 0
    """Ranks of the host; 0: the number in the pod's spec."""
    internal_address: Annotated[str, AfterValidator(check_address)] = ""
    """Address for the other hosts, such as a private IP; empty: the address from this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine and the route to it: a `NamedHost` with additions from an OpenSSH configuration."""

    address: str
    user: str = ""
    port: int = 0
    key: str = ""
    slots: int = 0
    internal_address: str = ""
    reached: str = ""
    """The address that the name stands for in an OpenSSH configuration; empty: `address`."""
    known_hosts: tuple[str, ...] = ()
    """The files of the user's configuration."""
    system_known_hosts: tuple[str, ...] = ()
    """The files of the machine, by the user's configuration."""
    jump: Host | None = None
    """The host to go through, as the user named it; None: as the configuration says."""
    hops: tuple[Host, ...] = ()
    """The hosts that the configuration goes through (ProxyJump)."""
    is_behind: bool = False
    """Whether the configuration goes through another host, or a command."""

    @property
    def where(self) -> str:
        reached = self.reached or self.address
        return f"{reached}:{self.port}" if self.port else reached

    @property
    def between(self) -> str:
        """Address for the other hosts."""
        return self.internal_address or self.reached or self.address

    def to_dict(self) -> dict[str, object]:
        options = {}
        for name in NamedHost.model_fields:
            value = getattr(self, name)
            if value:
                options[name] = value
        return options

    @property
    def written(self) -> str | dict[str, object]:
        """The host in the form that `read_host` reads."""
        options = self.to_dict()
        text = f"[{self.address}]" if ":" in self.address else self.address
        with contextlib.suppress(ConfigError):
            if read_host(text).to_dict() == options:
                return text
        return options

    def __str__(self) -> str:
        return f"{self.address} ({self.where})"


def read_host(given: object) -> Host:
    """Read a host as a user wrote it: "name", "user@name:port", or an object with the fields.

    Example:
        >>> read_host("ada@gpu-1:2222").where
        'gpu-1:2222'
        >>> read_host({"address": "10.0.0.5", "slots": 4}).slots
        4
    """
    named: Mapping[str, object]
    match given:
        case str():
            named = _read_text(given)
        case Mapping():
            named = given
        case _:
            raise ConfigError(
                f'{given!r} is not a host; write "name", "user@name:port" or'
                f' {{"address": …, "port": …}}'
            )
    try:
        fields = dict(NamedHost.from_dict(named))
        return Host(**fields)
    except ConfigError as error:
        raise ConfigError(f"{given!r} cannot be used: {error}") from None


def from_hostfile(path: Path, *, any_name: bool) -> list[Host]:
    """Read the hosts and slots of a DeepSpeed or MPI hostfile. `any_name`: as in `read_hosts`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error}") from error
    hosts = read_hosts(text, str(path), any_name=any_name)
    return [Host(address=address, slots=slots) for address, slots in hosts]


def resolved(host: Host, options: Sequence[str]) -> Host:
    """Fill in what the ssh configuration makes of a host, for people and for the other hosts.

    `options`: those of `ssh` for the host. The way to the host is OpenSSH's own matter.
    """
    told = ask_ssh([*options, "--", host.address])
    if told.get("forkafterauthentication") == ["yes"]:
        raise ConfigError(
            f"the ssh configuration of {host.address} has ForkAfterAuthentication, which hides the"
            " end of a connection. Remove the line, or let it hold for other names"
        )
    hops = _jumps(told)
    reached = told["hostname"][0]
    return replace(
        host,
        # The other hosts use the address, and so do the launchers.
        internal_address=host.internal_address or _between(reached),
        user=host.user or check_user(told["user"][0]),
        port=host.port or int(told["port"][0]),
        reached="" if reached == host.address else reached,
        known_hosts=tuple(told.get("userknownhostsfile", [""])[0].split()),
        system_known_hosts=tuple(told.get("globalknownhostsfile", [""])[0].split()),
        hops=tuple(hops),
        is_behind=bool(hops) or told.get("proxycommand", ["none"])[0] != "none",
    )


def completed(host: Host, *, user: str, port: int, key: str) -> Host:
    """Fill empty fields of a host and its jump host with defaults, where nothing is configured."""
    if not (host.key or key):
        raise ConfigError(
            f"no key for the login to {host.address}: give SSHPods(…, key=PATH of your private"
            " key), a key in the host's"
            " own object, or ssh_config=True to use your ssh configuration"
        )
    login = host.user or user
    if not login:
        if why := nameless(f"the login to {host.address}"):
            raise ConfigError(f"{why}. Or name the account of the host: SSHPods(…, user=NAME)")
        account = pwd.getpwuid(os.geteuid())
        login = check_user(account.pw_name)
    jump = host.jump
    if jump is not None:
        jump = completed(jump, user=user, port=22, key=key)
    return replace(
        host, user=login, port=host.port or port, key=absolute(host.key or key), jump=jump
    )


def check_between(hosts: Sequence[Host]) -> None:
    """Refuse hosts without addresses for the other hosts, such as a tunnel's ends."""
    example = '{"address": "NAME", "internal_address": "10.0.0.5"}'
    seen: dict[str, str] = {}
    for host in hosts:
        address = host.between.lower()
        if address in seen:
            raise ConfigError(
                f"{seen[address]} and {host.address} have the same address {address}, so pods"
                " cannot reach each other. Name each host with its own address between the hosts:"
                f" {example}"
            )
        seen[address] = host.address
        is_behind = host.is_behind or host.jump is not None
        if len(hosts) > 1 and is_behind and address in _ITSELF:
            raise ConfigError(
                f"the address of {host.address} behind its jump host is {address}, which is another"
                " machine for every host. Name the host with its address between the hosts:"
                f" {example}"
            )


def _between(reached: str) -> str:
    """Return the IP address of a host whose name no launcher can carry; empty for other names."""
    try:
        check_address(reached)
    except ConfigError:
        if "%" in reached:  # an address with a zone
            raise
        with contextlib.suppress(OSError, UnicodeError):
            return check_address(str(socket.getaddrinfo(reached, None)[0][4][0]))
        raise
    return ""


def _read_text(text: str) -> dict[str, object]:
    match = _FORM.fullmatch(text.removeprefix("ssh://"))
    if match is None:
        if "%" in text:
            check_address(text.rpartition("@")[2])  # which names a zone
        raise ConfigError(
            f'{text!r} is not a host; write "name" or "user@name:port", an IPv6 address as'
            ' "[::1]:22", and a name with a colon as {"address": NAME}'
        )
    address = match["address"]
    if address.startswith("[") and address.endswith("]"):
        address = check_address(address[1:-1])
    fields: dict[str, object] = {"address": address}
    if match["user"] is not None:
        fields["user"] = match["user"]
    if match["port"] is not None:
        fields["port"] = int(match["port"])
    return fields


def ask_ssh(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of `ssh` for a host, by their names in small letters; some repeat.

    `words`: arguments of `ssh`, the host last.
    """
    name = words[-1]
    if why := nameless("ssh"):
        raise ConfigError(f"ssh cannot read its configuration for {name}: {why}")
    argv = ["ssh", "-G", *words]
    try:
        done = run(argv, _CONFIG_S)
    except FileNotFoundError as error:
        raise ConfigError(
            "ssh is not installed here; run: sudo apt-get install openssh-client"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"`{' '.join(argv)}` did not end in {_CONFIG_S:.0f} s; look for a Match exec in the"
            " configuration that hangs"
        ) from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise ConfigError(f"ssh cannot read its configuration for {name}: {said}")
    # Some options have several lines, such as identityfile.
    told: dict[str, list[str]] = {}
    for line in done.stdout.decode(errors="surrogateescape").splitlines():
        key, _, value = line.partition(" ")
        told.setdefault(key, []).append(value)
    return told


Way = tuple[Sequence[str], Mapping[str, Sequence[str]]]
"""Words of `ssh` for a host, and the options that they stand for."""


def with_hops(hosts: Sequence[Sequence[str]]) -> list[Way]:
    """Return the ways to hosts, and after them the ways to the hosts between.

    `hosts`: words of `ssh` for each host. A host between is one of ProxyJump, or of a ProxyCommand
    that is `ssh -W`. A host whose configuration cannot be read is left out.
    """
    found: list[Way] = []
    pending = [list(words) for words in hosts]
    for words in pending:
        try:
            told = ask_ssh(words)
        except ConfigError:  # the login itself meets the same error, and names it
            continue
        found.append((words, told))
        pending += [hop for hop in _hops(words, told) if hop not in pending]
    return found


def _jumps(told: Mapping[str, Sequence[str]]) -> list[Host]:
    """Return the hosts of ProxyJump, as the configuration names them."""
    found = []
    for hop in told.get("proxyjump", ["none"])[0].split(","):
        if hop == "none":
            continue
        # The fields are free in their form here: a name may be an alias.
        with contextlib.suppress(ConfigError):  # another program's way to write a host
            found.append(Host(**_read_text(hop)))  # type: ignore[arg-type]
    return found


def _hops(words: Sequence[str], told: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the words of `ssh` for the hosts that a configuration goes through."""
    found = []
    file = list(words[words.index("-F") :][:2]) if "-F" in words else []
    for hop in _jumps(told):
        user = ["-l", hop.user] if hop.user else []
        port = ["-p", str(hop.port)] if hop.port else []
        found.append([*file, *user, *port, "--", hop.address])
    try:
        command = shlex.split(told.get("proxycommand", ["none"])[0].replace("%%", "%"))
    except ValueError:  # a shell's words, and not those of `ssh` alone
        command = []
    if command[:1] == ["exec"]:
        del command[0]
    forward = next((at for at, word in enumerate(command) if word.startswith("-W")), 0)
    if forward and Path(command[0]).name == "ssh":
        end = forward + (2 if command[forward] == "-W" else 1)
        found.append([*command[1:forward], *command[end:]])
    return found
