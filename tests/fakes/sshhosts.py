"""Machines that exist, as `SSHPods` finds them: real SSH daemons on loopback addresses.

As far as mounts allow, which take root, they share nothing
with the notebook: neither its folders nor its Python.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.support.poll import until
from workbench.base.process import descendants, process_table
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.bootstrap.sshd import find_sshd
from workbench.pods.hosts.note import note_of
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.place import Place
from workbench.pods.pod import LaunchContext
from workbench.pods.ssh.identity import Identity, fingerprint

_CONFIG = """\
ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication {questions}
UsePAM no
StrictModes no
AllowTcpForwarding {forwarding}
MaxStartups 100
LogLevel VERBOSE
{settings}
"""


_APART = """
mount --make-rprivate /
if [ -n "$2" ]; then mount --bind "$1" "$2"; mount -t tmpfs none "$1"; fi
shift 2
while [ "$1" != -- ]; do mount -t tmpfs none "$1"; shift; done
shift
exec "$@"
"""
"""Shows the notebook's Python at another path alone, and folders of the notebook empty."""


def apart(python: Path, hidden: Sequence[Path]) -> tuple[tuple[str, ...], str]:
    """Return the words before a program that shares nothing with this one, and its Python's path.

    Without root there are no mounts, and both share everything.
    """
    if os.geteuid() != 0:
        return (), sys.executable
    for folder in (python, *hidden):
        folder.mkdir(parents=True, exist_ok=True)
    in_venv = sys.prefix != sys.base_prefix
    moved = (sys.prefix, str(python)) if in_venv else ("", "")
    words = ("unshare", "--mount", "sh", "-ec", _APART, "sh", *moved, *map(str, hidden), "--")
    return words, f"{python}/bin/{Path(sys.executable).name}" if in_venv else sys.executable


_ACCOUNTS = """
mount --make-rprivate /
mount -t tmpfs none "$1/etc"
cp -a /etc/. "$1/etc"
cat "$1/passwd" >> "$1/etc/passwd"
mount --bind "$1/etc" /etc
shift
exec "$@"
"""
"""Shows a copy of /etc with more accounts. A mount on the file would end with its next change."""


