"""The index of runs: a copy that can be made again, quick, and whole whoever writes it at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench.base.errors import ConfigError, RunError
from workbench.client.history import history
from workbench.rundir.catalog.index import INDEX_FILE, RunIndex
from workbench.rundir.state import RunState

MANY = 2002
REFRESH = """
import sys
from workbench.rundir.catalog.index import RunIndex
for _ in range(int(sys.argv[2])):
    with RunIndex(sys.argv[1]) as index:
        index.rebuild()
print(len(RunIndex(sys.argv[1])))
"""


def write_run(folder: Path, number: int, **facts: object) -> Path:
    path = folder / f"run-{number:05}"
    path.mkdir(parents=True)
    info = {"id": path.name, "cluster": str(folder / "gone"), "submitted_s": 1e9 + number}
    (path / "run.json").write_text(
        json.dumps({**info, "benchmark": {"key": f"k{number % 7}", "repeat": 0}})
    )
    result = {
        "state": "succeeded",
        "model": "tiny-t5",
        "technique": ("zero1", "ddp")[number % 2],
        "steps": number,
    }
    (path / "result.json").write_text(json.dumps({**result, **facts}))
    return path


def test_it_says_what_the_run_directories_say_and_follows_them(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a", n) for n in range(20)]
    with RunIndex(tmp_path) as index:
        first = index.refresh()
        assert (first.runs, first.read, first.forgotten) == (20, 20, 0)
        assert index.query() == list(history(tmp_path).records)
        assert (index.refresh().read, len(index)) == (0, 20)

        (paths[3] / "result.json").write_text(
            json.dumps({"state": "failed", "model": "other", "technique": "fsdp"})
        )
        for name in ("run.json", "result.json"):
            (paths[4] / name).unlink()
        paths[4].rmdir()
        write_run(tmp_path / "b", 99)
        second = index.refresh()
        assert (second.runs, second.read, second.forgotten) == (20, 2, 1)
        assert index.query() == list(history(tmp_path).records)


def test_questions(tmp_path: Path) -> None:
    for n in range(20):
        write_run(tmp_path, n)
    with RunIndex(tmp_path) as index:
        index.refresh()
        assert [r.steps for r in index.query(technique="ddp", limit=3)] == [19, 17, 15]
        assert [r.steps for r in index.query(key="k3")] == [17, 10, 3]
        assert [
            r.steps for r in index.query(since_s=1e9 + 17, state=[RunState.SUCCEEDED, "failed"])
        ] == [19, 18, 17]
        assert index.query(state="failed") == []
        with pytest.raises(ConfigError, match="did you mean 'technique'"):
            index.query(tecnique="ddp")
        with pytest.raises(ConfigError, match="limit is -1"):
            index.query(limit=-1)
    with pytest.raises(RunError, match="there is no folder"):
        RunIndex(tmp_path / "none")


def test_thousands_of_runs_are_answered_by_an_index_and_not_by_a_look(tmp_path: Path) -> None:
    """Whatever the machine does meanwhile, an answer takes less processor time than 0.2 s."""
    for n in range(MANY):
        write_run(tmp_path / f"c{n % 10}", n)
    with RunIndex(tmp_path) as index:
        assert index.refresh().runs == MANY
        began = time.thread_time()
        newest = index.query(technique="zero1", state="succeeded", limit=100)
        of_key = index.query(key="k5")
        took_s = time.thread_time() - began
        plan = index._db.execute(
            "EXPLAIN QUERY PLAN SELECT * FROM runs WHERE key = 'k5'"
        ).fetchall()
    assert (len(newest), len(of_key)) == (100, MANY // 7)
    assert took_s / 2 < 0.2
    assert "by_key" in str(plan)


def test_two_notebooks_may_write_it_at_once(tmp_path: Path) -> None:
    for n in range(100):
        write_run(tmp_path, n)
    command = [sys.executable, "-c", REFRESH, str(tmp_path), "5"]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=180) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    with RunIndex(tmp_path) as index:
        assert index.refresh().read == 0
        assert index.query() == list(history(tmp_path).records)


@pytest.mark.parametrize(
    "content", [b"", b"this is no database, but text that is longer than a header of one is" * 20]
)
def test_a_broken_index_is_made_again(tmp_path: Path, content: bytes) -> None:
    write_run(tmp_path, 1)
    with RunIndex(tmp_path) as index:
        index.refresh()
    (tmp_path / INDEX_FILE).write_bytes(content)
    with RunIndex(tmp_path) as index:
        assert index.refresh().read == 1
        assert [r.id for r in index.query()] == ["run-00001"]


def test_a_link_in_place_of_the_index_is_not_followed(tmp_path: Path) -> None:
    folder, own = tmp_path / "foreign", tmp_path / "own.sqlite"
    write_run(folder, 1)
    with RunIndex(folder, own) as index:
        index.refresh()
    before = own.read_bytes()
    for name in (INDEX_FILE, f"{INDEX_FILE}-wal"):
        (folder / name).symlink_to(own)
        with pytest.raises(RunError, match="no link is followed there; remove it"):
            RunIndex(folder)
        (folder / name).unlink()
    assert own.read_bytes() == before
    os.mkfifo(folder / INDEX_FILE)
    with pytest.raises(RunError, match="not a regular file"):
        RunIndex(folder)


def test_an_index_with_an_overwritten_page_is_made_anew(tmp_path: Path) -> None:
    for n in range(40):
        write_run(tmp_path, n)
    with RunIndex(tmp_path) as index:
        index.refresh()
    file = tmp_path / INDEX_FILE
    for page in range(1, file.stat().st_size // 4096):
        whole = file.read_bytes()
        with file.open("r+b") as out:
            out.seek(page * 4096)
            out.write(b"\xa5" * 4096)
        with RunIndex(tmp_path) as index:
            assert index.refresh().runs == 40
            assert len(index.query()) == len(index) == 40
        file.write_bytes(whole)
