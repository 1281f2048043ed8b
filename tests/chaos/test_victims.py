"""What the program that kills at random aims at is what it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from poll import until
from takeover import counting, printed

from tools.chaos.victims import agent, bridges, ranks, words_of
from workbench import Cluster, LocalPods, PodSpec

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_the_bridge_of_a_pod_is_one_process_and_neither_agent_nor_rank(tmp_path: Path) -> None:
    with Cluster(LocalPods(), PodSpec(), count=1, path=tmp_path / "c", warm=False) as cluster:
        run = counting(cluster, "--until", str(tmp_path / "end"))
        until(lambda: "line 3" in printed(run, 0), 60)
        (pod,) = cluster.pods
        (bridge,) = bridges(pod)
        assert bridge not in [agent(pod), *ranks(run, pod)]
        assert "Carry bytes between stdin, stdout and a socket" in " ".join(words_of(bridge.pid))
        (tmp_path / "end").touch()
        run.wait(60, progress=False).raise_for_status()
