"""The first process of a Kubernetes pod: runs the SSH daemon, reports the pod, and ends the pod.

The program travels in a Secret and runs under the image's Python, so only the standard library is
used. The pod ends on SIGTERM, with its SSH daemon, or when no login was open for the lease. The
keeper is always logged in.

On SIGTERM the pod's agent has time to let its ranks write a checkpoint, if any rank would.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPORT = "@pod "
"""Prefix of the line with the pod's report in its log."""
ACCOUNT = "--account"
"""Option to write the pod's accounts, which name its user id, and exit."""

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
"""Options of every SSH daemon of ours: only our key may log in, and nothing is forwarded."""

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets")
_HIDDEN = re.compile(
    r"KUBERNETES_|HOSTNAME$|HOME$|PWD$|OLDPWD$|SHLVL$|TERM$|_$|USER$|LOGNAME$|SHELL$|MAIL$"
)
_MESSAGE = Path("/dev/termination-log")  # where Kubernetes looks for a container's message
_ACCOUNT_NAME = "pod"
_LISTEN_S = 60.0
_LOOK_S = 1.0
LATE_S = 5.0
"""Delay of a check, in seconds, from which the machine is taken to have slept or been frozen."""


LEAVING = "leaving"
"""Name of the file in the pod's folder that announces the end of the pod to its agent."""
LEAVE_S = 25.0
"""Longest time from SIGTERM to the end of the pod, if ranks need the time for a checkpoint."""


_TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM. Kueue counts a pod that ended with 0 as done, and takes no replacement
for the pod."""


class Stop(BaseException):
    """Unwinds from wherever SIGTERM found us."""


def main(argv: list[str] | None = None) -> int:
    """Be the pod until told to stop; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [ACCOUNT]:
        return write_accounts(Path(words[1]))
    options = _options(words)
    os.umask(0o077)
    signal.signal(signal.SIGTERM, stop)
    daemon = None
    try:
        daemon = _start(options)
        return _supervise(daemon, options)
    except Stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        announce_shutdown(options.root, options.leave_s)
        return _TERMINATED
    except (OSError, RuntimeError) as error:
        return _exit_message(str(error), 1)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if daemon is not None:
            daemon.terminate()


def write_accounts(path: Path) -> int:
    """Write the image's accounts, with a shell for this user id: a cluster may choose any id."""
    lines = [
        line
        for line in Path("/etc/passwd").read_text().splitlines()
        if not line.startswith(f"{_ACCOUNT_NAME}:")
    ]
    fields = next(
        (line.split(":") for line in lines if line.split(":")[2:3] == [str(os.geteuid())]), None
    )
    if fields is None or fields[-1].rpartition("/")[2] in ("", "nologin", "false"):
        lines.insert(0, f"{_ACCOUNT_NAME}:x:{os.geteuid()}:{os.getegid()}:pod:/tmp:/bin/sh")
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o644)
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True, help="the pod's name within its cluster")
    parser.add_argument(
        "--root", type=Path, required=True, help="the folder that becomes the pod's own"
    )
    parser.add_argument(
        "--secret", type=Path, required=True, help="the folder with host_key, authorized_keys"
    )
    parser.add_argument("--port", type=int, required=True, help="port of the SSH daemon")
    parser.add_argument("--slots", type=int, required=True, help="ranks that the pod carries")
    parser.add_argument(
        "--lease-s", type=float, required=True, help="seconds to live on with nobody logged in"
    )
    parser.add_argument(
        "--wait-s", type=float, required=True, help="the same before the first login"
    )
    parser.add_argument(
        "--leave-s", type=float, default=LEAVE_S, help="longest time from SIGTERM to the end"
    )
    return parser.parse_args(argv)


