"""A rank of hostile or broken code harms neither keeper, agents, other runs nor the notebook.

The ranks are real scripts on real local pods, and `scripts/rank.py` has their tricks. A local pod
has the user of the notebook, so a rank can read files of the user and reach all sockets. The tests
check that nothing outside comes into a run, that no run succeeds by a trick, and that all other
runs continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from tests.fakes.hostile_pod import contents
from tests.support.poll import until
from workbench import Cluster, LocalPods, PodSpec, Run, Script, history
from workbench.base.display_protocol import as_html, as_page, as_text
from workbench.base.files import read_json
from workbench.base.process import Process
from workbench.benchmark.result import Report, rows_below
from workbench.client.result import RunResult
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState

pytestmark = [pytest.mark.slow, pytest.mark.long]
TRICKS = Path(__file__).parent / "scripts" / "rank.py"
HONEST = Path(__file__).parent.parent / "scripts" / "beat.py"
SECRET = b"canary-5f0e7a91"
END_S = 600.0
LOOK_S = 300.0
"""Seconds of CPU that a view may take."""
T = TypeVar("T")
TRACEBACK = b"Traceback (most recent call last)"


@dataclass(frozen=True)
class World:
    """A cluster of two pods, and what hostile ranks may not harm."""

    cluster: Cluster
    keeper: Process
    outside: Path
    """Folder outside of all runs, with a secret and the notes of the tricks."""

    def submit(self, script: Path, *args: object, pods: int = 1, **options: object) -> Run:
        job = Script(path=str(script), args=[str(each) for each in args], **options)
        return self.cluster.submit(job, pods=pods)

    def trick(self, name: str, **options: object) -> Run:
        return self.submit(TRICKS, name, self.outside, **options)

    def daemons(self) -> list[Process]:
        """Return the daemons of all tricks that are alive."""
        notes = self.outside / "daemons"
        lines = notes.read_text().splitlines() if notes.exists() else []
        started = [Process(*map(int, line.split())) for line in lines]
        return [process for process in started if process.is_alive()]

    def logs(self) -> dict[Path, bytes]:
        """Return the logs of the keeper and of the agents."""
        agents = self.cluster.path.glob("pods/pod-*/agent.log")
        paths = [self.cluster.path / "keeper.log", *agents]
        return {path: path.read_bytes() for path in paths if path.is_file()}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("hostile-rank")
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    with Cluster(
        LocalPods(), PodSpec(), count=2, warm=False, path=folder / "cluster", idle_timeout_s=3600
    ) as cluster:
        state = read_json(cluster.path / "state.json")
        keeper = Process(int(str(state["pid"])), int(str(state["start_time"])))
        (outside / "keeper.sock").write_text(str(ClusterPaths(cluster.path).socket))
        world = World(cluster, keeper, outside)
        yield world
    assert world.daemons() == []
    assert not keeper.is_alive()
    assert not list(cluster.path.glob("pods/pod-?/*")), "the folders of the pods are gone"


@dataclass(frozen=True)
class Neighbour:
    """An honest run, and the file that ends it."""

    run: Run
    end: Path


@dataclass(frozen=True)
class Trial:
    trick: str
    state: RunState
    says: Sequence[str] = ()
    """Texts in the message of the result."""
    pods: int = 1
    options: Mapping[str, object] = field(default_factory=dict)
    logged: bytes = b""
    """Last line of a traceback that the keeper may log. Empty: none."""
    cancel_at: str = ""
    """Line of the rank after which the user cancels the run. Empty: never."""
    seconds: float = 600.0
    """Longest time of the run."""


FAILED, SUCCEEDED, CANCELLED = RunState.FAILED, RunState.SUCCEEDED, RunState.CANCELLED
CAUSE = "ValueError: the true cause"
TRIALS = [
    Trial("forged_events", SUCCEEDED, ["all ranks finished"]),
    Trial("endless_line", SUCCEEDED),
    Trial("escapes", FAILED, ["rank 0 on pod-1", "ValueError"]),
    Trial("forged_run", FAILED, [CAUSE]),
    Trial("forged_error", FAILED, ["rank 0 on pod-1"]),
    Trial("nested_error", FAILED, [CAUSE]),
    Trial("pipes_for_records", FAILED, [CAUSE]),
    Trial("devices_for_records", FAILED, [CAUSE]),
    Trial("odd_outputs", SUCCEEDED, ["outputs/ has 504 files", "are not followed"]),
    Trial(
        "deep_trees", SUCCEEDED, ["outputs/ has 1 file", "the name is not allowed", "unreadable"]
    ),
    Trial("linked_folders", SUCCEEDED, ["are not followed: out, script"]),
    Trial(
        "sparse_output",
        SUCCEEDED,
        ["outputs/ has 1 file", "beyond outputs_limit_gib=1"],
        options={"outputs_limit_gib": 1.0},
    ),
    # The keeper cannot know beforehand that the results of a run do not fit.
    Trial(
        "sparse_result",
        FAILED,
        ["the disk of this machine is full"],
        logged=b"DiskFull: the disk of this machine is full",
    ),
    Trial("removed_folders", SUCCEEDED, ["was removed"]),
    Trial("daemons", SUCCEEDED),
    Trial("deaf", CANCELLED, cancel_at="deaf"),
    Trial("kills_agent", FAILED, ["lost the agent of pod-1"]),
    Trial("poisons_agent", FAILED, ["pod-1"]),
    Trial("sockets", SUCCEEDED),
]


def test_a_rank_that_forges_the_end_of_another_has_the_true_cause(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    check_trial(world, Trial("forged_done", FAILED, [CAUSE], pods=2), capsys)


@pytest.fixture(scope="module")
def neighbour(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Neighbour]:
    """An honest run on the other pod, which outlives all tricks."""
    end = tmp_path_factory.mktemp("neighbour") / "end"
    run = world.submit(HONEST, "--until", end, "--pause-s", 0.2)
    until(lambda: "line 3" in printed(run), END_S)
    yield Neighbour(run, end)
    end.touch()
    run.wait(END_S, progress=False)


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.trick)
def test_a_hostile_rank_harms_its_own_run_alone(
    world: World, neighbour: Neighbour, trial: Trial, capsys: pytest.CaptureFixture[str]
) -> None:
    check_trial(world, trial, capsys)
    before = printed(neighbour.run)
    until(lambda: printed(neighbour.run) != before, END_S, why=lambda: neighbour.run.message)
    assert neighbour.run.state is RunState.RUNNING


def test_pods_serve_honest_runs_after_all_tricks(world: World, neighbour: Neighbour) -> None:
    neighbour.end.touch()
    honest = neighbour.run.wait(END_S, progress=False)
    assert honest.state is SUCCEEDED, honest.message
    after = world.submit(HONEST, "--lines", 3, pods=2)
    assert after.wait(END_S, progress=False).state is SUCCEEDED, after.message


def check_trial(world: World, trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    """Carry out a trick, and check what holds for each."""
    secrets = {path: facts for path, facts in contents(world.outside).items() if "secret" in path}
    logs = world.logs()
    result = outcome(world, trial)
    assert result.state is trial.state, result.message
    for words in trial.says:
        assert words in result.message
    # No daemon is left, whatever session, parent, environment or title it has.
    assert result.left_processes == 0
    until(lambda: not world.daemons(), 10, why=world.daemons)
    check_views(Run.load(result.path), result, capsys)

    # Nothing outside was changed, or copied into the run.
    now = contents(world.outside)
    assert {path: now[path] for path in secrets} == secrets
    files = [path for path in result.path.rglob("*") if not path.is_dir()]
    assert not [path for path in files if path.is_symlink() or not path.is_file()]
    assert not [path for path in files if SECRET in path.read_bytes()]

    # Keeper and agents had no error of their own.
    for path, text in world.logs().items():
        before = logs.get(path, b"")
        new = text[len(before) :] if text.startswith(before) else text
        assert TRACEBACK not in new or (trial.logged and trial.logged in new), new
    assert world.keeper.is_alive()


def outcome(world: World, trial: Trial) -> RunResult:
    """Carry out a trick and return the result of the keeper."""
    began = time.monotonic()
    run = world.trick(trial.trick, pods=trial.pods, **trial.options)
    try:
        if trial.cancel_at:
            until(lambda: trial.cancel_at in printed(run), END_S)
            run.cancel()
        if trial.trick == "forged_run":  # until the keeper's own result is there
            until(lambda: run.state is FAILED, END_S)
        result = run.wait(END_S, progress=False)
    finally:
        if not run.state.is_terminal:
            run.cancel()
    assert time.monotonic() - began < trial.seconds
    return result


def printed(run: Run) -> str:
    path = run.paths.rank_log(0, 0, "stdout")
    return path.read_text(errors="replace") if path.exists() else ""


def check_views(run: Run, result: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    """Draw a run in every way: whole, in time, and without a foreign tag or control character."""
    rows, problems = rows_below([run.path])
    report = Report(rows, problems=problems, with_cards=True)
    runs = history(run.path.parent)
    texts: list[Callable[[], str]] = [
        lambda: as_text(result),
        lambda: as_text(runs),
        lambda: repr(run) + repr(result) + repr(run.progress),
        lambda: run.message + result.message,
        lambda: shown(run, capsys),
    ]
    # The report has the card of the run, with its plots.
    pages: list[Callable[[], str]] = [
        lambda: as_html(result),
        lambda: as_html(runs),
        lambda: as_page(run),
        lambda: as_page(report),
    ]
    for look in texts:
        text = timed(look)
        assert text
        odd = [letter for letter in text if not letter.isprintable() and letter not in "\n\t"]
        assert not odd, text
    for look in pages:
        page = timed(look)
        assert page
        assert "<script>alert(" not in page
        assert "\x1b" not in page
    for stream in ("both", "stdout", "stderr"):
        assert timed(lambda stream=stream: run.logs(0, stream)).count("\n") < 400
    timed(lambda: run.logs(0, tail=None))
    assert timed(lambda: sum(1 for _ in run.events())) >= 0


def shown(run: Run, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `show` prints outside a notebook."""
    capsys.readouterr()
    run.show()
    return capsys.readouterr().out


def timed(look: Callable[[], T]) -> T:
    began = time.process_time()
    drawn = look()
    took_s = time.process_time() - began
    assert took_s < LOOK_S
    return drawn
