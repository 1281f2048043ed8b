"""What the program that kills at random aims at is what it names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.poll import until
from tests.support.takeover import counting, printed
from tools.chaos.faults import FAULTS
from tools.chaos.hooked import victims_of
from tools.chaos.victims import find_victims, ranks, words_of
from workbench import Cluster, LocalPods, PodSpec

pytestmark = pytest.mark.slow


def words(pid: int) -> str:
    return " ".join(words_of(pid))


@pytest.mark.long
def test_every_kind_of_victim_is_exactly_the_processes_that_it_names(tmp_path: Path) -> None:
    """The bridge of a pod is neither its agent nor a rank; no kind has a process of another."""
    end = tmp_path / "end"
    with Cluster(LocalPods(), PodSpec(), count=2, path=tmp_path / "c", warm=False) as cluster:
        run = counting(cluster, "--until", str(end), launcher="pdsh")
        until(lambda: "line 3" in printed(run, 0) and "line 3" in printed(run, 1), 60)
        pod, other = cluster.pods
        found: dict[str, Sequence[int]] = {}
        for kind in ("keeper", "agent", "worker", "sshd", "session", "bridge", "rank", "launcher"):
            found[kind] = [each.pid for each in find_victims(kind, cluster.path, pod, run)]
        # One process of a kind, but for the sessions and the launcher's own processes.
        single = ("keeper", "agent", "worker", "sshd", "bridge", "rank")
        assert {kind: len(found[kind]) for kind in single} == dict.fromkeys(single, 1)
        assert "workbench.keeper.keeper" in words(found["keeper"][0])
        assert f"workbench.agent serve {pod.root}" in words(found["agent"][0])
        assert "workbench.pods.bootstrap.guardian" in words(found["worker"][0])
        assert words(found["sshd"][0]).startswith("sshd: ")
        carrier = "Carry bytes between stdin, stdout and a socket"
        assert carrier in words(found["bridge"][0])
        assert "count.py" in words(found["rank"][0])
        assert found["session"]
        assert all(words(pid).startswith("sshd: ") for pid in found["session"])
        assert found["launcher"]
        for pid in found["launcher"]:
            assert "deepspeed" in words(pid) or "pdsh" in words(pid)
        # No process is of two kinds.
        every = [pid for pids in found.values() for pid in pids]
        assert len(every) == len(set(every))
        # A pod's kinds have no process of the other pod.
        for kind in ("agent", "worker", "sshd", "session", "bridge", "rank"):
            there = {each.pid for each in find_victims(kind, cluster.path, other, run)}
            assert there
            assert not there & set(found[kind])
        # Keeper, both agents and both ranks are halted together.
        halted = victims_of(FAULTS["freeze-all"], cluster.path, [pod, other], pod, run)
        assert len(halted) == 5
        assert {each.pid for each in ranks(run)} <= {each.pid for each in halted}
        end.touch()
        run.wait(300, progress=False).raise_for_status()
