from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import RemoteError
from workbench.base.messages.lines import Pipes
from workbench.base.messages.rpc import Client
from workbench.base.messages.server import Request, incoming
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


class NearLink(AgentLink):
    """A line to a peer that a test plays, over a pair of sockets in place of SSH."""

    def __init__(self, folder: Path, ours: socket.socket) -> None:
        pod = Pod(name="pod-0", root="/tmp/pod-0")
        super().__init__(pod, Identity(folder), lease_s=9.0, package=("w.zip", b""))
        self._line = Client(Pipes(ours.fileno(), ours.fileno()))

    def _connection(self) -> Any:
        return None

    def _keep_package(self, ssh: Any) -> None:
        pass


@contextmanager
def near(folder: Path, do: Callable[[Request], object]) -> Iterator[NearLink]:
    ours, theirs = socket.socketpair()

    def serve() -> None:
        for request in incoming(Pipes(theirs.fileno(), theirs.fileno())):
            do(request)

    thread = threading.Thread(target=serve)
    with theirs:
        with ours:
            thread.start()
            yield NearLink(folder, ours)
        thread.join(300)


def test_an_agent_that_works_is_asked_whether_it_lives_and_answers_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.keeper.link.agent._SIGN_S", 0.05)
    pings: list[Request] = []
    begun: list[Request] = []

    def do(request: Request) -> None:
        if request.fields["op"] == "stage":
            begun.append(request)
            return
        request.answer({"n": request.fields.get("n")})
        pings.append(request)
        if len(pings) == 5:
            begun[0].answer({"made": True})

    with near(tmp_path, do) as link:
        assert link.work("stage", 30.0, run="r")["made"] is True
        assert len(pings) >= 5
        assert link.call("poll", n=3)["n"] == 3


def test_work_that_fails_or_never_ends_is_an_error_and_the_line_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.keeper.link.agent._SIGN_S", 0.05)

    def do(request: Request) -> None:
        if request.fields["op"] == "list_outputs":
            request.refuse("it was killed", full=False)
        elif request.fields["op"] == "ping":
            request.answer({})

    with near(tmp_path, do) as link:
        with pytest.raises(RemoteError, match="pod-0: it was killed"):
            link.work("list_outputs", 30.0)
        with pytest.raises(RemoteError, match=sentence("no end in {} s", "pod-0", 0)):
            link.work("stage", 0.2)
        assert link.call("ping")["ok"]


def test_an_agent_that_is_silent_while_it_works_loses_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.keeper.link.agent._SIGN_S", 0.05)
    monkeypatch.setattr("workbench.keeper.link.agent._ANSWER_S", 0.1)
    with near(tmp_path, lambda request: None) as link:
        with pytest.raises(
            RemoteError,
            match=sentence("lost the line to", "pod-0", "ping")
            + sentence("no answer to {} in {} s"),
        ):
            link.work("stage", 600.0)
        with pytest.raises(RemoteError, match=sentence("no line to", "pod-0")):
            link.call("ping")


def test_a_slow_line_by_the_option_has_more_time_for_an_answer(tmp_path: Path) -> None:
    with near(tmp_path, lambda request: None) as link:
        usual_s = link.answer_s
        link.pod = replace(link.pod, connect_timeout_s=30.0)
        assert (usual_s, link.answer_s) == (8, 30)


def test_the_loss_of_an_old_line_leaves_a_new_one_alone(tmp_path: Path) -> None:
    other = Client(Pipes(*os.pipe()))
    with near(tmp_path, lambda request: request.answer({})) as link:
        old, link._line = link._line, other
        with pytest.raises(RemoteError, match=sentence("lost the line to")):
            raise link._lost(old, "ping", ConnectionError("it broke"))
        assert link._line is other
