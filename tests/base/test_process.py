"""Processes are told apart by pid and start time, whatever they are called."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from tests.support.poll import until
from workbench.agent.machine import memory, resident
from workbench.agent.ranks.memory import MemoryWatch
from workbench.agent.tasks import Tasks
from workbench.base import process
from workbench.base.child import close_input
from workbench.base.process import (
    FORK_SERVER_NAME,
    POD_MARK,
    POD_NAME,
    Process,
    activity,
    ancestors,
    become_subreaper,
    boot_id,
    catches,
    control_groups,
    descendants,
    die_with_parent,
    end_all,
    family_table,
    find,
    is_alive,
    kernel_link,
    kernel_text,
    live_descendants,
    look_up,
    marks,
    of_pods,
    open_output,
    peer,
    pod_name,
    pod_of,
    process_start_time,
    process_table,
    send_signal,
    status_of,
    with_mark,
    world,
)


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"])
    until(lambda: find(child.pid) is None)
    child.wait()


def test_descendants_are_found_and_ended_though_they_ignore_term(tmp_path: Path) -> None:
    script = "trap '' TERM; sh -c \"trap '' TERM; touch up; sleep 60; sleep 60\"; sleep 60"
    child = subprocess.Popen(["sh", "-c", script], cwd=tmp_path)
    until((tmp_path / "up").exists)
    mine = {process.pid for process in live_descendants(os.getpid())}
    assert child.pid in mine
    below = live_descendants(child.pid)
    assert below == sorted(below, key=lambda process: process.start_time), (
        "a parent comes before its children"
    )
    assert len(below) >= 1
    root = find(child.pid)
    assert root is not None
    began_s = time.monotonic()
    assert (
        end_all(
            lambda: [p for p in (root, *below, *live_descendants(child.pid)) if p.is_alive()],
            grace_s=0.3,
            kill_s=300.0,
        )
        == []
    )
    assert time.monotonic() - began_s > 0.3
    assert child.wait(300) == -signal.SIGKILL


def test_a_mark_must_be_the_whole_variable() -> None:
    env = {"PATH": os.environ["PATH"], "MARK": "/a/pod-1"}
    marked = subprocess.Popen(["sleep", "60"], env=env)
    like_it = subprocess.Popen(["sleep", "60"], env=env | {"MARK": "/a/pod-10"})
    in_argv = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "MARK=/a/pod-1"]
    )
    try:
        until(lambda: with_mark("MARK", ["/a/pod-1", "/b"]))  # until it has become `sleep`
        assert [process.pid for process in with_mark("MARK", ["/a/pod-1", "/b"])] == [marked.pid]
    finally:
        for process in (marked, like_it, in_argv):
            process.kill()
            process.wait()


def test_a_process_is_known_by_id_and_start_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    start = process_start_time(child.pid)
    assert start is not None
    assert is_alive(child.pid, start)
    assert not is_alive(child.pid, start + 1)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid, start), "a zombie does not live"
    child.wait()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') Z 1 (x'); print('up', flush=True); "
        "sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code]
    env = {**os.environ, "WORKBENCH_RUN": "r", "WORKBENCH_OTHER": "x"}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_is_read_whatever_its_name(sleeper: subprocess.Popen[bytes]) -> None:
    found = look_up(sleeper.pid)
    assert (found.parent, found.session, found.zombie) == (os.getpid(), os.getsid(0), False)
    assert look_up(2**22 + 1) is None


def test_a_signal_reaches_only_the_process_with_the_right_start_time(
    sleeper: subprocess.Popen[bytes],
) -> None:
    found = look_up(sleeper.pid)
    other = Process(found.pid, found.start_time + 1)
    assert other.send(signal.SIGKILL) is False
    assert look_up(sleeper.pid) == found
    assert found.send(signal.SIGKILL) is True
    sleeper.wait(timeout=300)
    assert found.send(signal.SIGKILL) is False


def test_marks_are_our_variables_only(sleeper: subprocess.Popen[bytes]) -> None:
    assert marks(sleeper.pid) == {"WORKBENCH_RUN": "r"}
    assert marks(2**22 + 1) == {}


def test_descent_is_followed_to_the_end_and_up_again() -> None:
    parents = {1: 0, 2: 1, 3: 2, 4: 3, 5: 1}
    table = {pid: Process(pid, pid, parent) for pid, parent in parents.items()}
    assert descendants(table, [2, 99]) == {2, 3, 4}
    assert ancestors(table, 4) == {4, 3, 2, 1}


def test_the_table_of_a_family_has_those_below_and_nobody_else() -> None:
    inner = (
        "import subprocess, sys; subprocess.Popen([sys.executable, "
        "'-c', 'input()']); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        family = family_table([parent.pid])
        assert len(family) == 2
        assert family.keys() == descendants(process_table(), [parent.pid])
    assert family_table([parent.pid]) == {}


def test_memory_has_a_peak(sleeper: subprocess.Popen[bytes]) -> None:
    now, peak = memory(sleeper.pid)
    assert 1 << 20 < now <= peak < 1 << 30
    assert memory(2**22 + 1) == (0, 0)


FORKS = r"""
import os, sys
# Every page is written, none is the kernel's page of zeros.
held = bytearray(os.urandom(1)) * (192 << 20)
read, write = os.pipe()
if os.fork() == 0:
    if sys.argv[1] == "writes":
        held[:: 4096] = b"x" * len(held[:: 4096])
    os.write(1, b"%d\n" % os.getpid())
    os.close(write)
    os.read(read, 1)
