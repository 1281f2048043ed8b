"""Logins to hosts by OpenSSH's client: the standing connections, and the refusals in plain words.

A host key is trusted by known_hosts, or by a fingerprint of the user's. In the second case the key
is fetched without a login, compared, and noted in the cluster's own file.
"""

from __future__ import annotations

import re
import shlex
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from workbench.base.errors import ConfigError, PodError, WorkbenchError
from workbench.base.files import is_there, read_text, write_text
from workbench.pods.hosts.certificates import ended
from workbench.pods.hosts.names import Host, ask_ssh, with_hops
from workbench.pods.hosts.way import words_to
from workbench.pods.pod import Report
from workbench.pods.ssh import master
from workbench.pods.ssh.identity import check_key_file, fingerprint, key_remedy
from workbench.pods.ssh.master import Master

_NOWHERE = ("/dev/null", "none")
_UNKNOWN = re.compile(r"No (\S+) host key is known for (\S+)")
_CHANGED = re.compile(r"IDENTIFICATION HAS CHANGED")
_REVOKED = re.compile(r"marked as revoked|revoked by file")
# ssh says no more about an unknown key with `UserKnownHostsFile none`.
_UNSAID = re.compile(r"Host key verification failed\.?")
_OFFENDING = re.compile(r"Offending (?:\S+ )?key in (\S+:\d+)")
_SHOWN = re.compile(r"SHA256:[A-Za-z0-9+/]+")
_DENIED = re.compile(r"(?<!\S)(\S{1,200})@([^\s@]{1,200}): Permission denied")
_UNSIGNED = re.compile(r"signing failed for \S+-SK\b")
_METHODS = re.compile(r"Permission denied \(([\w,@.-]*)\)")
_MANY = "Too many authentication failures"
_LOOK_S = 5.0


