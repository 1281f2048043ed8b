"""Large files both ways: whole, verified, continued after a break, and never in memory at once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import signal
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.pods.conftest import Launched
from tests.support.sentences import says, sentence
from workbench.base.errors import DiskFull, RemoteError
from workbench.pods.ssh.bulk import transfer
from workbench.pods.ssh.bulk.transfer import SshRoute, fetch_file, route_to, send_file

MIB = 1 << 20
SIZE = 20 * MIB + 12_345

# Passes its input on, with one byte changed.
FLIP = (
    "import sys\n"
    "at, seen = int(sys.argv[1]), 0\n"
    "while data := sys.stdin.buffer.read1(65536):\n"
    "    if seen <= at < seen + len(data):\n"
    "        data = data[: at - seen] + bytes([data[at - seen] ^ 1]) + data[at - seen + 1 :]\n"
    "    seen += len(data)\n"
    "    sys.stdout.buffer.write(data)\n"
    "    sys.stdout.buffer.flush()\n"
)


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(5).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


@dataclass
class Line:
    """A way to this very machine, and how to break it: each command notes its group."""

    folder: Path
    wrap: Sequence[str] = ()
    heard: list[int] = field(default_factory=list)
    begun: int = 0
    breaks: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    """Bytes after which the line is cut, and what is done then."""
    kills: bool = True

    def route(self, patience_s: float = 30.0) -> SshRoute:
        return SshRoute(
            name="pod-0",
            host="127.0.0.2",
            login="127.0.0.2",
            python=sys.executable,
            command=self.command,
            patience_s=patience_s,
        )

    def command(self, argv: Sequence[str]) -> list[str]:
        self.begun += 1
        words = ["sh", "-c", f'echo $$ > {self.folder}/pid; exec "$@"', "sh"]
        return ["setsid", *words, *self.wrap, *argv]

    def tell(self, done: int, size: int) -> None:
        assert size == SIZE
        self.heard.append(done)
        if self.breaks and done >= self.breaks[0][0]:
            _, act = self.breaks.pop(0)
            if self.kills:
                os.killpg(int((self.folder / "pid").read_text()), signal.SIGKILL)
            act()

    def carry(self, verb: str, source: Path, target: Path, patience_s: float = 30.0) -> str:
        route = self.route(patience_s)
        if verb == "fetch":
            return fetch_file(route, str(source), target, self.tell)
        return send_file(route, source, str(target), f"{target}.pod-0.part", self.tell)

    def part(self, verb: str, target: Path) -> Path:
        return target.with_name(
            f".{target.name}.part" if verb == "fetch" else f"{target.name}.pod-0.part"
        )


both = pytest.mark.parametrize("verb", ["fetch", "send"])


@both
def test_a_file_goes_over_whole_and_never_lies_in_memory(
    verb: str, tmp_path: Path, file: Path, content: bytes
) -> None:
    line, target = Line(tmp_path), tmp_path / "new" / "folder" / "there"
    tracemalloc.start()
    try:
        digest = line.carry(verb, file, target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * MIB
    assert digest == hashlib.sha256(content).hexdigest()
    assert target.read_bytes() == content
    assert [path.name for path in target.parent.iterdir()] == ["there"]
    assert line.heard[-1] == SIZE
    if verb == "send":
        assert target.stat().st_mode & 0o777 == 0o600


@both
def test_a_line_that_breaks_goes_on_from_where_it_was(
    verb: str, tmp_path: Path, file: Path, content: bytes
) -> None:
    line, target = Line(tmp_path), tmp_path / "there"
    line.breaks = [(5 * MIB, lambda: None), (12 * MIB, lambda: None)]
    line.carry(verb, file, target)
    assert target.read_bytes() == content
    assert line.begun == 3
    assert line.heard.count(0) == 1, "it began once"
    # What was under way is lost with a line, and nothing else:
    # pipes of 1 MiB on this side, smaller ones on the other.
    back = [
        before - after
        for before, after in zip(line.heard, line.heard[1:], strict=False)
        if after < before
    ]
    assert max(back, default=0) <= 3 * MIB
    assert not line.part(verb, target).exists()


@both
def test_a_later_try_goes_on_from_the_part(
    verb: str, tmp_path: Path, file: Path, content: bytes
) -> None:
    line, target = Line(tmp_path), tmp_path / "there"
    line.part(verb, target).write_bytes(content[: 7 * MIB + 1])
    line.carry(verb, file, target)
    assert line.heard[0] == 7 * MIB + 1
    assert target.read_bytes() == content


@both
@pytest.mark.parametrize("damage", ["flipped", "longer"])
def test_a_part_that_is_not_of_this_file_is_fetched_anew(
    verb: str, damage: str, tmp_path: Path, file: Path, content: bytes
) -> None:
    line, target = Line(tmp_path), tmp_path / "there"
    part = bytearray(content if damage == "longer" else content[: 3 * MIB])
    part[MIB] ^= 64
    line.part(verb, target).write_bytes(bytes(part) + (b"more" if damage == "longer" else b""))
    line.carry(verb, file, target)
    assert line.heard[0] == 0
    assert target.read_bytes() == content


@both
def test_a_byte_that_flips_on_the_way_is_found(
    verb: str, tmp_path: Path, file: Path, content: bytes
) -> None:
    once = tmp_path / "flipped"
    flip = (
        f"if test -e {once}; then exec cat; else touch {once}; "
        f'exec "{sys.executable}" -c "$FLIP" {9 * MIB}; fi'
    )
    pipe = f'"$@" | ({flip})' if verb == "fetch" else f'({flip}) | "$@"'
    line, target = (
        Line(tmp_path, wrap=["env", f"FLIP={FLIP}", "sh", "-c", pipe, "sh"]),
        tmp_path / "there",
    )
    line.carry(verb, file, target)
    assert target.read_bytes() == content
    assert line.begun >= 2
    assert line.heard.count(0) == 2, "the whole file travelled again"


@both
def test_a_file_that_always_arrives_as_another_is_given_up(
    verb: str, tmp_path: Path, file: Path
) -> None:
    flip = f'"{sys.executable}" -c "$FLIP" {9 * MIB}'
    pipe = f'"$@" | {flip}' if verb == "fetch" else f'{flip} | "$@"'
    line, target = (
        Line(tmp_path, wrap=["env", f"FLIP={FLIP}", "sh", "-c", pipe, "sh"]),
        tmp_path / "there",
    )
    with pytest.raises(
        RemoteError, match=r"on pod-0 arrived 3 times with another SHA-256 .* failing disk"
    ):
        line.carry(verb, file, target)
    assert not target.exists()


@both
def test_a_line_that_stays_broken_says_how_far_it_came(
    verb: str, tmp_path: Path, file: Path
) -> None:
    line, target = Line(tmp_path), tmp_path / "there"

    def sever() -> None:
        line.wrap = ["sh", "-c", "echo no route to host >&2; exit 255", "sh"]

    line.breaks = [(5 * MIB, sever)]
    with pytest.raises(RemoteError) as error:
        line.carry(verb, file, target, patience_s=1.0)
    said, part = str(error.value), line.part(verb, target)
    assert f"{file if verb == 'fetch' else target} on pod-0: " in said
    assert f" of {SIZE} bytes are over after " in said
    assert f"in {part}" in said
    assert "no route to host" in said
    assert says(said, "and the next try resumes there")
    assert 0 < part.stat().st_size < SIZE
    assert not target.exists()


@pytest.mark.parametrize(
    ("verb", "source", "target", "said"),
    [
        ("fetch", "none", "there", r"says: No such file or directory .*/none"),
        ("fetch", ".", "there", r"says: Is a directory"),
        (
            "send",
            "model.safetensors",
            "model.safetensors/below",
            r"says: (Not a directory|File exists)",
        ),
    ],
)
def test_what_the_pod_refuses_is_said_at_once(
    tmp_path: Path, file: Path, verb: str, source: str, target: str, said: str
) -> None:
    line = Line(tmp_path)
    with pytest.raises(RemoteError, match=said):
        line.carry(verb, tmp_path / source, tmp_path / target, patience_s=20)
    assert line.begun == 1


def test_a_disk_that_takes_no_more_is_said_at_once(tmp_path: Path, file: Path) -> None:
    line = Line(tmp_path, wrap=["prlimit", f"--fsize={4 * MIB}"])
    with pytest.raises(RemoteError, match=r"pod-0 .* says: File too large"):
        line.carry("send", file, tmp_path / "there", patience_s=20)


@pytest.mark.parametrize("ends", [True, False], ids=["writer ends", "writer stays"])
def test_a_writer_that_keeps_the_part_locked_costs_no_byte(
    tmp_path: Path, file: Path, content: bytes, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The far end of a broken line holds the lock for as long as its connection stays open."""
    script, wait = transfer._far_end_script(), "_WRITER_S = 10.0"
    assert wait in script
    impatient = script.replace(wait, "_WRITER_S = 0.2")
    monkeypatch.setattr(transfer, "_far_end_script", lambda: impatient)
    line, target = Line(tmp_path), tmp_path / "there"
    part = line.part("send", target)
    part.write_bytes(content[: 7 * MIB + 1])
    with part.open("rb") as stalled:
        fcntl.flock(stalled, fcntl.LOCK_EX)
        if ends:
            line.breaks = [(9 * MIB, stalled.close)]
            line.kills = False
        digest = line.carry("send", file, target)
        assert part.exists() is not ends, "the part of a living writer stays"
    assert line.heard[0] == 7 * MIB + 1, "no byte is sent twice"
    assert digest == hashlib.sha256(content).hexdigest()
    assert target.read_bytes() == content
    left = {path.name for path in tmp_path.iterdir()} - {"pid", file.name, target.name}
    assert left <= {part.name}, "the copy has become the file"


