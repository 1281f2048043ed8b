"""The store of a cluster: what is read back after damage, a full disk or a dead writer."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.smalldisk import small_disk
from tests.support.examplefolder import example_folder
from tests.support.poll import until
from workbench.base.errors import RunError, Unreadable
from workbench.rundir.register import store as module
from workbench.rundir.register.store import (
    DamagedStore,
    Decision,
    DecisionKind,
    KnownRun,
    Registration,
    close_store,
    create_store,
    journal_of,
    pods_in,
    read_store,
    registration_in,
    remove_store,
    runs_in,
    set_aside,
    write_store,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
ENTRY = Registration(path="/c", inode=7, device=8, boot="b", spec={"count": 2, "ü": None})
PODS = [{"name": "pod-0", "address": "127.0.0.2"}, {"name": "pod-1", "address": "127.0.0.3"}]
A, B = KnownRun(id="a", path=Path("/runs/a")), KnownRun(id="b", path=Path("/runs/b"))


def decision(run: str = "a", what: DecisionKind = DecisionKind.STAGED, **facts: object) -> Decision:
    return Decision(time_s=1.5, run=run, what=what, attempt=1, facts=facts)


def written(path: Path, count: int = 5) -> list[Decision]:
    decisions = [decision(number=number) for number in range(count)]
    create_store(path, ENTRY)
    write_store(path, runs=[A, B], decisions=decisions, first=1, pods=PODS)
    return decisions


def test_what_was_written_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    decisions = written(path)
    more = decision("b", DecisionKind.ENDED, message="a \udc80 b \n ü", pods=["p"], loss=None)
    write_store(path, runs=[B], decisions=[more], first=6)
    contents = read_store(path)
    assert contents.is_whole
    assert list(contents.runs) == [A, B] == list(runs_in(path))
    assert list(contents.decisions) == [*decisions, more]
    assert contents.pods == PODS == pods_in(path)
    write_store(path, runs=[], decisions=[], first=7, pods=PODS[1:])
    assert pods_in(path) == PODS[1:]
    assert contents.registration == ENTRY
    close_store(path)
    close_store(path)
    assert registration_in(path) == replace(ENTRY, is_closed=True)
    assert read_store(path).decisions == contents.decisions


@settings(max_examples=20)
@given(
    name=st.binary(min_size=1, max_size=40).filter(lambda raw: b"\0" not in raw and b"/" not in raw)
)
def test_a_path_of_any_bytes_is_read_as_it_was(name: bytes) -> None:
    with example_folder() as folder:
        store = Path(folder) / os.fsdecode(b"?#%20 \xff.db")
        run = KnownRun(id="a", path=Path("/runs", os.fsdecode(name)))
        create_store(store, ENTRY)
        write_store(store, runs=[run], decisions=[], first=1)
        assert list(read_store(store).runs) == [run]


def test_a_write_that_is_repeated_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    decisions = written(path)
    write_store(path, runs=[A], decisions=decisions[3:], first=4)
    contents = read_store(path)
    assert (list(contents.runs), list(contents.decisions)) == ([A, B], decisions)


def test_a_missing_and_an_empty_store_have_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    assert list(read_store(path).decisions) == []
    path.touch()
    assert read_store(path).is_whole
    with pytest.raises(DamagedStore):
        write_store(path, runs=[A], decisions=[], first=1)


def test_an_earlier_cluster_s_runs_are_gone_with_its_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path)
    create_store(path, ENTRY)
    assert list(runs_in(path)) == []
    remove_store(path)
    remove_store(path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Decision]]:
    path = tmp_path_factory.mktemp("store") / "store.db"
    decisions = written(path)
    return path.read_bytes(), decisions


@given(at=st.integers(0, 2**20), bits=st.integers(1, 255))
def test_no_flipped_bit_changes_a_row_that_is_read(
    whole: tuple[bytes, list[Decision]], at: int, bits: int
) -> None:
    data, decisions = bytearray(whole[0]), whole[1]
    data[at % len(data)] ^= bits
    with example_folder() as folder:
        path = Path(folder) / "store.db"
        path.write_bytes(data)
        try:
            contents = read_store(path)
        except RunError:  # the number of the format
            return
    assert [each for each in contents.decisions if each not in decisions] == []
    assert [each for each in contents.runs if each not in (A, B)] == []
    assert contents.registration in (ENTRY, None)
    if contents.is_whole:
        assert list(contents.decisions) == decisions


def test_a_store_is_whole_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that is killed while it writes the store again leaves none, or a whole one."""
    path = tmp_path / "store.db"
    decisions = [decision(number=number) for number in range(5)]
    monkeypatch.setattr(module, "_make_room", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if child == 0:
        create_store(path, ENTRY, [A], decisions)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    contents = read_store(path)
    assert contents.is_whole
    assert (contents.registration, list(contents.runs)) == (ENTRY, [A])
    assert list(contents.decisions) == decisions


def test_a_file_that_is_no_store_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"no store" * 1000)
    assert not read_store(path).is_whole
    set_aside(path)
    assert [each.name for each in tmp_path.iterdir()] == ["store.db.damaged"]


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path)
    with sqlite3.connect(path) as store:
        store.execute("PRAGMA user_version = 9")
    store.close()
    with pytest.raises(RunError, match="format 9"):
        read_store(path)


def test_a_store_that_another_program_holds_is_unreadable_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    written(path)
    monkeypatch.setattr(module, "_WAIT_S", 0.01)
    holder = sqlite3.connect(path, isolation_level=None)
    try:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Unreadable, match="locked"):
            read_store(path)
        with pytest.raises(OSError, match="locked"):
            write_store(path, runs=[], decisions=[decision()], first=6)
    finally:
        holder.close()
    assert len(read_store(path).decisions) == 5


