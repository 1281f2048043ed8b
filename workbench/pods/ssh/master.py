"""The standing connection to a host of the user's: an `ssh -M -N` child, shared by all others.

OpenSSH's client logs in as in the user's terminal. It never accepts an unknown host key, writes
nothing into `~/.ssh`, and asks no question. An `ssh` of the user's configuration on the way, as for
ProxyJump, follows the same rules. Without the rules a jump host's key could be noted.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.base.child import ended_within, kill_group
from workbench.base.errors import ConfigError, PodError, PodTimeout, WorkbenchError
from workbench.base.files import folders, read_text, write_text
from workbench.base.files.folders import make_private
from workbench.base.files.private import runtime_folder
from workbench.base.words import strip_controls
from workbench.pods.pod import Report, no_report
from workbench.pods.ssh.child import stands
from workbench.pods.ssh.identity import config_path

_RULES = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
    "CheckHostIP": "no",  # else an address is noted beside the name
    "VerifyHostKeyDNS": "no",
    "NoHostAuthenticationForLocalhost": "no",
    "AddKeysToAgent": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "Tunnel": "no",
    "ControlMaster": "no",
    "ControlPersist": "no",
    "ServerAliveInterval": "3",
    "ServerAliveCountMax": "3",
    "LogLevel": "INFO",
}
# The name `argv[0]` is the program that ssh starts for ProxyJump.
_WRAPPER = """\
#!/bin/sh
WORKBENCH_JUMPS=$((${{WORKBENCH_JUMPS:-0}} + 1)); export WORKBENCH_JUMPS
if [ "$WORKBENCH_JUMPS" -gt {most} ]; then
  echo "more than {most} jump hosts: ProxyJump of the ssh configuration leads in a circle" >&2
  exit 255
