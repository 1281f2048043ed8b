"""Disks that are really full, at every moment of a run: one message, the exit code, no process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.smalldisk import small_disk
from tests.support.poll import until
from tests.support.smalljobs import small_job
from workbench import Cluster, Run
from workbench.base.process import with_mark
from workbench.rundir.checkpoints import newest_good
from workbench.rundir.state import RunState

from .conftest import SCRIPTS

if TYPE_CHECKING:
    from .conftest import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system"),
]
MIB = 1 << 20
FULL = (
    r"the disk of (this machine|pod-[01]) is full: (\S+) needs (more room|[\d,]+ bytes)"
    r"( beside [\d,]+ that are kept for logs and results)? and has [\d,]+ free"
)


def fill(disk: Path, left: int = 0) -> None:
    with (disk / "ballast").open("ab") as ballast:
        facts = os.statvfs(disk)
        if (taken := facts.f_bavail * facts.f_frsize - left) > 0:
            os.posix_fallocate(ballast.fileno(), (disk / "ballast").stat().st_size, taken)


def command_line(tmp_path: Path, out: Path, *args: str) -> subprocess.Popen[str]:
    spec = tmp_path / "SPEC.json"
    job = {"kind": "script", "path": str(SCRIPTS / "beat.py"), "args": args}
    spec.write_text(
        json.dumps({"cluster": {"pods": {"cpus": 1}, "count": 2, "warm": False}, "job": job})
    )
    argv = [sys.executable, "-m", "workbench", "run", str(spec), "--out", str(out)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def nothing_runs(disk: Path) -> None:
    until(lambda: not with_mark("WORKBENCH_POD", [str(path) for path in disk.rglob("pod-*")]), 120)
    words = str(disk).encode()
    until(lambda: not [p for p in Path("/proc").glob("[0-9]*/cmdline") if words in read(p)], 120)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("free", "code", "whose"),
    [
        pytest.param(0, 2, "this machine", id="no run directory"),
        pytest.param(400_000, 2, "this machine", id="no room for a run", marks=pytest.mark.long),
        pytest.param(
            900_000, 2, "this machine", id="no room for a cluster", marks=pytest.mark.long
        ),
        pytest.param(1_300_000, 1, "pod-[01]", id="no room on a pod"),
    ],
)
def test_the_command_line_on_a_disk_that_is_full_before(
    tmp_path: Path, free: int, code: int, whose: str
) -> None:
    with small_disk(tmp_path / "disk", "16m") as disk:
        fill(disk, free)
        command = command_line(tmp_path, disk / "out", "--lines", "3")
        printed, _ = command.communicate(timeout=300)
        assert command.returncode == code, printed
        assert "Traceback" not in printed
        # Two pods may both find no room.
        found = list(re.finditer(FULL, printed))
        assert found and all(re.fullmatch(whose, each[1]) for each in found), printed
        assert all(Path(each[2]).is_relative_to(disk) for each in found)
        nothing_runs(disk)
        if code == 2:
            assert [path.name for path in disk.iterdir()] == ["ballast"], (
                "what is refused leaves nothing"
            )
        else:
            assert Run.load(disk / "out").state is RunState.FAILED


@pytest.mark.long
def test_the_command_line_on_a_disk_that_fills_while_it_runs(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with small_disk(tmp_path / "disk", "16m") as disk:
        command = command_line(tmp_path, disk / "out", "--until", str(end))
        logs = [
            disk / "out" / "logs" / "attempt-0" / f"rank-{rank}.stdout.log" for rank in range(2)
        ]
        until(
            lambda: (
                all(" line 3\n" in read(log).decode() for log in logs) or command.poll() is not None
            ),
            120,
        )
        fill(disk)
        end.touch()
        printed, _ = command.communicate(timeout=300)
        assert "Traceback" not in printed
        assert command.returncode == 0, printed
        result = Run.load(disk / "out").result
        assert result.state is RunState.SUCCEEDED
        nothing_runs(disk)


@pytest.mark.long
def test_a_checkpoint_that_found_no_room_here_is_fetched_later(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    options = {"max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2}
    job = small_job(20, 2, technique="single", checkpoints="bring", **options)
    with small_disk(tmp_path / "disk", "11m") as disk:
        run = cluster.submit(job, pods=1, path=disk / "run")
        result = world.ended(run, 300)
        assert result.state is RunState.SUCCEEDED, result.message
        words = (
            rf"the checkpoint of step 2 was not copied back: {FULL}; run.fetch\(\) copies the rest"
        )
        assert re.search(words, result.message), result.message
        assert not list(run.paths.checkpoints.glob("step-*"))
        (still,) = run.fetch()
        assert re.search(FULL, still)
        subprocess.run(["mount", "-o", "remount,size=600m", str(disk)], check=True)
        assert run.fetch() == []
        assert newest_good(run.path).step == 2
        kept = json.loads(run.paths.manifest.read_text())
        assert [name for name in kept if not (run.path / name).is_file()] == []
        assert "model/model.safetensors" in kept, "what had come back before is as it was"
