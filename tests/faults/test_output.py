"""Output at its worst, and full disks: what the run directory gets, and what it must not get."""

from __future__ import annotations

import os
import random
import re
import runpy
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.smalldisk import small_disk
from tests.support.sentences import says, sentence
from workbench import Cluster, LocalPods, PodSpec, Run
from workbench.base.errors import RunError
from workbench.base.files import read_json
from workbench.rundir.state import RunState

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
MIB = 1 << 20


def test_output_arrives_byte_for_byte_and_the_keeper_stays_small(world: World) -> None:
    """Row 52: 10^5 lines at once, a line of 1 MB, bars, bytes that are no text, and events."""
    keeper = int(str(read_json(world.cluster.path / "state.json")["pid"]))
    before = resident(keeper)
    began = time.monotonic()
    run = world.submit("noise.py")
    result = world.ended(run)
    world.measured("52", "3 x 4 MB and 10^5 lines, whole run", time.monotonic() - began, 10)
    result.raise_for_status()
    noise = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "noise.py"))["noise"]
    for rank in range(3):
        assert run.paths.rank_log(0, rank, "stdout").read_bytes() == noise(rank)
        assert run.paths.rank_log(0, rank, "stderr").read_bytes() == b"\r 10%\r 20%\xff\xfe"
        assert [e.data["n"] for e in run.events() if e.rank == rank] == [0, 1, 2, 3, 4]
    assert resident(keeper) - before < 100 * MIB
    assert run.logs(0, "stdout", tail=1) == "no newline at the end"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_ends_the_logs_and_not_the_run(world: World, tmp_path: Path) -> None:
    """Row 39. What was kept for the result is there in the end."""
    disk, end = tmp_path / "disk", tmp_path / "end"
    with small_disk(disk, "1m"):
        run = world.submit("beat.py", "--until", str(end), "--pause-s", "0.002", into=disk / "run")
        world.beats(run)
        with (disk / "ballast").open("wb", buffering=0) as ballast:
            while fill(ballast.fileno()):
                pass
        log = world.cluster.path / "keeper.log"
        ends = [f"{run.paths.rank_log(0, rank, 'stdout')} ends here for now" for rank in range(3)]
        world.until(lambda: all(end in log.read_text() for end in ends), 120)
        time.sleep(1)  # some hundred more lines that do not fit
        assert run.state is RunState.RUNNING, "the run must go on"
        end.touch()
        result = world.ended(run)
        result.raise_for_status()
        told = (
            "logs here are incomplete: the disk is full; run.fetch() "
            "copies the rest back while the cluster exists"
        )
        assert result.message == f"all ranks finished; {told}"
        for rank in range(3):
            text = world.log(run, rank)
            assert text
            lines = range(text.count("\n") + 1)
            assert "".join(f"rank {rank} line {n}\n" for n in lines).startswith(text)
        with pytest.raises(
            RunError,
            match=sentence(
                "the disk of {} is full: {} needs {}{} and has {} free", "this machine", "bytes"
            ),
        ):
            world.submit("beat.py", "--lines", "3", into=disk / "another")
    world.ended(world.submit("beat.py", "--lines", "3")).raise_for_status()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_of_a_pod_costs_no_line_and_no_run(world: World, tmp_path: Path) -> None:
    """Row 39, the other side: what finds no room in a log comes from the agent's memory."""
    disk, end = tmp_path / "disk", tmp_path / "end"
    with (
        small_disk(disk, "24m"),
        Cluster(
            LocalPods(), PodSpec(cpus=1), count=2, path=disk / "cluster", warm=False
        ) as cluster,
    ):
        args = ("--until", str(end), "--pause-s", "0.002")
        run = world.submit("beat.py", *args, cluster=cluster, into=tmp_path / "run")
        world.beats(run, 2)
        with (disk / "ballast").open("ab", buffering=0) as ballast:
            while fill(ballast.fileno()):
                pass
        before = [world.log(run, rank).count("\n") for rank in range(2)]
        on_pod = [
            path.stat().st_size
            for path in disk.glob("cluster/pods/*/runs/*/attempt-0/rank-*.stdout.log")
        ]
        world.until(
            lambda: all(
                world.log(run, rank).count("\n") > before[rank] + 1000 for rank in range(2)
            ),
            60,
        )
        assert max(on_pod) + 8192 > max(
            p.stat().st_size for p in disk.glob("cluster/pods/*/runs/*/attempt-0/rank-*.stdout.log")
        )
        end.touch()
        result = world.ended(run)
        result.raise_for_status()
        for rank in range(2):
            lines = world.log(run, rank).splitlines()
            assert lines == [f"rank {rank} line {n}" for n in range(len(lines))]
            assert len(lines) > before[rank] + 1000
        with (disk / "ballast").open("ab", buffering=0) as ballast:
            while fill(ballast.fileno()):
                pass
        failed = world.ended(
            world.submit("beat.py", "--lines", "3", cluster=cluster, into=tmp_path / "failed")
        )
        assert failed.state is RunState.FAILED
        assert re.search(
            r"the disk of pod-[01] is full: \S+ needs .* and has [\d,]+ free", failed.message
        ), failed.message
        assert failed.error is not None
        (disk / "ballast").unlink()
        world.ended(world.submit("beat.py", "--lines", "3", cluster=cluster)).raise_for_status()


