"""A run on a pod and its ranks, with pretended processes and a pretended clock. No process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from workbench.agent.machine import Resident
from workbench.agent.ranks import job, rank
from workbench.agent.ranks.job import PodRun, bind, shares
from workbench.agent.ranks.memory import MemoryWatch
from workbench.agent.ranks.output import OutputPump
from workbench.agent.ranks.rank import Rank
from workbench.agent.ranks.records import DONE, done_record, write_record
from workbench.agent.ranks.request import RunRequest
from workbench.agent.ranks.stacks import AT_ONCE, SIGNAL
from workbench.agent.tasks import Tasks
from workbench.base.process import Process, RankPlace, boot_id

KILL, TERM, CONT, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGCONT, signal.SIGINT


class World:
    """The processes of a machine, the signals sent to them, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table: dict[int, Process] = {}
        self.sent: list[tuple[int, int]] = []
        self.catching: set[int] = set()
        self.halted: set[int] = set()
        self.memory: dict[int, tuple[int, int]] = {}
        self.marks: dict[int, dict[str, str]] = {}
        self.hints: list[str] = []
        self.later = False
        self.now_s = 100.0
        world = self

        def send(process: Process, signum: int) -> bool:
            world.sent.append((process.pid, signum))
            return process.pid in world.table

        monkeypatch.setattr(Process, "send", send)
        monkeypatch.setattr(Process, "send_to_main_thread", send)
        monkeypatch.setattr(rank, "look_up", self.table.get)
        monkeypatch.setattr(rank, "catches", lambda pid, _: pid in self.catching)
        monkeypatch.setattr(rank, "resident", self.resident)
        for module in (rank, job):
            monkeypatch.setattr(module, "activity", lambda pid: (pid / 8, pid in self.halted))
        monkeypatch.setattr(job, "process_table", lambda: self.table)
        monkeypatch.setattr(job, "marks", lambda pid: self.marks.get(pid, {}))
        monkeypatch.setattr(job, "OomWatch", lambda: self)
        monkeypatch.setattr(job, "time", self)

    def resident(self, pid: int) -> Resident:
        now, peak = self.memory.get(pid, (0, 0))
        return Resident(now, peak, 0)

    def start(self, pid: int, *, at: int = 10, parent: int = 1, **other: Any) -> int:
        self.table[pid] = Process(pid, at, parent, other.pop("session", pid), **other)
        return pid

    def end(self, *pids: int) -> None:
        for pid in pids:
            del self.table[pid]

    def signals(self) -> list[tuple[int, int]]:
        sent, self.sent = sorted(self.sent), []
        return sent

    # The clock
    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    # The watch of kills for memory
    def add_group_of(self, pid: int, *, ended: bool = False) -> Path | None:
        if pid not in self.memory:
            return None
        return Path(f"{pid}{'-ended' if ended else ''}")

    def hint(self, group: Path | None) -> str:
        return f"{self.hints.pop(0)} {group}" if self.hints and self.hints[0] else self.skip()

    def skip(self) -> str:
        if self.hints:
            self.hints.pop(0)
        return ""

    def may_follow(self) -> bool:
        return self.later

    def counts(self) -> dict[str, int]:
        return {"a": 2, "b": 3}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    return tmp_path / "pod-0"


def request(**other: Any) -> RunRequest:
    ranks: list[dict[str, Any]] = [
        {"rank": 2, "local_rank": 0, "pod": "pod-0"},
        {"rank": 3, "local_rank": 1},
    ]
    ranks[1]["pod"] = "pod-0"
    elsewhere = {"rank": 0, "pod": "pod-1"}
    return RunRequest.from_dict(
        {"run": "r1", "ranks": [*ranks, elsewhere], "argv": ["x"], "attempt": 4, "restart": 3}
        | other
    )


@pytest.fixture
def run(world: World, pod: Path) -> PodRun:
    return PodRun(request(), pod)


def begin(run: PodRun, world: World, first: int = 50) -> list[Rank]:
    """Start both ranks as processes of their own sessions."""
    for number, each in enumerate(run.ranks.values()):
        run.begun(each, world.start(first + number), "cold")
    return list(run.ranks.values())


