"""Hosts that are really several, as far as one machine has such: a network namespace each, joined by a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.pods.sshhosts import SSHHost
from workbench import Cluster, PodSpec, Script, SSHPods
from workbench.pods.identity import Identity

pytestmark = pytest.mark.slow
RING = Path(__file__).parent.parent / "scripts" / "ring.py"
NET = "10.213.7"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Three namespaces, each with an address of its own that the bridge, and so this machine, reaches."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"wb{os.getpid() % 100_000}"
    with ExitStack() as undo:
        try:
            ip("link", "add", tag, "type", "bridge")
            undo.callback(ip, "link", "del", tag)
            ip("addr", "add", f"{NET}.1/24", "dev", tag)
            ip("link", "set", tag, "up")
            names = [f"{tag}n{n}" for n in range(3)]
            for number, name in enumerate(names):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
                ip("link", "add", f"{tag}v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", f"{tag}v{number}", "master", tag, "up")
                ip("-n", name, "addr", "add", f"{NET}.{number + 2}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"this machine allows no network namespaces: {error}")
        yield names


def test_three_hosts_with_networks_of_their_own_exchange(namespaces: list[str], tmp_path: Path) -> None:
    user = Identity.create(tmp_path / "user")
    with ExitStack() as undo:
        hosts = []
        for number, name in enumerate(namespaces):
            host = SSHHost(
                tmp_path / name, f"{NET}.{number + 2}", 22, user.public_key, prefix=("ip", "netns", "exec", name)
            )
            hosts.append(host.start())
            undo.callback(host.stop)
        backend = SSHPods(
            [host.address for host in hosts],
            key=user.key,
            trust={host.address: host.fingerprint for host in hosts},
            python=sys.executable,
            root=str(tmp_path / "root"),
        )
        with Cluster(backend, PodSpec(), count=3, path=tmp_path / "cluster", warm=False) as cluster:
            run = cluster.submit(Script(path=str(RING), args=["several"]))
            result = run.wait(120, progress=False).raise_for_status()
            assert [pod.address for pod in cluster.pods] == [f"{NET}.{n}" for n in (2, 3, 4)]
        assert result.world_size == 3
        for rank in range(3):
            assert "step 4 sum 3" in run.logs(rank, "stdout")
        assert list((tmp_path / "root").glob("*")) == []
        assert f"Accepted publickey for {tmp_path.owner()} from {NET}.1 " in hosts[0].log
