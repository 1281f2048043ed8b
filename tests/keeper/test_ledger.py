import queue
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sentences import says
from workbench.base.redact import Redactor
from workbench.jobs.job import Traits
from workbench.keeper.link.agent import Posted
from workbench.keeper.run.verdict import lost_pod
from workbench.keeper.watch.ledger import RunLedger
from workbench.keeper.watch.pod import PodReport, PodWatch, RunWatch
from workbench.pods.pod import Phase, Pod
from workbench.rundir.events import Event
from workbench.rundir.outcome import RankStatus
from workbench.rundir.paths import RunPaths

A, B = Pod(name="pod-0", address="127.0.0.2"), Pod(name="pod-1", address="127.0.0.3")


def ledger() -> RunLedger:
    return RunLedger(pods=["pod-0", "pod-1"], world_size=2)


def report(pod: Pod, rank: int, phase: str, **more: Any) -> PodReport:
    status = RankStatus(
        rank=rank, pod=pod, phase=phase, done=phase == "exited", ended_s=time.time()
    )
    return PodReport(pod=pod, ranks=[status], drained=True, **more)


def test_a_run_is_over_when_all_have_ended_are_swept_and_read() -> None:
    seen = ledger()
    seen.record(report(A, 0, "exited"))
    assert not seen.over
    seen.record(report(B, 1, "exited", live_processes=1))
    assert (seen.all_exited, seen.over, seen.live_processes) == (True, False, 1)
    seen.record(report(B, 1, "exited"))
    assert (seen.over, seen.all_done, seen.live_processes) == (True, True, 0)


@pytest.mark.parametrize(
    ("phase", "alone", "stepped", "named"),
    [
        ("exited", (True, True), False, True),
        ("exited", (True, False), False, False),
        ("running", (True, True), False, False),  # a group may still be opened
        ("running", (True, True), True, True),
        ("running", (False, False), True, False),
    ],
)
def test_ranks_without_a_group_are_named_once_they_train_or_have_ended(
    phase: str, alone: tuple[bool, bool], stepped: bool, named: bool
) -> None:
    seen = ledger()
    for number, pod in enumerate((A, B)):
        said = report(pod, number, phase)
        seen.record(replace(said, ranks=[replace(said.ranks[0], alone=alone[number])]))
    if stepped:
        seen.totals.take(Event(time_s=time.time(), rank=0, kind="step", data={"step": 1}))
    # torch's RPC, MPI and others connect ranks without a group.
    words = (
        "no process group of torch connects two ranks: each of the 2 ranks worked alone, "
        "unless the script connects the ranks by other means"
    )
    assert seen.warnings == [words] * named
    assert seen.remark("", stopping="") == words * named


def test_what_is_left_on_a_pod_that_was_never_heard_is_not_known() -> None:
    seen = ledger()
    seen.record(report(A, 0, "exited"))
    assert seen.live_processes is None
    seen.record(PodReport(pod=B, answered=False, lost="gone"))
    assert seen.live_processes == 0
    assert seen.gone


def test_silence_is_counted_from_the_last_answer_without_further_reports() -> None:
    now = [100.0]
    seen = RunLedger(pods=["pod-0", "pod-1"], world_size=2, clock=lambda: now[0])
    seen.record(report(A, 0, "running"))
    now[0] += 0.05
    seen.record(report(B, 1, "running"))
    assert list(seen.silent(0.04)) == ["pod-0"]
    seen.record(PodReport(pod=A, answered=False))
    assert list(seen.silent(0.04)) == ["pod-0"]


def test_ranks_that_ended_well_alone_are_known() -> None:
    seen = ledger()
    seen.record(report(A, 0, "running"))
    seen.record(report(B, 1, "exited"))
    assert list(seen.ended_alone) == [1]