else:
    os.write(1, b"%d\n" % os.getpid())
    sys.stdin.read()
"""


@pytest.mark.parametrize(("does", "times"), [("nothing", 1), ("writes", 2)])
def test_pages_that_a_fork_shares_with_its_parent_count_once(does: str, times: int) -> None:
    command = [sys.executable, "-c", FORKS, does]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        sizes = {pid: resident(pid) for pid in pids}
        watch = MemoryWatch(Tasks())
        until(lambda: watch.look([pids]) or len(watch._shares) == len(pids), 60)
        together = watch.total(sizes, {})
        parent.stdin.close()
    assert min(size.bytes for size in sizes.values()) > 192 << 20
    assert times * (192 << 20) < together < (times + 0.3) * (192 << 20)


NOBODY_S_PID = 2**22 + 1


def fields_of(state: bytes = b"S", *, ticks: tuple[int, ...] = (0, 0, 0, 0)) -> list[bytes]:
    """Return the fields of a `stat` from the state on, each another number."""
    fields = [state, *(b"%d" % (100 + number) for number in range(1, 50))]
    fields[11:15] = [b"%d" % each for each in ticks]
    return fields


def test_this_process_is_read_as_the_system_knows_it() -> None:
    this = look_up(os.getpid())
    assert this is not None
    assert (this.pid, this.parent, this.session, this.zombie) == (
        os.getpid(),
        os.getppid(),
        os.getsid(0),
        False,
    )
    began_s = psutil.boot_time() + this.start_time / os.sysconf("SC_CLK_TCK")
    assert began_s == pytest.approx(psutil.Process().create_time(), abs=1.5)
    assert find(os.getpid()) == this and this.is_alive()
    assert process_table()[os.getpid()] == this
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert status_of()["Pid"] == str(os.getpid())
    own = world()
    assert own["Uid"].split()[0] == str(os.getuid())
    assert {"Gid", "CapEff", "NoNewPrivs", "Cpus_allowed", "namespace pid", "control group"} <= {
        *own
    }
    assert "Pid" not in own, "another process has another"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer(ours) == (os.getpid(), os.getuid())


def test_fields_of_stat_are_counted_behind_the_last_parenthesis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = b"7 (a) Z 1 (b) " + b" ".join(fields_of(b"S"))
    monkeypatch.setattr(Path, "read_bytes", lambda _self: line)
    found = look_up(7)
    assert found is not None
    assert (found.start_time, found.parent, found.session) == (119, 101, 103)
    assert not found.zombie


def test_a_process_that_ended_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    for state, lives in ((b"S", True), (b"R", True), (b"Z", False), (b"X", False)):
        monkeypatch.setattr(process, "_read_stat", lambda _pid, state=state: fields_of(state))
        assert is_alive(7, 119) == lives
        assert (find(7) is not None) == lives
        assert process_start_time(7) == (119 if lives else None)
        assert not is_alive(7, 120), "another process has the pid"


def test_without_a_descriptor_or_proc_a_pid_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_pid: int) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(process, "_read_stat", fail)
    assert look_up(os.getpid()) is None
    for start_time in (None, 5):
        assert is_alive(os.getpid(), start_time)
        assert is_alive(1, start_time), "another user's, perhaps"
        assert not is_alive(NOBODY_S_PID, start_time)
        assert not is_alive(2**70, start_time)
        assert not is_alive(0, start_time), "a group of processes is no process"
    assert activity(os.getpid()) == (0.0, False)


def test_the_time_and_the_state_of_a_process_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    a_second = os.sysconf("SC_CLK_TCK")
    ticks = (a_second, 2 * a_second, 4 * a_second, 8 * a_second)
    for state, stopped in ((b"S", False), (b"T", True), (b"t", True)):
        fields = fields_of(state, ticks=ticks)
        monkeypatch.setattr(process, "_read_stat", lambda _pid, fields=fields: fields)
        assert activity(7) == (15.0, stopped)


def test_handlers_of_signals_are_seen_one_by_one() -> None:
    numbers = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    try:
        for caught in numbers:
            signal.signal(caught, lambda *_: None)
            assert [number for number in numbers if catches(os.getpid(), number)] == [caught]
            signal.signal(caught, signal.SIG_DFL)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert not catches(NOBODY_S_PID, signal.SIGUSR1)


def test_control_groups_are_listed_by_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    assert control_groups(NOBODY_S_PID) == {}
    lines = "5:cpu,cpuacct:/docker/a\n4:pids:/\n0::/b:c\n"
    monkeypatch.setattr(process, "kernel_text", lambda _path: lines)
    assert control_groups() == {"cpu": "docker/a", "cpuacct": "docker/a", "pids": "", "": "b:c"}


def test_descendants_are_sought_in_the_whole_table_if_the_quick_way_finds_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    young = Process(11, 900, 10)
    old = Process(12, 100, 10)
    dead = Process(13, 50, 10, zombie=True)
    root = Process(10, 10, 1)
    table = {each.pid: each for each in (root, young, old, dead, Process(14, 5, 1))}
    monkeypatch.setattr(process, "family_table", lambda _roots: table)
    monkeypatch.setattr(process, "process_table", dict)
    assert live_descendants(10) == [old, young]
    monkeypatch.setattr(process, "family_table", lambda _roots: {10: root})
    assert live_descendants(10) == []
    monkeypatch.setattr(process, "process_table", lambda: table)
    assert live_descendants(10) == [old, young]


def test_marked_processes_are_the_live_ones_but_this(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Process(11, 1)
    dead = Process(12, 1, zombie=True)
    this = Process(os.getpid(), 1)
    plain = Process(13, 1)
    monkeypatch.setattr(
        process, "process_table", lambda: {each.pid: each for each in (one, dead, this, plain)}
    )
    values = {11: "/a/pod-0", 12: "/a/pod-0", os.getpid(): "/a/pod-0", 13: "/a/pod-1"}
    monkeypatch.setattr(process, "marks", lambda pid, names: {names[0]: values[pid]})
    assert with_mark("MARK", ["/a/pod-0"]) == [one]
    assert of_pods(["/a/pod-0"]) == [one]


def test_a_fork_of_the_fork_server_belongs_to_the_pod_that_it_works_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(tmp_path / "pods" / FORK_SERVER_NAME)
    monkeypatch.setattr(process, "marks", lambda _pid, _names: {POD_MARK: own})
    below = tmp_path / "pods" / "pod-1" / "work"
    gone = tmp_path / "pods" / "pod-2"
    for folder, pod in (
        (below, str(tmp_path / "pods" / "pod-1")),
        (tmp_path / "pods", own),
        (tmp_path, own),
        (gone, str(gone)),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        if folder == gone:
            gone.rmdir()
        assert pod_of(os.getpid()) == pod
    assert pod_of(NOBODY_S_PID) == own
    monkeypatch.setattr(process, "marks", lambda _pid, _names: {POD_MARK: "/a/pod-3"})
    assert pod_of(os.getpid()) == "/a/pod-3"
    monkeypatch.setattr(process, "marks", lambda _pid, _names: {})
    assert pod_of(os.getpid()) == ""
    monkeypatch.chdir(tmp_path)


def test_a_rank_knows_the_name_of_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POD_NAME, "pod-1")
    assert pod_name() == "pod-1"
    monkeypatch.delenv(POD_NAME)
    assert pod_name() == "this pod"


class _Clock:
    """Time that passes only in `sleep`, for `end_all`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("ends_on", "signals", "ends_after_s"),
    [(signal.SIGTERM, 1, 0.02), (signal.SIGKILL, 2, 1.02), (None, None, 1.5)],
)
def test_processes_are_asked_once_then_killed_and_those_left_are_returned(
    monkeypatch: pytest.MonkeyPatch,
    ends_on: int | None,
    signals: int | None,
    ends_after_s: float,
) -> None:
    clock, sent = _Clock(), []
    one = Process(7, 1)
    listed = [one]

    def send(_process: Process, number: int) -> bool:
        sent.append(number)
        if number == ends_on:
            listed.clear()
        return True

    monkeypatch.setattr(process, "time", clock)
    monkeypatch.setattr(Process, "send", send)
    left = end_all(lambda: listed, grace_s=1.0, kill_s=0.5)
    assert left == ([one] if ends_on is None else [])
    assert clock.now_s == pytest.approx(100 + ends_after_s, abs=0.05)
    assert sent.count(signal.SIGTERM) == 1
    if signals is not None:
        assert len(sent) == signals


