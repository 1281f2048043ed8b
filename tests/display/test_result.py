from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.client.result import RunResult
from workbench.display.cluster import ClusterView, cluster_doc
from workbench.display.kit.doc import to_html, to_text
from workbench.pods.pod import Phase, Pod
from workbench.rundir.result import HostSlots, RunFault
from workbench.rundir.state import RunState

DONE = RunResult(
    path=Path("/runs/r1"),
    state=RunState.SUCCEEDED,
    hosts=(HostSlots(address="127.0.0.2", slots=1),),
    world_size=1,
    technique="zero1",
    launcher="ssh",
    precision="fp32",
    model="tiny-t5",
    steps=1200,
    global_batch_size=24,
    train_runtime_s=61.0,
    train_samples_per_s=472.1,
    train_loss=1.25,
    first_eval_loss=9.5,
    eval_loss=0.61,
    of_kind={"exact_match": 0.453},
    peak_memory_gib={"127.0.0.2": 0.913},
    time_to_first_step_s=3.25,
    duration_s=75.0,
)
FAILED = RunResult(
    path=Path("/runs/r2"),
    state=RunState.FAILED,
    technique="zero1",
    error=RunFault(
        host="127.0.0.3",
        pod="pod-1",
        rank=1,
        kind="ValueError",
        message="<img src=x onerror=alert(1)>",
        traceback='Traceback (most recent call last):\n  File "t.py", line 3\n\x1b[31mValueError',
    ),
)


@pytest.mark.parametrize("result", [DONE, FAILED], ids=["done", "failed"])
def test_text_and_html_state_the_same(result: RunResult) -> None:
    text, page = str(result), html.unescape(result._repr_html_())
    for line in text.splitlines():
        for piece in re.split(r"  |: |\d\. ", line):
            assert piece.strip() in page


def test_the_facts_of_a_run() -> None:
    text = " ".join(str(DONE).split())
    for fact in (
        "Run succeeded",
        "tiny-t5 zero1 fp32",
        "127.0.0.2 slots=1 (1 rank)",
        "optimizer steps 1,200",
        "training loop 1 min 1 s",
        "9.5 before the first step, 0.61 after the last",
        "exact match 45.3 %",
        "peak memory (resident) 127.0.0.2 0.91 GiB",
        "run directory /runs/r1",
    ):
        assert fact in text


def test_only_evaluations_that_took_place_are_stated() -> None:
    before = "evaluation loss 9.5 before the first step,"
    for change, words in (
        ({"eval_loss": None}, "not evaluated again"),
        ({"eval_step": 800}, "0.61 after step 800"),
    ):
        text = " ".join(str(replace(DONE, state=RunState.CANCELLED, **change)).split())
        assert f"{before} {words}" in text
        assert "after the last" not in text
    assert "after the last" in str(replace(DONE, eval_step=1200))


def test_the_peaks_stand_in_the_order_of_the_hosts() -> None:
    hosts = tuple(HostSlots(address=f"127.0.0.{n}", slots=1) for n in (2, 10))
    text = str(
        replace(
            DONE, hosts=hosts, world_size=2, peak_memory_gib={"127.0.0.10": 0.5, "127.0.0.2": 0.25}
        )
    )
    assert "127.0.0.2 0.25 GiB, 127.0.0.10 0.50 GiB" in text
    assert "(2 ranks)" in text


def test_what_was_not_measured_is_not_shown() -> None:
    assert "loss" not in str(FAILED)
    assert "exact match" not in str(FAILED)


def test_a_failed_run_shows_its_traceback_escaped() -> None:
    page = FAILED._repr_html_()
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "\x1b" not in page + str(FAILED)
    assert 'File "t.py", line 3' in str(FAILED)


def test_a_cluster_shows_its_pods() -> None:
    pods = [
        Pod(
            name="pod-0",
            phase=Phase.RUNNING,
            address="127.0.0.2",
            ssh_port=2222,
            versions={"torch": "2.13.0"},
        ),
        Pod(name="pod-1", phase=Phase.FAILED, message="<script>died</script>"),
    ]
    view = ClusterView(
        phase="ready",
        message="2 of 2 pods are up",
        path="/runs/c1",
        count=2,
        pods=pods,
        memory={"127.0.0.2": 0.5},
        load={"127.0.0.2": 0.97},
        runs={"127.0.0.2": "baseline"},
    )
    text, page = to_text(cluster_doc(view)), to_html(cluster_doc(view))
    for word in (
        "Cluster ready: 2 of 2 pods are up",
        "pod-0",
        "127.0.0.2:2222",
        "Running",
        "2.13.0",
        "0.50 GiB",
        "97.0 %",
        "baseline",
        "Failed",
    ):
        assert word in text
        assert word in page
    assert "<script>" not in page
    assert "<script>died</script>" in text
