"""What `ssh HOST` does in a terminal, `SSHPods` does: people's ssh configurations, real daemons."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.sshhosts import HostsPlace, SSHHost
from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError, PodError, PodTimeout, RemoteError, WorkbenchError
from workbench.base.process import live_descendants
from workbench.keeper.fleet import Fleet
from workbench.pods.hosts.certificates import ended, ending_soon, ends
from workbench.pods.hosts.names import Host, read_host, resolved, with_hops
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh import master
from workbench.pods.ssh.bulk.transfer import fetch_file, route_to
from workbench.pods.ssh.child import stands
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.master import Master
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec

SECURITY_KEY = Path(__file__).parents[1] / "fakes" / "securitykey.c"


@dataclass
class Site:
    """A machine of this test, two that let others through, and files of a user."""

    folder: Path
    place: HostsPlace
    host: SSHHost
    hops: list[SSHHost]

    @property
    def key(self) -> Path:
        return self.place.user.key

    @property
    def known(self) -> Path:
        """A known_hosts file with the keys of all machines."""
        file = self.folder / "known hosts"
        if not file.exists():
            lines = []
            for host in (self.host, *self.hops):
                public = (host.folder / "host_key.pub").read_text()
                lines.append(f"[{host.address}]:{host.port} {public}")
            file.write_text("".join(lines))
        return file

    def entry(self, name: str, host: SSHHost, more: str = "") -> str:
        return f"Host {name}\n  HostName {host.address}\n  Port {host.port}\n{more}"

    def config(self, text: str, *, key: bool = True, known: bool = True) -> Path:
        """Write a configuration that a person could have."""
        common = "Host *\n  StrictHostKeyChecking accept-new\n"
        common += f"  IdentityFile {self.key}\n" if key else ""
        common += f'  UserKnownHostsFile "{self.known}"\n' if known else ""
        (self.folder / "config").write_text(text + common)
        return self.folder / "config"

    def backend(self, name: str, config: Path, **options: object) -> SSHPods:
        options = {"python": self.place.python, "root": str(self.place.root), **options}
        options.setdefault("connect_timeout_s", 60)  # a busy machine's chain of logins
        return SSHPods([name], ssh_config=str(config), **options)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsPlace]:
    with HostsPlace(tmp_path_factory.mktemp("there")) as made:
        port = made.hosts[0].port
        for address in ("127.0.0.6", "127.0.0.7"):
            made.add(address, port, forwarding="yes")
        yield made


@pytest.fixture
def site(there: HostsPlace, tmp_path: Path) -> Site:
    return Site(tmp_path, there, there.hosts[0], there.hosts[3:5])


def new_key(path: Path, *options: str) -> Path:
    # Of two types, the last counts.
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-f", str(path), *(options or ("-N", ""))]
    subprocess.run(argv, check=True, timeout=300)
    return path


def two_keys(site: Site) -> Path:
    new_key(site.folder / "old")
    new_key(site.folder / "locked", "-N", "secret")
    files = "".join(f"  IdentityFile {site.folder}/{name}\n" for name in ("old", "locked", "none"))
    return site.config(site.entry("lab", site.host, files))


def token(site: Site) -> Path:
    (site.folder / f"id_{site.host.address}").symlink_to(site.key)
    return site.config(
        site.entry("lab", site.host, f"  IdentityFile {site.folder}/id_%h\n"), key=False
    )


@pytest.mark.parametrize(
    ("more", "words", "advises"),
    [
        (
            "  UserKnownHostsFile none\n",
            sentence("The ssh configuration notes no keys (UserKnownHostsFile", "none"),
            True,
        ),
        ("  RevokedHostKeys {revoked}\n", sentence("as revoked; nothing was sent there"), False),
    ],
)
def test_a_host_key_that_no_file_vouches_for_is_named_and_never_believed(
    site: Site, context: LaunchContext, more: str, words: str, advises: bool
) -> None:
    revoked = site.host.folder / "host_key.pub"
    config = site.config(site.entry("lab", site.host, more.format(revoked=revoked)))
    with pytest.raises(WorkbenchError, match=words) as caught:
        site.backend("lab", config).launch(PodSpec(), 1, context)
    assert ("trust=" in str(caught.value)) == advises


def test_more_keys_than_a_host_takes_need_the_right_ones_name(
    site: Site, context: LaunchContext
) -> None:
    files = "".join(f"  IdentityFile {new_key(site.folder / f'k{n}')}\n" for n in range(7))
    config = site.config(site.entry("lab", site.host, files))
    with pytest.raises(PodError, match=sentence("Name the right key: SSHPods(key=PATH)")):
        site.backend("lab", config).launch(PodSpec(), 1, context)
    backend = site.backend("lab", config, key=str(site.key))
    backend.launch(PodSpec(), 1, context)
    backend.stop()


of_root = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of a user ends otherwise")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            "ChrootDirectory /nowhere",
            sentence("runs no commands", "safely_chroot"),
            marks=of_root,
        ),
        pytest.param(
            # The parent of a session whose daemon has ended is the machine's first process.
            "ForceCommand grep -q sshd /proc/$PPID/comm && kill -9 $PPID",
            sentence("the host let us in and then ended the connection", "closed by remote host"),
            marks=of_root,
        ),
        (
            "AuthenticationMethods publickey,keyboard-interactive",
            sentence("The host asks for a password or a code"),
        ),
    ],
    ids=["chroot", "ends", "second-factor"],
)
def test_a_host_that_wants_more_than_a_key_or_ends_the_login_is_named(
    site: Site, context: LaunchContext, settings: str, words: str
) -> None:
    host = SSHHost(
        site.folder / "strict",
        "127.0.0.8",
        site.host.port,
        site.place.user.public_key,
        prefix=site.place.prefix,
        questions="yes",
        settings=settings,
    ).start()
    try:
        trust = {"lab": host.fingerprint}
        config = site.config(site.entry("lab", host))
        with pytest.raises(PodError, match=words):
            site.backend("lab", config, trust=trust).launch(PodSpec(), 1, context)
    finally:
        host.stop()


def chain(site: Site) -> Path:
    first, second = site.hops
    return site.config(
        site.entry("lab", site.host, "  ProxyJump one,two\n")
        + site.entry("one", first)
        + site.entry("two", second)
    )


def command(site: Site) -> Path:
    way = f"ssh -F {site.folder}/config -W %h:%p one"
    return site.config(
        site.entry("lab", site.host, f"  ProxyCommand {way}\n") + site.entry("one", site.hops[0])
    )


def match(site: Site) -> Path:
    return site.config(
        f'Match originalhost lab exec "test -d {site.folder}"\n  HostName {site.host.address}\n'
        f"  Port {site.host.port}\n"
    )


def alias_of_key(site: Site) -> Path:
    public = (site.host.folder / "host_key.pub").read_text()
    site.known.write_text(f"the-lab {public}")
    return site.config(site.entry("lab", site.host, "  HostKeyAlias the-lab\n"))


def strict(site: Site) -> Path:
    """Options of a configuration that would end, detach or change the connection."""
    more = "  ControlMaster auto\n  ControlPath ~/cm-%C\n  ControlPersist 10m\n"
    more += "  RemoteCommand echo hi\n  RequestTTY yes\n  LogLevel QUIET\n"
    more += "  LocalForward 127.0.0.1:1 127.0.0.1:1\n  ExitOnForwardFailure yes\n"
    return site.config(site.entry("lab", site.host, more))


def machine_wide(site: Site) -> Path:
    more = f'  GlobalKnownHostsFile "{site.known}"\n  UserKnownHostsFile /dev/null\n'
    return site.config(site.entry("lab", site.host, more), known=False)


CONFIGURATIONS: dict[str, tuple[str, Callable[[Site], Path]]] = {
    "several identity files": ("lab", two_keys),
    "token in a name": ("lab", token),
    "two jump hosts": ("lab", chain),
    "ProxyCommand": ("lab", command),
    "Match exec": ("lab", match),
    "HostKeyAlias": ("lab", alias_of_key),
    "known hosts of the machine": ("lab", machine_wide),
    "capital letters": ("GPU-1", lambda site: site.config(site.entry("GPU-1", site.host))),
    "underscore": ("gpu_1", lambda site: site.config(site.entry("gpu_1", site.host))),
    "slash": ("lab/gpu1", lambda site: site.config(site.entry("lab/gpu1", site.host))),
    "other letters": ("größe", lambda site: site.config(site.entry("größe", site.host))),
    "marks": ("#gpu=1~!%", lambda site: site.config(site.entry('"#gpu=1~!%"', site.host))),
    "patterns": ("^a*[1]?+", lambda site: site.config(site.entry("^a*[1]?+", site.host))),
    "digits": ("1080", lambda site: site.config(site.entry("1080", site.host))),
    "options that change the connection": ("lab", strict),
}


def try_login(backend: SSHPods, context: LaunchContext, folder: Path) -> Pod:
    """Launch, run a command, and stop."""
    try:
        (pod,) = backend.launch(PodSpec(), 1, context)
        identity = Identity.create(folder / "own")
        identity.pin([pod])
        with SSHConnection(pod, identity) as connection:
            assert connection.run(["echo", "in"]).stdout == "in\n"
        return pod
    finally:
        backend.stop()


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_configuration_leads_where_ssh_leads(
    site: Site, context: LaunchContext, tmp_path: Path, kind: str
) -> None:
    name, write = CONFIGURATIONS[kind]
    config = write(site)
    known = site.known.read_bytes()
    pod = try_login(site.backend(name, config), context, tmp_path)
    assert (pod.address, pod.ssh_port) == (site.host.address, site.host.port)
    assert site.known.read_bytes() == known


def test_every_alias_is_used_that_openssh_takes_and_others_are_refused_in_its_words(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  HostName 10.0.0.1\n")
    taken = ""
    for mark in map(chr, range(32, 127)):
        name = f"gpu{mark}1"
        argv = ["ssh", "-F", str(config), "-G", "--", name]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
        if mark == "@":  # the word before is an account
            continue
        host = {"address": name}
        if done.returncode == 0:
            (found,) = SSHPods([host], ssh_config=config).hosts_for(1)
            assert (found.address, found.between) == (name, "10.0.0.1")
            assert read_host(found.written).address == name
            taken += mark
        else:
            with pytest.raises(ConfigError, match=r"invalid characters|not an IP address"):
                SSHPods([host], ssh_config=config).hosts_for(1)
    assert set("=~#!%:*?[]^+/_") <= set(taken)


def test_the_aliases_of_a_hostfile_are_names_of_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host gpu_1\n  HostName 10.0.0.1\nHost gpu=2\n  HostName 10.0.0.2\n")
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("gpu_1 slots=2\ngpu=2 slots=4 # the large one\n")
    hosts = SSHPods(hostfile=hostfile, ssh_config=config).hosts_for(2)
    assert [(host.between, host.slots) for host in hosts] == [("10.0.0.1", 2), ("10.0.0.2", 4)]
    with pytest.raises(ConfigError, match=sentence("no _ stands in a host name")):
        SSHPods(hostfile=hostfile)


def test_a_host_name_that_no_launcher_carries_is_an_ip_address_between_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"gpu_1.lab": "10.0.0.1", "gpu-2.lab.": "10.0.0.2"}

    def look_up(name: str, *_: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    config = tmp_path / "config"
    config.write_text("Host a\n  HostName gpu_1.lab\nHost b\n  HostName gpu-2.lab.\n")
    hosts = SSHPods(["a", "b"], ssh_config=config).hosts_for(2)
    assert [host.between for host in hosts] == ["10.0.0.1", "10.0.0.2"]
    assert [host.reached for host in hosts] == ["gpu_1.lab", "gpu-2.lab."]
    with pytest.raises(ConfigError, match=sentence("no _ stands in a host name")):
        SSHPods(["gpu_3"], ssh_config=config).hosts_for(1)


def test_an_address_of_ssh_is_read_as_ssh_reads_it() -> None:
    (host,) = SSHPods(["ssh://ada@gpu-1:2222"]).hosts
    assert (host.user, host.address, host.port) == ("ada", "gpu-1", 2222)


@pytest.mark.parametrize("jump", [False, True])
def test_no_unknown_key_is_noted_or_accepted_even_where_the_configuration_would(
    site: Site, context: LaunchContext, jump: bool
) -> None:
    way = "  ProxyJump one\n" if jump else ""
    unknown = site.hops[0] if jump else site.host
    config = site.config(site.entry("lab", site.host, way) + site.entry("one", site.hops[0]))
    lines = site.known.read_text().splitlines(keepends=True)
    site.known.write_text("".join(line for line in lines if f"[{unknown.address}]" not in line))
    known = site.known.read_bytes()
    with pytest.raises(PodError, match=sentence("either give SSHPods(…", unknown.fingerprint)):
        site.backend("lab", config).launch(PodSpec(), 1, context)
    assert site.known.read_bytes() == known
    trust = {"one" if jump else "lab": unknown.fingerprint}
    try_login(site.backend("lab", config, trust=trust), context, site.folder)
    assert site.known.read_bytes() == known


def test_the_fingerprint_of_a_jump_host_is_asked_at_the_port_of_proxyjump(
    site: Site, context: LaunchContext
) -> None:
    hop = site.hops[0]
    account = pwd.getpwuid(os.geteuid()).pw_name
    lines = site.known.read_text().splitlines(keepends=True)
    site.known.write_text("".join(line for line in lines if f"[{hop.address}]" not in line))
    way = f"  ProxyJump {account}@{hop.address}:{hop.port}\n"
    config = site.config(site.entry("lab", site.host, way))
    with pytest.raises(PodError) as caught:
        site.backend("lab", config).launch(PodSpec(), 1, context)
    assert f'trust={{"{hop.address}": "{hop.fingerprint}"}}' in str(caught.value)
    try_login(
        site.backend("lab", config, trust={hop.address: hop.fingerprint}), context, site.folder
    )


@pytest.mark.parametrize(
    ("way", "hops"),
    [
        ("bob@g1:2222,[::1]:443,g3", [("g1", "bob", 2222), ("::1", "", 443), ("g3", "", 0)]),
        ("ssh://bob@g1:2222", [("g1", "bob", 2222)]),
        ("my_gate", [("my_gate", "", 0)]),
        ("none", []),
    ],
)
def test_the_hosts_of_proxyjump_are_read_with_accounts_and_ports(
    tmp_path: Path, way: str, hops: list[tuple[str, str, int]]
) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host lab\n  HostName 10.0.0.1\n  ProxyJump {way}\n")
    found = resolved(Host(address="lab"), ["-F", str(config)])
    assert [(hop.address, hop.user, hop.port) for hop in found.hops] == hops
    assert found.is_behind is bool(hops)


def test_an_agent_of_the_notebooks_environment_logs_in(
    site: Site, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")])
    try:
        until(lambda: stands(tmp_path / "agent"))
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        subprocess.run(["ssh-add", "-q", str(site.key)], check=True, timeout=300)
        config = site.config(site.entry("lab", site.host, "  IdentityFile ~/none\n"), key=False)
        try_login(site.backend("lab", config), context, tmp_path)
        subprocess.run(["ssh-add", "-q", "-D"], check=True, timeout=300)
        with pytest.raises(PodError, match=sentence("` in a terminal shows which keys ssh tried")):
            site.backend("lab", config).launch(PodSpec(), 1, context)
    finally:
        agent.kill()
        agent.wait(300)


def test_every_key_file_that_lets_nobody_in_is_named_with_its_reason(
    site: Site, context: LaunchContext, tmp_path: Path
) -> None:
    new_key(tmp_path / "other", "-t", "ed25519", "-N", "")
    new_key(tmp_path / "locked", "-t", "ed25519", "-N", "a word")
    files = f"  IdentityFile {tmp_path}/other\n  IdentityFile {tmp_path}/locked\n"
    config = site.config(site.entry("lab", site.host, files), key=False)
    with pytest.raises(PodError) as refused:
        site.backend("lab", config).launch(PodSpec(), 1, context)
    assert says(f"{refused.value}", "the account does not accept the key {}", f"{tmp_path}/other")
    assert says(f"{refused.value}", "the key {} has a passphrase", f"{tmp_path}/locked")


@pytest.fixture
def security_key(site: Site, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Give a security key with its library, and the file that stands for a touch of it."""
    if shutil.which("cc") is None:
        pytest.skip("needs a compiler, for a security key in software")
    touch, library, key = tmp_path / "touch", tmp_path / "key.so", tmp_path / "id_ed25519_sk"
    argv = ["cc", "-shared", "-fPIC", f'-DTOUCH="{touch}"', "-o", str(library), str(SECURITY_KEY)]
    subprocess.run(argv, check=True, timeout=300)
    new_key(key, "-t", "ed25519-sk", "-N", "", "-w", str(library))
    accepted = site.host.folder / "authorized_keys"
    before = accepted.read_text()
    accepted.write_text(before + key.with_suffix(".pub").read_text())
    yield library, touch
    accepted.write_text(before)


