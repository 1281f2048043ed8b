"""Ranks started by a pretended warm server, or cold. No process."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.agent.ranks import launcher
from workbench.agent.ranks.launcher import RankLauncher
from workbench.agent.ranks.request import RunRequest
from workbench.base.process import RankPlace


class Warm:
    """The warm server: it notes what is asked, and tells what it did."""

    def __init__(self) -> None:
        self.ready = True
        self.asked: dict[int, dict[str, Any]] = {}
        self.sent: set[int] = set()
        self.news: tuple[dict[int, int], list[int]] = ({}, [])
        self.seen: list[dict[str, str]] = []

    def serves(self, env: dict[str, str]) -> bool:
        self.seen.append(env)
        return self.ready

    def fork(self, **request: Any) -> int:
        token = len(self.asked) + 1
        self.asked[token] = request
        return token

    def cancel(self, token: int) -> bool:
        return token not in self.sent

    def receive(self) -> tuple[dict[int, int], list[int]]:
        news, self.news = self.news, ({}, [])
        return news


class Ended:
    """Processes that were sent a signal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[int, int]] = []
        self.gone: set[int] = set()
        monkeypatch.setattr(launcher, "look_up", self.look_up)

    def look_up(self, pid: int) -> Any:
        if pid in self.gone:
            return None
        return SimpleNamespace(send=lambda signum: self.sent.append((pid, signum)))


@pytest.fixture
def warm() -> Any:
    return Warm()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    return Ended(monkeypatch)


class Run:
    """A run on this pod, and what the launcher tells it."""

    def __init__(self, root: Path, **other: Any) -> None:
        self.root = root
        self.folder = root / "runs" / "r1"
        ranks = (RankPlace(rank=0, local_rank=0, pod=root.name),)
        request: dict[str, Any] = {
            "run": "r1",
            "ranks": ranks,
            "argv": ("python", "train.py"),
            "world_size": 1,
            "entry": "train:main",
            "env": {"A": "job"},
            "threads": 3,
        }
        self.request = RunRequest(**{**request, **other})
        self.stopping = False
        self.begins: list[tuple[int, str]] = []
        self.stops: list[tuple[float, bool]] = []
        self.ends: list[tuple[Any, ...]] = []
        self.rank: Any = SimpleNamespace(
            place=ranks[0],
            folder=self.folder / "rank-0",
            logs=[
                self.folder / "attempt-0" / f"rank-0.{name}.log" for name in ("stdout", "stderr")
            ],
            streams={},
            phase="waiting",
            stopped=False,
            end=lambda code, cannot_start="": self.ends.append((code, cannot_start)),
        )

    def begun(self, _rank: object, pid: int, how: str) -> None:
        self.begins.append((pid, how))

    def stop(self, grace_s: float, *, ask: bool = False) -> None:
        self.stops.append((grace_s, ask))


