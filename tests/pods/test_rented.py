"""Clusters of SkyPilot and dstack as `SSHPods`: their own ssh configurations, to real daemons."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.sshhosts import HostsPlace, SSHHost
from tests.support.sentences import says, sentence
from workbench import Cluster, PodSpec, Script
from workbench.base.errors import ConfigError, PodError
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.pod import LaunchContext, Pod
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import ssh_argv

# As SkyPilot 0.14.1 writes ~/.sky/generated/ssh/CLUSTER.
SKYPILOT = """\
# Added by sky (use `sky stop/down train` to remove)
Host {name}
  HostName {address}
  User {user}
  IdentityFile {key}
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile=/dev/null
  GlobalKnownHostsFile=/dev/null
  Port {port}
  SetEnv SKYPILOT_CLUSTER_NAME=train-1a2b
{more}
"""
# As dstack 0.22.5 writes ~/.dstack/ssh/config for a container on a machine.
DSTACK = """\
Host {name}-host
    HostName {jump}
    Port {jump_port}
    User {user}
    IdentityFile {key}
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
Host {name}
    HostName localhost
    Port {port}
    User {user}
    IdentityFile {key}
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    ProxyJump {name}-host
"""
# As dstack 0.22.5 appends to ~/.ssh/config in each container.
INSIDE = """
Host {address}
    Port {port}
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    IdentityFile {key}
"""
MEET = """\
import os, socket
rank, at = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(at) as server:
        server.settimeout(300)
        print("rank 0 met", server.accept()[0].recv(9).decode(), "at", at[0])
else:
    for _ in range(3000):
        try:
            socket.create_connection(at, timeout=300).sendall(b"rank 1")
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.1)
"""


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsPlace]:
    """Two machines that let others through; the daemons of their containers are made by tests."""
    with HostsPlace(tmp_path_factory.mktemp("rented")) as made:
        yield made


@pytest.fixture(scope="module")
def machines(rented: HostsPlace) -> list[SSHHost]:
    port = free_port(["127.0.0.6", "127.0.0.7"])
    return [rented.add(f"127.0.0.{n}", port, forwarding="yes") for n in (6, 7)]


@pytest.fixture(scope="module")
def containers(rented: HostsPlace) -> list[SSHHost]:
    """Daemons on `localhost`, as a container in its machine's network has one."""
    return [rented.add("127.0.0.1", free_port(["127.0.0.1"])) for _ in range(2)]


def place(rented: HostsPlace, hosts: list[object], config: Path, **options: object) -> SSHPods:
    options = {"python": rented.python, "root": str(rented.root), **options}
    options.setdefault("connect_timeout_s", 60)  # a busy machine's chain of logins
    return SSHPods(hosts, ssh_config=str(config), **options)


def skypilot(rented: HostsPlace, folder: Path, more: str = "", address: str = "") -> Path:
    """Write a configuration that includes those of all clusters; return its path."""
    (folder / "generated").mkdir()
    entries = [
        SKYPILOT.format(
            name=name,
            address=address or host.address,
            user=host.folder.owner(),
            key=rented.user.key,
            port=host.port,
            more=more,
        )
        for name, host in zip(("train", "train-worker1"), rented.hosts, strict=False)
    ]
    (folder / "generated" / "train").write_text("\n".join(entries))
    (folder / "config").write_text(f"Include {folder}/generated/*\n\nHost *\n  Port 1\n")
    return folder / "config"


def dstack(
    rented: HostsPlace, machines: list[SSHHost], containers: list[SSHHost], folder: Path
) -> tuple[Path, dict[str, str]]:
    """Write the configuration of an attached run of two nodes; return its path and all keys."""
    text, trust = "", {}
    for name, machine, container in zip(("run", "run-1-0"), machines, containers, strict=True):
        text += DSTACK.format(
            name=name,
            jump=machine.address,
            jump_port=machine.port,
            user=machine.folder.owner(),
            key=rented.user.key,
            port=container.port,
        )
        trust |= {name: container.fingerprint, f"{name}-host": machine.fingerprint}
    (folder / "config").write_text(text)
    return folder / "config", trust


def launched(backend: SSHPods, context: LaunchContext, count: int = 2) -> list[Pod]:
    try:
        return backend.launch(PodSpec(), count, context)
    finally:
        backend.stop()


def test_skypilots_configuration_is_used_and_its_trust_in_any_key_is_not(
    rented: HostsPlace, context: LaunchContext, tmp_path: Path
) -> None:
    config = skypilot(rented, tmp_path)
    hosts: list[object] = ["train", "train-worker1"]
    with pytest.raises(PodError) as caught:
        launched(place(rented, hosts, config), context)
    for name, host in zip(hosts, rented.hosts, strict=False):
        assert f'trust={{"{name}": "{host.fingerprint}"}}' in str(caught.value)
    assert "log in there once" not in str(caught.value), "ssh would note no key"
    assert says(
        caught.value, "The ssh configuration notes no keys (UserKnownHostsFile", "/dev/null"
    )
    trust = dict(zip(map(str, hosts), [h.fingerprint for h in rented.hosts], strict=False))
    # The notebook's machine knows the machines by other addresses than the machines do.
    inner: list[object] = [
        {"address": "train", "internal_address": "127.0.0.12"},
        {"address": "train-worker1", "internal_address": "127.0.0.13"},
    ]
    pods = launched(place(rented, inner, config, trust=trust), context)
    assert [(pod.address, pod.ssh_address, pod.ssh_port) for pod in pods] == [
        ("127.0.0.12", "127.0.0.2", rented.hosts[0].port),
        ("127.0.0.13", "127.0.0.3", rented.hosts[1].port),
    ]


