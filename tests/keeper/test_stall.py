"""When a run counts as standing still, by a clock that the test sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.keeper.run.stalls import Stall, StallGuard, StallWatch, culprits
from workbench.keeper.watch.pod import PodReport
from workbench.pods.pod import Pod
from workbench.rundir.events import Event
from workbench.rundir.outcome import RankStatus
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import RunFault

POD = Pod(name="pod-0", address="127.0.0.2")
BARRIER = (
    "Current thread 0x1 (most recent call first):\n  File "
    '"/x/torch/distributed/c10d.py", line 9 in barrier\n'
)
LOOP = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 5 in wait\n'


@dataclass
class Story:
    """A run of two ranks that is told second by second."""

    now: float = 1000.0
    cpu_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    halted: list[bool] = field(default_factory=lambda: [False, False])
    phase: str = "running"

    def __post_init__(self) -> None:
        self.watch = StallWatch(clock=lambda: self.now)

    def ranks(self) -> dict[int, RankStatus]:
        return {
            rank: RankStatus(
                rank=rank,
                pod=POD,
                phase=self.phase,
                cpu_s=self.cpu_s[rank],
                halted=self.halted[rank],
            )
            for rank in (0, 1)
        }

    def passes(
        self, seconds: int, *, busy: tuple[float, float] = (0, 0), printing: bool = False
    ) -> None:
        for _ in range(seconds):
            self.now += 1
            self.cpu_s = [used + share for used, share in zip(self.cpu_s, busy, strict=True)]
            self.watch.record(
                PodReport(pod=POD, ranks=list(self.ranks().values()), drained=not printing)
            )

    def step(self, number: int) -> None:
        self.watch.record_event(Event(time_s=self.now, rank=0, kind="step", data={"step": number}))

    def stall(self, *, training: bool = False, least_s: float | None = None) -> Stall | None:
        return self.watch.stall(self.ranks(), training=training, least_s=least_s)

    def suspects(self, *, training: bool = False) -> list[int]:
        stall = self.stall(training=training)
        return [rank.rank for rank in stall.suspects] if stall else []


def test_silence_without_cpu_is_a_stall_after_thirty_seconds() -> None:
    story = Story()
    story.passes(29)
    assert story.stall() is None
    story.passes(2, busy=(0.01, 0.01))  # housekeeping
    stall = story.stall()
    assert stall is not None and stall.what == "no output and no CPU for 31 s"
    assert story.suspects() == [0, 1]
    story.passes(1, printing=True)
    assert story.stall() is None


def test_whoever_computes_is_not_suspected() -> None:
    story = Story()
    story.passes(40, busy=(1.0, 0.0))
    assert story.suspects() == [1]
    story.passes(40, busy=(1.0, 0.5))
    assert story.stall() is None


def test_in_training_silence_is_enough_and_its_measure_is_the_median_step() -> None:
    story = Story()
    for number in range(1, 12):
        story.passes(10 if number != 3 else 200, busy=(1, 1))
        story.step(number)
    assert story.watch.patience_s == pytest.approx(50)
    story.passes(49, busy=(1, 1))
    assert story.stall(training=True) is None
    story.passes(2, busy=(1, 1))
    stall = story.stall(training=True)
    assert stall is not None and stall.what == "no step for 51 s, the last step was 11"
    assert story.suspects(training=True) == [0, 1], "ranks that all compute look alike"
    assert story.stall() is None, "an evaluation computes for as long as it takes"


def test_a_stopped_rank_needs_no_patience_and_a_shorter_one_can_be_asked_for() -> None:
    story = Story()
    story.passes(5)
    assert story.stall(least_s=6) is None
    story.passes(2)
    assert story.stall(least_s=6) is not None
    story.halted[1] = True
    story.passes(1, printing=True)
    stall = story.stall()
    assert stall is not None and stall.halted and [rank.rank for rank in stall.suspects] == [1]
    story.passes(3, printing=True)
    assert (story.stall() or stall).seconds == 3
    story.halted[1] = False
    story.passes(1, printing=True)
    assert story.stall() is None


def test_ranks_that_do_not_start_are_told_and_ranks_that_have_ended_are_not() -> None:
    story = Story(phase="waiting")
    story.passes(59)
    assert story.stall() is None, "a start of a minute is no silence"
    story.passes(2)
    stall = story.stall()
    assert stall is not None and stall.what == "no rank has started for 61 s"
    story.phase = "exited"
    assert story.stall() is None


def test_stacks_tell_who_waits_and_who_is_waited_for() -> None:
    ranks = list(Story().ranks().values())
    stall = Stall(30, "", ranks)
    assert [rank.rank for rank in culprits(stall, {0: BARRIER, 1: LOOP})] == [1]
    assert [rank.rank for rank in culprits(stall, {0: BARRIER, 1: ""})] == [1]
    assert culprits(stall, {0: BARRIER, 1: BARRIER}) == []
    assert culprits(stall, {0: LOOP, 1: LOOP}) == ()


def test_a_rank_that_reads_the_result_of_a_collective_waits() -> None:
    """NCCL's calls return at once."""
    reads = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "workbench/agent/rank/collectives.py", line 72 in broadcast_bytes\n'
        '  File "workbench/finetune/train/evaluation.py", line 210 in figures\n'
    )
    ranks = list(Story().ranks().values())
    stall = Stall(30, "", ranks)
    assert [rank.rank for rank in culprits(stall, {0: LOOP, 1: reads})] == [0]


