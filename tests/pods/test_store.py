"""What is sent to pods arrives whole or not at all: full disks, a spoiled store, many writers."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import pytest

from tests.fakes.smalldisk import small_disk
from tests.pods.conftest import Launched
from workbench.agent.supervisor import stamp
from workbench.base.errors import DiskFull, RemoteError
from workbench.keeper.link.files import ContentStore, PodFiles
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk.transfer import SshRoute, far_end_answer, far_end_argv, send_file
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity

_T = TypeVar("_T")
KIB = 1 << 10
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")


def free_of(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def fill(path: Path, free: int) -> None:
    with (path / "ballast").open("ab") as ballast:
        os.posix_fallocate(
            ballast.fileno(), 0, (path / "ballast").stat().st_size + free_of(path) - free
        )


class Here(SSHConnection):
    """A pod that is this machine: the far end is a process, and no SSH is between."""

    def _ask_far_end(self, words: Sequence[str], data: bytes = b"") -> dict[str, Any]:
        done = subprocess.run(
            far_end_argv(sys.executable, *words), input=data, capture_output=True, timeout=300
        )
        return far_end_answer(done.stdout or b'{"error": "silent"}', "pod-7", "127.0.0.7")


class PodHere(PodFiles):
    """What the keeper sends over, to that pod."""

    def __init__(self, root: Path, stock: ContentStore | None = None) -> None:
        super().__init__(Pod(name=root.name, root=str(root)), Identity(root), 5.0, [], stock)
        self.line = Here(Pod(name="pod-7", address="127.0.0.7"), Identity(root))

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, *, again: bool = False) -> str:
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def _connection(self) -> Any:
        return self.line

    def retry_until_lease(self, action: Callable[[Any], _T]) -> _T:
        return action(self.line)


@root_only
@pytest.mark.slow
@pytest.mark.parametrize("size", [98_305, 300_000, 900_000, 3_000_000])
def test_a_file_that_finds_no_room_on_a_pod_leaves_none_and_says_so(
    launched: Launched, tmp_path: Path, size: int
) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk, launched.connect() as connection:
        fill(disk, 98_304)
        free = free_of(disk)
        with pytest.raises(DiskFull) as refused:
            connection.put_bytes(b"x" * size, disk / "file")
        words = f"the disk of pod-0 is full: {disk} needs {size:,} bytes and has {free:,} free"
        assert str(refused.value) == words
        assert [path.name for path in disk.iterdir()] == ["ballast"]
        (disk / "ballast").unlink()
        connection.put_bytes(b"x" * size, disk / "file")
        assert (disk / "file").read_bytes() == b"x" * size


@root_only
def test_a_disk_that_fills_while_a_file_travels_leaves_none(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        data, path = b"x" * 4_000_000, disk / "file"
        words = ["take", str(path), str(len(data)), hashlib.sha256(data).hexdigest()]
        far = subprocess.Popen(
            far_end_argv(sys.executable, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert far.stdin is not None
        assert far.stdout is not None
        far.stdin.write(data[:2_000_000])
        far.stdin.flush()
        while not [part for part in disk.glob(".file.*") if part.stat().st_size >= 2_000_000]:
            assert far.poll() is None
        fill(disk, 16 * KIB)
        with pytest.raises(BrokenPipeError):
            far.stdin.write(data[2_000_000:])
            far.stdin.flush()
        line = far.stdout.readline()
        far.stdout.close()
        assert far.wait(300) == 1
        with pytest.raises(
            DiskFull,
            match=f"the disk of pod-7 is full: {disk} needs 4,000,000 bytes and has [0-9,]+ free",
        ):
            far_end_answer(line, "pod-7", "127.0.0.7")
        assert [path.name for path in disk.iterdir()] == ["ballast"]


@root_only
def test_a_large_file_that_finds_no_room_says_the_same_and_takes_none(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.write_bytes(bytes(9 << 20))
    with small_disk(tmp_path / "disk", "4m") as disk:
        route = SshRoute(
            name="pod-3", host="127.0.0.3", login="127.0.0.3", python=sys.executable, command=list
        )
        free = free_of(disk)
        with pytest.raises(DiskFull) as refused:
            send_file(route, source, str(disk / "model"), str(disk / "model.part"))
        assert (
            str(refused.value)
            == f"the disk of pod-3 is full: {disk} needs {9 << 20:,} bytes and has {free:,} free"
        )


@pytest.mark.parametrize("spoiled", [b"", b"cut sho", b"not what was sent"])
def test_a_spoiled_file_in_the_store_is_found_and_replaced(tmp_path: Path, spoiled: bytes) -> None:
    pod, data = PodHere(tmp_path / "pod-0"), b"what was sent, all of it"
    path = Path(pod.put(data, ".zip"))
    assert path.read_bytes() == data
    kept = path.stat()
    pod.put(data, ".zip")
    assert path.stat().st_ino == kept.st_ino, "what is there does not travel again"
    path.write_bytes(spoiled)
    assert Path(pod.put(data, ".zip")) == path
    assert path.read_bytes() == data
    path.write_bytes(spoiled)  # by an earlier keeper of the same store
    assert Path(PodHere(tmp_path / "pod-0").put(data, ".zip")).read_bytes() == data


def test_a_spoiled_large_file_in_the_store_is_found_and_replaced(tmp_path: Path) -> None:
    local, data = tmp_path / "model", random.Random(3).randbytes(9 << 20)
    local.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    pod = PodHere(tmp_path / "pods" / "pod-0")
    pod._carry = lambda _name, carry: carry(route_here(), lambda _done, _size: None)  # type: ignore[method-assign]
    path = Path(pod.put_once(local, digest))
    with path.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"another byte")
    assert Path(pod.put_once(local, digest)).read_bytes() == data


def route_here() -> SshRoute:
    return SshRoute(
        name="pod-0", host="127.0.0.2", login="127.0.0.2", python=sys.executable, command=list
    )


@pytest.mark.slow
def test_64_writers_of_one_file_into_a_store_that_they_share(tmp_path: Path) -> None:
    """Their parts had one name once, and who lost the race found it gone."""
    data, writers = random.Random(4).randbytes(1 << 20), 64
    pods = [PodHere(tmp_path / f"pod-{number}") for number in range(writers)]
    together = Barrier(writers)

    def write(pod: PodHere) -> str:
        together.wait(300)
        return pod.put(data, ".jsonl")

    with ThreadPoolExecutor(max_workers=writers) as pool:
        paths = set(pool.map(write, pods))
    (path,) = paths
    assert Path(path).read_bytes() == data
    assert [each.name for each in Path(path).parent.iterdir()] == [Path(path).name], (
        "no part is left"
    )


def test_pods_that_share_a_store_look_at_a_file_once_a_run(tmp_path: Path) -> None:
    stock, data = ContentStore(), b"a script's folder"
    pods = [PodHere(tmp_path / f"pod-{number}", stock) for number in range(16)]
    asked: list[str] = []
    for pod in pods:
        ask = pod.line._ask_far_end
        pod.line._ask_far_end = lambda words, data=b"", ask=ask: (
            asked.append(words[0]) or ask(words, data)
        )  # type: ignore
    with ThreadPoolExecutor(max_workers=16) as pool:
        (path,) = set(pool.map(lambda pod: pod.put(data, ".zip"), pods))
    assert asked == ["holds", "take"]
    Path(path).write_bytes(b"spoiled")
    for pod in pods:  # the next run
        pod.put(data, ".zip")
    assert asked[2:] == ["holds", "take"]
    assert Path(path).read_bytes() == data


def test_a_file_that_the_agent_finds_unchanged_is_not_read_again(tmp_path: Path) -> None:
    asked: list[str] = []

    class WithAgent(PodHere):
        def _stamp_now(self, path: str) -> str:
            return str(stamp({"path": path})["stamp"])

    pod, data = WithAgent(tmp_path / "pod-0"), b"rows"
    ask = pod.line._ask_far_end
    pod.line._ask_far_end = lambda words, data=b"": asked.append(words[0]) or ask(words, data)  # type: ignore
    for _ in range(4):
        path = Path(pod.put(data, ".jsonl"))
    assert asked == ["holds", "take", "holds"]
    path.write_bytes(b"spoi")
    pod.put(data, ".jsonl")
    assert asked[3:] == ["holds", "take"]
    assert path.read_bytes() == data


@pytest.mark.slow
def test_writers_of_one_large_file_do_not_meet_in_one_part(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "store" / "model"
    source.write_bytes(random.Random(5).randbytes(12 << 20))
    together = Barrier(8)

    def write(_: int) -> str:
        together.wait(300)
        return send_file(route_here(), source, str(target), f"{target}.pod-0.part")

    with ThreadPoolExecutor(max_workers=8) as pool:
        digests = set(pool.map(write, range(8)))
    assert digests == {hashlib.sha256(source.read_bytes()).hexdigest()}
    assert target.read_bytes() == source.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["model"]


KILLED = """#!/bin/sh
echo . >> {count}
[ $(wc -l < {count}) -gt {times} ] || kill -9 $$
exec "{python}" "$@"
"""


@pytest.mark.parametrize("times", [2, 3])
def test_a_far_end_that_is_killed_is_asked_again(
    launched: Launched, tmp_path: Path, times: int
) -> None:
    python, count = tmp_path / "python", tmp_path / "count"
    python.write_text(KILLED.format(count=count, times=times, python=sys.executable))
    python.chmod(0o755)
    target = tmp_path / "target"
    with SSHConnection(replace(launched.pods[0], python=str(python)), launched.identity) as ssh:
        if times == 3:
            with pytest.raises(
                RemoteError,
                match=rf"{target} on pod-0 cannot be written: .*python was killed there",
            ):
                ssh.put_bytes(b"content", str(target))
            assert not target.exists()
        else:
            ssh.put_bytes(b"content", str(target))
            assert target.read_bytes() == b"content"
    assert count.read_text().count(".") == 3
