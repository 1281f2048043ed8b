"""An OpenSSH daemon of a pod, run as the calling user; the machine's own sshd stays untouched."""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from workbench.base import entries
from workbench.base.child import start
from workbench.base.errors import ConfigError, PodError
from workbench.base.files import write_text
from workbench.base.files.records import try_read
from workbench.base.messages.lines import to_line
from workbench.pods.bootstrap import pod_main
from workbench.pods.bootstrap.pod_main import SSHD_OPTIONS, can_be_set, user_pattern
from workbench.pods.hostfile import check_address, check_port, check_user
from workbench.pods.ssh.identity import APT_LINE, check_key_line, generate_key, nameless

_SHADOW = Path("/etc/shadow")
_KEYGEN = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "")
_KEYGEN_S = 120.0

_CONFIG = """\
ListenAddress {listen}
HostKey {host_key}
AuthorizedKeysFile {authorized_keys}
AllowUsers {user}
{session}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Daemon:
    folder: Path
    address: str
    port: int
    user: str
    public_key: str
    environment: Mapping[str, str]
    allowed_from: str = "127.0.0.0/8"
    """Addresses that may log in: a single address or a network."""

    @property
    def host_key(self) -> str:
        return check_key_line((self.folder / "host_key.pub").read_text().strip())

    def start_own(self, before: Callable[[], object]) -> subprocess.Popen[bytes]:
        """Start the package's own daemon, which serves a user whom OpenSSH would not let in."""
        self.folder.mkdir(mode=0o700)
        generate_key(self.folder / "host_key", comment=self.folder.parent.name)
        process = start("-m", entries.SSH_SERVER, stdin=subprocess.PIPE, preexec_fn=before)
        assert process.stdin is not None
        process.stdin.write(to_line({**asdict(self), "folder": str(self.folder)}))
        process.stdin.close()
        return process

    def prepare(self) -> None:
        """Make the folder (0700) with host key and authorized key (0600)."""
        self.folder.mkdir(mode=0o700)
        _make_key(self.folder / "host_key", comment=self.folder.parent.name)
        allowed = f'restrict,from="{self.allowed_from}" {check_key_line(self.public_key)}\n'
        write_text(self.folder / "authorized_keys", allowed)

    def config(self) -> str:
        """Return the text of sshd_config.

        The text is never stored: a session's proxy may hold a password.
        """
        session = " ".join(_quoted(f"{name}={value}") for name, value in self.environment.items())
        own = _CONFIG.format(
            listen=f"{check_address(self.address)}:{check_port(self.port)}",
            host_key=_quoted(str(self.folder / "host_key")),
            authorized_keys=_quoted(str(self.folder / "authorized_keys").replace("%", "%%")),
            user=user_pattern(self.user),
            session=f"SetEnv {session}",
        )
        return own + SSHD_OPTIONS


def _make_key(path: Path, comment: str) -> None:
    """Make a key pair by OpenSSH's own program, as an image has no packages of the notebook."""
    words = [*_KEYGEN, "-C", comment, "-f", str(path)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_KEYGEN_S, umask=0o077)
    except FileNotFoundError as error:
        raise ConfigError(
            f"ssh-keygen is not installed, and pods need a host key; run: {APT_LINE}"
        ) from error
    if done.returncode != 0:
        raise PodError(f"ssh-keygen made no host key: {(done.stderr or done.stdout).strip()}")


def find_sshd() -> str:
    """Return the absolute path of sshd; as root, also see to its privilege separation folder."""
    try:
        return pod_main.find_sshd()
    except FileNotFoundError as error:
        raise ConfigError(
            f"sshd is not installed, and local pods are OpenSSH daemons; run: {APT_LINE}"
        ) from error


def login_user() -> str:
    """Return the name of the calling user. Refuse a user whom OpenSSH would not let in."""
    try:
        account = pwd.getpwuid(os.geteuid())
    except KeyError as error:
        raise ConfigError(nameless("sshd")) from error
    name = check_user(account.pw_name)
    if Path(account.pw_shell).name in ("nologin", "false"):
        raise ConfigError(
            f"user {name} has the shell {account.pw_shell}; over SSH nothing can run: chsh -s"
            f" /bin/sh {shlex.quote(name)}"
        )
    # Only root can read the file, and only a daemon of root looks there.
    passwords = (try_read(_SHADOW) or b"").decode(errors="replace")
    if f"\n{name}:!" in f"\n{passwords}":
        raise ConfigError(
            f"user {name} is locked and sshd lets no locked user in; run: usermod -p '*'"
            f" {shlex.quote(name)}"
        )
    return name


def _quoted(text: str) -> str:
    if not can_be_set(text):
        raise ConfigError(
            f"sshd cannot be given {text[:80]!r}: no quotes, backslashes or line breaks can stand"
            " there"
        )
    return f'"{text}"'
