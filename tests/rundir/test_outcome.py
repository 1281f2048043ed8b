from typing import Any

import pytest

from tests.support.sentences import sentence
from workbench.pods.pod import Pod
from workbench.rundir.events import Event
from workbench.rundir.outcome import (
    MemoryPeaks,
    RankStatus,
    first_cause,
    only_echoes,
    rank_statuses,
)
from workbench.rundir.totals import RunTotals

A, B = Pod(name="pod-0", address="127.0.0.2"), Pod(name="pod-1", address="127.0.0.3")


def status(rank: int, pod: Pod, **more: Any) -> RankStatus:
    return RankStatus(rank=rank, pod=pod, phase="exited", **more)


def test_a_fact_of_an_evaluation_is_in_the_result_also_of_a_run_that_was_cut_short() -> None:
    def facts(*evaluations: dict[str, float]) -> dict[str, object]:
        events = [Event(time_s=1.0, rank=0, kind="eval", data=data) for data in evaluations]
        return RunTotals.of(events).facts(0.0)

    untrained = {"step": 0, "eval_loss": 3.0, "perplexity": 20.1}
    trained = {"step": 5, "eval_loss": 2.0, "perplexity": 7.389}
    assert facts(untrained, trained)["perplexity"] == 7.389
    assert "perplexity" not in facts(untrained)
    assert "perplexity" not in facts(trained, {"step": 6, "eval_loss": 1000.0})
    assert "surprise" not in facts({**trained, "surprise": 1.0})


def test_the_earliest_record_is_the_cause_and_echoes_are_folded() -> None:
    echo = {
        "kind": "RuntimeError",
        "message": "Connection closed by peer",
        "time_s": 9.0,
        "echo": True,
    }
    root = {
        "kind": "ValueError",
        "message": "bad row",
        "time_s": 10.0,
        "traceback": "Traceback…",
        "echo": False,
    }
    fault = first_cause(
        [status(0, A, error=echo), status(1, B, error=root), status(2, B, error=echo)]
    )
    assert fault is not None
    assert (fault.rank, fault.pod, fault.kind, fault.message) == (
        1,
        "pod-1",
        "ValueError",
        "bad row",
    )
    assert fault.others == "2 ranks lost their peer (ranks 0, 2)"


def test_a_rank_that_left_with_0_before_the_others_lost_it_is_the_cause() -> None:
    echo = {
        "kind": "RuntimeError",
        "message": "Connection closed by peer",
        "time_s": 9.0,
        "echo": True,
    }
    left = status(1, B, done=True, exit_code=0, ended_s=9.5)
    fault = first_cause([status(0, A, error=echo), left])
    assert fault is not None
    assert (fault.rank, fault.kind, fault.others) == (1, "exit", "1 rank lost their peer (rank 0)")
    late = status(1, B, done=True, exit_code=0, ended_s=12.0)
    assert first_cause([status(0, A, error=echo), late]).rank == 0  # type: ignore[union-attr]
    own = {**echo, "message": "bad row", "echo": False}
    assert first_cause([status(0, A, error=own), left]).rank == 0  # type: ignore[union-attr]


def test_only_echoes_means_that_the_cause_is_elsewhere() -> None:
    echo = status(0, A, error={"echo": True})
    assert only_echoes([echo, status(1, B, done=True)])
    assert not only_echoes([echo, status(1, B, error={"echo": False})])
    assert not only_echoes([status(1, B, done=True)])


def test_ranks_that_were_stopped_or_done_are_no_cause() -> None:
    assert (
        first_cause(
            [status(0, A, done=True, exit_code=0), status(1, B, stopped=True, exit_code=-15)]
        )
        is None
    )


def test_a_signal_without_a_record_is_a_cause() -> None:
    fault = first_cause([status(0, A, exit_code=-9)])
    assert fault is not None
    assert fault.message == "exited with -9"


def test_times_of_a_pod_are_put_on_this_machines_clock() -> None:
    raw = {
        "rank": 1,
        "phase": "exited",
        "exit_code": 1,
        "ended_s": 105.0,
        "error": {"time_s": 104.0},
    }
    (found,) = rank_statuses(B, {"ranks": [raw]}, clock_offset_s=4.0)
    assert found.ended_s == 101.0
    assert found.error is not None and found.error.time_s == 100.0


