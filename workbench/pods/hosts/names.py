"""Existing hosts as a user names them: parsed, completed from defaults or, when asked, from an OpenSSH configuration.

Opens no connection. `~/.ssh` is read only through `ssh -G`, and only for a user who asked for it.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.base.errors import ConfigError, one_of
from workbench.pods.hostfile import HostEntry, Hostfile, check_address, check_port, check_user

__all__ = ["Host", "completed", "configured", "from_hostfile", "read_host"]

_FORM = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<address>\[[^]]*\]|[^:]*)(?::(?P<port>[0-9]{1,5}))?")
_CONFIG_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine and the way to it; what is empty is filled in later."""

    address: str
    """IP address or name, as it was given."""
    user: str = ""
    """User to log in as; empty: the default of all hosts."""
    port: int = 0
    """Port of its SSH daemon; 0: the default of all hosts."""
    key: str = ""
    """Path of the private key to log in with; empty: the default of all hosts."""
    slots: int = 0
    """Ranks that it carries; 0: what the pod's spec says."""
    reached: str = ""
    """The address that the name stands for in an OpenSSH configuration; empty: `address`."""
    known_as: str = ""
    """Its name in known_hosts files (`HostKeyAlias`); empty: by address and port."""
    known_hosts: tuple[str, ...] = ()
    """Files that its host key may be found in."""
    jump: Host | None = None
    """The host to go through; None: straight."""

    @property
    def where(self) -> str:
        """Return address and port as people write them."""
        return f"{self.reached or self.address}:{self.port}"

    def to_dict(self) -> dict[str, object]:
        """Return what was said of it, as `read_host` reads it."""
        names = ("address", "user", "port", "key", "slots")
        return {name: value for name in names if (value := getattr(self, name))}

    @property
    def written(self) -> str | dict[str, object]:
        """Return it as a person would write it for `read_host`."""
        return self.address if len(given := self.to_dict()) == 1 else given

    def __str__(self) -> str:
        return f"{self.address} ({self.where})"


def read_host(given: object) -> Host:
    """Read one host as a user wrote it: "name", "user@name:port", or an object with the fields.

    Example:
        >>> read_host("ada@gpu-1:2222").where
        'gpu-1:2222'
        >>> read_host({"address": "10.0.0.5", "slots": 4}).slots
        4
    """
    if isinstance(given, str):
        return _read_text(given)
    if not isinstance(given, Mapping):
        raise ConfigError(f'{given!r} is not a host; write "name", "user@name:port" or {{"address": …, "port": …}}')
    allowed = ("address", "user", "port", "key", "slots")
    for key in given:
        if key not in allowed:
            raise one_of("key of a host", key, allowed)
    if not isinstance(given.get("address"), str):
        raise ConfigError(f"the host {dict(given)!r} has no address")
    for key in ("user", "key"):
        if not isinstance(given.get(key, ""), str):
            raise ConfigError(f"{key} of host {given['address']} is {given[key]!r}; it must be text")
    host = Host(**given)
    if "slots" in given:
        HostEntry(address=host.address, slots=host.slots)
    if "port" in given:
        check_port(host.port)
    return _checked(host)


def from_hostfile(path: Path) -> list[Host]:
    """Read the hosts and slots of a DeepSpeed or MPI hostfile."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error}") from error
    entries = Hostfile.parse(text, source=str(path)).entries
    return [Host(address=entry.address, slots=entry.slots) for entry in entries]


def configured(host: Host, config: str, *, on_the_way: bool = False) -> Host:
    """Fill in what an OpenSSH configuration says of a host; what was given beside it stands."""
    options = _ask_ssh(host.address, config)
    jump = options.get("proxyjump", ["none"])[0]
    command = options.get("proxycommand", ["none"])[0]
    if command != "none":
        raise ConfigError(
            f"the ssh configuration reaches {host.address} by ProxyCommand {command!r}; only ProxyJump is supported"
        )
    if "," in jump or (on_the_way and jump != "none" and read_host(jump).address != host.address):
        raise ConfigError(f"the ssh configuration reaches {host.address} through several hosts ({jump}); one at most")
    via = host.jump or (None if jump == "none" or on_the_way else read_host(jump))
    reached = options["hostname"][0]
    files = [
        word for name in ("userknownhostsfile", "globalknownhostsfile") for word in options.get(name, [""])[0].split()
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
    """Fill what is still empty with defaults, for the host and the one on the way to it."""
    if not (host.key or key):
        raise ConfigError(
            f"no key to log in to {host.address} with: give SSHPods(…, key=PATH of your private key), one in the host's"
            " own object, or ssh_config=True to use what your ssh configuration says"
        )
    defaults = {"user": user, "port": port, "key": key, "known_hosts": known_hosts}
    return replace(
        host,
        user=host.user or user or check_user(_login_name()),
        port=host.port or port,
        key=str(Path(host.key or key).expanduser().absolute()),
        known_hosts=((known_hosts,) if known_hosts else ()) + host.known_hosts,
        jump=host.jump and completed(host.jump, **{**defaults, "port": 22}),  # type: ignore[arg-type]
    )


def _read_text(text: str) -> Host:
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f'{text!r} is not a host; write "name" or "user@name:port", an IPv6 address as "[::1]:22"')
    port = match["port"]
    host = Host(
        address=match["address"].removeprefix("[").removesuffix("]"),
        user=check_user(match["user"]) if match["user"] is not None else "",
        port=0 if port is None else check_port(int(port)),
    )
    return _checked(host)


def _checked(host: Host) -> Host:
    check_address(host.address)
    if host.user:
        check_user(host.user)
    return host


def _ask_ssh(name: str, config: str) -> dict[str, list[str]]:
    """Have `ssh -G` work out a host's options; the values of each, in order."""
    argv = ["ssh", "-G", *(["-F", config] if config else []), "--", check_address(name)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_CONFIG_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise ConfigError("ssh is not installed here; run: sudo apt-get install openssh-client") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"`{' '.join(argv)}` did not end in {_CONFIG_S:.0f} s; does a Match exec in it hang?"
        ) from error
    if done.returncode != 0:
        raise ConfigError(f"ssh cannot read its configuration for {name}: {done.stderr.strip()}")
    options: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key, []).append(value)
    return options


def _first_there(paths: Sequence[str]) -> str:
    """Return the first identity file that exists; ssh lists its defaults too, most of which do not."""
    return next((str(path) for text in paths if (path := Path(text).expanduser()).is_file()), "")


def _login_name() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
