"""Existing hosts as a user names them. `~/.ssh` is read only on request, and only by `ssh -G`."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from workbench.base.errors import ConfigError
from workbench.base.record import Record, Size
from workbench.pods.hostfile import Hostfile, check_address, check_user
from workbench.pods.place import LocalPath, Port
from workbench.pods.ssh.identity import nameless

_FORM = re.compile(r"(?:(?P<user>.*)@)?(?P<address>\[[^]]*\]|[^:@]*)(?::(?P<port>[0-9]{1,5}))?")
_CONFIG_S = 10.0
_ITSELF = ("localhost", "127.0.0.1", "::1")


class NamedHost(Record):
    """A machine as a user names it. Omitted fields are filled in later."""

    label: ClassVar[str] = "host"

    address: Annotated[str, AfterValidator(check_address)]
    """IP address or name."""
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
    known_as: str = ""
    """Its name in known_hosts files (`HostKeyAlias`); empty: by address and port."""
    known_hosts: tuple[str, ...] = ()
    jump: Host | None = None
    """The host to go through; None: straight."""

    @property
    def where(self) -> str:
        return f"{self.reached or self.address}:{self.port}"

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
        if len(options) == 1:
            return self.address
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


def from_hostfile(path: Path) -> list[Host]:
    """Read the hosts and slots of a DeepSpeed or MPI hostfile."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error}") from error
    entries = Hostfile.parse(text, source=str(path)).entries
    return [Host(address=entry.address, slots=entry.slots) for entry in entries]


def configured(host: Host, config: str, *, on_the_way: bool = False) -> Host:
    """Fill empty fields of a host from an OpenSSH configuration; given fields stay."""
    options = _ask_ssh(host.address, config)
    # The way to the host.
    jump = options.get("proxyjump", ["none"])[0]
    command = options.get("proxycommand", ["none"])[0]
    if command != "none":
        raise ConfigError(
            f"the ssh configuration reaches {host.address} by ProxyCommand {command!r}; only"
            " ProxyJump is supported. Write an entry with ProxyJump, or run the notebook on one of"
            " the hosts"
        )
    has_jump = jump != "none"
    if "," in jump or (on_the_way and has_jump and read_host(jump).address != host.address):
        raise ConfigError(
            f"the ssh configuration reaches {host.address} through several hosts ({jump}); use at"
            " most 1 jump host"
        )
    via = host.jump
    if via is None and has_jump and not on_the_way:
        via = read_host(jump)
    # The host and its keys.
    reached = options["hostname"][0]
    known_hosts = []
    for name in ("userknownhostsfile", "globalknownhostsfile"):
        files = options.get(name, [""])[0]
        for file in files.split():
            if file != "none":
                path = Path(file).expanduser()
                known_hosts.append(str(path))
    return replace(
        host,
        user=host.user or check_user(options["user"][0]),
        port=host.port or int(options["port"][0]),
        key=host.key or _first_there(options.get("identityfile", [])),
        reached="" if reached == host.address else check_address(reached),
        known_as=options.get("hostkeyalias", [""])[0],
        known_hosts=tuple(known_hosts),
        jump=via and configured(via, config, on_the_way=True),
    )


def completed(host: Host, *, user: str, port: int, key: str, known_hosts: str) -> Host:
    """Fill empty fields of a host and its jump host with defaults."""
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
    key_path = Path(host.key or key).expanduser()
    files = host.known_hosts
    if known_hosts:
        files = (known_hosts, *files)
    jump = host.jump
    if jump is not None:
        jump = completed(jump, user=user, port=22, key=key, known_hosts=known_hosts)
    return replace(
        host,
        user=login,
        port=host.port or port,
        key=str(key_path.absolute()),
        known_hosts=files,
        jump=jump,
    )


def check_between(hosts: Sequence[Host]) -> None:
    """Refuse hosts that cannot reach each other by their addresses, as a tunnel's ends."""
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
        if len(hosts) > 1 and host.jump is not None and address in _ITSELF:
            raise ConfigError(
                f"the address of {host.address} behind its jump host is {address}, which is another"
                " machine for every host. Name the host with its address between the hosts:"
                f" {example}"
            )


def _read_text(text: str) -> dict[str, object]:
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f'{text!r} is not a host; write "name" or "user@name:port", an IPv6 address as'
            ' "[::1]:22"'
        )
    address = match["address"].removeprefix("[").removesuffix("]")
    fields: dict[str, object] = {"address": address}
    if match["user"] is not None:
        fields["user"] = match["user"]
    if match["port"] is not None:
        fields["port"] = int(match["port"])
    return fields


def _ask_ssh(name: str, config: str) -> dict[str, list[str]]:
    argv = ["ssh", "-G"]
    if config:
        argv += ["-F", config]
    argv += ["--", check_address(name)]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_CONFIG_S,
            stdin=subprocess.DEVNULL,
        )
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
        why = nameless("ssh") or done.stderr.strip()
        raise ConfigError(f"ssh cannot read its configuration for {name}: {why}")
    options: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key, []).append(value)
    return options


def _first_there(paths: Sequence[str]) -> str:
    """Return the first identity file that exists; most of ssh's default files do not."""
    for text in paths:
        path = Path(text).expanduser()
        if path.is_file():
            return str(path)
    return ""
