"""The ephemeral key of a cluster and the pods' host keys, in a private folder.

`~/.ssh` is untouched.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import os
import pwd
import re
import shlex
import stat
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import read_text, write_text
from workbench.base.files.folders import remove_file, remove_folder
from workbench.pods.hostfile import check_address, check_port, check_user
from workbench.pods.pod import Pod
from workbench.pods.route import is_loopback

APT_LINE = "sudo apt-get install openssh-server openssh-client"

_KEY_LINE = re.compile(
    r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521)) ([A-Za-z0-9+/]+={0,2})(?: [!-~]+)?"
)

_KEY_BEGIN = 100
_KEY_BYTES = 65_536  # a whole key file has fewer
_PUBLIC = re.compile(
    rb"(?:(?:ssh|ecdsa|sk)-[\w@.-]+ |---- BEGIN SSH2 PUBLIC|-----BEGIN [A-Z ]*PUBLIC)"
)

# OpenSSH's own first choice, ChaCha20, takes more than twice the time of AES where the processor
# has instructions for AES. The rest are OpenSSH's other defaults.
CIPHERS = (
    "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com"
    ",aes128-ctr,aes192-ctr,aes256-ctr"
)
_CLIENT_OPTIONS = f"""\
BatchMode yes
Ciphers {CIPHERS}
StrictHostKeyChecking yes
GlobalKnownHostsFile /dev/null
UpdateHostKeys no
CheckHostIP no
VerifyHostKeyDNS no
IdentitiesOnly yes
IdentityAgent none
AddKeysToAgent no
PreferredAuthentications publickey
ForwardAgent no
ForwardX11 no
PermitLocalCommand no
ControlMaster no
ControlPath none
ConnectTimeout 5
ServerAliveInterval 3
ServerAliveCountMax 3
"""

_CONNECT_S = 5  # as in the options above
# OpenSSH 9's first choice takes six times the CPU in the client. The choice protects from an
# eavesdropper who records the bytes now and decrypts them in years.
_ON_LOOPBACK = "KexAlgorithms -sntrup761*"


@dataclass(frozen=True, slots=True)
class Identity:
    """The folder with the cluster's key and the pinned host keys."""

    folder: Path
    """Absolute, mode 0700."""

    @classmethod
    def create(cls, folder: Path) -> Identity:
        folder = folder.absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(
                f"{folder} is not empty; a cluster's identity needs a folder of its own"
            )
        folder.chmod(0o700)
        identity = cls(folder)
        generate_key(identity.key, comment="workbench")
        identity.pin([])
        return identity

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """The configuration for `ssh -F`.

        OpenSSH then reads neither the user's nor the machine's configuration.
        """
        return self.folder / "ssh_config"

    @property
    def public_key(self) -> str:
        return read_text(self.key.with_suffix(".pub")).strip()

    def pin(self, pods: Iterable[Pod]) -> None:
        """Trust the host keys of the given pods and no others.

        Replaces known_hosts and ssh_config atomically.
        """
        listed = list(pods)
        lines = [
            f"{known_hosts_name(pod.address, pod.ssh_port)} {check_key_line(pod.host_key)}\n"
            for pod in listed
            if not pod.control
        ]
        config = _client_config(self, listed)
        write_text(self.known_hosts, "".join(dict.fromkeys(lines)))
        write_text(self.ssh_config, config)

    def key_for(self, pod: Pod) -> Path:
        return Path(pod.key) if pod.key else self.key

    def pinned(self, address: str, port: int) -> list[str]:
        """Return the host keys (`type base64`) pinned for an address; none if unknown."""
        name = known_hosts_name(address, port)
        lines = read_text(self.known_hosts).splitlines()
        return [line.split(" ", 1)[1] for line in lines if line.split(" ", 1)[0] == name]

    def destroy(self) -> None:
        """Remove the key and the folder's content. Idempotent."""
        remove_file(self.key)
        remove_folder(self.folder)


