"""One OpenSSH daemon for one pod: its folder, host key and configuration, run as the calling user.

The machine's own sshd, its keys and its configuration are not touched. Nothing here waits or supervises; `worker.py`
does.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.pods.hostfile import check_address, check_port, check_user
from workbench.pods.ssh.identity import APT_LINE, check_key_line, generate_key, write_private

__all__ = ["SSHD_OPTIONS", "Daemon", "find_sshd", "login_user"]

_PRIVILEGE_SEPARATION = Path("/run/sshd")  # where Debian's sshd, started as root, wants an empty folder

_SHADOW = Path("/etc/shadow")

SSHD_OPTIONS = """\
PidFile none
PermitRootLogin prohibit-password
AuthenticationMethods publickey
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
HostbasedAuthentication no
UsePAM no
StrictModes no
PermitUserEnvironment no
PermitUserRC no
AllowTcpForwarding no
AllowStreamLocalForwarding no
AllowAgentForwarding no
GatewayPorts no
PermitTunnel no
X11Forwarding no
PrintMotd no
PrintLastLog no
UseDNS no
LoginGraceTime 30
MaxStartups 100
MaxSessions 100
LogLevel VERBOSE
Subsystem sftp internal-sftp
"""
"""What every daemon of ours is told, wherever it runs: this key or nothing, and no way through it to elsewhere."""

_CONFIG = """\
ListenAddress {listen}
HostKey {host_key}
AuthorizedKeysFile {authorized_keys}
AllowUsers {user}
{session}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Daemon:
    """What the daemon of one pod is made from."""

    folder: Path
    """Its own folder, absolute, made by `prepare`."""
    address: str
    """The address that it listens on, and no other."""
    port: int
    """Its port."""
    user: str
    """The one user that may log in."""
    public_key: str
    """The one key that may log in."""
    environment: Mapping[str, str]
    """Variables of every session, at least one."""
    allowed_from: str = "127.0.0.0/8"
    """The addresses that may log in: one, or a network."""

    @property
    def host_key(self) -> str:
        """Return the public host key, `type base64`."""
        return check_key_line((self.folder / "host_key.pub").read_text().strip())

    def prepare(self, sshd: str) -> None:
        """Make the folder (0700) with host key, authorized key and configuration (0600)."""
        self.folder.mkdir(mode=0o700)
        generate_key(self.folder / "host_key", comment=self.folder.parent.name)
        allowed = f'restrict,from="{self.allowed_from}" {check_key_line(self.public_key)}\n'
        write_private(self.folder / "authorized_keys", allowed)
        write_private(self.folder / "sshd_config", self.config() + _quirks(sshd))

    def config(self) -> str:
        """Return the text of sshd_config."""
        session = " ".join(_quoted(f"{name}={value}") for name, value in self.environment.items())
        own = _CONFIG.format(
            listen=f"{check_address(self.address)}:{check_port(self.port)}",
            host_key=_quoted(str(self.folder / "host_key")),
            authorized_keys=_quoted(str(self.folder / "authorized_keys").replace("%", "%%")),
            user=self.user,
            session=f"SetEnv {session}",
        )
        return own + SSHD_OPTIONS

    def command(self, sshd: str) -> list[str]:
        """Return the argument list that runs the daemon in the foreground, its log on stderr."""
        return [sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")]  # -f must be absolute: sshd runs itself anew


def find_sshd() -> str:
    """Return the absolute path of sshd; as root, also see to its privilege separation folder."""
    path = shutil.which("sshd", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin")
    if path is None:
        raise ConfigError(f"sshd is not installed, and local pods are OpenSSH daemons; run: {APT_LINE}")
    if os.geteuid() == 0:
        _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    return str(Path(path).absolute())


def login_user() -> str:
    """Return the name of the calling user, having seen that OpenSSH will let that user in and run commands."""
    try:
        account = pwd.getpwuid(os.geteuid())
    except KeyError as error:
        raise ConfigError(f"user id {os.geteuid()} has no name in /etc/passwd, and sshd needs one") from error
    name = check_user(account.pw_name)
    if Path(account.pw_shell).name in ("nologin", "false"):
        raise ConfigError(
            f"user {name} has the shell {account.pw_shell}; over SSH nothing can run: chsh -s /bin/sh {name}"
        )
    with contextlib.suppress(OSError):  # only root can read it, and only a daemon of root looks there
        if f"\n{name}:!" in "\n" + _SHADOW.read_text():
            raise ConfigError(f"user {name} is locked and sshd lets no locked user in; run: usermod -p '*' {name}")
    return name


def _quirks(sshd: str) -> str:
    """Give configuration lines that only newer versions of sshd know."""
    done = subprocess.run([sshd, "-V"], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stderr + done.stdout)
    return "" if version is None or (int(version[1]), int(version[2])) < (9, 8) else "PerSourcePenalties no\n"


def _quoted(text: str) -> str:
    """Quote a word for sshd_config."""
    if not text.isprintable() or '"' in text or "\\" in text:
        raise ConfigError(f"sshd cannot be given {text[:80]!r}: no quotes, backslashes or line breaks can stand there")
    return f'"{text}"'