def test_what_the_platform_says_goes_before_a_guess_about_this_machine() -> None:
    now = 1000.0
    seen = RunLedger(pods=["pod-0", "pod-1"], world_size=2, clock=lambda: now)
    now += 20
    assert says(
        seen.remark("", stopping=""), "this machine was cut off from the network, or asleep"
    ) and says(seen.remark("", stopping=""), "no sign from any pod")
    words = "its node gpu-7 is not ready since 14:31:07"
    said = seen.remark("", stopping="", place=words)
    assert said == f"no sign from any pod: {words}; training continues there until the lease ends"
    seen.record(report(A, 0, "running"))
    said = seen.remark("", stopping="", place=f"pod-1: {words}")
    assert said.startswith(f"no sign from pod-1 for 20 s: pod-1: {words}; ")


def run_on(*pods: Pod, kind: str = "kubernetes") -> Any:
    cluster = SimpleNamespace(backend={"kind": kind}, lease_s=2.0)
    links = [SimpleNamespace(pod=pod) for pod in pods]
    return SimpleNamespace(spec=SimpleNamespace(cluster=cluster), links=links, refresh=lambda: pods)


def test_a_lost_node_is_blamed_and_not_the_network() -> None:
    seen = ledger()
    begun = seen.clock()
    seen.clock = lambda: begun + 1000.0
    for pod in (A, B):
        seen.record(PodReport(pod=pod, answered=False, lost=f"no sign from {pod.name} for 2 s"))
    away = "the Kubernetes API server https://k:6443 does not answer"
    node = "its node gpu-7 is not ready since 14:31:07"
    lost = replace(B, phase=Phase.UNKNOWN, message=node)

    fault = lost_pod(run_on(replace(A, phase=Phase.RUNNING), lost), seen)
    assert (fault.kind, fault.pod, fault.host) == ("pod", "pod-1", B.address)
    assert fault.message == f"no sign from pod-1 for 2 s; {node}"

    fault = lost_pod(
        run_on(*[replace(pod, phase=Phase.RUNNING, message=away) for pod in (A, B)]), seen
    )
    assert (fault.kind, fault.pod) == ("network", "")
    assert fault.message == f"no sign from any pod: {away}; no sign from pod-0 for 2 s"

    # Hosts have no platform that watches them: their state is what this machine sees of them.
    hosts = run_on(
        A, replace(lost, message="no answer since 14:31:07"), kind="ssh"
    )  # it knows only what we see ourselves
    assert says(
        lost_pod(hosts, seen).message, "this machine was cut off from the network, or asleep"
    ) and says(lost_pod(hosts, seen).message, "no sign from any pod")


def test_a_pod_that_is_lost_before_the_others_have_answered_is_no_lost_network() -> None:
    seen = ledger()
    seen.record(PodReport(pod=A, answered=False, lost="watching pod-0 failed: no ranks"))
    fault = lost_pod(run_on(replace(A, phase=Phase.RUNNING)), seen)
    assert (fault.kind, fault.pod) == ("pod", "pod-0")


def test_a_watch_reads_the_live_processes(tmp_path: Path) -> None:
    reports: queue.Queue[PodReport] = queue.Queue()
    answer = {"ranks": [], "chunks": {}, "live_processes": 2, "gpus": []}
    link: Any = SimpleNamespace(
        pod=A,
        agent_pid=1,
        clock_offset_s=0.0,
        post=lambda _op, _arrived, **_fields: Posted(line, call, 60.0),
        answer=lambda _posted: answer,
    )
    line: Any = SimpleNamespace(lost="", descriptors=list, forget=lambda _call: None)
    call: Any = SimpleNamespace()
    context: Any = SimpleNamespace(
        run_id="r",
        restart=0,
        links=[link],
        paths=RunPaths(tmp_path),
        ranks_on=lambda _link: [0],
        redact=Redactor(),
        spec=SimpleNamespace(
            cluster=SimpleNamespace(lease_s=60.0), job=SimpleNamespace(traits=Traits())
        ),
    )
    context.paths.logs.mkdir()
    watch = RunWatch([PodWatch(link, context, reports)])
    watch.start()
    seen = reports.get(timeout=300)
    watch.close()
    assert seen.live_processes == 2