fi
exec {python} -IS -c 'import os, sys; os.execv(sys.argv[1], sys.argv[2:])' {ssh} "$0" {rules} "$@"
"""
# ssh starts the program when a security key waits for a touch. Without a terminal and without the
# program, ssh would wait in silence.
_ASKS = """\
#!/bin/sh
echo "$1" >&2
"""
_TOUCH = re.compile(rb"Confirm user presence for key [^\r\n]+")
# The connection ends with the process that holds the other end of its standard input.
_GUARD = """\
exec 3<&0
"$@" </dev/null 3<&- & ssh=$!
{ read -r _ <&3; kill $ssh; } 2>/dev/null & guard=$!
wait $ssh; code=$?
kill $guard 2>/dev/null
exit $code
"""
KINDS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512,rsa-sha2-256",
)
"""The signature algorithms of each type of host key."""
# Bytes of a folder of sockets: Linux takes 107 for a path, and ssh adds 17 while it makes a socket.
_SHORT = 60
_PREFIX = "ssh-"
_JUMPS = 9  # OpenSSH follows a circle without end, and each round is a process
_END_S = 2.0
_STEP_S = 0.02
_SHOWN = 1200
_MOST_ERRORS = 100_000
_NOISE = re.compile(
    r"^kex_exchange_identification: Connection (?:closed|reset) by"
    r"|^Connection closed by \S+ port|^@{5}|^\s*$"
    r"|^Warning: Permanently added|^Pseudo-terminal will not"
)
_OF_GUARD = re.compile(r"\bTerminated\b")
_LINES = 14  # what comes before may be a banner
_LATE = re.compile(r"timed out|Timeout, server|no answer", re.IGNORECASE)
_REFUSAL = re.compile(
    r"Permission denied|Too many authentication failures|Host key verification failed"
    r"|HOST IDENTIFICATION HAS CHANGED|REVOKED HOST KEY|host key is known for"
    r"|Unable to negotiate|[Bb]ad configuration option|Bad owner or permissions"
)


class Master:
    """A host's standing connection. It is opened, lost, and opened again."""

    def __init__(self, host: str, words: Sequence[str], control: Path) -> None:
        """`words`: arguments of `ssh` for the host. `control`: path of the socket."""
        self.host = host
        self.words = words
        self.control = control
        self.said = ""
        """Words of ssh at the last end."""
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the connection
        self._lock = threading.Lock()
        self._began_s = 0.0
        self._is_closed = False

    @property
    def is_up(self) -> bool:
        return self.is_running and stands(self.control)

    @property
    def is_running(self) -> bool:
        """Whether its process runs, logged in or not yet."""
        return self._process is not None and self._process.poll() is None

    @property
    def tried_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._began_s

    def start(self) -> None:
        """Start `ssh` and return at once."""
        with self._lock:
            if self._is_closed:
                raise PodError(f"the connection to {self.host} was given up")
            if self.is_running:
                return
            self._drop()
            self.control.unlink(missing_ok=True)
            self._errors.seek(0)
            self._errors.truncate()
            own = [
                "-M",
                "-N",
                "-o",
                f"ControlPath={config_path(self.control)}",
                "-o",
                "ClearAllForwardings=yes",
            ]
            wrapper = wrapper_of(self.control.parent)
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "sh", str(wrapper), *own, *self.words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment(wrapper),
                start_new_session=True,  # an interrupt is meant for the notebook
            )
            self._began_s = time.monotonic()

    def wait_up(self, limit_s: float, report: Report = no_report) -> bool:
        """Wait until the connection stands or its process has ended.

        `report`: receives a line about a security key that waits for a touch.
        """
        until = time.monotonic() + limit_s
        told = b""
        while not self.is_up:
            # A read at a place: the process writes where the file's own position is.
            asked = _TOUCH.findall(os.pread(self._errors.fileno(), _MOST_ERRORS, 0))
            if asked and asked[-1] != told:
                told = asked[-1]
                words = strip_controls(told.decode(errors="replace"))
                report(f"{self.host}: ssh waits for a touch of your security key. {words}")
            if not self.is_running or time.monotonic() > until:
                return self.is_up
            time.sleep(_STEP_S)
        return True

    def open(self, limit_s: float, report: Report = no_report) -> None:
        """Connect and log in. `report`: as for `wait_up`.

        Raises:
            WorkbenchError: The connection does not stand in time; the message has ssh's words.
        """
        self.start()
        if self.wait_up(limit_s, report):
            return
        late = self.is_running
        self.drop()
        if late and not (_LATE.search(self.said) or is_refusal(self.said)):
            words = f"; ssh says: {self.said}" if self.said else ""
            self.said = f"no answer in {limit_s:g} s{words}"
        raise failure(self.host, self.said)

    def drop(self) -> None:
        """End the connection, for now."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        process = self._process
        if process is None:
            return
        # The end of its input is the sign for the guard.
        if process.stdin is not None:
            process.stdin.close()
        ended_within(process, _END_S)
        # A program that the user's configuration started may stay.
        kill_group(process)
        process.wait()
        self._note_words()
        self._process = None

    def note_end(self) -> str:
        """Return ssh's words on the end of a broken connection."""
        with self._lock:
            if self._process is not None and not self.is_up:
                # ssh removes the socket first, and writes its last words then.
                ended_within(self._process, _END_S)
                self._note_words()
        return self.said

    def close(self) -> None:
        """End the connection for good. Idempotent."""
        self._is_closed = True
        self.drop()
        self.control.unlink(missing_ok=True)
        self._errors.close()

    def _note_words(self) -> None:
        if not self._errors.closed:
            self._errors.seek(0)
            self.said = said_by(self._errors.read())


def said_by(data: bytes) -> str:
    """Return the words of ssh as a line, without noise."""
    shown = data.decode(errors="replace").replace("\r", "").splitlines()
    lines = [line for line in shown if not _OF_GUARD.search(line)]
    telling = [line.strip() for line in lines if not _NOISE.search(line)] or lines
    last = list(dict.fromkeys(telling))[-_LINES:]
    return strip_controls("; ".join(last))[-_SHOWN:]


def is_refusal(said: str) -> bool:
    """Return whether ssh's words are a decision, unchanged by another try."""
    return _REFUSAL.search(said) is not None


def failure(host: str, said: str) -> WorkbenchError:
    """Make the error for a connection refused or not opened."""
    kind = ConfigError if "bad configuration option" in said.lower() else PodError
    if _LATE.search(said) and not is_refusal(said):
        kind = PodTimeout
    return kind(f"{host}: {said or 'ssh ended without a word'}")