class Cold:
    """Ranks that were started cold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.error: OSError | None = None
        monkeypatch.setattr(launcher, "start_cold", self.start)

    def start(self, *facts: Any) -> int:
        if self.error is not None:
            raise self.error
        self.started.append(facts)
        return 77


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Cold:
    return Cold(monkeypatch)


@pytest.fixture
def starts(warm: Any) -> RankLauncher:
    made = RankLauncher()
    made.warm = warm
    return made


def launch(starts: RankLauncher, run: Any) -> Any:
    starts.launch(run, run.rank, {"GLOO": "eth0"})
    return run


def test_a_warm_rank_runs_as_soon_as_its_pid_is_known(
    starts: RankLauncher, warm: Warm, cold: Cold, tmp_path: Path
) -> None:
    run = launch(starts, Run(tmp_path / "pod-0"))
    assert run.rank.phase == "forking" and not run.begins
    assert warm.seen == [{"A": "job", "GLOO": "eth0"}]
    request = warm.asked[1]
    assert request["entry"] == "train:main" and request["env"]["OMP_NUM_THREADS"] == "3"
    assert request["cwd"] == str(run.folder) and request["folder"] == run.folder / "rank-0"
    assert request["logs"] == run.rank.logs
    assert request["env"]["RANK"] == "0" and request["env"]["GLOO"] == "eth0"
    starts.hear()
    assert not run.begins
    warm.news = ({1: 55}, [])
    starts.hear()
    assert run.begins == [(55, "warm")] and not cold.started


def test_a_rank_starts_in_the_folder_that_was_asked_for(
    starts: RankLauncher, warm: Warm, cold: Cold, tmp_path: Path
) -> None:
    launch(starts, Run(tmp_path / "pod-0", cwd="/work"))
    assert warm.asked[1]["cwd"] == "/work"
    warm.ready = False
    launch(starts, Run(tmp_path / "pod-0", cwd="/work"))
    launch(starts, Run(tmp_path / "pod-0"))
    assert [facts[2] for facts in cold.started] == ["/work", str(tmp_path / "pod-0/runs/r1")]


@pytest.mark.parametrize(("entry", "ready"), [(None, True), ("train:main", False)])
def test_other_ranks_start_cold(
    starts: RankLauncher,
    warm: Warm,
    cold: Cold,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry: str | None,
    ready: bool,
) -> None:
    monkeypatch.setattr(launcher, "preloaded", lambda: {"LD_PRELOAD": "allocator"})
    warm.ready = ready
    run = launch(starts, Run(tmp_path / "pod-0", entry=entry))
    assert run.begins == [(77, "cold")] and not warm.asked
    argv, env, _, logs = cold.started[0]
    assert argv == ("python", "train.py") and logs == run.rank.logs
    assert env["A"] == "job" and env["RANK"] == "0"
    # Only ranks of ours have the allocator of the warm server.
    assert (env.get("LD_PRELOAD") == "allocator") is (entry is not None)


def test_a_rank_that_the_warm_server_refuses_starts_cold(
    starts: RankLauncher, warm: Warm, cold: Cold, tmp_path: Path
) -> None:
    run = launch(starts, Run(tmp_path / "pod-0"))
    warm.news = ({}, [1])
    starts.hear()
    assert run.begins == [(77, "cold")] and not run.ends


def test_a_rank_that_is_refused_after_a_stop_ends(
    starts: RankLauncher, warm: Warm, cold: Cold, tmp_path: Path
) -> None:
    run = launch(starts, Run(tmp_path / "pod-0"))
    run.stopping = True
    warm.news = ({}, [1])
    starts.hear()
    assert run.rank.stopped is True and run.ends == [(None, "")] and not cold.started


def test_a_rank_that_cannot_be_started_ends_with_the_shells_code(
    starts: RankLauncher, warm: Warm, cold: Cold, tmp_path: Path
) -> None:
    warm.ready = False
    cold.error = OSError("no memory")
    run = launch(starts, Run(tmp_path / "pod-0"))
    ((code, why),) = run.ends
    assert code == 127 and "pod-0" in why and "no memory" in why and not run.begins


def test_a_stop_cancels_the_runs_own_unsent_requests(
    starts: RankLauncher, warm: Warm, tmp_path: Path
) -> None:
    mine, sent, other = (launch(starts, Run(tmp_path / "pod-0")) for _ in range(3))
    warm.sent = {2}
    starts.stop(mine, 5.0, ask=True)
    starts.stop(sent, 6.0)
    assert [run.rank.phase for run in (mine, sent, other)] == ["waiting", "forking", "forking"]
    assert mine.stops == [(5.0, True)] and sent.stops == [(6.0, False)] and not other.stops
    warm.news = ({2: 51, 3: 52}, [])
    starts.hear()
    assert sent.begins == [(51, "warm")] and other.begins == [(52, "warm")]


def test_a_process_of_a_cancelled_request_is_ended(
    starts: RankLauncher, warm: Warm, ended: Ended, tmp_path: Path
) -> None:
    run = launch(starts, Run(tmp_path / "pod-0"))
    starts.stop(run, 5.0)
    ended.gone = {50}
    warm.news = ({1: 51, 9: 50}, [])
    starts.hear()
    assert ended.sent == [(51, signal.SIGKILL)] and not run.begins


def test_the_output_of_a_rank_goes_through_a_pipe(
    starts: RankLauncher, warm: Warm, tmp_path: Path
) -> None:
    from workbench.agent.ranks.output import OutputStream

    run: Any = Run(tmp_path / "pod-0")
    run.rank.folder.mkdir(parents=True)
    stream = OutputStream(run.rank.folder / "stdout.log", "stdout")
    run.rank.streams = {"stdout": stream}
    launch(starts, run)
    assert stream.pipe >= 0 and (run.rank.folder / "stdout.pipe").is_fifo()
    starts.pump.remove(stream)