def test_a_writer_that_is_killed_leaves_whole_transactions(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    create_store(path, ENTRY)
    code = (
        "import sys, pathlib\n"
        "from workbench.rundir.register.store import *\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "for n in range(1, 10_000, 2):\n"
        "    pair = [Decision(time_s=1.0, run='a', what=DecisionKind.STAGED)] * 2\n"
        "    write_store(path, runs=[], decisions=pair, first=n)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    seen = 0

    def has_written() -> bool:
        nonlocal seen
        with suppress(Unreadable):  # the writer hardly pauses
            seen = len(read_store(path).decisions)
        assert seen % 2 == 0, "a reader sees a pair or nothing"
        return seen >= 20

    until(has_written, every_s=0)
    writer.send_signal(signal.SIGKILL)
    writer.wait(300)
    contents = read_store(path)
    assert contents.is_whole
    assert len(contents.decisions) >= seen >= 20
    assert len(contents.decisions) % 2 == 0


@as_root
def test_a_full_disk_takes_some_hundred_decisions(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        path = disk / "store.db"
        written(path)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as out, pytest.raises(OSError, match="No space"):
            while True:
                out.write(bytes(4096))
        taken = 5
        note = "x" * 100
        with pytest.raises(OSError, match="full"):
            while True:
                write_store(path, runs=[], decisions=[decision(note=note)], first=taken + 1)
                taken += 1
        assert taken > 100
        assert len(read_store(path).decisions) == taken
        filler.unlink()
        write_store(path, runs=[], decisions=[decision()], first=taken + 1)
        assert len(read_store(path).decisions) == taken + 1


def test_room_that_cannot_be_kept_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "store.db"
    written(path)

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(module, "_make_room", fail)
    write_store(path, runs=[], decisions=[decision()], first=6)
    assert len(read_store(path).decisions) == 6
    assert "disk is full" in caplog.text


LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
int fcntl64(int fd, int cmd, ...) {
    va_list rest;
    va_start(rest, cmd);
    void *given = va_arg(rest, void *);
    va_end(rest);
    if (cmd == F_SETLK || cmd == F_GETLK) { ANSWER }
    int (*real)(int, int, ...) = dlsym(RTLD_NEXT, "fcntl64");
    return real(fd, cmd, given);
}
int fcntl(int fd, int cmd, ...) {
    va_list rest;
    va_start(rest, cmd);
    void *given = va_arg(rest, void *);
    va_end(rest);
    return fcntl64(fd, cmd, given);
}
"""
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def on_another_file_system(folder: Path, answer: str, code: str) -> str:
    """Run Python where locks answer as given, with the store's path as argument."""
    source, library = folder / "locks.c", folder / "locks.so"
    source.write_text(LOCKS.replace("ANSWER", answer))
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=300
    )
    begin = "import sys, pathlib\nfrom workbench.rundir.register import store\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code, str(folder / "store.db")],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout + done.stderr


@needs_compiler
def test_a_file_system_without_locks_takes_no_store(tmp_path: Path) -> None:
    """As NFS without lockd answers: ENOLCK."""
    said = on_another_file_system(
        tmp_path,
        "errno = ENOLCK; return -1;",
        "store._WAIT_S = 0.1\n"
        "try: store.create_store(pathlib.Path(sys.argv[1]), store.Registration())\n"
        "except OSError as error: print(error)\n",
    )
    assert "XDG_STATE_HOME" in said
    assert not (tmp_path / "store.db").exists()


@needs_compiler
@pytest.mark.parametrize("locks", ["shared", "of one machine"])
def test_a_reader_undoes_a_write_of_another_machine_only_where_locks_are_not_shared(
    tmp_path: Path, locks: str
) -> None:
    """As NFS mounted with `nolock` or `local_lock`, which docs/promises.md excludes."""
    path = tmp_path / "store.db"
    decisions = written(path)
    keeper = sqlite3.connect(path, isolation_level=None)
    try:
        for command in (
            "PRAGMA journal_mode = PERSIST",
            "PRAGMA cache_size = 1",
            "PRAGMA cache_spill = 1",
            "BEGIN IMMEDIATE",
            "UPDATE decision SET facts = 'half'",
            "CREATE TABLE more (filler BLOB)",
            *["INSERT INTO more VALUES (zeroblob(4000))"] * 40,
        ):
            keeper.execute(command)
        mute = {
            "shared": 'int (*real)(int, int, ...) = dlsym(RTLD_NEXT, "fcntl64");'
            " return real(fd, cmd, given);",
            "of one machine": "((struct flock *)given)->l_type = F_UNLCK; return 0;",
        }
        said = on_another_file_system(
            tmp_path,
            mute[locks],
            "store._WAIT_S = 0.1\n"
            "try: print(len(store.read_store(pathlib.Path(sys.argv[1])).decisions))\n"
            "except store.RunError as error: print(error)\n",
        )
        is_undone = not journal_of(path).exists()
    finally:
        keeper.close()
    assert is_undone == (locks == "of one machine"), said
    if locks == "shared":
        assert "locked" in said
        assert list(read_store(path).decisions) == decisions


def test_the_journal_stays_with_its_room(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path)
    size = journal_of(path).stat().st_size
    assert size >= 64 << 10
    write_store(path, runs=[], decisions=[decision()], first=6)
    assert journal_of(path).stat().st_size == size
