"""Memory, limits and networks of a pod, from pretended files of the kernel. No process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import says
from workbench.agent import machine
from workbench.agent.machine import OomWatch
from workbench.base import process
from workbench.base.machine import limits

MIB = 1 << 20
GIB = 1 << 30


class Proc:
    """Files of /proc and /sys/fs/cgroup below a folder of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.root = folder / "sys" / "fs" / "cgroup"
        self.root.mkdir(parents=True)
        self.groups: dict[int, dict[str, str]] = {}
        monkeypatch.setattr(machine, "Path", self.path)
        monkeypatch.setattr(process, "Path", self.path)
        monkeypatch.setattr(limits, "_ROOT", self.root)
        monkeypatch.setattr(limits, "control_groups", lambda pid: self.groups.get(pid, {}))

    def path(self, name: str | Path) -> Path:
        return name if isinstance(name, Path) else self.folder / name.lstrip("/")

    def write(self, name: str, text: str) -> None:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, name: str, kills: int | None = None, **files: int | str) -> Path:
        """Make a memory group of version 2, with files by name and `_` for a dot."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        if kills is not None:
            (folder / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\n")
        for file, value in files.items():
            (folder / file.replace("_", ".", 1)).write_text(f"{value}\n")
        return folder


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    return Proc(tmp_path, monkeypatch)


def test_a_process_has_its_memory_now_and_at_its_peak(proc: Proc) -> None:
    proc.write("/proc/5/status", "VmHWM:\t 2000 kB\nVmRSS:\t 1200 kB\nRssShmem:\t 300 kB\n")
    assert machine.memory(5) == (1200 * 1024, 2000 * 1024)
    assert machine.resident(5).own_bytes == 900 * 1024
    # The peak is never lower than the memory now.
    proc.write("/proc/5/status", "Name:\tx\nVmHWM:\t 20 kB\nVmRSS:\t 1200 kB\n")
    assert machine.memory(5) == (1200 * 1024, 1200 * 1024)


def test_a_process_that_ended_has_no_memory(proc: Proc) -> None:
    assert machine.memory(5) == (0, 0)
    proc.write("/proc/5/status", "Name:\tx\n")
    assert machine.memory(5) == (0, 0)


def test_the_memory_group_of_a_process_is_found_in_both_versions(proc: Proc) -> None:
    proc.groups = {1: {"": "a/b"}, 2: {"memory": "v1"}, 3: {"": "c"}, 4: {"memory": "elsewhere"}}
    assert limits.memory_group(1) is None
    proc.group("a/b", 0)
    proc.group("unified/c", 0)
    version_1 = proc.group("memory/v1")
    (version_1 / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert limits.memory_group(1) == proc.root / "a" / "b"
    assert limits.memory_group(2) == version_1
    assert limits.memory_group(3) == proc.root / "unified" / "c"
    assert limits.memory_group(4) is None
    # In a container the mount shows only the container's own group.
    proc.group("memory", 0)
    assert limits.memory_group(4) == proc.root / "memory"
    proc.groups[5] = {"": "elsewhere"}
    proc.group("", 0)
    assert limits.memory_group(5) == proc.root


def test_the_group_of_a_dead_process_is_known_in_version_2_alone(proc: Proc) -> None:
    proc.group("a", 0)
    proc.group("memory/v1", 0)
    proc.groups = {1: {"": "a (deleted)"}, 2: {"memory": "v1"}}
    assert limits.memory_group(1, ended=True) == proc.root / "a"
    assert limits.memory_group(2, ended=True) is None
    assert limits.memory_group(2) == proc.root / "memory" / "v1"


def test_a_group_without_a_counter_of_kills_is_none(proc: Proc) -> None:
    proc.groups = {1: {"": "a"}}
    folder = proc.group("a")
    for text in ("", "oom 9\n", "oom_kill\n", "oom_kill much\n", "oom_kill 1 2\n"):
        (folder / "memory.events").write_text(text)
        assert limits.memory_group(1) is None
    (folder / "memory.oom_control").write_text("oom_kill 0\n")
    assert limits.memory_group(1) == folder


def test_the_smallest_limit_around_a_process_counts(proc: Proc) -> None:
    proc.groups = {1: {"": "a/b"}, 2: {"": "c"}}
    assert limits.memory_limit_bytes(1) is None
    proc.group("a/b", 0, memory_max=3000)
    proc.group("a", memory_max=2000)
    proc.group("", memory_max="max")
    # A file outside of the groups is no limit.
    (proc.root.parent / "memory.max").write_text("5")
    assert limits.memory_limit_bytes(1) == 2000
    proc.group("c", 0, memory_max=1 << 60)
    assert limits.memory_limit_bytes(2) is None
    proc.group("c", memory_max="max", memory_limit_in_bytes=7000)
    assert limits.memory_limit_bytes(2) == 7000


def test_the_memory_of_a_host_is_that_of_its_container(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits.os, "getpid", lambda: 1)  # type: ignore[attr-defined]
    assert limits.most_memory_gib() is None
    proc.write("/proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {1 << 20} kB\n")
    assert (limits.most_memory_gib(), limits.memory_gib("MemAvailable")) == (64.0, 1.0)
    proc.groups = {1: {"": "a"}}
    proc.group("a", 0, memory_max=8 * GIB)
    assert limits.most_memory_gib() == 8.0


def test_the_cores_of_a_pod_are_its_cpu_set_or_its_smallest_quota(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _pid: set(range(16)))  # type: ignore[attr-defined]
    monkeypatch.setattr(limits.os, "getpid", lambda: 1)  # type: ignore[attr-defined]
    assert limits.cores() == 16.0
    proc.groups = {1: {"": "a/b"}}
    proc.group("a/b", cpu_max="max 100000")
    assert limits.cores() == 16.0
    proc.group("a", cpu_max="650000 100000")
    assert limits.cores() == 6.5
    # Version 1, where the mount shows the container's group alone.
    proc.groups = {1: {"cpu": "docker/x"}}
    proc.group("cpu", **{"cpu_cfs_quota_us": "-1", "cpu_cfs_period_us": "100000"})
    assert limits.cores() == 16.0
    proc.group("cpu", **{"cpu_cfs_quota_us": "300000"})
    assert limits.cores() == 3.0


@pytest.mark.parametrize(
    "text", ["max", "", "0 100000", "-1 100000", "100000 0", "x y", "1e5 100000", "1 2 3"]
)
def test_a_quota_that_is_none_limits_no_cores(
    proc: Proc, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _pid: set(range(16)))  # type: ignore[attr-defined]
    monkeypatch.setattr(limits.os, "getpid", lambda: 1)  # type: ignore[attr-defined]
    proc.groups = {1: {"": "a", "cpu": "b"}}
    proc.group("a", cpu_max=text)
    quota, _, period = text.partition(" ")
    proc.group("cpu", **{"cpu_cfs_quota_us": quota, "cpu_cfs_period_us": period})
    assert limits.cores() == 16.0


def test_kills_are_counted_from_the_start_of_the_run(proc: Proc) -> None:
    proc.groups = {1: {"": "a"}, 2: {"": "b"}}
    proc.group("a", 3, memory_max=40 * MIB)
    proc.group("b", 0)
    watch = OomWatch()
    group = watch.add_group_of(1)
    assert group == proc.root / "a" and watch.add_group_of(2) == proc.root / "b"
    assert watch.add_group_of(9) is None
    assert watch.hint(group) == "" == watch.hint(None)
    proc.group("a", 5)
    # A rank that starts later finds the group as it was.
    watch.add_group_of(1)
    assert watch.counts() == {proc.root / "a": 2, proc.root / "b": 0}
    for asked in (group, None, proc.root / "b"):
        assert says(watch.hint(asked), "was reached (oom_kill counter +", "40 MiB", "+2")
    proc.group("a", 1)
    assert watch.counts()[proc.root / "a"] == 0


def test_a_group_of_a_process_that_ended_counts_from_0(proc: Proc) -> None:
    proc.groups = {1: {"": "a"}}
    proc.group("a", 2)
    watch = OomWatch()
    group = watch.add_group_of(1, ended=True)
    assert watch.counts() == {group: 2}
    # No limit is known.
    assert says(
        watch.hint(group), "was reached (oom_kill counter +", "", "+2"
    ) and "MiB" not in watch.hint(group)


def test_a_group_that_is_gone_has_no_kills(proc: Proc) -> None:
    assert OomWatch({proc.root / "gone": 0}).counts() == {proc.root / "gone": 0}
    assert OomWatch({}).hint(None) == ""


def test_the_hint_names_the_ranks_own_group_before_others(proc: Proc) -> None:
    own = proc.group("own", 1, memory_max=10 * MIB)
    other = proc.group("other", 5, memory_max=20 * MIB)
    watch = OomWatch({own: 0, other: 0})
    assert says(watch.hint(own), "was reached (oom_kill counter +", "10 MiB", "+1")
    assert says(watch.hint(None), "was reached (oom_kill counter +", "20 MiB", "+5")


@pytest.mark.parametrize(
    ("limit", "peak", "follows"),
    [(1000, 990, True), (1000, 989, False), (1000, None, False), ("max", 2000, False)],
)
def test_a_kill_may_follow_where_a_group_was_full(
    proc: Proc, limit: int | str, peak: int | None, follows: bool
) -> None:
    empty = proc.group("empty", 0)
    files = {"memory_max": limit} | ({} if peak is None else {"memory_peak": peak})
    group = proc.group("a", 0, **files)
    assert OomWatch({empty: 0, group: 0}).may_follow() is follows


ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0
eth1 0000000A 00000000 0001 0 0 0 000000FF 0 0 0
ib0 0001000A 00000000 0001 0 0 0 00FFFFFF 0 0 0
ib1 0001000A 00000000 0001 0 0 0 00FFFFFF 0 0 0
"""
ADDRESSES = """fe800000000000000000000000000001 02 40 20 80 eth0
20010db8000000010000000000000005 03 40 00 80 ib0
"""


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("127.0.0.9", "lo"),
        ("::1", "lo"),
        ("10.0.1.7", "ib0"),
        ("10.9.9.9", "eth1"),
        ("192.0.2.1", "eth0"),
        ("2001:db8:0:1::77", "ib0"),
        ("2001:db8:0:2::77", ""),
    ],
)
def test_the_interface_of_an_address_is_that_of_the_narrowest_network(
    proc: Proc, address: str, interface: str
) -> None:
    proc.write("/proc/net/route", ROUTES)
    proc.write("/proc/net/if_inet6", ADDRESSES)
    assert machine.interface_of(address) == interface


