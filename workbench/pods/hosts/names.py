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

_FORM = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<address>\[[^]]*\]|[^:]*)(?::(?P<port>[0-9]{1,5}))?")
_CONFIG_S = 10.0


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine and the route to it: a `NamedHost` with additions from an OpenSSH configuration."""

    address: str
    user: str = ""
    port: int = 0
    key: str = ""
    slots: int = 0
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

    def to_dict(self) -> dict[str, object]:
        return {name: value for name in NamedHost.model_fields if (value := getattr(self, name))}

    @property
    def written(self) -> str | dict[str, object]:
        """The host in the form that `read_host` reads."""
        return self.address if len(given := self.to_dict()) == 1 else given

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
        return Host(**dict(NamedHost.from_dict(named)))
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
    jump = options.get("proxyjump", ["none"])[0]
    command = options.get("proxycommand", ["none"])[0]
    if command != "none":
        raise ConfigError(
            f"the ssh configuration reaches {host.address} by ProxyCommand {command!r}; only"
            " ProxyJump is supported"
        )
    if "," in jump or (on_the_way and jump != "none" and read_host(jump).address != host.address):
        raise ConfigError(
            f"the ssh configuration reaches {host.address} through several hosts ({jump}); use at"
            " most 1 jump host"
        )
    via = host.jump or (None if jump == "none" or on_the_way else read_host(jump))
    reached = options["hostname"][0]
    files = [
        word
        for name in ("userknownhostsfile", "globalknownhostsfile")
        for word in options.get(name, [""])[0].split()
    ]
    return replace(
        host,
        user=host.user or check_user(options["user"][0]),
        port=host.port or int(options["port"][0]),
        key=host.key or _first_there(options.get("identityfile", [])),
        reached="" if reached == host.address else check_address(reached),
        known_as=options.get("hostkeyalias", [""])[0],
        known_hosts=tuple(str(Path(file).expanduser()) for file in files if file != "none"),
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
    defaults = {"user": user, "port": port, "key": key, "known_hosts": known_hosts}
    return replace(
        host,
        user=host.user or user or check_user(pwd.getpwuid(os.geteuid()).pw_name),
        port=host.port or port,
        key=str(Path(host.key or key).expanduser().absolute()),
        known_hosts=((known_hosts,) if known_hosts else ()) + host.known_hosts,
        jump=host.jump and completed(host.jump, **{**defaults, "port": 22}),  # type: ignore[arg-type]
    )


def _read_text(text: str) -> dict[str, object]:
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f'{text!r} is not a host; write "name" or "user@name:port", an IPv6 address as'
            ' "[::1]:22"'
        )
    parts: dict[str, object] = {
        name: value for name, value in match.groupdict().items() if value is not None
    }
    address = match["address"].removeprefix("[").removesuffix("]")
    return {**parts, "address": address, **({"port": int(match["port"])} if match["port"] else {})}


def _ask_ssh(name: str, config: str) -> dict[str, list[str]]:
    argv = ["ssh", "-G", *(["-F", config] if config else []), "--", check_address(name)]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_CONFIG_S, stdin=subprocess.DEVNULL
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
        raise ConfigError(f"ssh cannot read its configuration for {name}: {done.stderr.strip()}")
    options: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key, []).append(value)
    return options


def _first_there(paths: Sequence[str]) -> str:
    """Return the first identity file that exists; most of ssh's default files do not."""
    return next((str(path) for text in paths if (path := Path(text).expanduser()).is_file()), "")