def make_folder(known: Sequence[str] | None, earlier: Path | None = None) -> Path:
    """Make a folder, mode 0700, for the sockets of a cluster, with the wrapper in it.

    `known`: known_hosts files of the machine, beside the cluster's own file. None: as the ssh
    configuration says, without the cluster's own. `earlier`: the folder of a keeper that died, to
    use again.
    """
    if earlier is not None:
        folder = earlier
        make_private(folder)
    else:
        # The path of a Unix socket has about 100 bytes at most.
        base = runtime_folder()
        short = base if len(os.fsencode(base)) <= _SHORT else Path("/tmp")
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=short))
    ssh = program()
    write_text(trusted_of(folder), "")
    # Host keys that the user trusted for this cluster come before the site's.
    rules = _as_words(_RULES)
    if known is not None:
        files = [trusted_of(folder), *map(Path, known)]
        rules += ["-o", f"GlobalKnownHostsFile={' '.join(map(config_path, files))}"]
    wrapper = wrapper_of(folder)
    wrapper.parent.mkdir(mode=0o700, exist_ok=True)
    # ssh starts the wrapper for each jump host too, so the rules hold there.
    write_text(
        wrapper,
        _WRAPPER.format(
            most=_JUMPS,
            python=shlex.quote(sys.executable),
            ssh=shlex.quote(ssh),
            rules=shlex.join(rules),
        ),
        mode=0o700,
    )
    write_text(_asks_of(wrapper), _ASKS, mode=0o700)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder of `make_folder`. Idempotent."""
    if folder.name.startswith(_PREFIX) and folder.is_dir() and not folder.is_symlink():
        folders.remove_folder(folder)


def program() -> str:
    """Return the path of OpenSSH's client."""
    found = shutil.which("ssh")
    if found is None:
        raise ConfigError("ssh is not installed here; run: sudo apt-get install openssh-client")
    return found


def wrapper_of(folder: Path) -> Path:
    """Return the path of the `ssh` with the rules."""
    return folder / "bin" / "ssh"


def trusted_of(folder: Path) -> Path:
    """Return the path of the known_hosts file of all `ssh` of a cluster."""
    return folder / "trusted"


def environment(wrapper: Path) -> Mapping[str, str]:
    """Return the variables by which the name `ssh` is the wrapper, and a touch is asked for."""
    path = os.environ.get("PATH", os.defpath)
    return {
        **os.environ,
        "PATH": f"{wrapper.parent}{os.pathsep}{path}",
        "SSH_ASKPASS": str(_asks_of(wrapper)),
        "SSH_ASKPASS_REQUIRE": "force",
    }


def _asks_of(wrapper: Path) -> Path:
    return wrapper.with_name("asks")


def host_key(
    host: str, words: Sequence[str], wrapper: Path, known_hosts: Path, kind: str, limit_s: float
) -> str:
    """Note a host's proven key in an empty file, without a login, and return the key.

    `kind`: signature algorithms to ask for.
    """
    rules = {
        **_RULES,
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": config_path(known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "HashKnownHosts": "no",
        "HostKeyAlgorithms": kind,
        "PreferredAuthentications": "none",
        "ControlPath": "none",
        "ClearAllForwardings": "yes",
    }
    argv = [str(wrapper), *_as_words(rules), *words, "exit"]
    try:
        done = run(argv, limit_s, executable=program(), env=environment(wrapper))
    except subprocess.TimeoutExpired as error:
        raise PodTimeout(f"{host}: no answer in {limit_s:.1f} s") from error
    if not known_hosts.is_file():
        raise failure(host, said_by(done.stderr))
    return " ".join(read_text(known_hosts).split()[1:3])


def run(
    argv: Sequence[str],
    limit_s: float,
    *,
    executable: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run an `ssh` to the end, and end all started programs.

    Raises:
        subprocess.TimeoutExpired: After the limit.
    """
    with subprocess.Popen(
        argv,
        executable=executable,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    ) as process:
        try:
            out, said = process.communicate(timeout=max(0.1, limit_s))
        finally:
            # With a jump host or a Match exec it is a group of processes.
            kill_group(process)
    return subprocess.CompletedProcess(argv, process.returncode, out, said)


def _as_words(options: Mapping[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
