"""Hosts that are really several, as far as one machine has such: a network namespace each, joined by a bridge."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from poll import until

from tests.pods.sshhosts import SSHHost
from workbench import Cluster, PodSpec, Script, SSHPods
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk.transfer import fetch_file, route_to, send_file
from workbench.pods.ssh.identity import Identity

pytestmark = [pytest.mark.slow, pytest.mark.long]
RING = Path(__file__).parent.parent / "scripts" / "ring.py"
NET = "10.213.7"
_TAGS = itertools.count()  # a namespace goes a little after its last process


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Three namespaces, each with an address of its own that the bridge, and so this machine, reaches."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"wb{os.getpid() % 100_000}{next(_TAGS)}"
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


def test_a_file_goes_on_after_the_network_was_away(namespaces: list[str], tmp_path: Path) -> None:
    """Both ways at once, and away for so long that OpenSSH gives up."""
    identity = Identity.create(tmp_path / "identity")
    host = SSHHost(
        tmp_path / "host", f"{NET}.2", 22, identity.public_key, prefix=("ip", "netns", "exec", namespaces[0])
    ).start()
    try:
        key = (tmp_path / "host" / "host_key.pub").read_text().rsplit(" ", 1)[0]
        pod = Pod(name="pod-0", address=host.address, user=tmp_path.owner(), host_key=key, python=sys.executable)
        identity.pin([pod])
        source, heard, away = tmp_path / "model", {"fetch": [0], "send": [0]}, threading.Event()
        source.write_bytes(content := random.Random(1).randbytes(24 << 20))

        def tell(verb: str, done: int) -> None:
            heard[verb].append(done)
            if done > 8 << 20:
                away.wait(60)  # both are under way when it goes

        def carry(verb: str) -> str:
            route, target = route_to(pod, identity, 120.0), tmp_path / verb
            if verb == "fetch":
                return fetch_file(route, str(source), target, lambda done, _: tell(verb, done))
            return send_file(route, source, str(target), f"{target}.part", lambda done, _: tell(verb, done))

        with ThreadPoolExecutor(2) as pool:
            digests = [pool.submit(carry, verb) for verb in heard]
            until(lambda: min(each[-1] for each in heard.values()) > 8 << 20)
            ip("-n", namespaces[0], "link", "set", "eth0", "down")
            away.set()
            time.sleep(16)  # ssh asks three times in 9 s, and then gives up
            ip("-n", namespaces[0], "link", "set", "eth0", "up")
            assert {digest.result(180) for digest in digests} == {hashlib.sha256(content).hexdigest()}
        for verb, done in heard.items():
            assert (tmp_path / verb).read_bytes() == content
            assert 0 not in done[2:], f"{verb} began again"
    finally:
        host.stop()
        listed = subprocess.run(["ip", "netns", "pids", namespaces[0]], capture_output=True, text=True, timeout=10)
        for pid in map(int, listed.stdout.split()):  # sshd's sessions whose line broke learn of it late
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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
            run = cluster.submit(Script(path=str(RING)))
            result = run.wait(120, progress=False).raise_for_status()
            assert [pod.address for pod in cluster.pods] == [f"{NET}.{n}" for n in (2, 3, 4)]
        assert result.world_size == 3
        for rank in range(3):
            assert "step 4 sum 3" in run.logs(rank, "stdout")
        assert list((tmp_path / "root").glob("*")) == []
        assert f"Accepted publickey for {tmp_path.owner()} from {NET}.1 " in hosts[0].log
