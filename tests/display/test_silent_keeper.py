"""A keeper that has not written its state for some time is shown as such in every view."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.writtenrun import WrittenRun, write_run
from workbench import Cluster, LocalPods, Run, history
from workbench.base.display_protocol import as_html
from workbench.base.files import read_json, write_json
from workbench.display.cluster import look_at
from workbench.display.run.page import run_text
from workbench.keeper.spawn import process_facts
from workbench.lab.listing import Listing
from workbench.rundir.view import RunView

WORDS = "the keeper does not answer since"


def cluster_of(written: WrittenRun) -> Cluster:
    return Cluster(LocalPods(), count=3, path=written.cluster.root)


def listed(written: WrittenRun, what: str) -> str:
    (row,) = Listing(written.cluster.root.parent).look("", 50)[what]
    return str(row["message"])


VIEWS: dict[str, Callable[[WrittenRun], str]] = {
    "message of the run": lambda written: Run.load(written.paths.root).message,
    "panel of the run": lambda written: run_text(RunView(written.paths.root)),
    "message of the cluster": lambda written: cluster_of(written).message,
    "panel of the cluster": lambda written: look_at(cluster_of(written)).message,
    "text of the cluster": lambda written: str(cluster_of(written)),
    "history": lambda written: as_html(history(written.cluster.root.parent)),
    "run in the sidebar": lambda written: listed(written, "runs"),
    "cluster in the sidebar": lambda written: listed(written, "clusters"),
}


@pytest.mark.parametrize("state", ["queued", "running"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_silent_keeper_is_shown_and_is_well_again(tmp_path: Path, view: str, state: str) -> None:
    written = write_run(tmp_path / "runs")
    written.state(state, "training on 3 pods")
    file = written.cluster.state
    write_json(file, {**read_json(file), **process_facts(os.getpid())})
    assert WORDS not in VIEWS[view](written)
    now_s = time.time()
    os.utime(file, (now_s - 19, now_s - 19))
    assert WORDS not in VIEWS[view](written), "19 s are no silence"
    os.utime(file, (now_s - 21, now_s - 21))
    assert WORDS in VIEWS[view](written)
    os.utime(file)
    assert WORDS not in VIEWS[view](written)
