"""The advice in messages about hosts is followed, word by word, and the trouble is gone."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.sshhosts import HostsPlace, SSHHost
from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.files.private import cluster_folder
from workbench.base.redact import mask_secrets
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.pod import LaunchContext, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import pdsh_environment, ssh_wrapper

NAMELESS = 1000660000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsPlace]:
    made = HostsPlace(tmp_path_factory.mktemp("there"))
    made.user = Identity.create(made.folder / "user")
    yield made
    made.__exit__()


@pytest.fixture
def host(place: HostsPlace, tmp_path: Path) -> Iterator[SSHHost]:
    with added(place, tmp_path / "host", "127.0.0.9") as made:
        yield made


@contextmanager
def added(place: HostsPlace, folder: Path, address: str, **options: str) -> Iterator[SSHHost]:
    port = free_port([address])
    made = SSHHost(folder, address, port, place.user.public_key, prefix=place.prefix, **options)
    place.hosts.append(made.start())
    yield made
    place.hosts.remove(made)
    made.stop()


class Launch:
    """Starts of a cluster on one host, and their messages."""

    def __init__(self, place: HostsPlace, context: LaunchContext) -> None:
        self._place = place
        self._context = context

    def fails(self, **options: object) -> str:
        with pytest.raises(WorkbenchError) as caught:
            self.works(**options)
        return str(caught.value)

    def works(self, **options: object) -> None:
        host = self._place.hosts[0]
        # A busy machine logs in slowly.
        own = {"hosts": [host.address], "connect_timeout_s": 60}
        given = {**own, **self._place.options, **options}
        backend = SSHPods(**given)  # type: ignore[arg-type]
        try:
            backend.launch(PodSpec(), 1, self._context)
        finally:
            backend.stop()


@pytest.fixture
def launch(place: HostsPlace, host: SSHHost, context: LaunchContext) -> Launch:
    return Launch(place, context)


def carry_out(command: str) -> str:
    """Run a command of a message as a person does, and return its output."""
    done = subprocess.run(
        ["sh", "-ec", command],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return done.stdout + done.stderr


def locked(key: Path, place: HostsPlace) -> None:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(key)]
    subprocess.run(argv, check=True, timeout=300)


def of_windows(key: Path, place: HostsPlace) -> None:
    key.write_bytes(place.user.key.read_bytes().replace(b"\n", b"\r\n"))
    key.chmod(0o600)


def without_an_end(key: Path, place: HostsPlace) -> None:
    key.write_bytes(place.user.key.read_bytes().rstrip(b"\n"))
    key.chmod(0o600)


def indented(key: Path, place: HostsPlace) -> None:
    key.write_bytes(b"\n\n    " + place.user.key.read_bytes().replace(b"\n", b"\n    "))
    key.chmod(0o600)


def of_openssl(key: Path, place: HostsPlace) -> None:
    argv = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(key)]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    key.chmod(0o600)


def open_to_all(key: Path, place: HostsPlace) -> None:
    key.write_bytes(place.user.key.read_bytes())
    key.chmod(0o644)


def foreign(key: Path, place: HostsPlace) -> None:
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(key)], check=True, timeout=300)


@pytest.mark.parametrize(
    ("spoil", "command", "named"),
    [
        (locked, r"a passphrase: (ssh-keygen .*), and add its \.pub", "_workbench"),
        (of_windows, r"Remove them: (sed .*)$", ""),
        (indented, r"Remove them: (sed .*)$", ""),
        (without_an_end, r"Add the end: (echo .*)$", ""),
        (of_openssl, r"needs another key: (ssh-keygen .*), and add its \.pub", "_workbench"),
        (open_to_all, r"run: (chmod .*)$", ""),
        (foreign, "", ""),
    ],
)
def test_a_key_is_mended_by_the_command_in_the_message(
    launch: Launch,
    place: HostsPlace,
    host: SSHHost,
    tmp_path: Path,
    spoil: Callable[[Path, HostsPlace], None],
    command: str,
    named: str,
) -> None:
    key = tmp_path / "it's my key"
    spoil(key, place)
    said = launch.fails(key=str(key))
    if command:
        found = re.search(command, said)
        assert found is not None, said
        carry_out(found[1])
    public = Path(f"{key}{named}.pub")
    if public.exists():
        assert "authorized_keys" in said
        with (host.folder / "authorized_keys").open("a") as accepted:
            accepted.write(public.read_text())
    launch.works(key=f"{key}{named}")


def test_an_unknown_host_key_is_trusted_in_both_ways_of_the_message(
    launch: Launch, host: SSHHost, place: HostsPlace, tmp_path: Path
) -> None:
    said = launch.fails(trust={})
    compare = re.search(r"`(ssh-keygen -lf )/etc/ssh/ssh_host_(\w+)_key\.pub`", said)
    assert compare is not None and compare[2] == host.key_type
    shown = carry_out(f"{compare[1]}{shlex.quote(str(host.folder / 'host_key.pub'))}")
    assert shown.split()[1] == host.fingerprint
    given = re.search(r"SSHPods\(…, trust=(\{.*?\})\)", said)
    assert given is not None and host.fingerprint in given[1]
    launch.works(trust=eval(given[1]))

    assert says(said, "log in there once with ssh to note the key")
    known = tmp_path / "known"
    argv = ["ssh", "-F", "none", "-i", str(place.user.key), "-p", str(host.port)]
    # In place of a person's "yes".
    argv += ["-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=accept-new"]
    subprocess.run([*argv, host.address, "true"], check=True, timeout=300, capture_output=True)
    launch.works(trust={}, known_hosts=str(known))


def test_the_command_for_a_refused_login_shows_the_keys(
    launch: Launch, host: SSHHost, place: HostsPlace, tmp_path: Path
) -> None:
    key = tmp_path / "mine"
    foreign(key, place)
    known = tmp_path / "known"
    known.write_text(f"[{host.address}]:{host.port} {(host.folder / 'host_key.pub').read_text()}")
    config = tmp_path / "my config"
    config.write_text(
        f"Host lab\n  HostName {host.address}\n  Port {host.port}\n  IdentityFile {key}\n"
        f"  UserKnownHostsFile {known}\n"
    )
    said = launch.fails(hosts=["lab"], ssh_config=str(config), key="", port=22)
    command = re.search(r"`(ssh -v .*?)` in a terminal", said)
    assert command is not None, said
    shown = carry_out(f"{command[1]} || true")
    assert f"Offering public key: {key} " in shown


@pytest.mark.parametrize(
    ("few", "words", "enough"),
    [
        ("MaxSessions 2", "set (MaxSessions 10) in its sshd_config", ""),
        # docs/errors.md
        (
            "KexAlgorithms diffie-hellman-group1-sha1",
            "no matching key exchange method found",
            "KexAlgorithms +curve25519-sha256",
        ),
    ],
)
def test_a_daemon_serves_after_the_advised_line(
    launch: Launch, host: SSHHost, few: str, words: str, enough: str
) -> None:
    before = (host.folder / "sshd_config").read_text()
    configure(host, before, few)
    found = re.search(words, launch.fails())
    assert found is not None
    configure(host, before, enough or found[1])
    launch.works()


def test_a_daemon_on_loopback_with_one_key_exchange_serves(launch: Launch, host: SSHHost) -> None:
    before = (host.folder / "sshd_config").read_text()
    configure(host, before, "KexAlgorithms sntrup761x25519-sha512@openssh.com")
    launch.works()


def configure(host: SSHHost, before: str, line: str) -> None:
    """Add a line to the configuration of a daemon, and wait until the daemon has read the file."""
    starts = host.log.count("Server listening")
    text = before.replace("LogLevel VERBOSE", f"LogLevel VERBOSE\n{line}")
    (host.folder / "sshd_config").write_text(text)
    host.process.send_signal(1)
    until(lambda: host.log.count("Server listening") > starts)


def test_a_circle_of_jump_hosts_ends_with_the_advised_line(
    launch: Launch, host: SSHHost, place: HostsPlace, tmp_path: Path
) -> None:
    with added(place, tmp_path / "jump", "127.0.0.6", forwarding="yes") as jump:
        end_circle(launch, {"lab": host, "jump": jump}, place, tmp_path)


def end_circle(
    launch: Launch, hosts: dict[str, SSHHost], place: HostsPlace, tmp_path: Path
) -> None:
    known = tmp_path / "known"
    text = f"IdentityFile {place.user.key}\nUserKnownHostsFile {known}\n"
    for each in hosts.values():
        public = (each.folder / "host_key.pub").read_text()
        with known.open("a") as file:
            file.write(f"[{each.address}]:{each.port} {public}")
    for name, each in hosts.items():
        text += f"Host {name}\n  HostName {each.address}\n  Port {each.port}\n"
    config = tmp_path / "config"
    options = {"hosts": ["lab"], "ssh_config": str(config), "key": "", "port": 22}
    circle = "Host *\n  ProxyJump jump\n"
    config.write_text(text + circle)
    assert "leads in a circle" in launch.fails(**options)
    config.write_text(f"{text}  ProxyJump none\n{circle}")  # of the entry `jump`; docs/errors.md
    launch.works(**options)


@pytest.mark.parametrize("home", ["with blank", "100%h", 'a"b', "a:b", "$x"])
def test_a_path_that_a_launcher_cannot_use_is_left_by_the_advised_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    def use() -> None:
        identity = Identity.create(cluster_folder(tmp_path / "cluster") / "identity")
        pdsh_environment(identity)
        ssh_wrapper(identity, [Pod(name="pod-0")])

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / home))
    with pytest.raises(WorkbenchError, match="set XDG_STATE_HOME to"):
        use()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "plain"))
    use()


SAME = "Host a b\n  HostName 10.0.0.1\n"
BEHIND = "Host gate\n  HostName 10.0.0.1\nHost a b\n  HostName localhost\n  ProxyJump gate\n"
OWN = [{"address": name, "internal_address": f"10.0.0.{n}"} for n, name in enumerate("ab", 5)]
NO_KEY = sentence("or ssh_config=True to use your ssh configuration")
KEYED = {"key": "k"}


@pytest.mark.parametrize(
    ("config", "refused", "words", "advised"),
    [
        ("", {"hosts": ["a"]}, NO_KEY, {"hosts": ["a"], "key": "k"}),
        ("", {"hosts": ["a"]}, NO_KEY, {"hosts": [{"address": "a", "key": "k"}]}),
        ("", {"hosts": ["a"]}, NO_KEY, {"hosts": ["a"], "ssh_config": "config"}),
        (
            "",
            {"hosts": ["lab/a"], **KEYED},
            sentence("a name in your ssh configuration needs ssh_config=True"),
            {"hosts": [{"address": "lab/a", "internal_address": "a"}], "ssh_config": "config"},
        ),
        (
            "",
            {"hosts": ["a", "a"], **KEYED},
            sentence("with slots for the number of ranks"),
            {"hosts": [{"address": "a", "slots": 2}], **KEYED},
        ),
        (
            SAME,
            {"hosts": ["a", "b"], "ssh_config": "config"},
            sentence("Name each host with its own address between the hosts"),
            {"hosts": OWN, "ssh_config": "config"},
        ),
        (
            BEHIND,
            {"hosts": ["a", {**OWN[1]}], "ssh_config": "config"},
            sentence("Name the host with its address between the hosts"),
            {"hosts": OWN, "ssh_config": "config"},
        ),
        (
            "",
            {"hosts": ["a"], "jump": {"address": "b", "slots": 2}, **KEYED},
            sentence("and no ranks run on a jump host"),
            {"hosts": ["a"], "jump": {"address": "b"}, **KEYED},
        ),
        (
            "",
            {"hosts": ["a"], "root": "$SCRATCH/x", **KEYED},
            sentence("it must be a path on the hosts that begins with / or ~/"),
            {"hosts": ["a"], "root": "~/x", **KEYED},
        ),
        (
            "",
            {"hosts": ["::1:22"], **KEYED},
            sentence('write "name" or "user@name:port'),
            {"hosts": ["[::1]:22"], **KEYED},
        ),
        (
            "",
            {"hosts": [7], **KEYED},
            sentence('user@name:port" or {"address'),
            {"hosts": ["ada@a:22", {"address": "b", "port": 22}], **KEYED},
        ),
    ],
)
def test_options_are_accepted_as_the_message_asks_for_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    refused: dict[str, object],
    words: str,
    advised: dict[str, object],
) -> None:
    def use(options: dict[str, object]) -> None:
        backend = SSHPods(**options)  # type: ignore[arg-type]
        backend.hosts_for(len(backend.hosts))

    monkeypatch.chdir(tmp_path)
    Path("config").write_text(config)
    with pytest.raises(ConfigError, match=words):
        use(refused)
    use(advised)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, for another user id"
)
def test_a_user_without_a_name_has_one_after_the_advised_line() -> None:
    program = (
        "import os; from workbench.pods.ssh.identity import nameless; os.setgid(0);"
        f" os.setuid({NAMELESS}); print(nameless('ssh'))"
    )
    inside = (
        'mount --make-rprivate /; cat /etc/passwd - > "$1/passwd"; chmod 644 "$1/passwd"; '
        'mount --bind "$1/passwd" /etc/passwd; rm -r "$1"; shift; exec "$@"'
    )
    user = ["setpriv", "--reuid", str(NAMELESS), "--regid", "0", "--clear-groups"]

    def as_user(lines: str, *argv: str) -> str:
        folder = subprocess.run(["mktemp", "-d"], capture_output=True, text=True).stdout.strip()
        words = ["unshare", "--mount", "sh", "-ec", inside, "sh", folder, *argv]
        done = subprocess.run(words, input=lines, capture_output=True, text=True, timeout=300)
        shutil.rmtree(folder, ignore_errors=True)
        return done.stdout + done.stderr

    ask = [*user, "ssh", "-G", "-F", "none", "127.0.0.1"]
    assert "No user exists" in as_user("", *ask)
    said = as_user("", sys.executable, "-c", program)
    # As people see it: the line is no secret.
    line = mask_secrets(said).strip().rpartition("to /etc/passwd: ")[2]
    assert line.startswith(f"workbench:x:{NAMELESS}:"), said
    assert "hostname 127.0.0.1" in as_user(f"{line}\n", *ask)