def test_a_run_has_the_pods_own_ranks_and_clean_folders(world: World, pod: Path) -> None:
    folder = pod / "runs" / "r1" / "rank-2"
    folder.mkdir(parents=True)
    for name in ("error.json", "done.json", "stacks.txt", "leave-asked", "leave-listens"):
        (folder / name).touch()
    (folder / "stdout.log").write_text("kept")
    run = PodRun(request(), pod)
    assert list(run.ranks) == [2, 3] and run.folder == pod / "runs" / "r1"
    assert sorted(path.name for path in folder.iterdir()) == [".reserve", "stdout.log"]
    assert (run.folder / "rank-3").stat().st_mode & 0o777 == 0o700
    assert json.loads((run.folder / "attempt.json").read_text()) == {"attempt": 4, "restart": 3}
    assert run.settled and not run.live and not run.hurried and not run.stopping


def test_a_run_without_a_rank_of_the_pod_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pod-7"):
        PodRun(request(), tmp_path / "pod-7")


def test_an_agent_that_takes_over_knows_what_its_ranks_left(world: World, pod: Path) -> None:
    first = PodRun(request(), pod)
    first.ranks[2].log("stdout").touch()
    write_record(first.folder / "rank-2" / DONE, done_record(2))
    run = PodRun(request(attempt=9, restart=9), pod, inherited=True)
    assert (run.attempt, run.restart) == (4, 3)
    done, never = run.ranks.values()
    assert (done.phase, done.done, done.stopped, done.error) == ("exited", True, False, None)
    assert (never.phase, never.done, never.stopped) == ("waiting", False, False)
    assert (first.folder / "rank-2" / "done.json").exists()


@pytest.mark.parametrize(
    ("left", "stopped", "kind"),
    [("", True, None), ('{"kind": "ValueError"}', False, "ValueError")],
)
def test_a_rank_that_left_no_record_was_stopped(
    world: World, pod: Path, left: str, stopped: bool, kind: str | None
) -> None:
    first = PodRun(request(), pod)
    first.ranks[2].log("stdout").touch()
    if left:
        (first.folder / "rank-2" / "error.json").write_text(left)
    found = PodRun(request(), pod, inherited=True).ranks[2]
    assert (found.stopped, (found.error or {}).get("kind"), found.done) == (stopped, kind, False)
    world.start(7, session=7)
    found.process = world.table[7]
    assert found.members(world.table) == set(), "its processes ended with the agent"


def test_a_rank_runs_from_its_begin_to_its_end(run: PodRun, world: World) -> None:
    first, second = begin(run, world)
    assert run.live and not run.settled and not run.hurried
    shown = first.to_dict()
    assert (shown["rank"], shown["local_rank"], shown["pid"]) == (2, 0, 50)
    assert (shown["phase"], shown["how"], shown["exit_code"]) == ("running", "cold", None)
    assert shown["started_s"] and shown["ended_s"] is None
    run.ended(99, 0)
    assert first.phase == second.phase == "running"
    run.ended(50, 0)
    assert (first.phase, first.done, first.exit_code) == ("exited", True, 0)
    assert first.error is None and first.ended_s and second.phase == "running"
    done = json.loads((first.folder / "done.json").read_text())
    assert (done["rank"], done["boot"]) == (2, boot_id())
    run.ended(50, 1)
    assert first.exit_code == 0, "a later process may have the same pid"
    assert run.hurried, "leftover processes are looked for"
    assert Rank(place=first.place, folder=first.folder, success="record").to_dict()["pid"] is None


def test_a_process_that_is_gone_already_is_kept_by_its_pid(run: PodRun, world: World) -> None:
    first = run.ranks[2]
    run.begun(first, 77, "warm")
    assert first.process == Process(77, 0) and first.process is not None and first.process.zombie
    assert first.process.parent == os.getpid() and first.process.session == 77


def test_a_rank_that_is_forked_waits_for_others(run: PodRun) -> None:
    first = run.ranks[2]
    first.phase = "forking"
    assert first.live and run.live and first.to_dict()["phase"] == "waiting"


def end(run: PodRun, world: World, code: int, stderr: str = "") -> Rank:
    first, _ = begin(run, world)
    first.log("stderr").write_text(stderr)
    run.ended(50, code)
    return first


def test_a_rank_that_failed_has_its_reason_on_disk(run: PodRun, world: World) -> None:
    first = end(run, world, 3, "no such column\n")
    assert first.error is not None and not first.done
    assert first.error["message"] == "exit code 3: no such column"
    assert first.error["echo"] is False and first.error["rank"] == 2
    kept = json.loads((first.folder / "error.json").read_text())
    assert kept["message"] == first.error["message"]