def test_a_rank_alone_is_the_culprit_of_its_stall() -> None:
    (first, _) = Story().ranks().values()
    assert culprits(Stall(30, "", [first]), {0: LOOP}) == [first]
    assert culprits(Stall(30, "", [first]), {}) == (), "no stack, no place"


def test_a_rank_that_computes_is_waited_for_where_all_idle_ones_wait() -> None:
    story = Story()
    story.passes(40, busy=(0.0, 1.0))
    stall = story.stall()
    assert stall is not None and [rank.rank for rank in stall.suspects] == [0]
    assert [rank.rank for rank in culprits(stall, {0: BARRIER, 1: LOOP})] == [1]
    assert [rank.rank for rank in culprits(stall, {0: LOOP, 1: BARRIER})] == [0], (
        "peers on a GPU spin"
    )
    assert culprits(stall, {0: BARRIER, 1: BARRIER}) == []


@pytest.mark.parametrize("launcher", ["openmpi", "pdsh"])
def test_a_launcher_that_starts_no_rank_is_ended(launcher: str) -> None:
    """mpirun waits for ever for a daemon that could not call back."""
    story = Story(phase="waiting")
    job = SimpleNamespace(launcher=launcher, stall_timeout_s=None)
    guard = StallGuard(SimpleNamespace(spec=SimpleNamespace(job=job)))  # type: ignore[arg-type]
    guard.watch = story.watch
    process = SimpleNamespace(halted=False, tail=lambda: "mpirun's last words")
    ledger = SimpleNamespace(ranks=story.ranks(), in_steps=False, started=False)
    story.passes(299)
    assert guard.check(ledger, process) is None  # type: ignore[arg-type]
    assert guard.remark == "no rank has started for 299 s"
    story.passes(1)
    assert guard.check(ledger, None) is None, "agents start ranks without a launcher"  # type: ignore[arg-type]
    fault = guard.check(ledger, process)  # type: ignore[arg-type]
    assert fault is not None
    assert (fault.kind, fault.traceback) == ("launcher", "mpirun's last words")
    assert fault.message.startswith(
        f"no rank has started for 300 s; the launcher {launcher} was ended."
    )
    assert ("NetworkPolicy may forbid that." in fault.message) == (launcher == "openmpi")
    job.stall_timeout_s = 600
    assert StallGuard(SimpleNamespace(spec=SimpleNamespace(job=job))).check(ledger, process) is None  # type: ignore[arg-type]


def test_the_imports_of_a_busy_pod_are_no_stall_of_a_run_with_a_short_limit() -> None:
    story = Story(phase="waiting")
    job = SimpleNamespace(launcher="ssh", stall_timeout_s=20)
    guard = StallGuard(SimpleNamespace(spec=SimpleNamespace(job=job)))  # type: ignore[arg-type]
    guard.watch = story.watch
    ledger = SimpleNamespace(ranks=story.ranks(), in_steps=False, started=False)
    story.passes(299)
    assert guard.check(ledger, None) is None  # type: ignore[arg-type]
    assert guard.remark == "no rank has started for 299 s"
    story.passes(1)
    fault = guard.check(ledger, None)  # type: ignore[arg-type]
    assert fault is not None and fault.kind == "stall"


class Guarded:
    """A stall guard of a story's run, whose stacks the test writes."""

    def __init__(self, tmp_path: Path, *, limit_s: float | None = None) -> None:
        self.story = Story()
        self.asked = 0
        self.stacks: dict[int, str] = {0: BARRIER, 1: LOOP}
        self.paths = RunPaths(tmp_path)
        self.paths.logs.mkdir(parents=True)
        job = SimpleNamespace(
            launcher="ssh",
            stall_timeout_s=limit_s,
            traits=SimpleNamespace(records_flight=False),
        )
        context = SimpleNamespace(
            spec=SimpleNamespace(job=job),
            paths=self.paths,
            redact=lambda text: text.replace("hunter2", "*******"),
            stacks=self.ask,
        )
        self.guard = StallGuard(context)  # type: ignore[arg-type]
        self.guard.watch = self.story.watch

    def ask(self, *, lenient: bool) -> dict[int, str]:
        assert lenient
        self.asked += 1
        return self.stacks

    def check(self, *, training: bool = False) -> RunFault | None:
        ledger = SimpleNamespace(ranks=self.story.ranks(), in_steps=training, started=True)
        return self.guard.check(ledger, None)  # type: ignore[arg-type]