def test_skypilots_containers_behind_a_command_are_reached_by_it(
    rented: HostsPlace, machines: list[SSHHost], context: LaunchContext, tmp_path: Path
) -> None:
    machine = machines[0]
    known = tmp_path / "known"
    known.write_text(
        f"[{machine.address}]:{machine.port} {(machine.folder / 'host_key.pub').read_text()}"
    )
    # As SkyPilot writes it; its options would trust any key of the machine.
    command = (
        f"ssh -i {rented.user.key} -o IdentitiesOnly=yes -o StrictHostKeyChecking=no"
        f" -o UserKnownHostsFile={known} -W %h:%p -p {machine.port} {machine.address}"
    )
    config = skypilot(rented, tmp_path, more=f"  ProxyCommand {command}")
    trust = {
        name: host.fingerprint
        for name, host in zip(("train", "train-worker1"), rented.hosts, strict=False)
    }
    hosts: list[object] = ["train", "train-worker1"]
    before = machine.log.count("Accepted publickey")
    pods = launched(place(rented, hosts, config, trust=trust), context)
    assert [pod.address for pod in pods] == ["127.0.0.2", "127.0.0.3"]
    assert machine.log.count("Accepted publickey") > before
    known.write_text("")
    with pytest.raises(PodError, match=rf"\[{machine.address}\]:{machine.port}"):
        launched(place(rented, hosts, config, trust=trust), context)
    assert known.read_text() == ""


def test_hosts_that_cannot_reach_each_other_are_refused_before_any_login(
    rented: HostsPlace,
    machines: list[SSHHost],
    containers: list[SSHHost],
    context: LaunchContext,
    tmp_path: Path,
) -> None:
    before = [host.log for host in rented.hosts]
    config, _ = dstack(rented, machines, containers, tmp_path)
    with pytest.raises(
        ConfigError, match=sentence("Name the host with its address between the hosts", "run")
    ):
        launched(place(rented, ["run", "run-1-0"], config), context)
    same = skypilot(rented, tmp_path, address="10.9.9.9")
    with pytest.raises(
        ConfigError,
        match=sentence(
            "Name each host with its own address between the hosts", "train", "train-worker1"
        ),
    ):
        launched(place(rented, ["train", "train-worker1"], same), context)
    assert [host.log for host in rented.hosts] == before
    with pytest.raises(ConfigError, match=sentence("and no ranks run on a jump host")):
        SSHPods(["a"], jump={"address": "b", "internal_address": "10.0.0.5"})


def test_inside_a_dstack_run_its_hostfile_and_configuration_do(
    rented: HostsPlace, context: LaunchContext, tmp_path: Path
) -> None:
    nodes = rented.hosts[:2]
    form = [INSIDE.format(address=h.address, port=h.port, key=rented.user.key) for h in nodes]
    (tmp_path / "config").write_text("".join(form))
    (tmp_path / "hostfile").write_text("".join(f"{host.address} slots=8\n" for host in nodes))
    scan = ["ssh-keyscan", "-T", "300", "-t", "ed25519", "-p", str(nodes[0].port)]
    scan += [host.address for host in nodes]
    keys = subprocess.run(scan, check=True, capture_output=True, text=True, timeout=300).stdout
    (tmp_path / "known_hosts").write_text(keys)
    backend = SSHPods(
        hostfile=tmp_path / "hostfile",
        ssh_config=str(tmp_path / "config"),
        known_hosts=str(tmp_path / "known_hosts"),
        python=rented.python,
        root=str(rented.root),
        connect_timeout_s=60,
    )
    pods = launched(backend, context)
    assert [(pod.address, pod.ssh_port, pod.slots) for pod in pods] == [
        (host.address, host.port, 8) for host in nodes
    ]


@pytest.mark.slow
def test_an_attached_dstack_run_takes_a_script_over_its_own_addresses(
    rented: HostsPlace, machines: list[SSHHost], containers: list[SSHHost], tmp_path: Path
) -> None:
    config, trust = dstack(rented, machines, containers, tmp_path)
    hosts: list[object] = [
        {"address": "run", "internal_address": "127.0.0.12"},
        {"address": "run-1-0", "internal_address": "127.0.0.13"},
    ]
    (tmp_path / "meet.py").write_text(MEET)
    backend = place(rented, hosts, config, trust=trust)
    options = {"count": 2, "warm": False, "path": tmp_path / "cluster"}
    with Cluster(backend, PodSpec(), **options) as cluster:  # type: ignore[arg-type]
        assert str(cluster.hostfile).split()[::2] == ["127.0.0.12", "127.0.0.13"]
        run = cluster.submit(Script(path=str(tmp_path / "meet.py")))
        run.wait(300, progress=False).raise_for_status()
        assert "rank 0 met rank 1 at 127.0.0.12\n" in run.paths.rank_log(0, 0, "stdout").read_text()
    assert list(rented.root.glob("*")) == []


def test_openssh_reaches_a_container_by_its_internal_address(
    rented: HostsPlace,
    machines: list[SSHHost],
    containers: list[SSHHost],
    context: LaunchContext,
    tmp_path: Path,
) -> None:
    config, trust = dstack(rented, machines, containers, tmp_path)
    hosts: list[object] = [{"address": "run-1-0", "internal_address": "127.0.0.13"}]
    backend = place(rented, hosts, config, trust=trust)
    try:
        (pod,) = backend.launch(PodSpec(), 1, context)
        identity = Identity.create(tmp_path / "other")
        identity.pin([pod])
        argv = ssh_argv(pod, identity, ["echo", "in"])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    finally:
        backend.stop()
    assert (done.stdout, done.stderr) == ("in\n", "")
