"""A pod that an attacker has taken over harms neither the keeper, nor other pods, nor files."""

from __future__ import annotations

import queue
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.hostile_pod import (
    HARMLESS,
    TRICKS,
    PlayedLink,
    Trick,
    contents,
    honest,
    honest_rank_1,
)
from tests.fakes.runloop import Simulation
from tests.support.scripts import script_job
from workbench.base.errors import RemoteError
from workbench.keeper.watch.ledger import RunLedger
from workbench.keeper.watch.pod import PodReport, PodWatch, RunWatch, Sampler

LONGEST_S = 600.0
MEMORY_KIB = 700 << 10
"""Growth of the keeper's memory, at most: an answer has 64 MiB, as bytes, text and values."""


@contextmanager
def watched(
    folder: Path, trick: Trick, lease_s: float
) -> Iterator[tuple[Simulation, queue.Queue[PodReport]]]:
    """Watch two pods of a run: a hostile one with a lease, and an honest one."""
    sim = Simulation(folder, script_job(path="/home/me/train.py"))
    played = [(trick, lease_s), (honest_rank_1, LONGEST_S)]
    links = []
    contexts = []
    for pod, (answers, pods_lease_s) in zip(sim.pods, played, strict=True):
        sim.lease_s = pods_lease_s
        contexts.append(sim.context())
        links.append(PlayedLink(pod.pod, folder, answers, lease_s=pods_lease_s))
    reports: queue.Queue[PodReport] = queue.Queue()
    watch = RunWatch(
        [
            PodWatch(link, context.on(links), reports)
            for link, context in zip(links, contexts, strict=True)
        ]
    )
    try:
        watch.start()
        yield sim, reports
    finally:
        for link in links:
            link.end()
        watch.close()


@pytest.mark.parametrize("name", TRICKS)
def test_a_hostile_pod_ends_its_run_in_words_and_nothing_else(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    before = contents(outside)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sampler = Sampler()
    lost = ""
    answers = 0
    honest_at = time.monotonic()
    longest_s = 0.0
    # The answers of a harmless pod are long, and a busy machine takes its time over them.
    lease_s = LONGEST_S if name in HARMLESS else 1.0
    with watched(tmp_path / "cluster", TRICKS[name], lease_s) as (sim, reports):
        ledger = RunLedger(["pod-0", "pod-1"], 2)
        end_s = time.monotonic() + LONGEST_S
        while not lost and time.monotonic() < end_s:
            report = reports.get(timeout=LONGEST_S)
            # The run loop takes every report in this way.
            ledger.record(report)
            for event in report.events:
                ledger.totals.take(event)
            sampler.sample(report)
            if report.pod.name == "pod-1":
                longest_s = max(longest_s, time.monotonic() - honest_at)
                honest_at = time.monotonic()
                assert report.answered, "the honest pod is heard"
                assert not report.lost
            else:
                lost = report.lost
                answers += report.answered
                if name in HARMLESS and answers >= 3:
                    break
        evil = [path for path in sim.paths.root.rglob("*") if "evil" in path.name]
    # The cause names the pod, in one line without escape sequences.
    if name in HARMLESS:
        assert (lost, answers >= 3) == ("", True)
    else:
        assert "pod-0" in lost
        assert "validation error" not in lost
        assert lost.isprintable()
        assert not ledger.totals.restarts
    assert not evil
    assert contents(outside) == before
    assert not Path("/evil").exists()
    assert longest_s < LONGEST_S / 2, "other pods wait for the hostile pod"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < MEMORY_KIB


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"pid": None, "time_s": 1.0},
        {"pid": 7},
        {"pid": 7, "time_s": "noon"},
        {"pid": 7, "time_s": 1.0, "interface": "lo --mca plm_rsh_agent /evil"},
    ],
)
def test_an_odd_greeting_is_an_error_of_the_pod(tmp_path: Path, hello: object) -> None:
    sim = Simulation(tmp_path / "cluster", script_job(path="/home/me/train.py"))
    with pytest.raises(RemoteError, match="the agent of pod-0"):
        PlayedLink(sim.pods[0].pod, tmp_path, honest, hello=hello)