class Logins:
    """How the hosts of a cluster are logged in to. Several threads may use it at once."""

    def __init__(
        self,
        folder: Path,
        *,
        config: bool | str,
        known_hosts: str,
        trust: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """`folder`: of the sockets, with the file of the keys whose fingerprints were given."""
        self._folder = folder
        self._config = config
        self._known_hosts = known_hosts
        self._trust = trust
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def words(self, host: Host) -> list[str]:
        return words_to(
            host,
            config=self._config,
            known_hosts=self._known_hosts,
            timeout_s=self._timeout_s,
            ssh=master.wrapper_of(self._folder),
        )

    def log_in(self, host: Host, connection: Master, report: Report) -> None:
        """Open a host's standing connection. `report`: as for `Master.open`.

        Raises:
            WorkbenchError: With the words of ssh, and the next step.
        """
        until = time.monotonic() + self._timeout_s
        for each in (host.jump, host):
            if each is not None and each.key:
                check_key_file(Path(each.key))
        try:
            for each in (host.jump, host):
                if each is not None:
                    self._trust_key(each, until)
            connection.open(max(0.1, until - time.monotonic()), report)
        except WorkbenchError as error:
            said = connection.said or str(error).removeprefix(f"{host}: ")
            explained = self._explained(host, said, error, until)
            if explained is error:
                raise
            raise explained from error

    def trust_hops(self, hosts: Sequence[Host]) -> None:
        """Note the keys of configured jump hosts whose fingerprints the user gave."""
        for hop in dict.fromkeys(hop for host in hosts for hop in host.hops):
            self._trust_key(hop, time.monotonic() + self._timeout_s)

    def _trust_key(self, host: Host, until: float) -> None:
        expected = vouched(host, self._trust)
        if not expected:
            return
        seen: list[str] = []
        for kind in (",".join(master.KINDS), *master.KINDS):
            try:
                line, key = self._shown_key(host, kind, until)
            except WorkbenchError:
                if seen:  # the host has no key of this type
                    continue
                raise
            if fingerprint(key) == expected:
                with self._lock:
                    file = master.trusted_of(self._folder)
                    lines = read_text(file)
                    if line not in lines:
                        write_text(file, lines + line)
                return
            seen.append(key)
        raise PodError(
            f"host key of {host} is not the key in `trust`: expected {expected}, got"
            f" {fingerprint(seen[0])}. Another machine answers there; nothing was sent"
        )

    def _shown_key(self, host: Host, kind: str, until: float) -> tuple[str, str]:
        """Return a host's proven key: the line for known_hosts, and `type base64`."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            file = Path(folder) / "shown"
            limit_s = until - time.monotonic()
            key = master.host_key(
                str(host), self.words(host), master.wrapper_of(self._folder), file, kind, limit_s
            )
            return read_text(file), key

    def _explained(
        self, host: Host, said: str, error: WorkbenchError, until: float
    ) -> WorkbenchError:
        """Return the error for people: the words of ssh, and the next step."""
        unknown = _UNKNOWN.search(said)
        if unknown or _UNSAID.fullmatch(said):
            return self._unknown_key(host, said, unknown[2] if unknown else "", until)
        if _REVOKED.search(said):
            return ConfigError(
                f"{self._known_hosts or 'known_hosts'} marks a host key of {host} as revoked;"
                f" nothing was sent there. ssh says: {said}"
            )
        if _CHANGED.search(said):
            return changed(host, said)
        if "Permission denied" in said or _MANY in said:
            hop = self._refusing_hop(host, said)
            asked = hop or host
            kind = ConfigError if asked.key and key_remedy(Path(asked.key)) else PodError
            advice = ended(self.words(host)) or self._login_advice(asked, said)
            whose = f"the jump host {hop.address} refused the login: " if hop else ""
            return kind(f"{host}: {whose}{said.rstrip('.')}. {advice}")
        return error

    def _unknown_key(self, host: Host, said: str, name: str, until: float) -> WorkbenchError:
        """Return the error for an unknown key: of the host, or of a host on the way."""
        jumps = [] if host.jump is None else [host.jump]
        until = max(until, time.monotonic() + _LOOK_S / 5)
        for each in (host, *jumps, *host.hops):
            try:
                line, key = self._shown_key(each, ",".join(master.KINDS), until)
            except WorkbenchError:  # such as a host behind the one whose key is unknown
                continue
            if name in ("", line.split(" ")[0]):
                return unknown(each, key, host.known_hosts)
        return PodError(
            f"{host}: {said}. Log in there once with ssh in a terminal, and compare the fingerprint"
            " that ssh shows"
        )

    def _refusing_hop(self, host: Host, said: str) -> Host | None:
        """Return the host on the way that refused the login. None: `host` itself did."""
        denied = _DENIED.search(said)
        if denied is None:
            return None
        own = self.words(host)
        for words, told in with_hops([own]):
            if (told["user"][0], told["hostname"][0]) != denied.groups():
                continue
            if words == own:
                return None
            jump = host.jump
            while jump is not None and jump.address != words[-1]:
                jump = jump.jump
            return jump or Host(address=words[-1])
        return None

    def _login_advice(self, host: Host, said: str) -> str:
        """Return the next step after a refused login."""
        if _UNSIGNED.search(said):
            return (
                "The security key did not sign. Plug the key into this machine; a key with a"
                " library of its own needs SecurityKeyProvider in the ssh configuration"
            )
        # The host's own list of methods rules out every key.
        methods = _METHODS.search(said)
        if methods and "publickey" not in methods[1]:
            return (
                "The host asks for a password or a code, and a keeper can answer neither. Ask its"
                " administrators for a login by key or certificate alone"
            )
        # The key may be right, and was never tried.
        if _MANY in said:
            return (
                "ssh offered more keys than the host takes. Name the right key: SSHPods(key=PATH),"
                " or IdentityFile with IdentitiesOnly yes in the ssh configuration"
            )
        if host.key:
            return (
                key_remedy(Path(host.key))
                or f"The account does not accept the key {host.key}: add its .pub to"
                " ~/.ssh/authorized_keys there, take the others' right to write in the home folder"
                " (chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys), or name another user or key"
            )
        # No known cause: show how to see which keys were tried.
        file = ["-F", self._config] if isinstance(self._config, str) else []
        command = shlex.join(["ssh", "-v", *file, host.address])
        return (
            self._key_files(host)
            + f"`{command}` in a terminal shows which keys ssh tried. A key with a passphrase must"
            " be in an agent (ssh-add) before the notebook's server starts, with SSH_AUTH_SOCK set"
        )

    def _key_files(self, host: Host) -> str:
        """Return why no key file of the ssh configuration logged in; empty without such files."""
        reasons = []
        with suppress(ConfigError):
            for name in ask_ssh(self.words(host)).get("identityfile", ()):
                path = Path(name).expanduser()
                if is_there(path):
                    refused = f"the account does not accept the key {path}"
                    reasons.append(key_remedy(path) or refused)
        return f"The ssh configuration names these keys: {'; '.join(reasons)}. " if reasons else ""


def vouched(host: Host, trust: Mapping[str, str]) -> str:
    """Return the user's vouched fingerprint of a host, by its name or its address and port."""
    names = (host.address, f"{host.address}:{host.port}", host.where, host.reached)
    return next((trust[name] for name in names if name in trust), "")


def changed(host: Host | str, said: str) -> PodError:
    """Make the error for another key than the known one."""
    shown = _SHOWN.search(said)
    offending = _OFFENDING.search(said)
    return PodError(
        f"host key of {host} changed: got {shown[0] if shown else 'another key'}, and"
        f" {offending[1] if offending else 'known_hosts'} has another. Another machine answers"
        " there; nothing was sent"
    )


def unknown(host: Host, key: str, configured: Sequence[str]) -> PodError:
    """Make the error for an unknown key, with both ways to trust the key."""
    mark = fingerprint(key)
    kind = key.split(" ")[0].removeprefix("ssh-").partition("-")[0]
    noting = 'log in there once with ssh to note the key, and give known_hosts="~/.ssh/known_hosts"'
    nowhere = [file for file in configured if file in _NOWHERE]
    if nowhere:
        noting = (
            "give known_hosts=PATH of a file with the key. The ssh configuration notes no keys"
            f" (UserKnownHostsFile {nowhere[0]})"
        )
    return PodError(
        f"the host key of {host} is unknown: {mark}. Compare this fingerprint with the output"
        " of `ssh-keygen -lf"
        f" /etc/ssh/ssh_host_{kind}_key.pub` on {host.address} itself. If both are equal,"
        " either give"
        f' SSHPods(…, trust={{"{host.address}": "{mark}"}}), or {noting}'
    )