def check_key_file(path: Path) -> None:
    """Refuse any other file than a private key, and a key readable by others, as OpenSSH does."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            raise ConfigError(f"the key {path} is a folder; name the file of the private key in it")
        begin = _first_bytes(path, _KEY_BEGIN).lstrip()
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}") from error
    if _PUBLIC.match(begin):
        raise ConfigError(
            f"the key {path} is a public key; name the private key, which usually lies beside it,"
            " without .pub"
        )
    if mode & 0o077:
        # Another file, such as ~/.ssh/config, keeps its mode.
        if not begin.startswith((b"-----BEGIN ", b"PuTTY-User-Key-File")):
            raise ConfigError(not_usable(path, ""))
        raise ConfigError(
            f"key file {path} has mode {mode:04o}, so other users may read the key; run: chmod"
            f" 600 {shlex.quote(str(path))}"
        )


def key_remedy(path: Path) -> str:
    """Return cause and remedy if OpenSSH cannot use a key file; empty for a usable key."""
    argv = ["ssh-keygen", "-y", "-P", "", "-f", str(path)]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == 0:
        return ""
    said = done.stderr.strip()
    return passphrase_advice(path) if "passphrase" in said else not_usable(path, said)


def passphrase_advice(path: Path) -> str:
    """Report a key with a passphrase, and the remedy."""
    return (
        f"the key {path} has a passphrase, and the keeper cannot ask for the passphrase. Make"
        f" a key without a passphrase: {_new_key(path)}"
    )


def _new_key(path: Path) -> str:
    new = shlex.quote(f"{path}_workbench")
    return f"ssh-keygen -t ed25519 -N '' -f {new}, and add its .pub to the hosts' authorized_keys"


def not_usable(path: Path, said: str) -> str:
    """Report a file that is no private key, its format, and the command to convert the file."""
    content = b""
    with contextlib.suppress(OSError):
        content = _first_bytes(path, _KEY_BYTES)
    # The first line names the form. The checks go from the surest sign to the weakest.
    begin = content.lstrip()[:_KEY_BEGIN]
    name = shlex.quote(str(path))
    remedy = said
    if begin.startswith((b"-----BEGIN PRIVATE KEY", b"-----BEGIN ENCRYPTED PRIVATE KEY")):
        remedy = (
            "the key has the form PKCS#8. Write the key in OpenSSH's form:"
            f" ssh-keygen -p -N '' -f {name}. OpenSSH before 9.6 cannot read an ed25519 key in"
            f" PKCS#8 and needs another key: {_new_key(path)}"
        )
    elif begin.startswith(b"PuTTY-User-Key-File"):
        remedy = (
            "it is a key of PuTTY. Convert it and name the new file:"
            f" puttygen {name} -O private-openssh -o {name}.openssh"
        )
    elif not begin.startswith(b"-----BEGIN ") or b"\n" not in begin:
        remedy = (
            "its first line is not -----BEGIN … PRIVATE KEY-----. Copy the file of the key as it"
            " is, with all its line ends"
        )
    elif re.search(rb"\A\s|\n[ \t]", content):
        remedy = (
            "blanks or empty lines stand before its lines. Remove them: sed -i"
            f" 's/^[[:space:]]*//; /^$/d' {name}"
        )
    elif b"\r" in begin:
        remedy = (
            "its lines end with carriage returns, as on Windows. Remove them:"
            f" sed -i 's/\\r$//' {name}"
        )
    elif not content.endswith(b"\n"):
        remedy = f"its last line has no line end. Add the end: echo >> {name}"
    return f"{path} is no usable private key: {remedy}"


def _first_bytes(key: Path, count: int) -> bytes:
    with key.open("rb") as file:
        return file.read(count)


def known_hosts_name(address: str, port: int) -> str:
    """Return OpenSSH's name of a host in known_hosts.

    Example:
        >>> known_hosts_name("127.0.0.2", 2222), known_hosts_name("pod.example", 22)
        ('[127.0.0.2]:2222', 'pod.example')
    """
    return address if port == 22 else f"[{address}]:{port}"


def check_key_line(line: str) -> str:
    """Return `type base64` of a public key line; the comment is dropped."""
    match = _KEY_LINE.fullmatch(line)
    try:
        blob = base64.b64decode(match[2], validate=True) if match else b""
    except ValueError:
        blob = b""
    if match is None or not blob.startswith(len(match[1]).to_bytes(4, "big") + match[1].encode()):
        raise ConfigError(f"{line[:40]!r} is not an OpenSSH public key line")
    return f"{match[1]} {match[2]}"


def fingerprint(line: str) -> str:
    """Return the fingerprint of a public key line in ssh's form: SHA256 in base64, unpadded."""
    digest = hashlib.sha256(base64.b64decode(check_key_line(line).split(" ")[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def new_key() -> tuple[str, str]:
    """Return a new ed25519 key: the private part in OpenSSH's form, and `type base64`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private.decode(), check_key_line(public.decode())


def generate_key(path: Path, comment: str) -> None:
    """Make an ed25519 key pair; both files have mode 0600 under any umask.

    ssh-keygen refuses a user id without a name.
    """
    private, public = new_key()
    write_text(path, private)
    write_text(path.with_name(path.name + ".pub"), f"{public} {comment}\n")


def nameless(program: str) -> str:
    """Return why a program of OpenSSH lacks the calling user's name; "": no lack."""
    user = os.geteuid()
    try:
        pwd.getpwuid(user)
    except KeyError:
        line = f"workbench:x:{user}:{os.getegid()}::{os.environ.get('HOME') or '/tmp'}:/bin/sh"
        return (
            f"user id {user} has no name in /etc/passwd, and {program} needs a name. Let an"
            f" administrator, or the image, add this line to /etc/passwd: {line}"
        )
    return ""


def _client_config(identity: Identity, pods: Iterable[Pod]) -> str:
    blocks = []
    for pod in pods:
        if pod.control:
            blocks.append(_over_master(pod))
            continue
        lines = [
            f'User "{check_user(pod.user)}"',
            f"IdentityFile {config_path(identity.key_for(pod))}",
        ]
        # A host behind a slow line needs more time than usual.
        if pod.connect_timeout_s > _CONNECT_S:
            lines.append(f"ConnectTimeout {math.ceil(pod.connect_timeout_s)}")
        # Known under the name that the pods use: a forwarded port is another pod's tomorrow.
        if pod.ssh_address:
            alias = known_hosts_name(pod.address, pod.ssh_port).lower()
            lines.append(f"HostName {check_address(pod.ssh_address)}")
            lines.append(f"HostKeyAlias {alias}")
        elif is_loopback(pod.address):
            lines.append(_ON_LOOPBACK)
        blocks.append(_block(check_address(pod.address), check_port(pod.ssh_port), lines))
    # With `none`, a host that is not listed above is not offered the user's own keys.
    files = f"IdentityFile none\nUserKnownHostsFile {config_path(identity.known_hosts)}\n"
    return "".join([*blocks, "Host *\n", files, _CLIENT_OPTIONS])


def _over_master(pod: Pod) -> str:
    """Return the block of a host with a standing connection: there is no other way there."""
    lines = [
        f"ControlPath {config_path(Path(pod.control))}",
        f"ProxyCommand sh -c 'echo {gone(check_address(pod.address))} >&2; exit 255'",
    ]
    return _block(check_address(pod.address), check_port(pod.ssh_port), lines)


def gone(host: str) -> str:
    """Report the end of the standing connection to a host."""
    return f"the connection to {host} is gone, and the keeper opens it again"


def _block(host: str, port: int, lines: Sequence[str]) -> str:
    return "".join([f"Host {host}\n", f"  Port {port}\n", *(f"  {line}\n" for line in lines)])


def config_path(path: Path) -> str:
    """Quote a path for ssh_config, where `%` and `${}` have a special meaning."""
    text = str(path)
    if any(c in text for c in '"\\$') or not text.isprintable():
        raise ConfigError(
            f"OpenSSH cannot use the path {text!r}, with quotes, $ or backslashes. Move your own"
            " key, or for the cluster's own files set XDG_STATE_HOME to another folder"
        )
    return '"' + text.replace("%", "%%") + '"'
