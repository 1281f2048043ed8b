"""Why a rank failed, read from what it left: tracebacks as Python, torch and users write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sentences import says
from workbench.agent import machine
from workbench.agent.ranks.output import OutputOrder, OutputStream
from workbench.agent.ranks.records import (
    failure_from,
    last_traceback,
    read_record,
    write_record,
)
from workbench.base.machine.limits import memory_group

PROGRAMS = {
    "plain": ("raise KeyError('a')", "KeyError", "'a'"),
    "no message": ("raise RuntimeError", "RuntimeError", ""),
    "chained": (
        "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise OSError('second') from e",
        "OSError",
        "second",
    ),
    "while handling": ("try:\n    1/0\nexcept ZeroDivisionError:\n    {}['x']", "KeyError", "'x'"),
    "own class": (
        "class E(Exception): pass\n"
        "E.__module__ = 'torch.distributed'; E.__qualname__ = 'DistError'\n"
        "raise E('m')",
        "DistError",
        "m",
    ),
    "several lines": ("raise ValueError('one\\ntwo\\nthree')", "ValueError", "one"),
    "message on the next line": (
        "raise ValueError('\\nCUDA out of memory')",
        "ValueError",
        "CUDA out of memory",
    ),
    "handled before": (
        "import traceback\n"
        "try:\n"
        "    1/0\n"
        "except Exception:\n"
        "    traceback.print_exc()\n"
        "raise TypeError('real')",
        "TypeError",
        "real",
    ),
    "then a finalizer fails": (
        "class D:\n"
        "    def __del__(self): raise ValueError('late')\n"
        "d = D()\n"
        "raise TypeError('real')",
        "TypeError",
        "real",
    ),
    "after a thread failed": (
        "import threading\n"
        "t = threading.Thread(target=lambda: 1/0); t.start(); t.join()\n"
        "raise TypeError('real')",
        "TypeError",
        "real",
    ),
    "syntax": ("x = = 1", "SyntaxError", "invalid syntax"),
    "group": (
        "raise ExceptionGroup('both', [ValueError(1), TypeError(2)])",
        "ExceptionGroup",
        "both (2 sub-exceptions)",
    ),
    "after a bar": (
        "import sys\nsys.stderr.write('\\r 10%|█')\nraise TypeError('real')",
        "TypeError",
        "real",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_exception_that_ended_a_real_program_is_found(name, tmp_path):
    code, kind, message = PROGRAMS[name]
    (tmp_path / "prog.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "prog.py"], cwd=tmp_path, capture_output=True, timeout=300
    )
    failure = failure_from(done.stderr.decode(errors="replace"), done.returncode)
    assert (failure.kind, failure.message) == (kind, message)
    assert 'prog.py", line' in failure.traceback


def test_a_chain_is_kept_whole(tmp_path):
    code, _, _ = PROGRAMS["chained"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    traceback = last_traceback(f"noise\n{done.stderr}").traceback
    assert (
        "ZeroDivisionError" in traceback
        and "direct cause" in traceback
        and "noise" not in traceback
    )


def test_torch_s_rank_prefix_is_read_over():
    text = (
        "[rank1]: Traceback (most recent call last):\n[rank1]: "
        '  File "x.py", line 3, in <module>\n[rank1]:     f()\n'
    )
    failure = last_traceback(
        text + "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried\n[W1 c10d] bye\n"
    )
    assert (failure.kind, failure.message) == ("OutOfMemoryError", "CUDA out of memory. Tried")
    assert "[rank1]" not in failure.traceback


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Traceback (most recent call last):",
        "Traceback (most recent call last):\n  File",
        "\x00\n" * 50,
    ],
)
def test_half_a_traceback_is_none(text):
    assert last_traceback(text) is None


def test_huge_output_is_read_from_its_end(tmp_path):
    (tmp_path / "stderr.log").write_bytes(
        b"x" * 50_000_000
        + b"\nTraceback (most recent call last):\n  f\nValueError: "
        + b"y" * 200_000
    )
    failure = failure_from(OutputStream(tmp_path / "stderr.log", "stderr").tail(), 1)
    assert (
        failure.kind == "ValueError"
        and len(failure.message) <= 4000
        and len(failure.traceback) <= 64 * 1024
    )


def test_without_a_traceback_the_last_lines_are_kept(tmp_path):
    """Python ends with 1 after a text; another code says nothing of the last line."""
    stderr = "".join(f"line {i}\n" for i in range(100))
    for code, message in ((1, "exit code 1: line 99"), (2, "exit code 2")):
        failure = failure_from(stderr, code)
        assert failure.message == message
        assert failure.traceback.splitlines()[0] == "line 80"
    unread = OutputStream(tmp_path / "nowhere" / "stderr.log", "stderr").tail()
    assert failure_from(unread, 1).message == "exit code 1"


def test_sigbus_hints_at_shared_memory(tmp_path):
    assert says(failure_from("", -7).message, "often shared memory that is too small")


def test_records_are_written_whole_or_not_at_all(tmp_path):
    write_record(tmp_path / "error.json", {"rank": 1})
    assert read_record(tmp_path / "error.json")["rank"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
    (tmp_path / "error.json").write_text('{"rank": ')
    assert read_record(tmp_path / "error.json") is None


@pytest.fixture
def small_group():
    """A memory cgroup of 40 MiB, version 1 or 2."""
    mine = memory_group(os.getpid())
    if mine is None:
        pytest.skip("this machine has no memory cgroup with an oom_kill counter")
    group = mine / f"workbench-test-{os.getpid()}"
    try:
        group.mkdir()
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(40 << 20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"may not make a memory cgroup here: {error}")
    yield group
    group.rmdir()


def test_a_rank_killed_for_its_memory_says_so(agent, small_group: Path, tmp_path: Path):
    take = "bytearray({0} << 20); x[::4096] = b'1' * len(x[::4096])"
    code = (
        "import os, time\n"
        f"open('{small_group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        f"x = {take.format(20)}\n"
        f"while not os.path.exists('{tmp_path}/go'): time.sleep(0.02)\n"
        f"x = {take.format(100)}\n"
    )
    agent.start("r", code)
    # Version 1 forgets the group of the dead: the agent must have looked at the rank in it.
    agent.until("r", lambda a: a["ranks"][0]["rss_bytes"] > 22 << 20)
    (tmp_path / "go").touch()
    answer = agent.until_exited("r")
    error = answer["ranks"][0]["error"]
    assert answer["ranks"][0]["exit_code"] == -9 and answer["oom_kills"] == 1
    assert says(error["message"], "was reached (oom_kill counter +", "of 40 MiB")
    assert agent.ask("ping")["pid"] == agent.pid


@pytest.mark.parametrize(
    ("highest", "follows"), [(40 << 20, True), (20 << 20, False), (None, False)]
)
def test_a_kill_may_be_counted_late_only_where_the_limit_was_reached(
    tmp_path: Path, highest: int | None, follows: bool
):
    (tmp_path / "memory.limit_in_bytes").write_text(f"{40 << 20}\n")
    if highest is not None:
        (tmp_path / "memory.max_usage_in_bytes").write_text(f"{highest}\n")
    assert machine.OomWatch({tmp_path: 0}).may_follow() is follows
    assert not machine.OomWatch().may_follow()


def test_a_dying_rank_seen_in_the_root_group_was_killed_in_its_own(tmp_path: Path):
    own, root = tmp_path / "own", tmp_path / "root"
    for group, kills in ((own, 1), (root, 0)):
        group.mkdir()
        (group / "memory.oom_control").write_text(
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        )
    (own / "memory.limit_in_bytes").write_text(f"{40 << 20}\n")
    assert says(
        machine.OomWatch({own: 0, root: 0}).hint(root),
        "was reached (oom_kill counter +",
        "of 40 MiB",
    )
    assert machine.OomWatch({own: 1, root: 0}).hint(root) == ""  # that kill was before this run
    assert machine.OomWatch({}).hint(None) == ""


def test_a_pipe_in_place_of_a_file_of_the_rank_is_no_file(tmp_path: Path) -> None:
    for name in ("error.json", "order.log", "stdout.log"):
        os.mkfifo(tmp_path / name)
    assert read_record(tmp_path / "error.json") is None
    order = OutputOrder(tmp_path / "order.log")
    order.note("stdout", 1)
    order.note("stderr", 1)
    assert order.read(0, 10) == b""
    assert OutputStream(tmp_path / "stdout.log", "stdout").read(0, 10) == b""
    assert (tmp_path / "order.log").is_fifo()