@pytest.mark.parametrize(
    ("stderr", "echo"),
    [
        ("Traceback (most recent call last):\n  f\nRuntimeError: ncclRemoteError", True),
        ("Traceback (most recent call last):\n  f\nRuntimeError: NCCL\nncclRemoteError", True),
        ("Traceback (most recent call last):\n  f ncclRemoteError\nRuntimeError: bad", False),
        ("ncclRemoteError", False),
    ],
)
def test_a_lost_peer_is_an_echo_of_another_rank(
    run: PodRun, world: World, stderr: str, echo: bool
) -> None:
    error = end(run, world, 1, stderr).error
    assert error is not None and error["echo"] is echo


def test_a_ranks_own_record_is_its_reason(run: PodRun, world: World) -> None:
    first = run.ranks[2]
    (first.folder / "error.json").write_text('{"kind": "ValueError"}')
    assert first.to_dict()["error"] is None, "it does not run yet"
    begin(run, world)
    assert first.to_dict()["error"] == {"kind": "ValueError"}
    run.ended(50, 1)
    assert first.error == {"kind": "ValueError"}


def test_records_of_the_last_moment_count(world: World, pod: Path) -> None:
    run = PodRun(request(success="record"), pod)
    first, second = begin(run, world)
    (first.folder / "error.json").write_text('{"kind": "ValueError"}')
    (second.folder / "done.json").write_text("{}")
    run.ended(50, 1)
    run.ended(51, 0)
    assert first.error == {"kind": "ValueError"} and not first.done
    assert second.done and second.error is None


def test_a_child_that_left_its_session_is_still_of_the_rank(run: PodRun, world: World) -> None:
    first, _ = begin(run, world)
    world.start(60, parent=50)
    assert first.members(world.table) == {50, 60}
    world.end(50, 60)
    world.start(60, parent=1)
    world.start(61, parent=60)
    assert first.members(world.table) == {60, 61}


@pytest.mark.parametrize("has_record", [True, False])
def test_a_rank_may_prove_its_success_by_a_record(
    world: World, pod: Path, has_record: bool
) -> None:
    run = PodRun(request(success="record"), pod)
    first, _ = begin(run, world)
    if has_record:
        (first.folder / "done.json").write_text("{}")
    assert first.to_dict()["done"] is has_record
    run.ended(50, 0)
    assert first.done is has_record and (first.error is None) is has_record


def test_a_record_alone_is_no_success_where_the_exit_code_counts(run: PodRun, world: World) -> None:
    first, _ = begin(run, world)
    (first.folder / "done.json").write_text("{}")
    assert first.to_dict()["done"] is False
    run.ended(50, 1)
    assert not first.done and first.error is not None


def test_a_rank_that_cannot_start_has_the_reason(run: PodRun) -> None:
    first = run.ranks[2]
    first.end(127, cannot_start="pod-0 has no room")
    assert first.error is not None and first.error["message"] == "pod-0 has no room"
    second = run.ranks[3]
    second.end(None)
    assert second.error is None and not second.done and second.phase == "exited"


def test_a_kill_for_memory_may_be_counted_late(run: PodRun, world: World) -> None:
    world.memory[50] = (1, 1)
    world.later = True
    world.hints = ["", "", "out of memory"]
    error = end(run, world, -KILL).error
    assert error is not None and str(error["message"]).endswith("; out of memory 50-ended")
    assert world.now_s < 100.2


@pytest.mark.parametrize(("later", "waits_s"), [(False, 0.05), (True, 3.0)])
def test_a_kill_without_a_count_is_waited_for(
    run: PodRun, world: World, later: bool, waits_s: float
) -> None:
    world.later = later
    error = end(run, world, -KILL).error
    assert error is not None and "memory" not in str(error["message"])
    assert world.now_s - 100.0 == pytest.approx(waits_s, abs=0.06)


def test_only_kills_are_waited_for(run: PodRun, world: World) -> None:
    end(run, world, -TERM)
    assert world.now_s == 100.0
    run.stop(5.0)
    run.ended(51, -KILL)
    assert world.now_s == 100.0 and run.ranks[3].stopped and run.ranks[3].error is None