def test_processes_are_killed_however_long_a_listing_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, sent = _Clock(), []
    listed = [Process(7, 1)]

    def listing() -> list[Process]:
        clock.now_s += 100.0  # many processes of a busy machine
        return list(listed)

    def send(_process: Process, number: int) -> bool:
        sent.append(number)
        if number == signal.SIGKILL:
            listed.clear()
        return True

    monkeypatch.setattr(process, "time", clock)
    monkeypatch.setattr(Process, "send", send)
    assert end_all(listing, grace_s=0.0) == []
    assert sent == [signal.SIGKILL]


def test_a_system_without_handles_of_processes_is_signalled_by_pid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_pid: int) -> NoReturn:
        raise OSError(errno.ENOSYS, "not implemented")

    sent = []
    this = look_up(os.getpid())
    assert this is not None
    monkeypatch.setattr(os, "pidfd_open", fail)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    assert this.send(signal.SIGTERM)
    assert not Process(os.getpid(), this.start_time + 1).send(signal.SIGTERM)
    assert sent == [(os.getpid(), signal.SIGTERM)]


WATCHES = r"""
import signal, sys, threading, time
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
takes = threading.Event()
def other():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    takes.set()
    threading.Event().wait()
threading.Thread(target=other, daemon=True).start()
takes.wait()
print("up", flush=True)
sys.stdin.readline()
# The other thread takes a signal for the process once it gets a core.
deadline_s = time.monotonic() + float(sys.argv[1])
while signal.SIGUSR1 in signal.sigpending() and time.monotonic() < deadline_s:
    time.sleep(0.01)
print(signal.SIGUSR1 in signal.sigpending(), flush=True)
"""