def test_what_a_pod_leaves_cannot_take_the_place_of_the_keepers_own_records(world: World) -> None:
    keepers_records_are_its_own(world.submit("overwrite.py", pods=2))


@pytest.mark.long
def test_what_a_pod_of_a_shared_folder_leaves_cannot_take_their_place_either(
    world: World, tmp_path: Path
) -> None:
    with Cluster(LocalPods(), count=2, path=tmp_path / "c", warm=False, shared=True) as cluster:
        keepers_records_are_its_own(world.submit("overwrite.py", cluster=cluster))


def keepers_records_are_its_own(run: Run) -> None:
    result = run.wait(300, progress=False).raise_for_status()
    mine = b"written by the pod: "
    taken = sorted(path.relative_to(run.path).as_posix() for path in files_with(run.path, mine))
    assert taken == ["files/mine.txt", "predictions.jsonl"]
    assert says(result.message, "files/ and the run's own files are copied")
    assert not (run.path / "files" / "link").exists()
    assert not (run.path / "card.html").exists()


def files_with(folder: Path, text: bytes) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".zip" and text in path.read_bytes()
    ]


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_what_found_no_room_here_at_the_end_is_fetched_later(world: World, tmp_path: Path) -> None:
    size = 12_000_000
    disk, end = tmp_path / "disk", tmp_path / "end"
    with small_disk(disk, "24m"):
        run = world.submit("leave.py", "--bytes", str(size), "--until", str(end), into=disk / "run")
        world.until(lambda: "at work" in world.log(run, 0), 60)
        with pytest.raises(RunError, match="has not ended"):
            run.fetch()
        with (disk / "ballast").open("wb", buffering=0) as ballast:
            while fill(ballast.fileno()):
                pass
        end.touch()
        result = world.ended(run)
        assert result.state is RunState.FAILED
        words = (
            rf"the disk of this machine is full: \S+ needs {size:,} bytes "
            r"and has [\d,]+ free; run.fetch\(\) tries again"
        )
        assert re.search(words, result.message), result.message
        with pytest.raises(
            RunError,
            match=sentence("the disk of {} is full: {} needs {}{} and has {} free", "this machine"),
        ):
            run.fetch()
        (disk / "ballast").unlink()
        assert run.fetch() == []
        assert run.state is RunState.SUCCEEDED
        assert (
            run.result.raise_for_status().message
            == "all ranks finished; the results were copied back later"
        )
        assert (run.path / "files" / "big.bin").read_bytes() == random.Random(11).randbytes(size)
        assert [world.log(run, rank) for rank in range(3)] == ["at work\n"] * 3


def fill(file: int) -> bool:
    try:
        return os.write(file, bytes(4096)) > 0
    except OSError:
        return False


def resident(pid: int) -> int:
    """Memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
