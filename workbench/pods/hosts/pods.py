"""`SSHPods`: pods on existing machines, reached through SSH daemons with the user's key.

Owns only the folders and agents made on the machines, and stops nothing else. OpenSSH's client logs
in, once per host; all else travels on the same connection. `~/.ssh` is read only on request, and
never written. An unknown host key is refused unless the user vouches for it.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PrivateAttr

from workbench.base.errors import BackendError, ConfigError, PodError, WorkbenchError
from workbench.base.files import is_folder, is_there, read_text, user_path, write_text
from workbench.base.record import Allowed, PathText, Positive, Unit
from workbench.pods.hostfile import check_address, check_user
from workbench.pods.hosts import provision
from workbench.pods.hosts.certificates import ending_soon
from workbench.pods.hosts.login import Logins
from workbench.pods.hosts.names import (
    Host,
    check_between,
    completed,
    from_hostfile,
    read_host,
    resolved,
)
from workbench.pods.hosts.note import Note, make_folder, note_of, read_note, write_note
from workbench.pods.hosts.reopening import Reopening
from workbench.pods.hosts.way import given
from workbench.pods.place import CoreBinding, LocalPath, Place, Port, SetupLines
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh import master
from workbench.pods.ssh.identity import Identity, nameless
from workbench.pods.ssh.master import Master

if TYPE_CHECKING:
    from workbench.pods.ssh.connection import SSHConnection

logger = logging.getLogger(__name__)
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_AGAIN_S = 15.0  # between attempts of a login without OpenSSH
_AGAIN_TAKES_S = 2.0
_LOG_S = 4.0


def _kept(given: object) -> object:
    if isinstance(given, Host):
        return given
    return read_host(given)


def _on_hosts(option: str) -> AfterValidator:
    def check(path: str) -> str:
        is_plain = path.isprintable() and "$" not in path and "`" not in path
        # A name without a folder is a program, found on the hosts' PATH.
        is_program = option == "python" and "/" not in path and path[:1] not in ("", "-", "~")
        if not is_plain or not (is_program or path == "~" or path.startswith(("/", "~/"))):
            raise ConfigError(
                f"SSHPods {option} is {path!r}; it must be a path on the hosts that begins with /"
                " or ~/. Write the path itself: the hosts' variables are not known here"
            )
        return path

    return AfterValidator(check)


def _check_file(known_hosts: str) -> str:
    path = Path(known_hosts)
    if known_hosts and (is_folder(path) or not is_there(path)):
        raise ConfigError(f"the known_hosts file {known_hosts} is not there")
    return known_hosts


def _check_marks(trust: Mapping[str, str]) -> Mapping[str, str]:
    for host, mark in trust.items():
        if not _FINGERPRINT.fullmatch(mark):
            raise ConfigError(
                f"trust of {host} is {mark!r}; it must be a fingerprint as ssh shows it, SHA256:…"
            )
    return trust


def _check_once(hosts: Sequence[Host]) -> Sequence[Host]:
    seen: set[str] = set()
    for host in hosts:
        address = host.address.lower()
        if address in seen:
            raise ConfigError(
                f"host {host.address} is named twice; name the host once, with slots for the"
                " number of ranks"
            )
        seen.add(address)
    return hosts


def _check_jump(jump: Host | None) -> Host | None:
    for option in ("slots", "internal_address"):
        if jump is not None and getattr(jump, option):
            raise ConfigError(
                f"the jump host {jump.address} has {option}, and no ranks run on a jump host; leave"
                f" {option} out"
            )
    return jump


NamedOrGiven = Annotated[Host, BeforeValidator(_kept), PlainSerializer(Host.to_dict)]


class SSHPods(Place):
    """Pods on existing machines. `PodSpec.image` means nothing here."""

    label: ClassVar[str] = "SSHPods"
    kind: ClassVar[str] = "ssh"
    core_binding: ClassVar[CoreBinding] = "always"
    takes_seats: ClassVar[bool] = True

    hosts: Annotated[
        Sequence[NamedOrGiven], AfterValidator(_check_once), Allowed("a list of hosts")
    ] = ()
    """Each "name", "user@name:port", or an object with address, user, port, key,
    slots, internal_address."""
    hostfile: Annotated[PathText, Field(exclude=True)] = ""
    """A DeepSpeed or MPI hostfile to take the hosts and their slots from instead."""
    user: Annotated[str, AfterValidator(lambda user: user and check_user(user))] = ""
    """User to log in as where a host names none. Default: the calling user's name."""
    port: Port = 22
    """Port of the SSH daemons where a host names none. Default 22."""
    key: LocalPath = ""
    """Private key to log in with where a host names none; without a passphrase. A certificate
    beside the key, `KEY-cert.pub`, is used too."""
    known_hosts: Annotated[LocalPath, AfterValidator(_check_file)] = ""
    """A file of host keys to believe, such as `~/.ssh/known_hosts`."""
    trust: Annotated[Mapping[str, str], AfterValidator(_check_marks)] = Field(default_factory=dict)
    """Fingerprints (`SHA256:…`) of host keys to believe, by host."""
    jump: Annotated[
        NamedOrGiven | None,
        AfterValidator(_check_jump),
        Allowed("a host, as text or as an object, or None"),
    ] = None
    """Jump host, written like an entry of `hosts`; it must allow forwarding."""
    ssh_config: bool | LocalPath = False
    """True: log in as `ssh HOST` in a terminal does, by your ssh configuration, keys and agent;
    options given here go first. A path: read that file instead. Default: no configuration is
    read."""
    python: Annotated[str, _on_hosts("python")] = "python3"
    """Python on the hosts with torch and DeepSpeed; `~/` is the home folder there."""
    root: Annotated[str, _on_hosts("root")] = "~/.cache/deepspeed-workbench"
    """Folder on the hosts; every cluster makes its own folder inside."""
    setup: SetupLines = ()
    """Shell commands that run once on every host before the pod starts: `module load cuda` and
    others, in a login shell of bash. The ranks have the variables that the commands set, except
    `PYTHONPATH` and `PYTHONHOME`."""
    connect_timeout_s: Annotated[Positive, Unit("s")] = provision.CONNECT_S
    """Time limit for the login to all hosts, in seconds. Failed hosts are then named and the start
    fails. Default 5; a line with a round trip of two seconds needs 30."""

    _identity: Identity | None = None
    _pods: list[Pod] = PrivateAttr(default_factory=list)
    _connections: dict[str, SSHConnection] = PrivateAttr(default_factory=dict)
    _masters: dict[str, Reopening] = PrivateAttr(default_factory=dict)
    _sockets: Path | None = None
    _tried_s: dict[str, float] = PrivateAttr(default_factory=dict)
    _logs: dict[str, list[str]] = PrivateAttr(default_factory=dict)
    _folder: str = ""  # the cluster's own on the hosts, once it may be there
    _stopped: bool = False
    _working: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def __init__(
        self, hosts: Sequence[object] = (), *, hostfile: str | Path = "", **options: object
    ) -> None:
        # An unknown option is the error to name first. The base class refuses the option.
        are_known = options.keys() <= self._fields().keys()
        if bool(hosts) == bool(hostfile) and are_known:
            raise ConfigError("SSHPods needs either hosts=[…], a list, or hostfile=PATH")
        if hosts:
            options["hosts"] = hosts
        elif hostfile:
            path = user_path(hostfile)
            any_name = bool(options.get("ssh_config", False))
            options["hosts"] = from_hostfile(path.absolute(), any_name=any_name)
        super().__init__(**options)
        # A name for the configuration is free in its form; an address goes to launchers, too.
        if self.ssh_config is False:
            for host in [*self.hosts, *([self.jump] if self.jump else [])]:
                try:
                    check_address(host.address)
                except ConfigError as error:
                    raise ConfigError(
                        f"{error}; a name in your ssh configuration needs ssh_config=True"
                    ) from None

    def __repr__(self) -> str:
        options = self.to_dict()
        del options["kind"]
        options["hosts"] = [host.written for host in self.hosts]
        written = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"SSHPods({written})"

    def launch(self, spec: PodSpec, count: int, context: LaunchContext) -> list[Pod]:
        """Log in to the first `count` hosts, name all failures, then make a folder on each host."""
        if self._pods:
            raise BackendError(
                f"the hosts are in use already ({len(self._pods)} pods); stop the pods first"
            )
        if count < 1:
            raise ConfigError(f"count is {count!r}; a cluster has at least one pod")
        self._stopped = False
        hosts = self.hosts_for(count)
        try:
            with self._working:
                self._pods = self._log_in(hosts, spec, context)
            context.arrived(self._pods)
            addresses = ", ".join(host.address for host in hosts)
            context.report(f"{count} of {count} hosts let us in: {addresses}")
            for line in ending_soon([each.master.words for each in self._masters.values()]):
                context.report(line)
            with self._working:
                self._enter(spec, context)
            return list(self._pods)
        except BaseException:
            self.stop()
            raise

    def _log_in(self, hosts: Sequence[Host], spec: PodSpec, context: LaunchContext) -> list[Pod]:
        """Log in to all hosts and return the pods."""
        limit_s = self.connect_timeout_s
        step_s = provision.STEP * limit_s
        # OpenSSH refuses a user id without a name, so paramiko logs in.
        if nameless("ssh"):
            return self._log_in_directly(hosts, spec, context)
        self._sockets = master.make_folder(self._system_known(len(hosts)))
        logins = Logins(
            self._sockets,
            config=self.ssh_config,
            known_hosts=self.known_hosts,
            trust=self.trust,
            timeout_s=step_s,
        )
        logins.trust_hops(hosts)
        pods = []
        # One connection per host carries all later commands.
        for number, host in enumerate(hosts):
            control = str(self._sockets / f"{secrets.token_hex(3)}.{number}")
            pod = provision.pod_of(number, host, spec, control=control, connect_timeout_s=limit_s)
            connection = Master(str(host), logins.words(host), Path(control))
            self._masters[pod.name] = Reopening(connection, limit_s)
            pods.append(pod)

        def log_in(number: int, host: Host) -> None:
            logins.log_in(host, self._masters[f"pod-{number}"].master, context.report)

        provision.connect_all(hosts, log_in, limit_s, context.report)
        return pods

    def _log_in_directly(
        self, hosts: Sequence[Host], spec: PodSpec, context: LaunchContext
    ) -> list[Pod]:
        """Return the pods for a calling user whom OpenSSH refuses."""
        from workbench.pods.hosts.keys import try_login

        limit_s = self.connect_timeout_s

        def log_in(number: int, host: Host) -> Pod:
            host_key = try_login(host, self.trust, provision.STEP * limit_s)
            pod = provision.pod_of(number, host, spec, control="", connect_timeout_s=limit_s)
            return replace(pod, key=host.key, host_key=host_key)

        return provision.connect_all(hosts, log_in, limit_s, context.report)

    def _system_known(self, count: int) -> list[str] | None:
        """Return the machine's known_hosts files, as for `master.make_folder`."""
        if self.ssh_config is False:
            return []
        if not self.trust:
            return None
        hosts = self.hosts_for(count)
        return list(dict.fromkeys(file for host in hosts for file in host.system_known_hosts))

    def hosts_for(self, count: int) -> list[Host]:
        """Return the first hosts with complete login data; connects to none."""
        if count > len(self.hosts):
            raise ConfigError(
                f"the cluster wants {count} pods and SSHPods names {len(self.hosts)} hosts; name"
                " more in hosts=[…]"
            )
        hosts = [self._complete(host) for host in self.hosts[:count]]
        check_between(hosts)
        return hosts

    def adopt(self, pods: Sequence[Pod], _spec: PodSpec, context: LaunchContext, /) -> list[Pod]:
        """Take the pods over, by the keeper's note in the cluster's private folder."""
        note = note_of(context.directory)
        if not note.is_file():
            raise BackendError(
                f"{note} is gone, so the pods' folders on the hosts are unknown; start another"
                " cluster"
            )
        noted = replace(read_note(context.directory), pods=pods)
        self._recall(context.directory, noted)
        for each in self._masters.values():
            each.master.start()
        for each in self._masters.values():
            each.master.wait_up(self.connect_timeout_s)
        self._logs = {pod.name: [f"{pod.address}: taken over"] for pod in self._pods}
        return list(self._pods)

    def _recall(self, directory: Path, note: Note) -> None:
        from workbench.pods.ssh.connection import SSHConnection

        self._stopped = False
        self._folder = note.folder
        self._identity = Identity(note_of(directory).parent)
        self._pods = list(note.pods)
        if note.ways:
            # The words name the folder of the keeper before.
            known = self._system_known(len(note.pods))
            self._sockets = master.make_folder(known, earlier=Path(note.pods[0].control).parent)
            write_text(master.trusted_of(self._sockets), note.trusted)
            for number, (pod, words) in enumerate(zip(note.pods, note.ways, strict=True)):
                control = self._sockets / f"{secrets.token_hex(3)}.{number}"
                self._pods[number] = replace(pod, control=str(control))
                connection = Master(pod.address, words, control)
                self._masters[pod.name] = Reopening(connection, self.connect_timeout_s)
        self._identity.pin(self._pods)
        self._connections = {pod.name: SSHConnection(pod, self._identity) for pod in self._pods}

    def restore(
        self, lost: Collection[str], _spec: PodSpec, _context: LaunchContext, /
    ) -> list[Pod]:
        """Return the pods, lost ones as failed: there is no other host.

        A later look may find lost pods again.
        """
        why = "its host does not answer, and there is no other in its place"
        pods = self.refresh()
        for number, pod in enumerate(pods):
            if pod.name in lost and not pod.phase.is_terminal:
                pods[number] = replace(pod, phase=Phase.FAILED, message=why)
        return pods

    def refresh(self) -> list[Pod]:
        """Return the pods; a host with a broken connection is Unknown until the next answer."""
        self._pods = [self._look(pod) for pod in self._pods]
        return list(self._pods)

    def logs(self, name: str, tail: int = 50) -> str:
        """Return the known facts of a host, and the end of the agent's log; also after `stop`."""
        if name not in self._logs:
            raise ConfigError(
                f"no pod {name!r} was launched; there are: {', '.join(self._logs) or 'none'}"
            )
        lines = list(self._logs[name])
        connection = self._connections.get(name)
        if connection is not None and connection.is_open:
            try:
                argv = ["tail", "-n", str(tail), f"{connection.pod.root}/agent.log"]
                end = connection.run(argv, timeout_s=_LOG_S)
                lines += end.stdout.splitlines()
            except WorkbenchError as error:
                lines.append(f"the agent's log cannot be read: {error}")
        return "\n".join(lines[-tail:])

    def stop(self) -> None:
        """End our agents and remove our folders.

        On an unreachable host the agent ends by the lease.
        """
        self._stopped = True
        # A launch that waits for a host gives up when its connection goes.
        if self._working.locked():
            for connection in list(self._connections.values()):
                connection.close()
            for each in list(self._masters.values()):
                each.master.close()
        with self._working:
            provision.on_all_hosts(self._leave, self._pods)
            for connection in self._connections.values():
                connection.close()
            for each in self._masters.values():
                each.master.close()
            if self._sockets is not None:
                master.remove_folder(self._sockets)
            self._pods = []
            self._connections = {}
            self._masters = {}
            self._folder = ""
            if self._identity is not None:
                self._identity.destroy()

    def remove_left(self, directory: Path) -> None:
        """Clean up the hosts of a dead keeper, by the note in the cluster's private folder.

        Idempotent.
        """
        if note_of(directory).is_file():
            self._recall(directory, read_note(directory))
            self.stop()

    def _complete(self, host: Host) -> Host:
        # Options of this place go before the ssh configuration. The default port is no option.
        port = self.port if self.port != 22 else 0
        asked = replace(
            host,
            jump=host.jump or self.jump,
            user=host.user or self.user,
            port=host.port or port,
            key=host.key or self.key,
        )
        if self.ssh_config is False:
            return completed(asked, user=self.user, port=self.port, key=self.key)
        # ssh reads nothing there, without a word.
        if self.ssh_config is not True and Path(self.ssh_config).is_dir():
            raise ConfigError(
                f"SSHPods ssh_config is the folder {self.ssh_config!r}; give the file in it"
            )
        return resolved(asked, given(asked, self.ssh_config))

    def _enter(self, spec: PodSpec, context: LaunchContext) -> None:
        from workbench.pods.ssh.connection import SSHConnection

        if self._stopped:
            raise PodError("the hosts were given up before their pods were made")
        # A key of its own is not needed: the standing connections are the user's.
        self._identity = Identity(make_folder(context.directory))
        self._identity.pin(self._pods)
        self._connections = {pod.name: SSHConnection(pod, self._identity) for pod in self._pods}
        # No other user can have made the folder: its name is secret until now.
        safe_id = re.sub(r"[^A-Za-z0-9._-]", "-", context.cluster_id)
        self._folder = f"{safe_id[:60]}-{secrets.token_hex(8)}"
        ways = [each.master.words for each in self._masters.values()]
        trusted = ""
        if self._sockets is not None:
            trusted = read_text(master.trusted_of(self._sockets))
        note = Note(folder=self._folder, pods=self._pods, ways=ways, trusted=trusted)
        write_note(context.directory, note)

        def enter(number: int) -> provision.HostFacts:
            connection = self._connections[f"pod-{number}"]
            try:
                host = provision.create_pod_folder(
                    connection,
                    root=self.root,
                    folder=self._folder,
                    python=self.python,
                    setup=self.setup,
                    spec=spec,
                    cluster=context.cluster_id,
                    report=context.report,
                )
            except PodError as error:
                # If the connection itself has ended, ssh knows the reason and the command does not.
                own = self._masters.get(connection.pod.name)
                if own is None or own.master.is_up or self._stopped:
                    raise
                said = own.master.note_end().rstrip(".") or "nothing"
                raise PodError(
                    f"{own.master.host}: the host let us in and then ended the connection. ssh"
                    f" says: {said}. The log of the host's sshd has the reason"
                ) from error
            pod = provision.with_facts(connection.pod, host)
            connection.pod = pod
            self._pods[number] = pod
            self._logs[pod.name] = [f"{pod.address}: {host}"]
            return host

        facts = provision.on_all_hosts(enter, range(len(self._pods)))
        provision.check_hosts(self._pods, facts, spec)
        for pod, host in zip(self._pods, facts, strict=True):
            if few := spec.few_cores(host.cores):
                context.report(f"{pod.address} has {few}")
        self._pods = [replace(pod, phase=Phase.RUNNING) for pod in self._pods]

    def _look(self, pod: Pod) -> Pod:
        """Check the connection to a host, and now and then try to open a broken connection."""
        if pod.name in self._masters:
            return self._masters[pod.name].look(pod)
        connection = self._connections[pod.name]
        if not connection.is_open:
            tried_s = self._tried_s.get(pod.name, -_AGAIN_S)
            if time.monotonic() - tried_s < _AGAIN_S:
                return pod
            self._tried_s[pod.name] = time.monotonic()
            connection.timeout_s = max(_AGAIN_TAKES_S, self._more_s)
            try:
                connection.open()
            except WorkbenchError as error:
                if pod.phase is Phase.UNKNOWN:  # its message has the time of the first failure
                    return pod
                since = f"{time.strftime('%H:%M:%S')}: {error}"
                return replace(pod, phase=Phase.UNKNOWN, message=since)
        return replace(pod, phase=Phase.RUNNING, message="")

    @property
    def _more_s(self) -> float:
        """Seconds of a single attempt if `connect_timeout_s` is above the default, else 0."""
        if self.connect_timeout_s <= provision.CONNECT_S:
            return 0.0
        return self.connect_timeout_s

    def _leave(self, pod: Pod) -> None:
        connection = self._connections.get(pod.name)
        if connection is None or not self._folder:
            return
        limit_s = max(_AGAIN_TAKES_S, self._more_s)
        connection.timeout_s = limit_s
        log = self._logs.setdefault(pod.name, [])
        try:
            if pod.name in self._masters:
                self._masters[pod.name].master.open(limit_s)
            log += provision.remove_pod_folder(
                connection,
                root=self.root,
                folder=self._folder,
                python=self.python,
            )
        except WorkbenchError as error:
            words = (
                f"{pod.address} could not be tidied up: {error}; "
                "an agent there ends by itself, its folder stays"
            )
            logger.warning("%s", words)
            log.append(words)
