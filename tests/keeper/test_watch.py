"""The watch of a pod ends with a report, whichever call fails while the pod is silent."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.base.errors import RemoteError
from workbench.base.redact import Redactor
from workbench.jobs.job import Traits
from workbench.keeper.watch.pod import PodReport, PodWatch, RunWatch
from workbench.pods.pod import Pod
from workbench.rundir.paths import RunPaths

POD = Pod(name="pod-0", address="127.0.0.2")


def silent(*_args: object, **_fields: object) -> dict[str, object]:
    raise RemoteError("lost the line to pod-0", host=POD.address)


def watch(folder: Path, *, opened: object, refreshed: object) -> queue.Queue[PodReport]:
    """Watch a silent pod. Return the queue of the reports."""
    link: Any = SimpleNamespace(pod=POD, agent_pid=1, post=silent, open=opened)
    job, cluster = SimpleNamespace(traits=Traits()), SimpleNamespace(lease_s=1.0)
    context: Any = SimpleNamespace(
        run_id="r",
        links=[link],
        paths=RunPaths(folder),
        ranks_on=lambda _link: [0],
        redact=Redactor(),
        restart=0,
        refresh=refreshed,
        spec=SimpleNamespace(cluster=cluster, job=job),
    )
    context.paths.logs.mkdir()
    reports: queue.Queue[PodReport] = queue.Queue()
    RunWatch([PodWatch(link, context, reports)]).start()
    return reports


def loss(reports: queue.Queue[PodReport]) -> str:
    """Return the reason of the report that gives the pod up."""
    while True:
        report = reports.get(timeout=300)
        if report.lost:
            return report.lost


def no_thread(*_args: object) -> object:
    raise RuntimeError("can't start new thread")


def test_a_watch_that_cannot_start_a_thread_to_reconnect_tries_until_the_lease_ends(
    tmp_path: Path,
) -> None:
    """Otherwise the watch ended in silence, and its run never."""
    reports = watch(tmp_path, opened=no_thread, refreshed=lambda: [POD])
    assert "no sign from pod-0" in loss(reports)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_while_a_pod_is_silent_reaches_the_run(tmp_path: Path) -> None:
    reports = watch(tmp_path, opened=silent, refreshed=no_thread)
    assert "can't start new thread" in loss(reports)
