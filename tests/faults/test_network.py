"""What happens to a run when its network falls silent, is slow, breaks often, or carries junk."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.namespaces import Namespace, joined
from tests.fakes.proxy import bad_network
from tests.fakes.sshhosts import HostsPlace, SSHHost
from tests.support.poll import until
from workbench import Cluster, PodSpec, Run, SSHPods
from workbench.base.process import with_mark
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.ssh.identity import Identity
from workbench.rundir.state import RunState

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow


@pytest.fixture
def networks() -> Iterator[list[Namespace]]:
    with joined(2) as made:
        yield made
        for each in made:
            each.end_what_is_left()


@pytest.fixture
def apart(networks: list[Namespace], tmp_path: Path) -> Iterator[SSHPods]:
    """Two machines, each in a network of its own."""
    user = Identity.create(tmp_path / "user")
    with ExitStack() as undo:
        hosts = []
        for each in networks:
            host = SSHHost(
                tmp_path / each.name, each.address, 22, user.public_key, prefix=each.prefix
            ).start()
            undo.callback(host.stop)
            hosts.append(host)
        yield SSHPods(
            [host.address for host in hosts],
            key=user.key,
            trust={host.address: host.fingerprint for host in hosts},
            python=sys.executable,
            root=str(tmp_path / "root"),
            connect_timeout_s=60,
        )


@pytest.mark.long
def test_a_silent_network_is_shown_and_outlived(
    world: World, networks: list[Namespace], apart: SSHPods, tmp_path: Path
) -> None:
    """Row 24: one pod is silent, and then all are."""
    end = tmp_path / "end"
    with Cluster(apart, PodSpec(), count=2, path=tmp_path / "c", warm=False) as cluster:
        run = world.beating("--until", str(end), "--pause-s", "0.1", pods=2, cluster=cluster)
        with networks[1].silent():
            shown_s = until(lambda: "no sign from pod-1 for 15 s" in run.message, 120)
            world.measured("24", "network silent -> shown", shown_s, 15)
            with networks[0].silent():
                until(lambda: "no sign from any pod: this machine was cut off" in run.message, 120)
                assert not run.state.is_terminal
                before = [len(world.log(run, rank)) for rank in range(2)]
        heard_s = until(lambda: "no sign" not in run.message, 120)
        world.measured("24", "network back -> heard", heard_s, 15)
        until(lambda: _all_grew(world, run, before), 120)
        end.touch()
        run.wait(300, progress=False).raise_for_status()
        for rank in range(2):
            lines = world.log(run, rank).splitlines()
            assert len(lines) > 300, "those printed meanwhile are there"
            assert lines == [f"rank {rank} line {n}" for n in range(len(lines))]


@pytest.mark.long
def test_a_network_that_stays_silent_ends_the_ranks_on_both_sides(
    world: World, networks: list[Namespace], apart: SSHPods, tmp_path: Path
) -> None:
    """Row 24, the other end of it: the cut-off agent ends its ranks by itself."""
    with Cluster(apart, PodSpec(), count=2, path=tmp_path / "c", warm=False, lease_s=10) as cluster:
        run = world.beating(pods=2, cluster=cluster)
        assert len(with_mark("WORKBENCH_RUN", [run.id])) >= 2
        with networks[1].silent():
            silent = time.monotonic()
            result = run.wait(300, progress=False)
            world.measured(
                "24", "network silent for good -> result, lease 10 s", time.monotonic() - silent, 20
            )
            assert result.state is RunState.FAILED
            assert result.error is not None
            assert (result.error.kind, result.error.pod) == ("pod", "pod-1")
            until(lambda: not with_mark("WORKBENCH_RUN", [run.id]), 60)


@pytest.mark.long
def test_all_pods_silent_at_once_is_said_so_and_blamed_on_none(
    world: World, networks: list[Namespace], apart: SSHPods, tmp_path: Path
) -> None:
    with Cluster(apart, PodSpec(), count=2, path=tmp_path / "c", warm=False, lease_s=10) as cluster:
        run = world.beating(pods=2, cluster=cluster)
        with networks[0].silent(), networks[1].silent():
            result = run.wait(300, progress=False)
        assert result.state is RunState.FAILED
        assert result.error is not None
        assert (result.error.kind, result.error.pod, result.error.host) == ("network", "", "")
        assert "no sign from any pod: this machine was cut off" in result.error.message


@pytest.mark.long
def test_a_slow_line_that_keeps_breaking_loses_and_doubles_nothing(
    world: World, tmp_path: Path
) -> None:
    """Row 25: 100 ms each way, and all connections cut every other second."""
    with HostsPlace(tmp_path / "hosts") as place, ExitStack() as undo:
        port = free_port(["127.0.0.7", "127.0.0.8"])
        proxies = [
            undo.enter_context(bad_network(address, port, (host.address, host.port), delay_s=0.1))
            for address, host in zip(("127.0.0.7", "127.0.0.8"), place.hosts, strict=False)
        ]
        backend = SSHPods(
            ["127.0.0.7", "127.0.0.8"],
            port=port,
            key=place.user.key,
            trust=dict(
                zip(
                    ("127.0.0.7", "127.0.0.8"),
                    (host.fingerprint for host in place.hosts),
                    strict=False,
                )
            ),
            python=place.python,
            root=str(place.root),
            connect_timeout_s=60,
        )
        with Cluster(backend, PodSpec(), count=2, path=tmp_path / "c", warm=False) as cluster:
            end = tmp_path / "end"
            run = world.beating("--until", str(end), pods=2, cluster=cluster)
            for _ in range(3):
                with suppress(TimeoutError):
                    run.wait(1.5, progress=False)
                assert min([proxy.cut() for proxy in proxies]) > 0, "the keeper has lines to both"
                seen = [len(world.log(run, rank)) for rank in range(2)]
                again_s = until(lambda seen=seen: _all_grew(world, run, seen), 60)
                world.measured(
                    "25", "cut, 200 ms there and back -> lines of all again", again_s, 10
                )
            end.touch()
            world.ended(run).raise_for_status()
            for rank in range(2):
                lines = world.log(run, rank).splitlines()
                assert len(lines) > 200
                assert lines == [f"rank {rank} line {n}" for n in range(len(lines))]


def _all_grew(world: World, run: Run, seen: list[int]) -> bool:
    return all(len(world.log(run, rank)) > size for rank, size in enumerate(seen))


def test_junk_on_the_training_port_disturbs_nobody(world: World, tmp_path: Path) -> None:
    """Row 35, with torch's store: noise, HTTP, a megabyte without end of line, open connections."""
    end = tmp_path / "end"
    run = world.submit("ring.py", "--until", str(end), pods=2)
    until(lambda: "step 4 " in world.log(run, 0) or run.state.is_terminal, 120)
    port = int(run.paths.command.read_text().partition("--master-port ")[2].split()[0].strip("'\""))
    left_open = [socket.create_connection(("127.0.0.2", port), timeout=300) for _ in range(50)]
    for number in range(40):
        with suppress(OSError), socket.create_connection(("127.0.0.2", port), timeout=300) as junk:
            junk.settimeout(1)
            junk.sendall(
                (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"x" * (1 << 20), bytes(64))[
                    number % 4
                ]
            )
    before = world.log(run, 1).count("\n")
    until(lambda: world.log(run, 1).count("\n") > before + 5 or run.state.is_terminal, 120)
    end.touch()
    world.ended(run, 120).raise_for_status()
    for connection in left_open:
        connection.close()
    assert {line.rpartition(" ")[2] for line in world.log(run, 1).splitlines()} == {"2"}