def _start(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    user = _user()
    sshd = find_sshd()
    options.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    options.root.chmod(0o700)  # a volume's group bit would stay
    folder = options.root / "sshd"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    (options.root / LEAVING).unlink(missing_ok=True)
    # Copies, because the Secret's own files belong to root and a group.
    for name in ("host_key", "authorized_keys"):
        content = (options.secret / name).read_bytes()
        (folder / name).write_bytes(content)
    daemon = start_sshd(sshd, _config(options, folder, user) + SSHD_OPTIONS)
    _await_listening(daemon, options.port)
    _report(options, user)
    (folder / "listening").touch()
    return daemon


def _report(options: argparse.Namespace, user: str) -> None:
    report = {
        "name": options.name,
        "address": os.environ["POD_IP"],
        "ssh_port": options.port,
        "user": user,
        "slots": options.slots,
        "host_key": " ".join((options.secret / "host_key.pub").read_text().split()[:2]),
        "root": str(options.root),
        "python": sys.executable,
        "versions": _versions(),
    }
    _write(REPORT + json.dumps(report))


def _versions() -> dict[str, str]:
    # importlib.metadata also loads email. Guardians of other pods import this module and need
    # neither.
    import importlib.metadata

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise RuntimeError(
            f"user id {os.geteuid()} has no name in the image's /etc/passwd, and sshd needs a"
            " name. Give the image's own"
            " user, KubernetesPods(run_as_user=ID), or None: None gives any id a name"
        ) from None


def find_sshd() -> str:
    """Return the absolute path of sshd; as root, also make its privilege separation folder."""
    path = shutil.which(
        "sshd", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin"
    )
    if path is None:
        raise FileNotFoundError(
            "sshd is not installed here, and pods are reached over SSH: install openssh-server in"
            " the image"
        )
    if os.geteuid() == 0:
        # Where Debian's sshd, started as root, wants the folder.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    return str(Path(path).absolute())


def _config(options: argparse.Namespace, folder: Path, user: str) -> str:
    lines = [
        f"Port {options.port}",
        f'HostKey "{folder / "host_key"}"',
        f'AuthorizedKeysFile "{folder / "authorized_keys"}"',
        f"AllowUsers {user_pattern(user)}",
        "ClientAliveInterval 15",
        f"ClientAliveCountMax {max(1, int(options.lease_s // 15))}",
        f"SetEnv {_session()}",
    ]
    listen = os.environ.get("WORKBENCH_LISTEN")  # for pods that share one machine's network
    return "\n".join([*lines, *([f"ListenAddress {listen}"] if listen else []), ""])


def _session() -> str:
    path = str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", os.defpath)
    given = {name: value for name, value in os.environ.items() if not _HIDDEN.match(name)}
    words = []
    for name, value in {**given, "PATH": path, "SHLVL": "1"}.items():
        if can_be_set(value):
            words.append(f'"{name}={value}"')
        else:
            _say(f"variable {name} is left out: sshd takes no quotes, backslashes or line breaks")
    return " ".join(words)


def user_pattern(user: str) -> str:
    """Return a pattern of sshd_config for a user, where `@` and `!` have meanings of their own."""
    return re.sub(rb"[^A-Za-z0-9_.-]", b"?", user.encode()).decode()


def can_be_set(value: str) -> bool:
    """Whether sshd_config can hold this text between quotes."""
    return value.isprintable() and not set(value) & set('"\\')


def start_sshd(
    sshd: str, config: str, before: Callable[[], object] | None = None
) -> subprocess.Popen[bytes]:
    """Start a daemon in the foreground, its log on stderr.

    It hands its configuration on to sessions, so no file is.
    """
    argv = [sshd, "-D", "-e", "-f", "/dev/stdin"]
    daemon = subprocess.Popen(argv, stdin=subprocess.PIPE, preexec_fn=before)
    assert daemon.stdin is not None
    try:
        daemon.stdin.write((config + _version_options(sshd)).encode())
        daemon.stdin.close()
    except BrokenPipeError:
        pass  # it has ended, and its log says why
    return daemon


def _version_options(sshd: str) -> str:
    """Keep sshd 9.8 and later from blocking an address after a failed login.

    All connections of a port-forward come from the same address.
    """
    done = subprocess.run(
        [sshd, "-V"], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
    )
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stderr + done.stdout)
    return (
        ""
        if version is None or (int(version[1]), int(version[2])) < (9, 8)
        else "PerSourcePenalties no\n"
    )


def _await_listening(daemon: subprocess.Popen[bytes], port: int) -> None:
    address = os.environ.get("WORKBENCH_LISTEN") or os.environ["POD_IP"]
    deadline = time.monotonic() + _LISTEN_S
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            raise RuntimeError(
                f"sshd ended with {daemon.returncode} instead of listening on port {port}"
            )
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"sshd did not listen on {address} port {port} within {_LISTEN_S:.0f} s")


def _supervise(daemon: subprocess.Popen[bytes], options: argparse.Namespace) -> int:
    limit_s = options.wait_s
    deadline = time.monotonic() + options.wait_s
    looked = time.monotonic()
    graced = False
    while True:
        # After sleep the keeper gets a third of the limit to log in again: the keeper may have
        # slept too. Granted once, until the keeper has logged in.
        late_s = time.monotonic() - looked
        looked = time.monotonic()
        if late_s > LATE_S and not graced:
            deadline = max(deadline, looked + limit_s / 3)
            graced = True
            _say(f"this machine slept for {late_s:.0f} s")
        code = reap().get(daemon.pid)
        if code is not None:
            return _exit_message(f"the pod's sshd ended with {code}", 1)
        if has_sessions(daemon.pid):
            limit_s = options.lease_s
            deadline = time.monotonic() + options.lease_s
            graced = False
        elif looked > deadline:  # what is slept through after the look is seen by the next one
            return _exit_message(f"nobody was logged in for {limit_s:.0f} s; this pod ends", 0)
        time.sleep(_LOOK_S)


def announce_shutdown(root: Path, leave_s: float = LEAVE_S) -> None:
    """Announce the end of the pod to its agent, and wait until the agent removes the file.

    The agent removes the file at once if no rank would use the time.
    """
    try:
        pid = int(json.loads((root / "agent.json").read_text())["pid"])
        process = Path(f"/proc/{pid}")
        if not process.exists():
            return
        (root / LEAVING).touch()
    # No agent was started here, or the disk is full.
    except (OSError, ValueError, KeyError, TypeError):
        return
    deadline = time.monotonic() + leave_s
    while (root / LEAVING).exists() and process.exists() and time.monotonic() < deadline:
        reap()
        time.sleep(0.05)


def reap() -> dict[int, int]:
    """Collect ended children; return the exit codes (a signal as a negative number)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def has_sessions(daemon: int) -> bool:
    """Return whether the daemon has a child; the daemon forks a child per connection."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == daemon:
                return True
        except (OSError, IndexError, ValueError):
            continue
    return False


def _exit_message(text: str, code: int) -> int:
    _say(text)
    try:
        with _MESSAGE.open("r+") as file:  # never makes the file where there is none
            file.write(text)
    except OSError:
        pass  # not in a container
    return code


def _say(text: str) -> None:
    _write(f"pod: {text}")


def _write(line: str) -> None:
    """Write a whole line at once: sshd writes to the same log."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def stop(*_: object) -> None:
    raise Stop


if __name__ == "__main__":
    sys.exit(main())
