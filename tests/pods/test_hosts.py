"""`SSHPods` beyond the contract: who is let in, who is believed, and early refusals."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.proxy import bad_network
from tests.fakes.sshhosts import HostsPlace, SSHHost
from tests.support.deep import deep_tree
from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench import Cluster, Function
from workbench.agent.site.setup import setup_variables
from workbench.base.errors import BackendError, ConfigError, PodError, WorkbenchError
from workbench.base.machine.limits import cores
from workbench.base.machine.seats import gpus_here
from workbench.base.process import find, live_descendants
from workbench.pods.backends import backend_from_dict, remove_left
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.hosts import remote_helper
from workbench.pods.hosts.keys import try_login
from workbench.pods.hosts.names import Host, read_host, resolved
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.hosts.provision import far_end_script
from workbench.pods.hosts.remote_helper import ANSWER, LISTENS, enter, leave
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity, generate_key, known_hosts_name
from workbench.pods.ssh.openssh import ssh_argv

Launch = Callable[..., list[Pod]]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsPlace]:
    """Three machines for all tests of this file."""
    with HostsPlace(tmp_path_factory.mktemp("there")) as made:
        yield made


@pytest.fixture(scope="module")
def hop(there: HostsPlace) -> SSHHost:
    """One more, that lets others through."""
    return there.add("127.0.0.6", there.hosts[0].port, forwarding="yes")


@pytest.fixture
def made() -> Iterator[list[SSHPods]]:
    backends: list[SSHPods] = []
    yield backends
    for backend in backends:
        backend.stop()


@pytest.fixture
def launch(there: HostsPlace, context: LaunchContext, made: list[SSHPods]) -> Launch:
    """Launches with changed options; stopped afterwards."""

    def go(
        count: int = 1,
        spec: PodSpec | None = None,
        report: Callable[[str], None] | None = None,
        **changes: object,
    ) -> list[Pod]:
        made.append(there.backend(**changes))  # type: ignore[arg-type]
        told = context if report is None else replace(context, report=report)
        return made[-1].launch(spec or PodSpec(), count, told)

    return go


def known_hosts(there: HostsPlace, path: Path, hashed: bool = False) -> Path:
    """What `ssh` would have noted after a first login to each."""
    lines = [
        f"{known_hosts_name(h.address, h.port)} {(h.folder / 'host_key.pub').read_text()}"
        for h in there.hosts
    ]
    path.write_text("".join(lines))
    if hashed:
        subprocess.run(
            ["ssh-keygen", "-q", "-H", "-f", path], check=True, capture_output=True, timeout=300
        )
    return path


def logins(there: HostsPlace) -> int:
    return sum(host.log.count("Accepted publickey") for host in there.hosts)


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_the_ways_to_trust_it(
    there: HostsPlace, launch: Launch
) -> None:
    before = logins(there)
    with pytest.raises(PodError) as caught:
        launch(3, trust={there.hosts[1].address: there.hosts[1].fingerprint})
    words = str(caught.value)
    assert words.startswith("2 of 3 hosts are not usable:")
    for host in (there.hosts[0], there.hosts[2]):
        assert f'trust={{"{host.address}": "{host.fingerprint}"}}' in words
    assert says(words, "either give SSHPods(…")
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in words
    assert 'known_hosts="~/.ssh/known_hosts"' in words
    assert logins(there) == before + 1, "only the believed one was shown our key"
    assert there.hosts[1].fingerprint not in words
    assert list(there.root.glob("*")) == []


@pytest.mark.parametrize("hashed", [False, True])
def test_a_known_hosts_file_is_believed(
    there: HostsPlace, launch: Launch, tmp_path: Path, hashed: bool
) -> None:
    file = known_hosts(there, tmp_path / "known", hashed)
    before = file.read_bytes()
    assert len(launch(2, trust={}, known_hosts=file)) == 2
    assert file.read_bytes() == before


def test_a_changed_host_key_is_a_hard_stop(
    there: HostsPlace, launch: Launch, tmp_path: Path
) -> None:
    file, (first, second, _) = tmp_path / "known", there.hosts[:3]
    lines = known_hosts(there, file).read_text().splitlines()
    swapped = [
        f"{a.split()[0]} {' '.join(b.split()[1:])}\n"
        for a, b in zip(lines, [lines[1], lines[0]], strict=False)
    ]
    file.write_text("".join(swapped))
    before = logins(there)
    mark = f"expected {second.fingerprint}, got {first.fingerprint}"
    with pytest.raises(
        PodError,
        match=sentence(
            "has another. Another machine answers there", first.fingerprint, f"{file}:1"
        ),
    ):
        launch(trust={}, known_hosts=file)
    with pytest.raises(PodError, match=f"is not the key in `trust`: {mark.replace('+', '.')}"):
        launch(trust={first.address: second.fingerprint})
    file.write_text(f"@revoked {lines[0]}\n")
    with pytest.raises(ConfigError, match=sentence("nothing was sent there")):
        launch(trust={}, known_hosts=file)
    assert logins(there) == before


def test_every_host_has_its_own_user_port_key_and_type_of_host_key(
    there: HostsPlace, launch: Launch, tmp_path: Path
) -> None:
    other = Identity.create(tmp_path / "other")
    odd = there.add(
        "127.0.0.5", free_port(["127.0.0.5"]), public_key=other.public_key, key_type="rsa"
    )
    user = there.hosts[0].folder.owner()
    own = {
        "address": odd.address,
        "user": user,
        "port": odd.port,
        "key": str(other.key),
        "slots": 2,
    }
    pods = launch(
        2,
        hosts=[f"{user}@{there.hosts[0].address}:{there.hosts[0].port}", own],
        port=9,
        trust=there.trust,
    )
    assert [(pod.ssh_port, pod.slots) for pod in pods] == [
        (there.hosts[0].port, 1),
        (odd.port, 2),
    ]
    identity = Identity.create(tmp_path / "cluster")
    identity.pin(pods)
    with SSHConnection(pods[1], identity) as connection:
        assert connection.run(["echo", "in"]).stdout == "in\n"
    argv = ssh_argv(pods[1], identity, ["echo", "in"])
    assert subprocess.run(argv, capture_output=True, text=True, timeout=300).stdout == "in\n"


@pytest.mark.parametrize("config", [False, True])
def test_a_jump_host_is_gone_through_and_checked_too(
    there: HostsPlace, hop: SSHHost, launch: Launch, tmp_path: Path, config: bool
) -> None:
    jump = {"address": hop.address, "port": hop.port, "key": str(there.user.key)}
    ways: dict[str, object] = {
        "hosts": ["a", "b"],
        "ssh_config": str(tmp_path / "config"),
        "port": 22,
        "key": "",
    }
    blocks = [
        f"Host {n}\n HostName {h.address}\n Port {h.port}\n ProxyJump hop\n"
        for n, h in zip("ab", there.hosts[:2], strict=True)
    ]
    blocks.append(f"Host hop\n HostName {hop.address}\n Port {hop.port}\n")
    key = (
        f"Host *\n IdentityFile {there.user.key}\n UserKnownHostsFile "
        f"{known_hosts(there, tmp_path / 'known')}\n"
    )
    (tmp_path / "config").write_text("".join([*blocks, key]))
    pods = launch(
        2,
        connect_timeout_s=60,
        **({**ways, "trust": {}} if config else {"jump": jump, "trust": there.trust}),
    )
    assert [pod.address for pod in pods] == ["127.0.0.2", "127.0.0.3"]
    identity = Identity.create(tmp_path / "a b")
    identity.pin(pods)
    before = hop.log.count("Accepted publickey")
    with SSHConnection(pods[1], identity) as connection:
        assert connection.run(["echo", "in"]).stdout == "in\n"
    argv = ssh_argv(pods[1], identity, ["echo", "in"])
    assert subprocess.run(argv, capture_output=True, text=True, timeout=300).stdout == "in\n"
    assert hop.log.count("Accepted publickey") == before, "the connection stands"
    if not config:
        with pytest.raises(PodError, match=sentence("either give SSHPods(…", "127.0.0.6")):
            launch(2, jump=jump, trust={host.address: host.fingerprint for host in there.hosts[:3]})
        with pytest.raises(PodError, match=r"administratively prohibited|stdio forwarding failed"):
            launch(2, jump=f"{there.hosts[2].address}:{there.hosts[2].port}")


def test_a_user_without_a_name_goes_through_no_jump_host(
    there: HostsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = replace(read_host("127.0.0.2"), key=str(there.user.key))
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="trust="):
        try_login(host, {}, 1.0)
    through = replace(host, jump=read_host("127.0.0.6"))
    with pytest.raises(ConfigError, match=r"through the jump host 127\.0\.0\.6 needs a name"):
        try_login(through, {}, 1.0)


def test_sixteen_hosts_that_will_not_do_are_all_named_within_the_limit(
    there: HostsPlace, launch: Launch, tmp_path: Path
) -> None:
    stranger = Identity.create(tmp_path / "stranger")
    with (
        socket.create_server(("127.0.0.7", 0)) as silent,
        socket.create_server(("127.0.0.7", 0)) as closed,
    ):
        port, gone = silent.getsockname()[1], closed.getsockname()[1]
        closed.close()
        hosts: list[object] = [f"127.0.0.{n}:{gone}" for n in range(10, 17)]
        hosts += [f"240.0.0.{n}" for n in range(1, 7)]
        hosts += [f"127.0.0.7:{port}", "no-such-host.invalid"]
        hosts += [
            {
                "address": there.hosts[0].address,
                "port": there.hosts[0].port,
                "key": str(stranger.key),
            }
        ]
        with pytest.raises(PodError) as caught:
            launch(16, hosts=hosts, connect_timeout_s=20)
    words = str(caught.value).splitlines()
    assert words[0] == "16 of 16 hosts are not usable:"
    assert len([line for line in words if "Connection refused" in line]) == 7
    assert len([line for line in words if "240.0.0." in line]) == 6
    assert any(
        "127.0.0.7" in line and ("timed out during banner exchange" in line or "no answer" in line)
        for line in words
    ), words
    assert any("no-such-host.invalid" in line for line in words)
    assert any(
        f"{there.user.folder.owner()}@127.0.0.2: Permission denied (publickey)" in line
        for line in words
    )


def test_something_else_on_the_port(launch: Launch) -> None:
    with socket.create_server(("127.0.0.7", 0)) as web:
        port = web.getsockname()[1]
        pid = os.fork()
        if pid == 0:
            web.settimeout(300)
            connection, _ = web.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()
            os._exit(0)
        with pytest.raises(PodError, match=rf"127\.0\.0\.7:{port}\): kex_exchange_identification"):
            launch(hosts=[f"127.0.0.7:{port}"])
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "weak",
    [
        "Ciphers aes256-cbc",
        "Ciphers 3des-cbc",
        "Ciphers aes256-ctr\nMACs hmac-sha1",
        "Ciphers aes256-ctr\nMACs hmac-md5",
    ],
)
def test_a_host_that_speaks_weak_algorithms_alone_is_refused(
    there: HostsPlace, launch: Launch, tmp_path: Path, weak: str
) -> None:
    port = free_port(["127.0.0.8"])
    host = SSHHost(
        tmp_path / "weak", "127.0.0.8", port, there.user.public_key, settings=weak
    ).start()
    try:
        with pytest.raises(
            PodError,
            match=r"127\.0\.0\.8 .*no matching .* found. Their offer: ",
        ):
            launch(hosts=[f"127.0.0.8:{port}"], trust={"127.0.0.8": host.fingerprint})
        assert "Accepted publickey" not in host.log
    finally:
        host.stop()


def test_a_hostfile_is_adopted_with_its_slots(
    there: HostsPlace, launch: Launch, tmp_path: Path
) -> None:
    file = tmp_path / "hostfile"
    file.write_text("# ours\n127.0.0.2 slots=3\n127.0.0.3 slots=1 max_slots=4\n127.0.0.4\n")
    pods = launch(2, hosts=(), hostfile=file)
    assert [(pod.address, pod.slots) for pod in pods] == [("127.0.0.2", 3), ("127.0.0.3", 1)]
    again = backend_from_dict(json.loads(json.dumps(SSHPods(hostfile=file, key="k").to_dict())))
    assert eval(repr(again), {"SSHPods": SSHPods}).to_dict() == again.to_dict()
    assert repr(SSHPods(["a", "ada@b:7"], python="~/py")) == (
        "SSHPods(hosts=['a', {'address': 'b', 'user': 'ada', 'port': 7}], python='~/py')"
    )
    file.write_text("127.0.0.2 slots=2\n-oProxyCommand=id slots=1\n")
    with pytest.raises(
        ConfigError,
        match=sentence(
            "is not an IP address or a host name", "hostfile, line 2: '-oProxyCommand=id'"
        ),
    ):
        SSHPods(hostfile=file)


def lab() -> tuple[str | None, str | None]:
    return os.environ.get("LAB"), os.environ.get("OMP_NUM_THREADS")


@pytest.mark.slow
@pytest.mark.long
def test_ranks_on_hosts_have_what_setup_lines_set(there: HostsPlace, tmp_path: Path) -> None:
    place = there.backend(setup=["export LAB=here OMP_NUM_THREADS=5"])
    with Cluster(place, PodSpec(), count=1, path=tmp_path / "cluster", warm=False) as cluster:
        run = cluster.submit(Function(lab))
        run.wait(timeout_s=300, progress=False).raise_for_status()
    assert run.returned == [("here", "5")]


PROFILE = """
echo "Welcome to the lab"
module() { test "$2" != none && export CUDA_HOME="/opt/$2" PATH="/opt/$2/bin:$PATH"; }
"""


def test_setup_lines_run_once_on_a_host_and_the_agent_has_their_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".bash_profile").write_text(PROFILE)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    lines = ["module load cuda", "LAB='a b'; set -- x", "export PYTHONPATH=/opt/site"]
    answer = enter(root=str(tmp_path / "wb"), folder=f"c-{'0' * 16}", pod="pod-0", setup=lines)
    place = Path(answer["root"])
    found = setup_variables(place)
    assert found.pop("PATH").startswith("/opt/cuda/bin:")
    assert found == {"CUDA_HOME": "/opt/cuda", "LAB": "a b"}
    assert [path.name for path in place.iterdir()] == ["setup.json"]
    assert setup_variables(tmp_path) == {}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["true", "module load none"], "the setup line module load none ended with exit code 1"),
        (["nosuch"], "nosuch: command not found"),
        (["echo 'open", "true"], "the setup line echo 'open ended with exit code"),
        (["exit 3"], "the setup lines ended with exit code 3"),
        (["exit 0"], "the setup lines ended with exit code 0"),
        (["PATH=/nothing"], "env: "),
    ],
)
def test_a_setup_line_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], words: str
) -> None:
    (tmp_path / ".bash_profile").write_text(PROFILE)
    monkeypatch.setenv("HOME", str(tmp_path))
    answer = enter(root=str(tmp_path / "wb"), folder=f"c-{'0' * 16}", pod="pod-0", setup=lines)
    assert list(answer) == ["setup"]
    assert words in answer["setup"]


def test_a_setup_line_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_helper, "_SETUP_S", 10.0)
    monkeypatch.setenv("HOME", str(tmp_path))
    pids = tmp_path / "pids"
    lines = [f"echo $$ >>{pids}", f"sleep 600 & echo $! >>{pids}", "yes | sleep 600"]
    answer = enter(root=str(tmp_path / "wb"), folder=f"c-{'0' * 16}", pod="pod-0", setup=lines)
    assert "did not end in 10 s" in answer["setup"]
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    until(lambda: not any(map(find, started)))


def test_a_setup_line_may_print_much_and_leave_a_service_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pid = tmp_path / "pid"
    lines = ["yes | head -c 100000000; yes x | head -c 10000000 >&2"]
    lines += [f"sleep 600 & echo $! >{pid}", "export LAB=here; set -u -e"]
    answer = enter(root=str(tmp_path / "wb"), folder=f"c-{'0' * 16}", pod="pod-0", setup=lines)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert setup_variables(Path(answer["root"])) == {"LAB": "here"}


def test_a_setup_line_that_fails_ends_the_start_with_the_host_and_the_line(
    there: HostsPlace, launch: Launch
) -> None:
    words = sentence("or try the line in a login shell of bash on the host", "127.0.0.2", "nosuch")
    with pytest.raises(ConfigError, match=words):
        launch(setup=["nosuch"])
    assert list(there.root.glob("*")) == []


def test_setup_lines_run_on_a_host_before_its_agent(there: HostsPlace, launch: Launch) -> None:
    (pod,) = launch(setup=["export LAB=here"])
    assert pod.phase is Phase.RUNNING
    (kept,) = there.root.glob("*/pod-0/setup.json")
    assert json.loads(kept.read_text())["LAB"] == "here"


def test_what_a_host_lacks_is_said_and_nothing_stays(
    there: HostsPlace, launch: Launch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(2, PodSpec(gpus=64, cpus=4000, memory_gib=1e6))
    for host in ("127.0.0.2", "127.0.0.3"):
        assert says(caught.value, "GPUs, {} are asked for", host, len(gpus_here(None)), 64)
        assert says(caught.value, "cores, {} are asked for", host, f"{cores():g}", 4000)
    assert says(caught.value, "GiB of memory, {} are asked for", "1e+06")
    with pytest.raises(
        ConfigError,
        match=sentence("Give python=PATH of the Python with torch and DeepSpeed", "no-such-python"),
    ):
        launch(python="/usr/bin/no-such-python")
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {Path(sys.executable).resolve()} -I -S "$@"\n')
    bare.chmod(0o700)
    with pytest.raises(
        ConfigError, match=sentence("A login without a terminal activates no environment")
    ):
        launch(python=str(bare))
    with pytest.raises(
        ConfigError, match=sentence("no folder for the pod below {}: {}", "/proc/none")
    ) as caught:
        launch(root="/proc/none")
    assert str(caught.value).count("root=") == 1
    team = tmp_path / "team"
    team.mkdir()
    team.chmod(0o777)
    with pytest.raises(
        ConfigError,
        match=sentence("no folder for the pod below {}: {}", "/team", "everybody")
        + sentence("may be written by"),
    ) as caught:
        launch(root=str(team / "pods"))
    assert str(caught.value).count("root=") == 1
    assert list(team.iterdir()) == []
    assert list(there.root.glob("*")) == []


def test_what_runs_on_a_host_imports_nothing_from_where_a_login_begins(tmp_path: Path) -> None:
    for name in ("json.py", "contextlib.py", "workbench.py"):
        (tmp_path / name).write_text("raise SystemExit('taken over')")
    request = json.dumps(
        {"enter": {"root": str(tmp_path), "folder": f"c-{'0' * 16}", "pod": "pod-0"}}
    )
    argv = [sys.executable, "-c", far_end_script(), request]
    done = subprocess.run(
        argv, input=LISTENS, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith(ANSWER), done.stderr
    assert json.loads(done.stdout.removeprefix(ANSWER))["root"] == str(
        tmp_path / f"c-{'0' * 16}" / "pod-0"
    )


def test_the_modules_of_the_script_for_hosts_share_no_name() -> None:
    """The script has the text of several modules, and a later name replaces an earlier name."""
    names: Counter[str] = Counter()
    for statement in ast.parse(far_end_script()).body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] += 1
            case ast.Assign(targets=[ast.Name(id=name)]):
                names[name] += 1
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []


def test_a_tree_of_any_depth_on_a_host_is_removed(tmp_path: Path) -> None:
    names = {"root": str(tmp_path), "folder": f"c-{'0' * 16}", "pod": "pod-0"}
    place = Path(enter(**names)["root"])
    with deep_tree(place / "runs"):
        assert leave(**names) == {"left": [], "log": [], "there": False}
    assert not place.parent.exists()


def test_an_open_folder_on_a_host_is_not_mended_by_a_variable_of_the_notebook(
    tmp_path: Path,
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    names = {"root": str(tmp_path / "open" / "wb"), "folder": f"c-{'0' * 16}", "pod": "pod-0"}
    with pytest.raises(
        ValueError, match=sentence("choose another folder on the host: SSHPods(root=PATH)")
    ) as error:
        enter(**names)
    assert "WORKBENCH_TRUSTED_FOLDERS" not in str(error.value)
    enter(**{**names, "root": str(tmp_path / "wb")})
    command = re.search("run (chmod .*), or choose", str(error.value))
    assert command is not None
    subprocess.run(["sh", "-ec", command[1]], check=True, timeout=300)
    enter(**names)


def test_one_host_under_two_names(there: HostsPlace, launch: Launch) -> None:
    twice = there.add("127.0.0.1", there.hosts[0].port)
    trust = {"localhost": twice.fingerprint, "127.0.0.1": twice.fingerprint}
    with pytest.raises(
        ConfigError,
        match=sentence(
            "and {} are two names of the same host; name the host once", "localhost", "127.0.0.1"
        ),
    ):
        launch(2, hosts=["localhost", "127.0.0.1"], trust=trust)
    with pytest.raises(ConfigError, match=sentence("with slots for the number of ranks")):
        launch(2, hosts=["GPU-1", "root@gpu-1:7"])


def test_keys_that_cannot_be_used(there: HostsPlace, launch: Launch, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True, timeout=300
    )
    with pytest.raises(
        ConfigError, match=sentence("and add its .pub to the hosts' authorized_keys")
    ):
        launch(key=locked)
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(ConfigError, match=sentence("is no usable private key")):
        launch(key=tmp_path / "text")
    generate_key(tmp_path / "open", "x")
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(ConfigError, match=sentence("so other users may read the key", "0644")):
        launch(key=tmp_path / "open")
    with pytest.raises(ConfigError, match=sentence("the key {} cannot be read")):
        launch(key=tmp_path / "none")
    with pytest.raises(
        ConfigError, match=sentence("or ssh_config=True to use your ssh configuration", "127.0.0.2")
    ):
        launch(key="")


def test_a_strangers_process_lives_on_and_ours_does_not(
    there: HostsPlace, launch: Launch, made: list[SSHPods]
) -> None:
    (pod,) = launch()
    ours = subprocess.Popen(["sleep", "600"], env={**os.environ, "WORKBENCH_POD": pod.root})
    stranger = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "WORKBENCH_POD": pod.root + "0"}
    )
    made[-1].stop()
    assert ours.wait(300) == -signal.SIGTERM
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait(300)
    assert "not be tidied" not in made[-1].logs("pod-0")


def test_a_host_that_is_gone_is_unknown_until_it_answers_again(
    there: HostsPlace, launch: Launch, made: list[SSHPods]
) -> None:
    launch(2, connect_timeout_s=20)  # the end waits so long for the host that is gone
    backend, host = made[-1], there.hosts[0]
    assert [pod.phase for pod in backend.refresh()] == [Phase.RUNNING, Phase.RUNNING]
    host.process.send_signal(signal.SIGSTOP)  # its port stays taken, and nobody answers
    for session in live_descendants(host.process.pid):
        session.send(signal.SIGKILL)
    until(lambda: backend.refresh()[0].phase is not Phase.RUNNING)
    pods = backend.refresh()
    assert [pod.phase for pod in pods] == [Phase.UNKNOWN, Phase.RUNNING]
    assert says(pods[0].message, "the connection broke and is opened again")
    assert "closed by remote host" in pods[0].message
    backend.stop()
    assert says(backend.logs("pod-0"), "an agent there ends by itself", "127.0.0.2")
    host.process.send_signal(signal.SIGCONT)
    (left,) = there.root.glob("*/pod-*")
    assert left.name == "pod-0"
    subprocess.run(["rm", "-r", left.parent], check=True, timeout=300)


def test_a_connection_that_broke_is_made_anew(
    there: HostsPlace, launch: Launch, made: list[SSHPods]
) -> None:
    launch()
    for session in live_descendants(there.hosts[0].process.pid):
        session.send(signal.SIGKILL)
    connection = made[-1]._connections["pod-0"]
    until(lambda: not connection.is_open)

    def is_back() -> bool:
        phases = [pod.phase for pod in made[-1].refresh()]
        # The client may still be ending when the socket is gone.
        return phases == [Phase.RUNNING] and connection.is_open

    until(is_back)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, sentence("SSHPods needs either hosts=[…], a list, or hostfile=PATH")),
        (
            {"hosts": ["a"], "hostfile": "/x"},
            sentence("SSHPods needs either hosts=[…], a list, or hostfile=PATH"),
        ),
        (
            {"hostfile": "/no/such/hostfile"},
            sentence("the hostfile {} cannot be read", "/no/such/hostfile"),
        ),
        ({"hosts": "gpu-1"}, sentence("a list of hosts")),
        ({"hosts": ["-oProxyCommand=id"]}, sentence("is not an IP address or a host name")),
        ({"hosts": ["exec:x"]}, sentence('write "name" or "user@name:port', "exec:x")),
        ({"hosts": ["^/etc/passwd"]}, sentence("is not an IP address or a host name")),
        ({"hosts": ["a;id"]}, sentence("is not an IP address or a host name")),
        ({"hosts": ["n[1-3]"]}, "is no"),
        ({"hosts": ["x slots=9\ny"]}, sentence("is not an IP address or a host name")),
        (
            {"hosts": ["a"], "jump": "-oProxyCommand=id"},
            sentence("is not an IP address or a host name"),
        ),
        (
            {"hosts": ["a:70000"]},
            sentence("cannot be used", "a:70000", "host port is 70000", "a port")
            + sentence("it must be"),
        ),
        ({"hosts": ["$(id)@a"]}, sentence("and $ or \\ only as in gpu-1$ or CORP\\ada")),
        ({"hosts": ["@a"]}, sentence("and $ or \\ only as in gpu-1$ or CORP\\ada")),
        ({"hosts": ["a b"]}, sentence("is not an IP address or a host name")),
        ({"hosts": [7]}, sentence('user@name:port" or {"address', 7)),
        ({"hosts": [{"adress": "a"}]}, sentence(": did you mean '{}'?", "address")),
        (
            {"hosts": [{"user": "a"}]},
            sentence("needs the option", "{'user': 'a'}", "host", "address")
            + sentence("cannot be used"),
        ),
        (
            {"hosts": [{"address": "a", "slots": 0}]},
            sentence("cannot be used", "'a', 'slots': 0}", "host slots is 0"),
        ),
        (
            {"hosts": [{"address": "a", "port": "22"}]},
            sentence("it must be", "host port is '22'", "a port"),
        ),
        (
            {"hosts": [{"address": "a", "key": 7}]},
            sentence("it must be", "host key is 7", "text"),
        ),
        (
            {"hosts": ["a"], "trust": {"a": "SHA256:x"}},
            sentence("it must be a fingerprint as ssh shows it"),
        ),
        (
            {"hosts": ["a"], "known_hosts": "/no/such/file"},
            sentence("the known_hosts file {} is not there", "/no/such/file"),
        ),
        (
            {"hosts": ["a"], "python": "-c"},
            sentence("it must be a path on the hosts that begins with / or ~/", "python", "-c"),
        ),
        *(
            (
                {"hosts": ["a"], "root": path},
                sentence("it must be a path on the hosts that begins with / or ~/", "root"),
            )
            for path in (
                "",
                "$SCRATCH/x",
                "${HOME}/x",
                "/scratch/`id -un`",
                "/scratch/$USER",
                "scratch/x",
                "%h/x",
                "-x",
            )
        ),
        *(
            (
                {"hosts": ["a"], "python": path},
                sentence("it must be a path on the hosts that begins with / or ~/"),
            )
            for path in ("$HOME/venv/bin/python", "venv/bin/python", "~ada/python", "-c", "~x")
        ),
    ],
)
def test_refusals(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SSHPods(**options)  # type: ignore[arg-type]


def test_what_an_ssh_configuration_cannot_ask(
    there: HostsPlace, launch: Launch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    here = f"Host *\n HostName 127.0.0.2\n Port {there.hosts[0].port}\n"
    for text, words in {
        f"{here} ProxyCommand no-such-program %h %p\n": "no-such-program: (command )?not found",
        f"{here} ProxyJump b\n": "leads in a circle",
        "Hots *\n": sentence("ssh cannot read its configuration for"),
    }.items():
        config.write_text(text)
        with pytest.raises(WorkbenchError, match=words):
            launch(hosts=["a"], ssh_config=config)


@pytest.mark.parametrize("given", ["[::1]", "ada@[fd00::5]", "[::ffff:10.0.0.5]:2222", "gpu-1"])
def test_a_host_is_read_again_as_it_is_written(given: str) -> None:
    host = read_host(given)
    assert read_host(host.written) == host


@pytest.mark.parametrize("given", ["fe80::1%eth0", "[fe80::1%eth0]:22", "ada@fe80::1%eth0"])
def test_a_zone_is_for_the_login_alone(given: str, tmp_path: Path) -> None:
    zone = sentence("an interface of this machine alone", "fe80::1%eth0")
    with pytest.raises(ConfigError, match=zone):
        read_host(given)
    config = tmp_path / "config"
    config.write_text("Host lab\n  HostName fe80::1%%eth0\n")
    with pytest.raises(ConfigError, match=zone):
        resolved(Host(address="lab"), ["-F", str(config)])
    host = resolved(Host(address="lab", internal_address="10.0.0.5"), ["-F", str(config)])
    assert (host.reached, host.between) == ("fe80::1%eth0", "10.0.0.5")


def test_paths_of_keys_are_made_absolute_where_the_notebook_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backend = SSHPods(
        [{"address": "a", "key": "mine"}], key="ours", jump={"address": "b", "key": "~/theirs"}
    )
    assert (backend.hosts[0].key, backend.key) == (str(tmp_path / "mine"), str(tmp_path / "ours"))
    assert backend.jump is not None
    assert backend.jump.key == str(Path("~/theirs").expanduser())


def test_counts(launch: Launch, context: LaunchContext, made: list[SSHPods]) -> None:
    with pytest.raises(ConfigError, match=sentence("pods and SSHPods names", 4, 3)):
        launch(4)
    with pytest.raises(ConfigError, match=sentence("count is {}; a cluster has at least one pod")):
        launch(0)
    launch(1)
    with pytest.raises(
        BackendError, match=sentence("the hosts are in use already ({} pods); stop the pods first")
    ):
        made[-1].launch(PodSpec(), 1, context)


def test_what_a_killed_keeper_left_is_tidied_up(
    there: HostsPlace, launch: Launch, context: LaunchContext
) -> None:
    (pod,) = launch(connect_timeout_s=20)  # its end waits so long for what the others ended
    ours = subprocess.Popen(["sleep", "600"], env={**os.environ, "WORKBENCH_POD": pod.root})
    assert Path(pod.root).is_dir()
    for _ in range(2):  # another process, which knows the backend's JSON form alone
        remove_left(there.backend().to_dict(), context.directory)
    assert ours.wait(300) == -signal.SIGTERM
    assert there.left(context) == []


@pytest.mark.long
def test_a_host_behind_a_slow_line_needs_more_time_and_is_never_told_to_have_refused(
    there: HostsPlace, launch: Launch
) -> None:
    """Three seconds there and back: the login needs more than the five of the default."""
    far, host = "127.0.0.7", there.hosts[0]
    port, reports = free_port([far]), []
    with bad_network(far, port, (host.address, host.port), delay_s=1.5):
        options = {"hosts": [f"{far}:{port}"], "trust": {far: host.fingerprint}}
        with pytest.raises(PodError) as caught:
            launch(1, **options, connect_timeout_s=5)
        words = str(caught.value)
        assert "connect_timeout_s=20" in words
        assert "denied" not in words
        (pod,) = launch(1, **options, connect_timeout_s=60, report=reports.append)
        assert pod.connect_timeout_s == 60
        assert any(line.startswith(f"still trying to log in to {far}") for line in reports)
