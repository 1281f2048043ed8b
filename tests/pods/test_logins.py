"""Logins of strangers: any shell, start-up files that print, and logins that run nothing."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.fakes.sshhosts import Login, SSHHost, with_accounts
from tests.support.poll import until
from workbench.base.errors import ConfigError, PodError, RemoteError
from workbench.base.process import with_mark
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.doctor.examination import examine_pods
from workbench.pods.hosts import provision
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.pod import LaunchContext, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh import channel as channels
from workbench.pods.ssh import connection as connections
from workbench.pods.ssh.bulk import pipe as pipes
from workbench.pods.ssh.bulk.transfer import fetch_file, route_to, send_file
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.login import Output, marked
from workbench.pods.ssh.openssh import run_over_openssh, start_ssh

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to show a daemon other accounts"
)
NASTY = "a'b\"c!d\\e\n\nf  g * $HOME `x` é \t#~ \udcff"
LINES = "for n in 1 2 3 4; do seq 50; done\n"
PRINTS = {
    "one-line": Login(files={".bashrc": 'echo "Welcome to the lab"\n'}),
    "many-lines": Login(files={".bashrc": LINES}),
    "no-end": Login(files={".bashrc": "printf 'last login: today'\n"}),
    "binary": Login(files={".bashrc": "printf 'a\\377\\001\\200b'; echo to stderr >&2\n"}),
    "zsh-prints": Login("zsh", {".zshenv": "echo Welcome; printf 'last login: '\n"}),
    "fish-prints": Login("fish", {".config/fish/config.fish": "echo Welcome; printf 'last: '\n"}),
    "python-path": Login(
        files={
            ".bashrc": "export PYTHONPATH=$HOME\n",
            "json.py": "raise SystemExit('another json')\n",
        }
    ),
    "late": Login(
        files={
            ".bashrc": "trap 'echo Bye' EXIT\nsh() { echo mine; }\nexport PYTHONHOME=/nowhere\n",
        }
    ),
    "zsh-late": Login("zsh", {".zshenv": "TRAPEXIT() { echo Bye }\nalias sh=zsh\n"}),
    "fish-late": Login(
        "fish", {".config/fish/config.fish": "function bye --on-event fish_exit; echo Bye; end\n"}
    ),
    "agent": Login(
        files={
            ".bashrc": 'eval "$(ssh-agent -s)" >/dev/null; echo $SSH_AGENT_PID >>~/agents\n'
            "trap 'echo Bye; ssh-agent -k; echo $SSH_AGENT_PID >>~/ended;"
            " (sleep 1; touch ~/started) >/dev/null 2>&1 &' EXIT\n",
        }
    ),
    "tcsh-prints": Login("tcsh", {".cshrc": "echo Welcome; printf 'last login: '\n"}),
}
SHELLS = {shell: Login(shell) for shell in ("bash", "rbash", "dash", "ksh", "zsh", "fish", "tcsh")}
REFUSED = {
    "nologin": Login("nologin"),
    "false": Login("false"),
    "exits": Login(files={".bashrc": '[ -z "$PS1" ] && exit 0\n'}),
    "execs": Login(files={".bashrc": "exec sh\n"}),
    "mutes": Login(files={".bashrc": "exec >/dev/null\n"}),
    "reads": Login(files={".bashrc": "cat >/dev/null\n"}),
    "reads-line": Login(files={".bashrc": "read -r line\n"}),
    "no-path": Login(files={".bashrc": "export PATH=/nowhere\n"}),
    "no-base64": Login(files={".bashrc": "mkdir -p ~/b; ln -sf /bin/sh ~/b/sh; export PATH=~/b\n"}),
    "waits": Login(files={".bashrc": "printf 'Project? '; echo $$ >>~/pids; exec sleep 40\n"}),
    "lingers": Login(files={".bashrc": "sleep 90 & echo $! >>~/pids\n"}),
    "endless": Login(files={".bashrc": "exec yes welcome\n"}),
}
EVERY = {**PRINTS, **SHELLS, **REFUSED, "file-only": Login(), "few": Login()}
SETTINGS = """\
Match User file-only
    ForceCommand internal-sftp
Match User few
    MaxSessions 2