@pytest.mark.parametrize("has_tgkill", [True, False])
def test_a_signal_for_the_main_thread_is_taken_by_no_other(
    monkeypatch: pytest.MonkeyPatch, has_tgkill: bool
) -> None:
    argv = [sys.executable, "-c", WATCHES, "3" if has_tgkill else "300"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watches:
        assert watches.stdin is not None and watches.stdout is not None
        watches.stdout.readline()
        found = look_up(watches.pid)
        assert found is not None
        if not has_tgkill:
            monkeypatch.setattr(process.ctypes, "CDLL", lambda _name: object())
        assert not Process(found.pid, found.start_time + 1).send_to_main_thread(signal.SIGUSR1)
        assert found.send_to_main_thread(signal.SIGUSR1)
        print(file=watches.stdin, flush=True)
        # Any thread may take a signal for the process, and one does.
        assert watches.stdout.readline() == f"{has_tgkill}\n"
    assert not found.send_to_main_thread(signal.SIGUSR1)


def test_handles_of_processes_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    this = look_up(os.getpid())
    assert this is not None
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    assert this.send(0)
    assert not Process(os.getpid(), this.start_time + 1).send(0)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208

    def refuse(_handle: int, _number: int) -> NoReturn:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    assert not this.send(0)


def test_output_goes_to_a_pipe_that_is_read_and_else_to_a_private_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: dict[int, int] = {}
    monkeypatch.setattr(process, "_put", lambda opened, number: put.update({number: opened}))
    os.mkfifo(tmp_path / "stdout.pipe")
    os.mkfifo(tmp_path / "stderr.pipe")
    (tmp_path / "stderr.log").write_text("before\n")
    reader = os.open(tmp_path / "stdout.pipe", os.O_RDONLY | os.O_NONBLOCK)
    open_output([tmp_path / "stdout.log", tmp_path / "stderr.log"])
    try:
        assert sorted(put) == [0, 1, 2]
        assert os.read(put[0], 1) == b""
        assert os.get_blocking(put[1])
        os.write(put[1], b"out")
        assert os.read(reader, 10) == b"out"
        os.write(put[2], b"err")
        assert (tmp_path / "stderr.log").read_text() == "before\nerr"
        assert not (tmp_path / "stdout.log").exists()
        os.close(reader)
        os.close(put[1])
        open_output([tmp_path / "stdout.log", tmp_path / "stderr.log"])
        assert (tmp_path / "stdout.log").stat().st_mode & 0o777 == 0o600
    finally:
        for opened in put.values():
            os.close(opened)


def test_a_child_whose_parent_died_before_it_asked_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = [], []
    monkeypatch.setattr(process, "_prctl", lambda *given: asked.append(given))
    monkeypatch.setattr(os, "_exit", ended.append)
    die_with_parent(os.getppid())
    assert ended == []
    die_with_parent(NOBODY_S_PID)
    assert ended == [128 + signal.SIGKILL]
    become_subreaper()
    on_death, subreaper = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
    assert asked == [(on_death, signal.SIGKILL)] * 2 + [(subreaper, 1)]
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"prctl\(9999\) failed: Invalid argument"):
        process._prctl(9999, 0)


