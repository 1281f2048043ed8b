"""Several hosts, as far as one machine has such: network namespaces joined by a bridge."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.namespaces import Namespace, ip, joined
from tests.fakes.sshhosts import SSHHost
from tests.support.poll import until
from workbench import Cluster, PodSpec, Script, SSHPods
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk.transfer import fetch_file, route_to, send_file
from workbench.pods.ssh.identity import Identity

pytestmark = [pytest.mark.slow, pytest.mark.long]
RING = Path(__file__).parent.parent / "scripts" / "ring.py"


@pytest.fixture
def namespaces() -> Iterator[list[Namespace]]:
    with joined(3) as made:
        yield made


def test_a_file_goes_on_after_the_network_was_away(
    namespaces: list[Namespace], tmp_path: Path
) -> None:
    """Both ways at once, and away for so long that OpenSSH gives up."""
    identity = Identity.create(tmp_path / "identity")
    cut_off = namespaces[0]
    host = SSHHost(
        tmp_path / "host", cut_off.address, 22, identity.public_key, prefix=cut_off.prefix
    ).start()
    try:
        key = (tmp_path / "host" / "host_key.pub").read_text().rsplit(" ", 1)[0]
        pod = Pod(
            name="pod-0",
            address=host.address,
            user=tmp_path.owner(),
            host_key=key,
            python=sys.executable,
        )
        identity.pin([pod])
        source, heard, away = tmp_path / "model", {"fetch": [0], "send": [0]}, threading.Event()
        source.write_bytes(content := random.Random(1).randbytes(24 << 20))

        def tell(verb: str, done: int) -> None:
            heard[verb].append(done)
            if done > 8 << 20:
                away.wait(300)  # both are under way when it goes

        def carry(verb: str) -> str:
            route, target = route_to(pod, identity, 120.0), tmp_path / verb
            if verb == "fetch":
                return fetch_file(route, str(source), target, lambda done, _: tell(verb, done))
            return send_file(
                route, source, str(target), f"{target}.part", lambda done, _: tell(verb, done)
            )

        with ThreadPoolExecutor(2) as pool:
            digests = [pool.submit(carry, verb) for verb in heard]
            until(lambda: min(each[-1] for each in heard.values()) > 8 << 20)
            ip("-n", cut_off.name, "link", "set", "eth0", "down")
            away.set()
            time.sleep(16)  # ssh asks three times in 9 s, and then gives up
            ip("-n", cut_off.name, "link", "set", "eth0", "up")
            assert {digest.result(300) for digest in digests} == {
                hashlib.sha256(content).hexdigest()
            }
        for verb, done in heard.items():
            assert (tmp_path / verb).read_bytes() == content
            assert 0 not in done[2:], f"{verb} began again"
    finally:
        host.stop()
        cut_off.end_what_is_left()


def test_three_hosts_with_networks_of_their_own_exchange(
    namespaces: list[Namespace], tmp_path: Path
) -> None:
    user = Identity.create(tmp_path / "user")
    with ExitStack() as undo:
        hosts = []
        for each in namespaces:
            host = SSHHost(
                tmp_path / each.name, each.address, 22, user.public_key, prefix=each.prefix
            )
            hosts.append(host.start())
            undo.callback(host.stop)
        backend = SSHPods(
            [host.address for host in hosts],
            key=user.key,
            trust={host.address: host.fingerprint for host in hosts},
            python=sys.executable,
            root=str(tmp_path / "root"),
            connect_timeout_s=60,
        )
        with Cluster(backend, PodSpec(), count=3, path=tmp_path / "cluster", warm=False) as cluster:
            run = cluster.submit(Script(path=str(RING)))
            result = run.wait(300, progress=False).raise_for_status()
            assert [pod.address for pod in cluster.pods] == [each.address for each in namespaces]
        assert result.world_size == 3
        for rank in range(3):
            assert "step 4 sum 3" in run.logs(rank, "stdout")
        assert list((tmp_path / "root").glob("*")) == []
        here = namespaces[0].bridge
        assert f"Accepted publickey for {tmp_path.owner()} from {here} " in hosts[0].log


HIDDEN = 'mount --make-rprivate /; mount --bind "$1" /etc/hosts; shift; exec "$@"'
"""Shows a program another /etc/hosts."""
NOTEBOOK = """
import sys
from workbench import Cluster, PodSpec, Script, SSHPods
names, key, root, folder, script, *marks = sys.argv[1:]
names = names.split(",")
trust = dict(zip(names, marks))
own = {"python": sys.executable, "root": root, "connect_timeout_s": 60}
place = SSHPods(names, key=key, trust=trust, **own)
with Cluster(place, PodSpec(), count=2, path=folder, warm=False) as cluster:
    for pod in cluster.doctor().hosts:
        print(*(finding.detail for finding in pod.findings if finding.check == "address"))
    run = cluster.submit(Script(script))
    run.wait(300, progress=False).raise_for_status()
    print(run.logs(0), run.logs(1))
"""
SHOW = "import os\nprint(*(os.environ[n] for n in ('MASTER_ADDR', 'GLOO_SOCKET_IFNAME')))\n"


def test_hosts_whose_own_names_are_loopback_addresses_meet(
    namespaces: list[Namespace], tmp_path: Path
) -> None:
    """As Debian's installer writes /etc/hosts: `127.0.1.1 gpu-1` on gpu-1 itself."""
    user = Identity.create(tmp_path / "user")
    names = {"gpu-1": namespaces[0], "gpu-2": namespaces[1]}

    def with_hosts(file: str, own: str = "") -> tuple[str, ...]:
        addresses = {name: "127.0.1.1" if name == own else names[name].address for name in names}
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        (tmp_path / file).write_text("127.0.0.1 localhost\n" + "".join(lines))
        return ("unshare", "--mount", "sh", "-ec", HIDDEN, "sh", str(tmp_path / file))

    with ExitStack() as undo:
        hosts = []
        for name, each in names.items():
            prefix = (*each.prefix, *with_hosts(f"hosts-{name}", name))
            host = SSHHost(tmp_path / name, each.address, 22, user.public_key, prefix=prefix)
            hosts.append(host.start())
            undo.callback(host.stop)
        (tmp_path / "notebook.py").write_text(NOTEBOOK)
        (tmp_path / "show.py").write_text(SHOW)
        words = [",".join(names), user.key, *(tmp_path / name for name in ("root", "cluster"))]
        argv = [*with_hosts("hosts"), sys.executable, tmp_path / "notebook.py", *words]
        argv += [tmp_path / "show.py", *(host.fingerprint for host in hosts)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.stdout.count(f"{namespaces[0].address} eth0") == 2, done.stdout + done.stderr
    # The doctor names the address that others use, and its source.
    told = f"gpu-1 is 127.0.1.1 there; others get {namespaces[0].address}, from the SSH connection"
    assert told in " ".join(done.stdout.split()), done.stdout
