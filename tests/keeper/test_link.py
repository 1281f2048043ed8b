from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.keeper.link.agent import AgentLink
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity

AHEAD_S = 5.0  # the pod's clock


class FarClock(AgentLink):
    """A line whose answers take as long as a test says, on a clock of its own."""

    def __init__(self, folder: Path, waits: Iterator[tuple[float, float]]) -> None:
        super().__init__(
            Pod(name="pod-0", root="/tmp/pod-0"),
            Identity(folder),
            lease_s=9.0,
            package=("w.zip", b""),
        )
        self.waits = waits
        self.now_s = 1000.0

    def call(self, op: str, *_rest: Any, **_options: Any) -> dict[str, object]:
        there_s, back_s = next(self.waits)
        self.now_s += there_s
        answer: dict[str, object] = {"time_s": self.now_s + AHEAD_S, "pid": 7, "interface": "eth0"}
        self.now_s += back_s
        return answer


def test_a_pod_s_clock_is_read_off_the_quickest_answer_and_not_off_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first waits a second for the far end to start, the third for a busy pod.
    link = FarClock(tmp_path, iter([(1.0, 0.001), (0.002, 0.002), (0.4, 0.001), (0.03, 0.01)]))
    monkeypatch.setattr("workbench.keeper.link.agent.now_s", lambda: link.now_s)
    link._greet()
    assert link.clock_offset_s == pytest.approx(AHEAD_S, abs=1e-6)
    assert (link.agent_pid, link.interface) == (7, "eth0")