def test_an_ended_process_has_no_text_and_gets_no_signal() -> None:
    code = "print(flush=True); input()"
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.readline()  # the program runs
    assert kernel_text(f"/proc/{child.pid}/cmdline").split("\0")[1:3] == ["-c", code]
    assert kernel_link(f"/proc/{child.pid}/cwd") == str(Path.cwd())
    assert send_signal(child.pid, 0)
    child.kill()
    child.wait()
    close_input(child)
    close_input(child)
    assert kernel_text(f"/proc/{child.pid}/cmdline") == ""
    assert kernel_link(f"/proc/{child.pid}/cwd") == ""
    assert status_of(child.pid) == {}
    assert not send_signal(child.pid, signal.SIGTERM)


def test_the_descriptors_that_are_kept_stay_open() -> None:
    kept, other, last = (os.open(os.devnull, os.O_RDONLY) for _ in range(3))
    code = (
        "import os; from workbench.base.process import close_descriptors; "
        f"close_descriptors([1, {kept}, 5000]); "
        "print(sorted(map(int, os.listdir('/proc/self/fd'))))"
    )
    try:
        shown = subprocess.run(
            [sys.executable, "-c", code],
            pass_fds=[kept, other, last],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        for number in (kept, other, last):
            os.close(number)
    open_there = set(json.loads(shown.stdout))
    assert open_there >= {0, 1, 2, kept}
    # One descriptor is that of the listing itself.
    assert len(open_there - {0, 1, 2, kept}) == 1