def test_stacks_are_asked_for_once_and_again_for_a_rank_that_stopped_later(tmp_path: Path) -> None:
    run = Guarded(tmp_path)
    run.story.passes(40, busy=(1.0, 0.0))
    for _ in range(3):
        assert run.check() is None
    assert run.asked == 1
    assert run.guard.remark == (
        "no output and no CPU for 40 s; rank 1 on pod-0 is at train.py:5 in wait; "
        "stacks.txt in logs/ has the stacks of all ranks"
    )
    # Rank 0 computed when the stacks were asked for, and has stopped since.
    run.story.passes(40)
    run.check()
    run.check()
    assert run.asked == 2
    run.story.passes(1, printing=True)
    assert run.check() is None and run.guard.remark == ""
    run.story.passes(40)
    run.check()
    assert run.asked == 3, "another stall has other stacks"


def test_a_wait_for_the_build_of_an_op_is_named(tmp_path: Path) -> None:
    run = Guarded(tmp_path)
    run.stacks[1] = LOOP.replace('"/job/train.py", line 5', '"/utils/file_baton.py", line 50')
    run.story.passes(40, busy=(1.0, 0.0))
    run.check()
    assert (
        "rank 1 on pod-0 is at file_baton.py:50 in wait, for the build lock of an op; "
        "its log names the lock and the way out" in run.guard.remark
    )


def test_in_training_a_change_of_suspects_asks_for_no_other_stacks(tmp_path: Path) -> None:
    run = Guarded(tmp_path)
    run.story.passes(40, busy=(1.0, 0.0))
    run.check(training=True)
    run.story.passes(40)
    run.check(training=True)
    assert run.asked == 1


def test_the_file_of_stacks_names_each_rank_and_has_no_secret(tmp_path: Path) -> None:
    run = Guarded(tmp_path)
    run.stacks = {1: "", 0: "in hunter2", 7: "elsewhere"}
    run.story.halted[1] = True
    run.story.passes(40)
    run.check()
    assert run.paths.stacks.read_text().split("\n\n") == [
        "rank 0 on pod-0\nin *******",
        "rank 1 on pod-0\nstopped by a signal",
        "rank 7\nelsewhere\n",
    ]
    assert "rank 1 on pod-0 is stopped by a signal (SIGSTOP)" in run.guard.remark
    run.story.halted[1] = False
    run.story.passes(1, printing=True)
    run.check()
    run.story.passes(40)
    run.check()
    assert "rank 1 on pod-0\nthe stack gives no position" in run.paths.stacks.read_text()


def test_a_run_ends_at_its_own_limit_with_the_culprit_and_the_stack(tmp_path: Path) -> None:
    run = Guarded(tmp_path, limit_s=60)
    run.stacks = {0: BARRIER, 1: LOOP + "hunter2"}
    run.story.passes(59)
    assert run.check() is None
    run.story.passes(1)
    fault = run.check()
    assert fault is not None
    assert (fault.kind, fault.rank, fault.pod, fault.host) == ("stall", 1, "pod-0", "127.0.0.2")
    assert fault.message.endswith("; ended as stall_timeout_s=60 asks")
    assert "*******" in fault.traceback
    # Where no rank stands out, none is blamed.
    other = Guarded(tmp_path / "other", limit_s=60)
    other.stacks = {0: BARRIER, 1: BARRIER}
    other.story.passes(60)
    fault = other.check()
    assert fault is not None and (fault.rank, fault.pod, fault.traceback) == (None, "", "")


def test_a_rank_that_still_computes_is_not_ended_outside_of_training(tmp_path: Path) -> None:
    run = Guarded(tmp_path, limit_s=60)
    run.story.passes(90, busy=(0.0, 1.0))  # rank 0 waits for rank 1, which computes
    assert run.check() is None
    assert run.check(training=True) is not None


def test_the_collectives_of_the_ranks_are_in_the_remark_of_their_stall_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Guarded(tmp_path)
    told = [["rank 1 is a collective behind"], []]
    monkeypatch.setattr(StallGuard, "_keep_flight", lambda _: told.pop(0))
    run.story.passes(40)
    run.check()
    run.check()
    assert "in wait; rank 1 is a collective behind; stacks.txt" in run.guard.remark
    run.story.passes(1, printing=True)
    run.check()
    run.story.passes(40)
    run.check()
    assert "collective" not in run.guard.remark and told == []