def test_peaks_are_sums_over_a_host_and_cuda_wins() -> None:
    peaks, gib = MemoryPeaks(), 1024**3
    peaks.record([status(0, A, rss_bytes=gib), status(1, A, rss_bytes=gib)])
    peaks.record([status(0, A, rss_bytes=gib)])
    assert (peaks.kind, peaks.gib) == ("resident", {"127.0.0.2": 2.0})
    peaks.record_event(
        Event(time_s=0, rank=0, kind="memory", data={"cuda_reserved_gib": 5.0}), "127.0.0.2"
    )
    assert (peaks.kind, peaks.gib) == ("cuda", {"127.0.0.2": 5.0})


def test_a_run_too_short_for_a_sample_has_the_peaks_that_its_ranks_report() -> None:
    peaks = MemoryPeaks()
    peaks.record([status(0, A), status(1, A)])  # before both report
    for rank, gib in ((0, 0.4), (1, 0.5), (1, 0.3)):
        data = {"rss_gib": 0.2, "peak_rss_gib": gib}
        peaks.record_event(Event(time_s=0, rank=rank, kind="memory", data=data), A.address)
    assert peaks.gib == peaks.resident_gib == {A.address: 0.9}
    peaks.record([status(0, A, rss_bytes=1024**3)])
    assert peaks.gib == {A.address: 1.0}


def test_figures_of_a_run_that_was_cut_short_are_those_it_reached() -> None:
    events = [
        Event(time_s=10, rank=0, kind="start", data={"global_batch_size": 24}),
        Event(time_s=11, rank=0, kind="eval", data={"step": 0, "eval_loss": 5.0}),
        Event(time_s=12.5, rank=0, kind="first_step"),
        Event(time_s=13, rank=0, kind="step", data={"step": 7, "epoch": 0.5, "loss": 3.0}),
    ]
    facts = RunTotals.of(events).facts(10)
    assert facts == {
        "global_batch_size": 24,
        "first_eval_loss": 5.0,
        "time_to_first_step_s": 2.5,
        "steps": 7,
        "epochs": 0.5,
        "step_figures": {"loss": 3.0},
    }, "of the trained model there is no evaluation to state"
    events.insert(-1, Event(time_s=12.8, rank=0, kind="eval", data={"step": 5, "eval_loss": 4.0}))
    facts = RunTotals.of(events).facts(10)
    assert [facts[name] for name in ("first_eval_loss", "eval_loss", "eval_step", "steps")] == [
        5.0,
        4.0,
        5,
        7,
    ]


def traffic(rank: int, **told: object) -> list[Event]:
    data = {"sent_bytes": 600, "steps": 3, "ranks_on_pod": 1, **told}
    device = Event(time_s=1.0, rank=rank, kind="device", data={"name": "AMD EPYC"})
    return [device, Event(time_s=2.0, rank=rank, kind="traffic", data=data)]


def test_bytes_sent_are_a_mean_over_pods_and_steps() -> None:
    facts = RunTotals.of([*traffic(0), *traffic(1, sent_bytes=1200)]).facts(0.0)
    assert (facts["sent_bytes_per_step"], facts["device"], facts["devices"]) == (
        300.0,
        "AMD EPYC",
        2,
    )
    of_one_pod = [*traffic(0, ranks_on_pod=2), *traffic(1, ranks_on_pod=2)]
    assert RunTotals.of(of_one_pod).facts(0.0)["sent_bytes_per_step"] == 400.0


@pytest.mark.parametrize("told", [{"sent_bytes": None}, {"steps": 0}, {"ranks_on_pod": "1"}])
def test_where_one_rank_does_not_know_what_it_sent_nobody_does(told: dict[str, object]) -> None:
    assert "sent_bytes_per_step" not in RunTotals.of([*traffic(0), *traffic(1, **told)]).facts(0.0)


def test_bytes_of_a_rank_that_has_not_told_are_not_taken_for_none() -> None:
    assert "sent_bytes_per_step" not in RunTotals.of([*traffic(0), traffic(1)[0]]).facts(0.0)