@pytest.mark.slow
def test_the_real_ssh_is_killed_and_the_file_arrives(
    launched: Launched, tmp_path: Path, file: Path, content: bytes
) -> None:
    pod = launched.pods[0]
    route = route_to(pod, launched.identity, 60.0)
    killed: list[int] = []

    def cut(done: int, _size: int) -> None:
        if done > SIZE // 2 and not killed:
            killed.extend(ssh_to(launched))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    there = f"{pod.root}/in/model.safetensors"
    digest = send_file(route, file, there, f"{there}.part", cut)
    assert len(killed) == 1
    killed.clear()
    assert (
        fetch_file(route, there, tmp_path / "back", cut)
        == digest
        == hashlib.sha256(content).hexdigest()
    )
    assert len(killed) == 1
    assert (tmp_path / "back").read_bytes() == content


def ssh_to(launched: Launched) -> list[int]:
    """The OpenSSH clients that this process runs with the identity of these pods."""
    mine, config = f"PPid:\t{os.getpid()}\n", str(launched.identity.ssh_config)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if mine in (folder / "status").read_text() and argv[0] == "ssh" and config in argv:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_line_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's program may send one; the keeper has other things to do than to read it."""
    from workbench.pods.ssh.bulk import pipe

    endless = [
        sys.executable,
        "-c",
        "import os\nprint('@m', flush=True)\nwhile True: os.write(1, b'x' * 65536)",
    ]
    with (
        pytest.raises(
            pipe.Broken, match=sentence("it sent a line of more than {} bytes", "1,048,576")
        ),
        pipe.Pipe(endless, b"@m", "pod-0", "pod-0") as line,
    ):
        line.readline()
    monkeypatch.setattr(pipe, "_HASHED_S", 1.0)
    slow = [
        sys.executable,
        "-uc",
        "import os, time\nprint('@m')\nwhile True: os.write(1, b'x'); time.sleep(0.05)",
    ]
    with (
        pytest.raises(pipe.Broken, match=sentence("no whole line came for {} s", 1)),
        pipe.Pipe(slow, b"@m", "pod-0", "pod-0") as line,
    ):
        line.readline()


def test_a_file_that_is_larger_than_the_room_is_refused_before_it_fills_the_disk(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file on a pod takes no room there, and may be larger than any disk."""
    monkeypatch.setattr(transfer, "free_bytes", lambda _: SIZE - 1)
    line, target = Line(tmp_path), tmp_path / "there"
    words = sentence(
        "the disk of {} is full: {} needs {}{} and has {} free", "this machine", f"{SIZE:,}"
    )
    with pytest.raises(DiskFull, match=words):
        line.carry("fetch", file, target)
    assert line.heard == [0]
    assert not target.exists()
    assert not line.part("fetch", target).exists()