@pytest.mark.parametrize("named", ["{library}", "$LAB_KEY_LIBRARY"])
def test_a_security_key_logs_in_and_is_named_while_it_waits_for_a_touch(
    site: Site,
    context: LaunchContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    security_key: tuple[Path, Path],
    named: str,
) -> None:
    library, touch = security_key
    monkeypatch.setenv("LAB_KEY_LIBRARY", str(library))
    more = f"  IdentityFile {tmp_path}/id_ed25519_sk\n  IdentityAgent none\n"
    more += f"  SecurityKeyProvider {named.format(library=library)}\n"
    config = site.config(site.entry("lab", site.host, more), key=False)
    # Without a touch; a busy machine takes seconds until ssh asks for it.
    with pytest.raises(PodTimeout, match="Confirm user presence for key ED25519-SK SHA256:"):
        site.backend("lab", config, connect_timeout_s=12).launch(PodSpec(), 1, context)
    # With a touch once the panel asks for one.
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if says(line, "ssh waits for a touch of your security key."):
            touch.touch()

    asked = replace(context, report=report)
    try_login(site.backend("lab", config), asked, tmp_path)
    assert sum(says(line, "ssh waits for a touch of your security key.") for line in lines) == 1


def test_a_security_key_that_is_not_there_is_named_with_what_it_needs(
    site: Site, context: LaunchContext, tmp_path: Path, security_key: tuple[Path, Path]
) -> None:
    library, touch = security_key
    touch.touch()
    more = f"  IdentityFile {tmp_path}/id_ed25519_sk\n  IdentityAgent none\n"
    for missing in ("", f"  SecurityKeyProvider {tmp_path}/none.so\n"):
        config = site.config(site.entry("lab", site.host, more + missing), key=False)
        with pytest.raises(PodError) as caught:
            site.backend("lab", config).launch(PodSpec(), 1, context)
        assert says(caught.value, "Plug the key into this machine")
        assert "signing failed for ED25519-SK" in str(caught.value)
    # The advice.
    config = site.config(
        site.entry("lab", site.host, f"{more}  SecurityKeyProvider {library}\n"), key=False
    )
    try_login(site.backend("lab", config), context, tmp_path)