def test_a_stop_ends_ranks_and_their_children(run: PodRun, world: World) -> None:
    begin(run, world)
    world.start(60, parent=50, session=50)
    world.start(61, parent=1, session=51)
    world.start(62, parent=1, session=51, at=3)
    world.start(63, parent=60, zombie=True)
    world.start(70)
    run.stop(5.0)
    assert run.stopping and run.hurried
    expected = [(pid, signum) for pid in (50, 51, 60, 61) for signum in (TERM, CONT)]
    assert world.signals() == sorted(expected)
    run.stop(5.0)
    assert world.signals() == [], "a second stop repeats nothing"
    world.now_s = 104.9
    run.tick(world.table)
    assert world.signals() == []
    world.now_s = 105.0
    run.tick(world.table)
    assert world.signals() == [(pid, KILL) for pid in (50, 51, 60, 61)]
    assert all(each.forced for each in run.ranks.values())


def test_a_later_stop_may_shorten_the_grace_alone(run: PodRun, world: World) -> None:
    begin(run, world)
    run.stop(50.0)
    run.stop(-1.0)
    run.stop(80.0)
    world.signals()
    run.tick(world.table)
    assert (50, KILL) in world.signals()


def test_a_stop_ends_ranks_that_wait(run: PodRun, world: World) -> None:
    run.stop(5.0)
    for each in run.ranks.values():
        assert (each.phase, each.stopped, each.done, each.error) == ("exited", True, False, None)
    assert run.settled and world.signals() == []
    run.begun(run.ranks[2], world.start(50), "warm")
    assert world.signals() == [(50, TERM)], "a process that starts later is ended at once"


def test_asked_ranks_end_by_themselves_and_are_then_told(run: PodRun, world: World) -> None:
    trainer, handler = begin(run, world)
    (trainer.folder / "trainer-listens").touch()
    world.catching = {51}
    world.start(60, parent=51, session=51)
    run.stop(60.0, ask=True)
    assert world.signals() == [(51, TERM)] and (trainer.folder / "trainer-asked").exists()
    assert (trainer.asked, handler.asked) == ("Trainer", "SIGTERM")
    assert not any(each.forced for each in run.ranks.values())
    run.stop(60.0, ask=True)
    assert world.signals() == []
    run.stop(10.0)
    assert {pid for pid, _ in world.signals()} == {50, 51, 60}
    run.stop(10.0)
    assert world.signals() == []


def test_a_rank_without_a_handler_is_interrupted(run: PodRun, world: World) -> None:
    first, _ = begin(run, world)
    run.stop(60.0, ask=True)
    assert world.signals() == [(50, INT), (51, INT)] and first.asked == "SIGINT"


def test_a_waiting_rank_that_is_asked_ends(run: PodRun, world: World) -> None:
    run.begun(run.ranks[2], world.start(50), "cold")
    run.stop(60.0, ask=True)
    assert world.signals() == [(50, INT)] and run.ranks[3].stopped


def test_a_stopped_rank_that_returns_0_did_not_succeed(run: PodRun, world: World) -> None:
    begin(run, world)
    run.stop(5.0)
    run.ended(50, 0)
    first = run.ranks[2]
    assert first.stopped and not first.done and first.error is None


def test_what_a_rank_leaves_is_killed_after_half_a_second(run: PodRun, world: World) -> None:
    begin(run, world)
    world.start(60, parent=50, session=50)
    run.tick(world.table)
    world.end(50)
    run.ended(50, 0)
    run.tick(world.table)
    assert world.signals() == []
    world.now_s += 0.5
    run.tick(world.table)
    assert world.signals() == [(60, KILL)] and run.hurried
    world.end(60)
    run.tick(world.table)
    first = run.ranks[2]
    assert first.sweep_at is None and first.swept and not run.hurried and run.live
    # A later process with the same session is another's.
    world.start(80, session=50)
    run.tick(world.table)
    assert world.signals() == []


def test_a_run_is_settled_when_no_marked_process_is_left(
    run: PodRun, world: World, pod: Path
) -> None:
    begin(run, world)
    ours = {"WORKBENCH_RUN": "r1", "WORKBENCH_POD": str(pod), "MORE": "x"}
    world.marks = {
        70: ours,
        71: {**ours, "WORKBENCH_POD": "other"},
        72: ours,
        74: {"WORKBENCH_RUN": "r1", "WORKBENCH_POD": str(pod)},
    }
    for pid, at in ((70, 12), (71, 12), (72, 3), (74, 10)):
        world.start(pid, at=at)
    world.start(73, parent=70)
    world.start(75, parent=70, zombie=True)
    assert run.family(world.table) == {50, 51, 70, 73, 74}
    for pid in (50, 51):
        world.end(pid)
        run.ended(pid, 0)
    run.tick(world.table)
    assert not run.settled and world.signals() == [(70, KILL), (73, KILL), (74, KILL)]
    assert run.poll(world.table, {}, 100)["live_processes"] == 3
    world.end(70, 73, 74)
    run.tick(world.table)
    assert run.settled and run.poll(world.table, {}, 100)["live_processes"] == 0