@dataclass(frozen=True)
class Login:
    """An account of a machine."""

    shell: str = "/bin/bash"
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Start-up files, by their names in the home folder."""


def with_accounts(folder: Path, logins: Mapping[str, Login]) -> tuple[str, ...]:
    """Return the words before a program for which the accounts exist, beside the machine's own.

    Takes root, whose other names they are.
    """
    lines = []
    for name, login in logins.items():
        home = folder / name
        home.mkdir(parents=True)
        for file, text in login.files.items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_bytes(text.encode() if isinstance(text, str) else text)
        lines.append(f"{name}:x:0:0::{home}:{login.shell}\n")
    (folder / "etc").mkdir()
    (folder / "passwd").write_text("".join(lines))
    return ("unshare", "--mount", "sh", "-ec", _ACCOUNTS, "sh", str(folder))


@dataclass
class SSHHost:
    """One machine."""

    folder: Path
    address: str
    port: int
    public_key: str
    forwarding: str = "no"
    key_type: str = "ed25519"
    questions: str = "no"
    settings: str = ""
    """More lines of sshd_config."""
    prefix: tuple[str, ...] = ()
    """Words before sshd's: what starts it in a namespace of the network or of mounts."""
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> Self:
        self.folder.mkdir(parents=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", self.key_type, "-N", "", "-f", self.folder / "host_key"],
            check=True,
            timeout=300,
        )
        (self.folder / "authorized_keys").write_text(self.public_key + "\n")
        config = _CONFIG.format(**vars(self))
        (self.folder / "sshd_config").write_text(config)
        with (self.folder / "log").open("ab") as log:
            argv = [*self.prefix, find_sshd(), "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        listens = "Server listening"
        until(
            lambda: listens in self.log or self.process.poll() is not None,
            every_s=0.01,
            why=lambda: self.log,
        )
        assert listens in self.log, self.log
        return self

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def fingerprint(self) -> str:
        return fingerprint((self.folder / "host_key.pub").read_text().strip())

    def stop(self) -> None:
        """End the daemon; connections that stand go on."""
        self.process.terminate()
        self.process.wait(300)

    def die(self) -> None:
        """End the daemon and all its connections, as with the machine."""
        table = process_table()
        sessions = descendants(table, {self.process.pid}) - {self.process.pid}
        self.stop()
        for pid in sessions:
            table[pid].send(signal.SIGKILL)


class HostsPlace:
    """Three machines and the user's key to them."""

    owns_daemons = False
    launchers = ("ssh", "pdsh", "openmpi")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: list[SSHHost] = []
        self.root = folder / "on-the-hosts"
        # Where the tests' notebooks have their clusters, beside this place.
        self.prefix, self.python = apart(
            folder / "python", [folder.parent / name for name in ("cluster", "runs")]
        )

    def __enter__(self) -> Self:
        self.user = Identity.create(self.folder / "user")
        addresses = [f"127.0.0.{n}" for n in (2, 3, 4)]
        port = free_port(addresses)
        for address in addresses:
            self.add(address, port)
        return self

    def __exit__(self, *_exc: object) -> None:
        for host in self.hosts:
            host.stop()

    def add(self, address: str, port: int, **options: object) -> SSHHost:
        """Bring one more machine up."""
        folder = self.folder / f"host-{len(self.hosts)}"
        options.setdefault("public_key", self.user.public_key)
        options.setdefault("prefix", self.prefix)
        self.hosts.append(SSHHost(folder, address, port, **options).start())  # type: ignore[arg-type]
        return self.hosts[-1]

    @property
    def trust(self) -> dict[str, str]:
        return {host.address: host.fingerprint for host in self.hosts}

    @property
    def options(self) -> Mapping[str, object]:
        """What an `SSHPods` for all three is made with, apart from the hosts."""
        return {
            "port": self.hosts[0].port,
            "key": str(self.user.key),
            "trust": self.trust,
            "python": self.python,
            "root": str(self.root),
            "connect_timeout_s": 60,  # a busy machine logs in late
        }

    def backend(self, **changes: object) -> Place:
        hosts = [host.address for host in self.hosts[:3]]
        return SSHPods(**{"hosts": hosts, **self.options, **changes})  # type: ignore[arg-type]

    def left(self, context: LaunchContext) -> list[str]:
        folder = note_of(context.directory).parent
        return [str(path) for path in self.root.glob("*")] + [
            str(path) for path in folder.glob("*")
        ]


READS = {
    "sh": "",
    "bash": ".bashrc",
    "rbash": ".bashrc",
    "dash": "",
    "ksh": "",
    "zsh": ".zshenv",
    "fish": ".config/fish/config.fish",
    "tcsh": ".cshrc",
    "csh": ".cshrc",
    "bsd-csh": ".cshrc",
}
"""The start-up file that a shell reads for a command; bash does so for one that comes over SSH."""

NOISE = {
    "nothing": b"",
    "one line": b"Welcome to the lab\n",
    "200 lines": b"Welcome to the lab\n" * 200,
    "no end": b"Welcome\n@workbench-last login: today",
    "binary": bytes(range(256)) + b"\xff\x00\x80",
}
"""What a login prints before a command."""


class StrangersPlace(HostsPlace):
    """Three machines whose account has this shell, and a login that prints.

    A shell without a start-up file prints by `~/.ssh/rc`, which sshd runs before any command.
    Takes root, for the account.
    """

    def __init__(self, folder: Path, shell: str, noise: str) -> None:
        super().__init__(folder)
        self.shell = shell
        self.greeting = NOISE[noise]
        """What ssh itself shows before a command's output."""
        program = shutil.which(shell) or shell
        files = {"noise": self.greeting, READS[shell] or ".ssh/rc": b"cat ~/noise\n"}
        login = {"stranger": Login(program, files)}
        self.prefix += with_accounts(folder / "accounts", login)

    @property
    def options(self) -> Mapping[str, object]:
        return {**super().options, "user": "stranger"}