def test_resident_memory_is_kept_where_gpus_are_used_too() -> None:
    peaks = MemoryPeaks()
    peaks.record([status(0, A, rss_bytes=3 << 29), status(1, A, rss_bytes=1 << 30)])
    peaks.record_event(
        Event(time_s=1.0, rank=0, kind="memory", data={"cuda_reserved_gib": 7.0}), A.address
    )
    assert (peaks.kind, peaks.gib, peaks.resident_gib) == (
        "cuda",
        {A.address: 7.0},
        {A.address: 2.5},
    )


def test_a_rank_failed_if_it_has_an_error_or_ended_without_being_done_or_stopped() -> None:
    running = RankStatus(rank=0, pod=A, phase="running")
    assert not running.failed
    assert RankStatus(rank=0, pod=A, phase="running", error={"kind": "OSError"}).failed
    assert status(0, A).failed
    assert not status(0, A, done=True).failed and not status(0, A, stopped=True).failed


def test_of_ranks_without_a_record_the_first_to_end_is_the_cause() -> None:
    fault = first_cause(
        [status(0, A, exit_code=1, ended_s=9.0), status(1, B, exit_code=-9, ended_s=8.0)]
    )
    assert fault is not None
    assert (fault.rank, fault.others) == (1, "also rank 0: exit 1")
    # A rank whose end has no time comes last.
    fault = first_cause([status(0, A, exit_code=1), status(1, B, exit_code=-9, ended_s=8.0)])
    assert fault is not None and fault.rank == 1


def test_the_first_rank_that_left_with_0_is_the_cause_and_not_one_that_crashed_when_done() -> None:
    echo = {"kind": "RuntimeError", "message": "closed", "time_s": 9.0, "echo": True}
    ranks = [
        status(0, A, error=echo),
        status(1, B, done=True, exit_code=0, ended_s=8.5),
        status(2, B, done=True, exit_code=0, ended_s=8.2),
        status(3, B, done=True, exit_code=-11, ended_s=8.0),
        status(4, B, done=True, exit_code=0),
    ]
    fault = first_cause(ranks)
    assert fault is not None and fault.rank == 2


def test_a_pod_answers_for_its_own_ranks_only() -> None:
    answer = {"ranks": [{"rank": 1, "phase": "running"}]}
    assert [found.rank for found in rank_statuses(B, answer, 0.0, own={1, 2})] == [1]
    with pytest.raises(
        ValueError, match=sentence("reports rank {}, and the rank runs on another pod", "pod-1", 1)
    ):
        rank_statuses(B, answer, 0.0, own={0})
    with pytest.raises(ValueError, match=sentence("reports a rank without a number")):
        rank_statuses(B, {"ranks": [{"phase": "running"}]}, 0.0)


def test_small_peaks_are_kept_with_four_digits_and_by_rank_on_gpus() -> None:
    def reserved(rank: int | None, gib: float) -> Event:
        return Event(time_s=0, rank=rank, kind="memory", data={"cuda_reserved_gib": gib})

    peaks = MemoryPeaks()
    peaks.record([status(0, A, rss_bytes=2**27), status(1, B)])
    assert peaks.gib == peaks.resident_gib == {A.address: 0.125}, "no one reported of the other"
    peaks.record([status(0, A, rss_bytes=round(2**30 * 0.123456789))])
    peaks.record([status(0, A, rss_bytes=round(2**30 * 0.223456789))])
    assert peaks.resident_gib == {A.address: 0.2235}
    peaks.record_event(reserved(None, 9.0), A.address)
    assert peaks.kind == "resident", "a figure without a rank is of no GPU"
    for rank, gib in ((0, 0.25), (0, 0.125), (1, 0.12344)):
        peaks.record_event(reserved(rank, gib), A.address)
    assert (peaks.kind, peaks.gib) == ("cuda", {A.address: 0.3734})


def test_peaks_are_recalled_from_the_files_of_a_run() -> None:
    peaks = MemoryPeaks()
    peaks.recall(
        [
            Event(time_s=0, rank=None, kind="restarted", data={"host": A.address, "rss_gib": 9.0}),
            Event(time_s=0, rank=1, kind="memory", data={"cuda_reserved_gib": 5.0}),
        ],
        {1: B.address},
        {A.address: 1.5},
    )
    assert (peaks.resident_gib, peaks.gib) == ({A.address: 1.5}, {B.address: 5.0})