"""


@dataclass
class Strangers:
    """A machine with these accounts, the user's key to it, and the folder for pods."""

    host: SSHHost
    user: Identity
    root: Path

    def pods(self, login: str, **options: object) -> SSHPods:
        return SSHPods(
            [f"{login}@{self.host.address}"],
            port=self.host.port,
            key=str(self.user.key),
            trust={self.host.address: self.host.fingerprint},
            root=str(self.root),
            **{"python": sys.executable, "connect_timeout_s": 60, **options},  # type: ignore[arg-type]
        )


def strangers(folder: Path, address: str, **options: str) -> Strangers:
    user = Identity.create(folder / "user")
    accounts = {
        name: Login(shutil.which(login.shell) or login.shell, login.files)
        for name, login in EVERY.items()
    }
    prefix = with_accounts(folder / "homes", accounts)
    port = free_port([address])
    host = SSHHost(folder / "host", address, port, user.public_key, prefix=prefix, **options)
    return Strangers(host.start(), user, folder / "pods")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let a login that waits for ever be named soon."""
    login = getattr(request.node, "callspec", None) and request.node.callspec.params.get("login")
    if login == "waits":
        monkeypatch.setattr(connections, "_SESSIONS_S", 10.0)
    if login == "lingers":
        monkeypatch.setattr(channels, "_LINGERS_S", 5.0)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strangers]:
    made = strangers(tmp_path_factory.mktemp("strangers"), "127.0.0.31", settings=SETTINGS)
    yield made
    made.host.stop()
    for file in made.host.folder.parent.glob("homes/*/pids"):
        for pid in file.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def try_files(pod: Pod, identity: Identity, folder: Path) -> None:
    """Try commands and files of both clients."""
    data = os.urandom(70_000)
    there = f"{pod.root}/deep/it's.bin"
    with SSHConnection(pod, identity) as connection:
        done = connection.run(["printf", "%s|", NASTY, ""], stdin=b"not read")
        assert done.stdout == NASTY.replace("\udcff", "\\xff") + "||"
        assert connection.run(["cat"], stdin=b"in").stdout == "in"
        stream = connection.stream(["cat"])
        stream.write(b"asked\n")
        assert stream.read(300) == b"asked\n"
        stream.close()
        connection.put_bytes(data, there)
        assert connection.size(there) == len(data)
        connection.get(there, folder / "back")
        assert (folder / "back").read_bytes() == data
        with pytest.raises(RemoteError, match="none"):
            connection.get(f"{pod.root}/none", folder / "none")
    route = route_to(pod, identity, 300.0)
    send_file(route, folder / "back", f"{there}2", f"{there}.part")
    fetch_file(route, f"{there}2", folder / "again")
    assert (folder / "again").read_bytes() == data


@pytest.mark.parametrize("login", [*PRINTS, *SHELLS])
def test_commands_and_files_pass_any_login(
    there: Strangers, context: LaunchContext, tmp_path: Path, login: str
) -> None:
    if shutil.which(EVERY[login].shell) is None:
        pytest.skip(f"{EVERY[login].shell} is not installed")
    backend = there.pods(login)
    (pod,) = backend.launch(PodSpec(), 1, context)
    try:
        identity = Identity.create(tmp_path / "own")
        identity.pin([pod])
        try_files(pod, identity, tmp_path)
        if login in ("no-end", "tcsh-prints"):
            seen = run_over_openssh(pod, identity, ["echo", "own"], timeout_s=300)
            assert (seen.exit_code, seen.out) == (0, "own\n")
            process, marker = start_ssh(pod, identity, ["echo", "own"])
            out, _ = process.communicate(timeout=300)
            assert out.endswith(f"{marker}\nown\n{marker} end 0\n")
    finally:
        backend.stop()
    assert list(there.root.glob("*")) == []
    assert "tidied" not in backend.logs("pod-0")


@pytest.mark.parametrize(
    ("login", "words"),
    [
        ("nologin", r"login nologin@127.0.0.31 runs no commands.*code 1.*not available.*nologin"),
        (
            "false",
            r"login false@\S+ runs no commands.*exit code 1 and printed nothing.*nologin or false"
            r" \(`getent passwd false` there shows",
        ),
        ("exits", r"login exits@\S+ runs no commands.*exit code 0.*start-up files"),
        ("execs", r"login execs@\S+ runs no commands.*exit code 0.*start another shell"),
        ("mutes", r"login mutes@\S+ runs no commands.*exit code 0.*redirect the output"),
        ("reads", r"start-up files of the login read its standard input"),
        ("reads-line", r"start-up files of the login read its standard input"),
        ("no-path", r"runs no commands.*exit code 127.*PATH"),
        ("no-base64", r"runs no commands.*exit code 127.*base64.*PATH"),
        (
            "waits",
            r"login waits@\S+ started no command in 10 s and printed 'Project\?.*a waiting command",
        ),
        ("lingers", r"\(pod-0\): the login lingers@\S+ .*does not end.*start-up files.*</dev/null"),
        ("endless", r"the login prints without end: 'welcome"),
        ("file-only", r"runs no commands.*one command only"),
        ("few", r"pod-0 .*opens no further session.*MaxSessions 10"),
    ],
)
def test_a_login_that_cannot_serve_is_named_before_anything_is_made(
    there: Strangers,
    context: LaunchContext,
    login: str,
    words: str,
) -> None:
    with pytest.raises((ConfigError, PodError), match=words) as caught:
        there.pods(login).launch(PodSpec(), 1, context)
    assert "python=" not in str(caught.value)
    assert list(there.root.glob("*")) == []


@pytest.mark.parametrize(
    ("login", "advice", "mended"),
    [
        ("exits", "let them do so only with a terminal", "[ -t 0 ] && exit 0\n"),
        ("execs", "let them do so only with a terminal", "[ -t 0 ] && exec sh\n"),
        ("mutes", "let them do so only with a terminal", "[ -t 0 ] && exec >/dev/null\n"),
        ("reads", "COMMAND </dev/null", "cat </dev/null >/dev/null\n"),
        ("reads-line", "COMMAND </dev/null", "read -r line </dev/null\n"),
        ("no-path", "let them add to PATH", "export PATH=/nowhere:$PATH\n"),
        ("waits", "for a waiting command", "[ -t 0 ] && sleep 40\n"),
        (
            "lingers",
            "with </dev/null >/dev/null 2>&1",
            "sleep 90 </dev/null >/dev/null 2>&1 & echo $! >>~/pids\n",
        ),
    ],
)
def test_a_login_serves_once_its_start_up_file_follows_the_advice(
    there: Strangers,
    context: LaunchContext,
    login: str,
    advice: str,
    mended: str,
) -> None:
    backend = there.pods(login)
    with pytest.raises((ConfigError, PodError), match=advice):
        backend.launch(PodSpec(), 1, context)
    file = there.host.folder.parent / "homes" / login / ".bashrc"
    before = file.read_bytes()
    file.write_text(mended)
    try:
        backend.launch(PodSpec(), 1, context)
    finally:
        backend.stop()
        file.write_bytes(before)


def left_host(there: Strangers, context: LaunchContext, tmp_path: Path) -> tuple[Pod, Identity]:
    """Return a host that a cluster has left, and an identity for logins to it."""
    backend = there.pods("bash")
    (pod,) = backend.launch(PodSpec(), 1, context)
    backend.stop()
    key = (there.host.folder / "host_key.pub").read_text().rpartition(" ")[0]
    alone = replace(pod, control="", key=str(there.user.key), host_key=key)
    return alone, Identity.create(tmp_path / "own")


def test_a_stream_through_a_login_that_runs_nothing_says_so(
    there: Strangers, context: LaunchContext, tmp_path: Path
) -> None:
    pod, identity = left_host(there, context, tmp_path)
    identity.pin([pod])
    with SSHConnection(replace(pod, user="nologin"), identity) as connection:
        with pytest.raises(RemoteError, match=r"runs no commands.*nologin"):
            connection.run(["true"])
        with pytest.raises(ConnectionError, match=r"runs no commands.*nologin"):
            connection.stream(["cat"]).read(300)
    identity.pin([replace(pod, user="exits")])
    route = route_to(replace(pod, user="exits"), identity, 60.0)
    with pytest.raises(RemoteError, match=r"runs no commands.*exit code 0"):
        fetch_file(route, "/etc/hostname", tmp_path / "here")


def test_the_doctor_names_a_login_that_runs_nothing(
    there: Strangers, context: LaunchContext, tmp_path: Path
) -> None:
    pod, identity = left_host(there, context, tmp_path)
    changed = replace(pod, user="exits")
    identity.pin([changed])
    (host,) = examine_pods([changed], identity, "/none", PodSpec())
    ssh = host.findings[0]
    assert "runs no commands: it ended with exit code 0" in ssh.detail
    assert "start-up files" in ssh.fix


def test_a_slow_login_is_named_with_its_seconds(
    there: Strangers, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "_SLOW_LOGIN_S", 0.0)
    reports: list[str] = []
    report = LaunchContext(
        cluster_id=context.cluster_id,
        directory=context.directory,
        public_key=context.public_key,
        report=reports.append,
    )
    backend = there.pods("bash")
    backend.launch(PodSpec(), 1, report)
    backend.stop()
    assert any("start-up files of the login take" in line for line in reports)


@pytest.mark.parametrize("others", [b"", b"Welcome\n" * 200, b"last login: ", bytes(range(256))])
@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_output_outside_the_markers_is_dropped_and_quotable(others: bytes, step: int) -> None:
    _, marker = marked(["true"])
    output, own = Output(marker), b"own@\n" + marker + b"\n@workbench-" + marker
    data = others + marker + b"\n" + own + marker + b" end 7\n" + others
    come = b""
    for at in range(0, len(data), step):
        come += output.strip(data[at : at + step])
    assert (come, output.exit_code, output.has_started) == (own, 7, True)
    unstarted = Output(marker)
    assert unstarted.strip(others) == b""
    for each in (output, unstarted):
        assert len(each.words) <= 300
        assert bool(each.words) == bool(others)
        assert "\n" not in each.words
    assert (unstarted.exit_code, unstarted.has_started) == (None, False)


@pytest.mark.parametrize(
    ("said", "code"), [("0", 0), ("255", 255), ("137", -1), ("x", -1), ("9" * 9999, -1)]
)
def test_the_exit_code_of_the_last_line_is_read(said: str, code: int) -> None:
    output = Output(b"@m")
    assert output.strip(f"@m\nown@m end {said}\n".encode()) == b"own"
    assert output.exit_code == code


def test_a_stream_that_ends_without_the_last_line_broke(
    there: Strangers, context: LaunchContext, tmp_path: Path
) -> None:
    pod, identity = left_host(there, context, tmp_path)
    identity.pin([pod])
    with SSHConnection(pod, identity) as connection:
        done = connection.run(["sh", "-c", "echo own; kill -9 $PPID"])
        assert (done.exit_code, done.stdout) == (-1, "own\n")
        assert connection.run(["sh", "-c", "kill -9 $$"]).exit_code == -1


def test_traps_of_a_login_run_to_their_end(
    there: Strangers, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each login starts an agent that its trap ends, after a line on a pipe that someone reads."""
    pod, identity = left_host(there, context, tmp_path)
    own = replace(pod, user="agent")
    for module, name in ((channels, "_TRAPS_S"), (channels, "_LINGERS_S"), (pipes, "_END_S")):
        monkeypatch.setattr(module, name, 300.0)  # a busy machine may need more than the moment
    identity.pin([own])
    home = there.host.folder.parent / "homes" / "agent"
    # Tests before this one left logins to the same account after the ordinary moment.
    earlier = words_of(home / "agents")
    with SSHConnection(own, identity) as connection:
        assert connection.run(["cat"], stdin=b"in").stdout == "in"
        assert connection.run(["sh", "-c", "exit 3"]).exit_code == 3
        stream = connection.stream(["cat"])
        stream.write(b"asked\n")
        assert stream.read(300) == b"asked\n"
        stream.close()
        send_file(route_to(own, identity, 300.0), home / ".bashrc", f"{home}/sent", f"{home}/part")
    agents = words_of(home / "agents") - earlier
    assert len(agents) >= 4
    until(lambda: agents <= words_of(home / "ended"), why=lambda: agents - words_of(home / "ended"))
    until((home / "started").is_file)


def words_of(path: Path) -> set[str]:
    return set(path.read_text().split()) if path.exists() else set()


def test_a_command_ends_with_the_connection(
    there: Strangers, context: LaunchContext, tmp_path: Path
) -> None:
    pod, identity = left_host(there, context, tmp_path)
    late = replace(pod, user="late")
    identity.pin([late])
    with SSHConnection(late, identity) as connection:
        stream = connection.stream(["cat"])
        stream.write(b"asked\n")
        assert stream.read(300) == b"asked\n"
    home = there.host.folder.parent / "homes" / "late"
    until(lambda: with_mark("HOME", [str(home)]) == [])