def test_a_process_that_starts_meanwhile_is_found_in_a_newer_table(
    run: PodRun, world: World, pod: Path
) -> None:
    begin(run, world)
    for pid in (50, 51):
        world.end(pid)
        run.ended(pid, 0)
    old = dict(world.table)
    world.start(70)
    world.marks[70] = {"WORKBENCH_RUN": "r1", "WORKBENCH_POD": str(pod)}
    run.tick(old)
    assert world.signals() == [(70, KILL)] and not run.settled


def test_a_process_with_the_ranks_pid_but_another_start_is_no_rank(
    run: PodRun, world: World
) -> None:
    begin(run, world)
    world.end(50)
    world.start(50, at=99)
    world.start(60, parent=50, at=99, session=50)
    assert run.ranks[2].members(world.table) == set()


def test_memory_and_time_of_a_rank_are_those_of_its_processes(run: PodRun, world: World) -> None:
    watch = MemoryWatch(Tasks())
    first, second = begin(run, world)
    world.start(60, parent=50)
    world.memory = {50: (100, 500), 60: (130, 900)}
    run.sample(world.table, watch)
    assert (first.rss_bytes, first.peak_rss_bytes) == (130, 500)
    assert first.cpu_s == (50 + 60) / 8 and not first.halted
    assert first.group == Path("50") and second.rss_bytes == 0
    # Time and peak never fall.
    world.end(60)
    world.memory = {50: (20, 20)}
    world.halted = {50}
    run.sample(world.table, watch)
    assert (first.rss_bytes, first.peak_rss_bytes, first.cpu_s) == (20, 500, 110 / 8)
    assert first.halted and not second.halted
    world.memory = {}
    world.halted = set()
    run.sample(world.table, watch)
    assert first.group == Path("50") and not first.halted
    assert first.to_dict()["cpu_s"] == 13.75
    first.cpu_s = 1.23456
    assert first.to_dict()["cpu_s"] == 1.23
    first.rss_bytes = 9
    run.ended(50, 0)
    assert first.to_dict()["rss_bytes"] == 0
    run.sample(world.table, watch)
    assert first.cpu_s == 1.23456, "a rank that ended is not measured"


def test_a_poll_has_output_and_what_was_lost(run: PodRun, world: World, pod: Path) -> None:
    first, second = begin(run, world)
    first.log("stdout").write_text("out")
    second.log("stderr").write_text("err")
    first.log("order").write_text("stdout 3\n")
    answer = run.poll(world.table, {"attempt-3/rank-2.stdout.log": 1}, 100)
    assert answer["chunks"] == {
        "attempt-3/rank-2.stdout.log": {"offset": 1, "data": "ut"},
        "attempt-3/rank-3.stderr.log": {"offset": 0, "data": "err"},
        "attempt-3/rank-2.order.log": {"offset": 0, "data": "stdout 3\n"},
    }
    assert (answer["oom_kills"], answer["removed"], answer["full"]) == (5, "", "")
    assert answer["live_processes"] == 2
    first.streams["stdout"].dropped = 3
    second.streams["stderr"].dropped = 4
    full = str(run.poll(world.table, {}, 100)["full"])
    assert "pod-0" in full and "7 bytes" in full


