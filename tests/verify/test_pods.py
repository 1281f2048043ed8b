"""The clusters of a verification: opened once, cleared of runs, and closed whatever happens."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from workbench.base.errors import PodError
from workbench.verify.pods import Pods


@dataclass
class MadeUpCluster:
    path: Path
    fails: bool = False
    calls: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.calls.append("start")

    def close(self) -> None:
        self.calls.append("close")
        if self.fails:
            raise PodError("a process remains")


def test_the_users_own_pods_start_once_and_are_closed(tmp_path: Path) -> None:
    given: Any = MadeUpCluster(tmp_path / "main")
    with closing(Pods(tmp_path, given)) as pods:
        assert given.calls == []
        assert all(main is given for main in (pods.main, pods.main))
    assert given.calls == ["start", "close"]


def test_a_cluster_that_cannot_be_closed_leaves_the_others_and_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clusters: list[Any] = [MadeUpCluster(tmp_path / "a"), MadeUpCluster(tmp_path / "b", fails=True)]
    with closing(Pods(tmp_path)) as pods:
        for cluster in clusters:
            pods.started(cluster)
    assert [cluster.calls for cluster in clusters] == [["start", "close"]] * 2
    assert "b was not closed" in caplog.text and "a process remains" in caplog.text