LOGIN = "192.0.2.9 50000 10.0.1.7 22"
"""SSH_CONNECTION: the notebook's end, and the host's."""


@pytest.mark.parametrize(
    ("resolved", "login", "address", "interface"),
    [
        (["10.9.9.9"], LOGIN, "gpu-1", "eth1"),  # as the host resolves it
        (["127.0.1.1"], LOGIN, "10.0.1.7", "ib0"),  # as Debian's installer writes /etc/hosts
        (["127.0.1.1", "10.9.9.9"], LOGIN, "10.9.9.9", "eth1"),
        (["127.0.0.1"], "::1 1 ::ffff:10.0.1.7 22", "10.0.1.7", "ib0"),
        ([], LOGIN, "10.0.1.7", "ib0"),  # a host that does not know its own name
        (["127.0.1.1"], "127.0.0.1 1 127.0.0.1 22", "gpu-1", "lo"),  # all on one machine
        (["127.0.1.1"], "fe80::1%eth0 1 fe80::2%eth0 22", "gpu-1", "lo"),
        (["127.0.1.1"], "", "gpu-1", "lo"),
        ([], "", "gpu-1", ""),
    ],
)
def test_a_name_that_is_loopback_at_home_is_replaced_by_the_address_of_the_login(
    proc: Proc,
    monkeypatch: pytest.MonkeyPatch,
    resolved: list[str],
    login: str,
    address: str,
    interface: str,
) -> None:
    proc.write("/proc/net/route", ROUTES)

    def resolve(_name: str, _port: None) -> list[Any]:
        if not resolved:
            raise OSError("unknown")
        return [(0, 0, 0, "", (each, 0)) for each in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setenv("SSH_CONNECTION", login)
    assert machine.address_for_others("gpu-1") == address
    assert machine.interface_of("gpu-1") == interface
    assert machine.own_addresses("gpu-1") == resolved
    # An address is what was asked for, also a loopback address: local pods have such.
    assert machine.address_for_others("127.0.0.2") == "127.0.0.2"


def test_names_are_resolved_first(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.write("/proc/net/route", ROUTES)

    def resolve(name: str, _port: None) -> list[Any]:
        if name != "pod-1":
            raise OSError("unknown")
        return [(0, 0, 0, "", ("10.0.1.7", 0)), (0, 0, 0, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert machine.interface_of("pod-1") == "ib0"
    assert machine.interface_of("pod-2") == ""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_free_port_can_be_taken(address: str) -> None:
    family = socket.AF_INET if "." in address else socket.AF_INET6
    try:
        port = machine.free_port(address)
    except OSError:
        pytest.skip(f"this machine has no {address}")
    assert port > 1023
    with socket.socket(family) as taken:
        taken.bind((address, port))
