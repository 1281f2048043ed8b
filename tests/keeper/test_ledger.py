import time
from typing import Any

from workbench.keeper.watch.ledger import RunLedger
from workbench.keeper.watch.pod import PodReport
from workbench.pods.pod import Pod
from workbench.rundir.outcome import RankStatus

A, B = Pod(name="pod-0", address="127.0.0.2"), Pod(name="pod-1", address="127.0.0.3")


def ledger() -> RunLedger:
    return RunLedger(pods=["pod-0", "pod-1"], world_size=2)


def report(pod: Pod, rank: int, phase: str, **more: Any) -> PodReport:
    status = RankStatus(rank=rank, pod=pod, phase=phase, done=phase == "exited", ended_s=time.time())
    return PodReport(pod=pod, ranks=[status], drained=True, **more)


def test_a_run_is_over_when_all_have_ended_are_swept_and_read() -> None:
    seen = ledger()
    seen.see(report(A, 0, "exited"))
    assert not seen.over
    seen.see(report(B, 1, "exited", left=1))
    assert (seen.all_exited, seen.over, seen.left_processes) == (True, False, 1)
    seen.see(report(B, 1, "exited"))
    assert (seen.over, seen.all_done, seen.left_processes) == (True, True, 0)


def test_what_is_left_on_a_pod_that_was_never_heard_is_not_known() -> None:
    seen = ledger()
    seen.see(report(A, 0, "exited"))
    assert seen.left_processes is None
    seen.see(PodReport(pod=B, answered=False, lost="gone"))
    assert seen.left_processes == 0
    assert seen.gone


def test_silence_is_counted_from_the_last_answer_without_further_reports() -> None:
    now = [100.0]
    seen = RunLedger(pods=["pod-0", "pod-1"], world_size=2, clock=lambda: now[0])
    seen.see(report(A, 0, "running"))
    now[0] += 0.05
    seen.see(report(B, 1, "running"))
    assert list(seen.silent(0.04)) == ["pod-0"]
    seen.see(PodReport(pod=A, answered=False))
    assert list(seen.silent(0.04)) == ["pod-0"]


def test_ranks_that_ended_well_alone_are_known() -> None:
    seen = ledger()
    seen.see(report(A, 0, "running"))
    seen.see(report(B, 1, "exited"))
    assert list(seen.ended_alone) == [1]
