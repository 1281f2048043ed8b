from __future__ import annotations

from pathlib import Path

import pytest

from workbench.finetune.job.finetune import FineTune
from workbench.keeper.awake import uptime_clock
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec


@pytest.fixture(autouse=True)
def this_process_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test with a clock that has just been looked at.

    A keeper looks every second. The process of the tests does not, so its clock reports a sleep.
    """
    monkeypatch.setattr(uptime_clock, "_looked", uptime_clock._clock())
    monkeypatch.setattr(uptime_clock, "_last", None)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a fine-tuning run over two pods."""
    rows = {"kind": "wikisql-mini", "train_rows": 16, "eval_rows": 4}
    job = FineTune(dataset=rows, technique="zero1", restarts=1)
    spec = RunSpec(cluster=ClusterSpec(count=2), job=job)
    return prepare_run(spec, root=tmp_path_factory.mktemp("prepared") / "run").paths.root