@pytest.fixture
def authority(tmp_path: Path, there: HostsPlace) -> Iterator[tuple[Path, SSHHost]]:
    """Give an authority for users and hosts, and a machine that believes it and is signed by it."""
    ca = new_key(tmp_path / "ca")
    host = SSHHost(
        tmp_path / "signed",
        "127.0.0.8",
        there.hosts[0].port,
        "",
        settings=f"TrustedUserCAKeys {ca}.pub\nHostCertificate {tmp_path}/signed/host_key-cert.pub",
        prefix=there.prefix,
    )
    host.start()
    sign = ["ssh-keygen", "-q", "-s", str(ca), "-I", "host", "-h", "-n", host.address]
    subprocess.run([*sign, str(tmp_path / "signed" / "host_key.pub")], check=True, timeout=300)
    host.process.send_signal(1)  # its certificate is there now
    until(lambda: host.log.count("Server listening") > 1)
    yield ca, host
    host.stop()


def sign(ca: Path, key: Path, validity: str, target: Path | None = None) -> Path:
    """Sign a user's key for an account, and return the certificate."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    argv = ["ssh-keygen", "-q", "-s", str(ca), "-I", "ada", "-n", user, "-V", validity]
    subprocess.run([*argv, f"{key}.pub"], check=True, timeout=300)
    made = key.with_name(key.name + "-cert.pub")
    return made.rename(target) if target else made


@pytest.mark.parametrize("beside", [True, False])
def test_certificates_of_users_and_of_hosts(
    site: Site,
    authority: tuple[Path, SSHHost],
    context: LaunchContext,
    tmp_path: Path,
    beside: bool,
) -> None:
    ca, host = authority
    key = new_key(tmp_path / "mine")
    certificate = sign(ca, key, "-1h:+2h", None if beside else tmp_path / "elsewhere.pub")
    site.known.write_text(f"@cert-authority * {Path(f'{ca}.pub').read_text()}")
    more = f"  IdentityFile {key}\n" + ("" if beside else f"  CertificateFile {certificate}\n")
    config = site.config(site.entry("lab", host, more), key=False)
    reports: list[str] = []
    told = LaunchContext(
        cluster_id="test",
        directory=context.directory,
        public_key=context.public_key,
        report=reports.append,
    )
    try_login(site.backend("lab", config), told, tmp_path)
    if beside:
        assert any(f"the certificate {certificate} ends at 20" in line for line in reports), reports
        sign(ca, key, "-2h:-1h")
        with pytest.raises(PodError, match=sentence("the certificate {} ended at", certificate)):
            site.backend("lab", config).launch(PodSpec(), 1, context)
        # A damaged certificate is named, and the whole one there again logs in.
        whole = sign(ca, key, "-1h:+2h").read_text()
        certificate.write_text(whole[:200])
        with pytest.raises(
            PodError, match=sentence("ssh cannot read the certificate", certificate)
        ):
            site.backend("lab", config).launch(PodSpec(), 1, context)
        certificate.write_text(whole)
        again = tmp_path / "again"
        again.mkdir()
        try_login(site.backend("lab", config), context, again)


@pytest.mark.parametrize(
    ("validity", "has_end"),
    [
        ("-1h:+2h", True),
        ("always:20300101", True),
        ("20200101:forever", False),
        ("always:forever", False),
    ],
)
def test_a_certificate_has_an_end_or_none(tmp_path: Path, validity: str, has_end: bool) -> None:
    key = new_key(tmp_path / "mine")
    file = sign(new_key(tmp_path / "ca"), key, validity)
    words = ["-F", "none", "-o", f"IdentityFile={key}", "--", "127.0.0.1"]
    assert list(ends([words])) == ([str(file)] if has_end else [])
    assert ended(words) == ""


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole.replace(b"A", b"", 1),
        lambda whole: b"\n".join(whole[at : at + 64] for at in range(0, len(whole), 64)),
        lambda whole: whole.partition(b" ")[2],
        lambda whole: b"ssh-ed25519 AAAA mine\n",
        lambda _whole: b"",
        lambda _whole: b"\n",
        lambda _whole: bytes(range(256)),
        lambda whole: whole.decode().encode("utf-16"),
    ],
)
def test_a_damaged_certificate_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    key = new_key(tmp_path / "mine")
    file = sign(new_key(tmp_path / "ca"), key, "-1h:+2h")
    words = ["-F", "none", "-o", f"IdentityFile={key}", "--", "127.0.0.1"]
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert ends([words]) == {str(file): None}
    assert says(ended(words), "ssh cannot read the certificate", file)
    (line,) = ending_soon([words])
    assert says(line, "ssh cannot read the certificate", file)
    # Either advice ends it.
    file.write_bytes(whole)
    assert list(ends([words]).values()) != [None]
    assert ended(words) == ""
    file.unlink()
    assert ends([words]) == {}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """Give the socket of an agent without keys."""
    socket = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    until(lambda: stands(socket))
    yield socket
    process.kill()
    process.wait(300)


def hand_over(agent: Path, key: Path) -> None:
    """Give a key and the certificate beside it to an agent alone."""
    environment = {**os.environ, "SSH_AUTH_SOCK": str(agent)}
    subprocess.run(["ssh-add", "-q", str(key)], check=True, timeout=300, env=environment)
    key.unlink()
    Path(f"{key}-cert.pub").unlink()


def test_a_certificate_of_an_agent_is_named_with_its_hour(
    site: Site,
    authority: tuple[Path, SSHHost],
    context: LaunchContext,
    tmp_path: Path,
    agent: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ca, host = authority
    key = new_key(tmp_path / "mine")
    copy = tmp_path / "copy-cert.pub"
    copy.write_text(sign(ca, key, "-1h:+2h").read_text().replace("\n", " with a comment\n"))
    hand_over(agent, key)
    site.known.write_text(f"@cert-authority * {Path(f'{ca}.pub').read_text()}")
    more = f"  IdentityAgent {agent}\n"
    config = site.config(site.entry("lab", host, f"{more}  IdentityFile ~/none\n"), key=False)
    reports: list[str] = []
    told = replace(context, report=reports.append)
    try_login(site.backend("lab", config), told, tmp_path)
    assert any("the certificate 'ada' of the agent ends at 20" in line for line in reports), reports
    # An agent that ssh does not ask, or asks for keys of files alone, has no certificate to name.
    other = new_key(tmp_path / "other")
    only = ["-F", str(config), "-o", f"IdentityFile={other}", "-o", "IdentitiesOnly=yes"]
    assert ends([[*only, "--", "lab"]]) == {}
    assert ends([["-F", "none", "--", "lab"]]) == {}
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    assert list(ends([["-F", "none", "--", "lab"]])) == ["'ada' of the agent"]
    assert ends([["-F", "none", "-o", "IdentityAgent=none", "--", "lab"]]) == {}
    both = ["-F", "none", "-o", f"CertificateFile={copy}", "-o", "IdentityFile=~no-account/k"]
    assert list(ends([[*both, "--", name] for name in ("lab", "lab-2")])) == [str(copy)]


@pytest.mark.parametrize(
    ("lines", "hops"),
    [
        ("ProxyJump ada@one:2200,two", ["one", "two"]),
        ("ProxyJump ssh://ada@one:2200", ["one"]),
        ("ProxyJump ada@[::1]:2200", ["::1"]),
        ("ProxyCommand ssh -q ada@one -W %h:%p", ["ada@one"]),
        ("ProxyCommand exec ssh -W%h:%p one", ["one"]),
        ("ProxyCommand /usr/bin/ssh -W [%h]:%p one", ["one"]),
        ("ProxyCommand nc -X 5 -x proxy:1080 %h %p", []),
        ("ProxyCommand cloudflared access ssh --hostname %h", []),
        ("ProxyCommand none", []),
    ],
)
def test_the_hosts_on_the_way_are_found_however_they_are_written(
    tmp_path: Path, lines: str, hops: Sequence[str]
) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host lab\n  {lines}\n")
    found = with_hops([["-F", str(config), "--", "lab"]])
    assert [words[-1] for words, _ in found] == ["lab", *hops]


@pytest.mark.parametrize(
    ("prints", "words"),
    [("", "no answer in 10 s"), ("Please wait", "no answer in 10 s; ssh says: Please wait")],
)
def test_a_login_that_is_ended_at_the_limit_is_named_with_the_limit(
    tmp_path: Path, prints: str, words: str
) -> None:
    """The words of what ends ssh, Terminated, are not those of the login."""
    program = master.wrapper_of(tmp_path / "s")
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho {prints} >&2\nexec sleep 600\n")
    program.chmod(0o755)
    connection = Master("lab", ["--", "lab"], tmp_path / "s" / "c")
    with pytest.raises(PodTimeout) as caught:
        connection.open(10.0)
    connection.close()
    assert str(caught.value) == f"lab: {words}"
    assert master.said_by(b"Terminated\n") == ""


def test_jump_hosts_in_a_circle_are_each_found_once(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    found = with_hops([["-F", str(config), "--", "a"]])
    assert [words[-1] for words, _ in found] == ["a", "b"]


@pytest.fixture
def gate(there: HostsPlace, tmp_path: Path) -> Iterator[tuple[Path, SSHHost]]:
    """Give an authority, and a jump host that lets in its certificates alone."""
    ca = new_key(tmp_path / "gate-ca")
    host = SSHHost(
        tmp_path / "gate",
        "127.0.0.9",
        there.hosts[0].port,
        "",
        forwarding="yes",
        settings=f"TrustedUserCAKeys {ca}.pub",
        prefix=there.prefix,
    )
    host.start()
    yield ca, host
    host.stop()


@pytest.mark.parametrize("way", ["ProxyJump", "ProxyCommand", "jump"])
def test_a_jump_host_with_a_certificate_of_its_own_is_named_with_it(
    site: Site, gate: tuple[Path, SSHHost], context: LaunchContext, tmp_path: Path, way: str
) -> None:
    ca, host = gate
    key = new_key(tmp_path / "at-the-gate")
    site.hops.append(host)
    certificate = sign(ca, key, "-1h:+2h")
    lines = "  ProxyJump gate\n" if way == "ProxyJump" else ""
    if way == "ProxyCommand":
        lines = f"  ProxyCommand ssh -F {tmp_path}/config -W [%h]:%p -- gate\n"
    lab = site.entry("lab", site.host, f"{lines}  IdentityFile {site.key}\n")
    config = site.config(
        lab + site.entry("gate", host, f"  IdentityFile {key}\n  IdentitiesOnly yes\n"), key=False
    )
    backend = site.backend("lab", config)
    if way == "jump":
        backend = SSHPods(
            [f"{site.host.address}:{site.host.port}"],
            python=site.place.python,
            root=str(site.place.root),
            key=str(site.key),
            known_hosts=str(site.known),
            jump={"address": host.address, "port": host.port, "key": str(key)},
            connect_timeout_s=60,
        )
    reports: list[str] = []
    told = LaunchContext(
        cluster_id="test",
        directory=context.directory,
        public_key=context.public_key,
        report=reports.append,
    )
    try_login(backend, told, tmp_path / "first")
    name = host.address if way == "jump" else "gate"
    owner = f"{certificate} for the jump host {name}"
    assert any(f"the certificate {owner} ends at 20" in line for line in reports), reports

    sign(ca, key, "-2h:-1h")
    with pytest.raises(PodError) as refused:
        backend.launch(PodSpec(), 1, context)
    assert says(refused.value, "the certificate {} ended at", owner)
    assert f"the jump host {name} refused the login" in str(refused.value)

    # A key without a certificate: the advice is about the key of the jump host.
    certificate.unlink()
    with pytest.raises(PodError) as refused:
        backend.launch(PodSpec(), 1, context)
    assert f"the jump host {name} refused the login" in str(refused.value)
    advice = str(key) if way == "jump" else f"ssh -v -F {config} gate"
    assert advice in str(refused.value)

    # The remedy that the words name.
    sign(ca, key, "-1h:+2h")
    try_login(backend, context, tmp_path / "renewed")


def launch_before_the_end(
    site: Site, authority: tuple[Path, SSHHost], context: LaunchContext, key: Path
) -> tuple[SSHPods, Pod, Path]:
    """Launch with a certificate that ends some seconds later: more of them on a busy machine."""
    ca, host = authority
    site.known.write_text(f"@cert-authority * {Path(f'{ca}.pub').read_text()}")
    more = f"  IdentityFile {key}\n"
    config = site.config(site.entry("lab", host, more), key=False)
    for seconds in (4, 20, 100):
        certificate = sign(ca, key, f"-1m:+{seconds}s")
        backend = site.backend("lab", config)
        try:
            (pod,) = backend.launch(PodSpec(), 1, context)
        except PodError as error:
            assert says(error, "the certificate {} ended at")
        else:
            return backend, pod, certificate
    raise AssertionError("the machine does not log in within 100 s")


@pytest.mark.long
@pytest.mark.slow
def test_a_certificate_that_ends_during_a_run_ends_no_connection_and_is_named_at_the_next(
    site: Site,
    authority: tuple[Path, SSHHost],
    context: LaunchContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workbench.pods.hosts.reopening._PAUSES_S", ())
    monkeypatch.setattr("workbench.pods.hosts.reopening._LONGEST_S", 0.0)
    ca, host = authority
    key = new_key(tmp_path / "mine")
    backend, pod, certificate = launch_before_the_end(site, authority, context, key)
    words = backend._masters[pod.name].master.words
    try:
        identity = Identity.create(tmp_path / "own")
        identity.pin([pod])
        with SSHConnection(pod, identity) as connection:
            run = connection.stream(["cat"])
            until(lambda: ended(words), 180)
            run.write(b"step\n")
            assert run.read(300) == b"step\n"
            assert connection.run(["echo", "more"]).stdout == "more\n"
            fetch_file(route_to(pod, identity, 60.0), "/etc/hostname", tmp_path / "here")
        assert backend.refresh()[0].phase is Phase.RUNNING

        for session in live_descendants(host.process.pid):
            session.send(9)
        until(lambda: backend.refresh()[0].phase is Phase.FAILED)

        def gone(_silent_s: float = 0.0) -> str:
            return backend.refresh()[0].message

        said = r"Permission denied \(publickey\); the certificate .*mine-cert.pub ended at 20\d\d-"
        with pytest.raises(WorkbenchError, match=said):
            fetch_file(route_to(pod, identity, 3600.0, gone), "/etc/hostname", tmp_path / "here")
        assert says(gone(), "the certificate {} ended at", certificate)

        # The remedy that the words name.
        sign(ca, key, "-1m:+2h")
        monkeypatch.setattr("workbench.pods.hosts.reopening._REFUSED_S", 0.0)
        until(lambda: backend.refresh()[0].phase is Phase.RUNNING)
        fetch_file(route_to(pod, identity, 60.0), "/etc/hostname", tmp_path / "here")
    finally:
        backend.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", [Phase.UNKNOWN, pytest.param(Phase.RUNNING, marks=pytest.mark.long)]
)
def test_a_closing_cluster_waits_for_no_retry_of_a_copy_whose_connection_broke(
    site: Site,
    context: LaunchContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
) -> None:
    """A place may name a dead pod Running, as Kubernetes does until its node counts as lost."""
    host = SSHHost(
        tmp_path / "dies",
        "127.0.0.9",
        site.host.port,
        site.place.user.public_key,
        prefix=site.place.prefix,
    ).start()
    config = site.config(site.entry("lab", host))
    with site.known.open("a") as known:
        public = (host.folder / "host_key.pub").read_text()
        known.write(f"[{host.address}]:{host.port} {public}")
    backend = site.backend("lab", config)
    closing = threading.Event()
    spec = ClusterSpec(count=1, backend=backend.to_dict())
    fleet = Fleet(ClusterPaths(tmp_path / "c"), spec, lambda _line: None, closing=closing)
    monkeypatch.setattr(fleet, "_backend", backend)
    tries: list[Sequence[str]] = []
    try:
        fleet.pods = backend.launch(PodSpec(), 1, context)
        pod = fleet.pods[0]
        identity = Identity.create(tmp_path / "own")
        identity.pin([pod])
        host.die()
        if phase is Phase.RUNNING:
            monkeypatch.setattr(fleet, "_backend", SimpleNamespace(refresh=lambda: [pod]))
            monkeypatch.setattr("workbench.keeper.fleet._CLOSING_S", 2.0)
        route = route_to(pod, identity, 86_400.0, partial(fleet._reason_gone, pod.name))

        def tried(argv: Sequence[str]) -> list[str]:
            tries.append(argv)
            return route.command(argv)

        def copy() -> str:
            return fetch_file(replace(route, command=tried), "/etc/hostname", tmp_path / "here")

        with ThreadPoolExecutor() as pool:
            copying = pool.submit(copy)
            until(lambda: len(tries) > 1)
            assert not copying.done(), "a break alone is tried again"
            closing.set()
            words = {
                Phase.UNKNOWN: r"Unknown: .*the connection broke",
                Phase.RUNNING: "Running and does not answer",
            }
            with pytest.raises(RemoteError, match=words[phase]) as left:
                copying.result(300)
            assert "/etc/hostname on pod-0: 0 of unknown bytes" in str(left.value)
    finally:
        closing.set()
        backend.stop()


def test_a_key_in_the_form_pkcs8_is_a_key(
    site: Site, authority: tuple[Path, SSHHost], context: LaunchContext, tmp_path: Path
) -> None:
    _, host = authority
    key = tmp_path / "pkcs8"
    make = ["openssl", "genpkey", "-algorithm", "RSA", "-out", str(key)]
    subprocess.run(make, check=True, capture_output=True, timeout=300)
    key.chmod(0o600)
    public = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(key)], check=True, capture_output=True, text=True
    ).stdout
    (host.folder / "authorized_keys").write_text(public)
    backend = SSHPods(
        [host.address],
        port=host.port,
        key=str(key),
        trust={host.address: host.fingerprint},
        python=site.place.python,
        root=str(site.place.root),
        connect_timeout_s=60,
    )
    try_login(backend, context, tmp_path)


def test_a_key_with_the_line_ends_of_windows_is_refused_at_the_start(
    site: Site, context: LaunchContext, tmp_path: Path
) -> None:
    key = tmp_path / "crlf"
    key.write_bytes(site.key.read_bytes().replace(b"\n", b"\r\n"))
    key.chmod(0o600)
    with pytest.raises(ConfigError, match=sentence("its lines end with carriage returns")):
        site.place.backend(key=str(key)).launch(PodSpec(), 1, context)


def test_a_refusal_later_ends_the_wait_with_the_words_of_ssh(
    site: Site, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.pods.hosts.reopening._PAUSES_S", ())
    monkeypatch.setattr("workbench.pods.hosts.reopening._LONGEST_S", 0.0)
    backend = site.place.backend()
    accepted = site.host.folder / "authorized_keys"
    before = accepted.read_text()
    try:
        (pod,) = backend.launch(PodSpec(), 1, context)
        identity = Identity.create(tmp_path / "own")
        identity.pin([pod])
        accepted.write_text("")
        for session in live_descendants(site.host.process.pid):
            session.send(9)
        until(lambda: backend.refresh()[0].phase is Phase.FAILED)
        assert "Permission denied (publickey)" in backend.refresh()[0].message

        def gone(_silent_s: float = 0.0) -> str:
            return backend.refresh()[0].message

        with pytest.raises(WorkbenchError, match=r"Permission denied \(publickey\)"):
            fetch_file(route_to(pod, identity, 3600.0, gone), "/etc/hostname", tmp_path / "here")
        accepted.write_text(before)
        monkeypatch.setattr("workbench.pods.hosts.reopening._REFUSED_S", 0.0)
        until(lambda: backend.refresh()[0].phase is Phase.RUNNING)
    finally:
        accepted.write_text(before)
        backend.stop()


def test_a_user_without_a_name_logs_in_where_all_is_given(
    site: Site, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = site.host.folder.owner()
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    backend = site.place.backend(user=user)
    try:
        (pod,) = backend.launch(PodSpec(), 1, context)
        assert not pod.control
    finally:
        backend.stop()
    with pytest.raises(ConfigError, match=sentence("ssh cannot read its configuration for")):
        site.backend("lab", site.config("")).launch(PodSpec(), 1, context)
    with pytest.raises(
        ConfigError, match=sentence('. Or give SSHPods(…, trust={"{}": FINGERPRINT})')
    ):
        site.place.backend(user=user, trust={}).launch(PodSpec(), 1, context)