def test_a_folder_or_log_that_was_removed_is_named(run: PodRun, world: World) -> None:
    pump = OutputPump()
    stream = run.ranks[3].streams["stdout"]
    pump.add(stream)
    stream.log.unlink()
    assert str(stream.log) in str(run.poll(world.table, {}, 100)["removed"])
    run.close(pump)
    assert stream.pipe < 0
    for path in sorted(run.folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.folder.rmdir()
    assert str(run.folder) in str(run.poll(world.table, {}, 100)["removed"])


def test_stacks_are_asked_of_ranks_that_have_a_handler(run: PodRun, world: World) -> None:
    first, second = begin(run, world)
    (first.folder / "stacks.txt").write_text("old\n")
    sizes = run.ask_stacks()
    assert sizes == {2: 4} and world.signals() == [(50, SIGNAL)]
    assert run.stacks(sizes) == {"2": "", "3": ""}
    # The rank waits in compiled code.
    run.demand_stacks(sizes)
    assert world.signals() == [(50, AT_ONCE)]
    with (first.folder / "stacks.txt").open("a") as file:
        file.write("new\n")
    run.demand_stacks(sizes)
    assert world.signals() == []
    assert run.stacks(sizes) == {"2": "new\n", "3": ""}
    (second.folder / "stacks.txt").touch()
    world.halted = {51}
    sizes = run.ask_stacks()
    assert sizes == {2: 8, 3: 0}
    world.signals()
    run.demand_stacks(sizes)
    assert world.signals() == [(50, AT_ONCE)], "a stopped rank cannot write"


def test_no_stacks_are_asked_of_ranks_that_ended(run: PodRun, world: World) -> None:
    first, second = begin(run, world)
    for each in (first, second):
        (each.folder / "stacks.txt").touch()
    world.end(51)
    assert run.ask_stacks() == {2: 0}, "the second has just ended"
    run.ended(50, 0)
    world.signals()
    assert run.ask_stacks() == {}
    run.demand_stacks({2: 0})
    assert world.signals() == [(51, SIGNAL)]


def test_a_rank_takes_leave_if_it_listens(run: PodRun, world: World) -> None:
    first, second = run.ranks.values()
    assert not first.announce_shutdown()
    begin(run, world)
    assert not first.announce_shutdown() and world.signals() == []
    (first.folder / "leave-listens").touch()
    assert first.announce_shutdown() is True and (first.folder / "leave-asked").exists()
    world.catching = {51}
    assert second.announce_shutdown() is True and world.signals() == [(51, TERM)]
    run.ended(51, 0)
    assert not second.announce_shutdown()


def test_cores_are_shared_evenly() -> None:
    assert shares({4, 0, 2, 6}, 2, 2) == [[0, 2], [4, 6]]
    assert shares({0, 1, 2}, 3, 1) == [[0], [1], [2]]
    assert shares({0, 1, 2}, 1, 1) == [] == shares({0, 1, 2}, 2, 2)


@pytest.mark.parametrize(
    ("binding", "machine", "env", "bound"),
    [
        ("always", 4, {}, [2, 3]),
        ("cpuset", 4, {}, None),
        ("cpuset", 8, {}, [2, 3]),
        ("", 8, {}, None),
        ("always", 8, {"OMP_PLACES": "cores"}, None),
        ("cpuset", None, {}, None),
    ],
)
def test_ranks_are_bound_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
    binding: str,
    machine: int | None,
    env: dict[str, str],
    bound: list[int] | None,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3} if pid == 0 else set())
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *facts: given.append(facts))
    bind(50, 1, 2, 1, binding, env)
    assert given == ([] if bound is None else [(50, bound)])
    bind(51, 2, 2, 1, binding, env)
    assert len(given) <= 1, "there is no third share"


def test_a_rank_that_cannot_be_bound_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    bind(50, 0, 2, 1, "always", {})


def test_a_rank_has_two_streams_and_their_order(tmp_path: Path) -> None:
    place = RankPlace(rank=0, local_rank=0, pod="p")
    made: Any = Rank(place=place, folder=tmp_path, success="record")
    made.order.log.parent.mkdir()
    assert sorted(made.streams) == ["stderr", "stdout"]
    assert made.order.size == 0
    for name, data in (("stdout", b"1"), ("stderr", b"22")):
        made.streams[name]._take(data)
    assert (tmp_path.parent / "attempt-0/rank-0.order.log").read_text() == "stdout 1\n"


def test_a_rank_that_was_done_before_the_machine_restarted_is_not_known_to_be_whole(
    run: PodRun, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, the files that the rank wrote before its record may be empty."""
    first, second = begin(run, world)
    first.log("stdout").touch()
    run.ended(50, 0)
    first.recover()
    assert (first.done, first.stopped) == (True, False)
    monkeypatch.setattr("workbench.agent.ranks.records.boot_id", lambda: "another")
    first.recover()
    assert (first.done, first.stopped) == (False, True)
    assert second.phase == "running"
