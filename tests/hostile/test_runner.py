"""A whole run with a pod that answers anything: the run ends in words, and harms nothing else.

Links, watches, parsers, run loop and log of decisions are the product's own. Pods, their processes
and the clock are simulated.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.hostile_answers import (
    AGENT_OPS,
    SHELL_OPS,
    HostileSimulation,
    Lie,
    below,
)
from tests.fakes.runloop import RUN, Fate, KeeperDied, Plan
from tests.support.examplefolder import example_folder
from tests.support.examples import tries
from tests.support.scripts import script_job
from workbench.base.errors import RemoteError, WorkbenchError
from workbench.base.files import read_json
from workbench.finetune.job.finetune import FineTune
from workbench.jobs.job import Job
from workbench.keeper.decisions import replay
from workbench.keeper.run.runner import Runner
from workbench.rundir.checkpoints import newest_good
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.register.store import DecisionKind, journal_of, read_store
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.status import result_file

FINAL = ("succeeded", "failed", "cancelled", "stopped")
CANCELLED_AT_S = 100.0
"""When the user gives up a run that the hostile pod keeps open."""
BOUNDARIES = ("workbench.keeper.boundary", "workbench.keeper.run.attempt")
"""Loggers with a traceback for an error that no one has named."""
OF_PYTHON = ("KeyError", "TypeError", "ValueError", "AttributeError", "UnicodeEncodeError")
TRAINS = [
    (0.5, "start", {"max_steps": 8}),
    (1.0, "first_step", {}),
    (2.0, "step", {"step": 3, "max_steps": 8, "loss": 1.0}),
    (2.5, "checkpoint", {"step": 3, "bytes": 20, "took_s": 0.1}),
]
SHA = hashlib.sha256(b"42").hexdigest()


class Tracebacks(logging.Handler):
    """Records of the boundaries: what reached them had no words of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, WorkbenchError):
            self.found.append(f"{record.getMessage()}: {error!r}"[:300])


@contextmanager
def tracebacks() -> Iterator[list[str]]:
    handler = Tracebacks()
    loggers = [logging.getLogger(name) for name in BOUNDARIES]
    for each in loggers:
        each.addHandler(handler)
    try:
        yield handler.found
    finally:
        for each in loggers:
            each.removeHandler(handler)


@dataclass(kw_only=True)
class Ended:
    """A run with a hostile pod, after its end."""

    sim: HostileSimulation
    runner: Runner
    hostile: int
    state: str
    result: Mapping[str, Any]
    wrong: list[str] = field(default_factory=list)

    @property
    def message(self) -> str:
        return str(self.result["message"])

    @property
    def blames(self) -> str:
        return str((self.result.get("error") or {}).get("pod", ""))


def carry_out(
    folder: Path,
    hostile: int,
    lies: Mapping[str, Lie],
    *,
    job: Job | None = None,
    template: Path | None = None,
    plan: Plan | None = None,
    honest_until: int = 0,
    keeper_dies: bool = False,
) -> Ended:
    """Carry out a run of two pods, one of them hostile, and check what holds for each run."""
    sim = HostileSimulation(
        folder / "cluster",
        job or script_job(path="/home/me/train.py", outputs=["*"]),
        [plan or Plan()],
        template=template,
        lies={hostile: lies},
    )
    sim.honest_until = honest_until
    if template is not None:
        sim.give_checkpoint(3)
    (folder / "secret").write_text("of the user")
    before = below(folder)
    with sim.clocked(), tracebacks() as found:
        runner = sim.submitted()
        living = [runner]
        sim.at(CANCELLED_AT_S, lambda: living[0].cancel())
        if keeper_dies:
            sim.dies_at = {"after line started": 1}
        try:
            state = str(runner.run())
        except KeeperDied:
            runners, _ = sim.taken_over()
            runner = living[0] = runners[RUN]
            state = str(runner.run())
        result: Any = read_json(result_file(sim.paths))
        ended = Ended(sim=sim, runner=runner, hostile=hostile, state=state, result=result)
        check(ended, before, folder)
        check_later_requests(ended)
        check_next_keeper(ended)
        check_outside(ended, before, folder)
    assert found == []
    return ended


def check(ended: Ended, before: Mapping[str, bytes], folder: Path) -> None:
    """Check state, words, log of decisions and the honest pod after the end of a run."""
    sim = ended.sim
    result = ended.result
    assert ended.state in FINAL
    assert (result["state"], bool(ended.message)) == (ended.state, True)
    # A cause names the hostile pod, and is not the words of Python for a value.
    assert ended.message.replace("\n", " ").isprintable()
    if ended.state == "failed":
        assert f"pod-{ended.hostile}" in json.dumps([ended.message, result["error"]])
        if result["error"].get("rank") is None:
            assert result["error"]["kind"] not in OF_PYTHON
    honest = sim.pods[1 - ended.hostile]
    done = [rank.done for rank in honest.ranks.values()]
    if ended.state == "succeeded":
        assert honest.cleared or all(done)
    # No rank on the honest pod outlives the run.
    assert honest.running == []
    contents = read_store(sim.log_path)
    assert contents.is_whole
    assert len([each for each in contents.decisions if each.what is DecisionKind.ENDED]) == 1
    assert replay(contents)[RUN].outcome["state"] == ended.state
    check_outside(ended, before, folder)


def check_outside(ended: Ended, before: Mapping[str, bytes], folder: Path) -> None:
    """Check that nothing but the run's folder and the keeper's own files was written."""
    root = ended.sim.paths.root
    own = {str(ended.sim.log_path), str(journal_of(ended.sim.log_path))}
    after = {path: data for path, data in below(folder).items() if path not in own}
    outside = {path: data for path, data in after.items() if not Path(path).is_relative_to(root)}
    assert outside == {p: d for p, d in before.items() if not Path(p).is_relative_to(root)}
    assert not Path("/evil").exists()
    assert not list(root.rglob("*evil*"))


def check_later_requests(ended: Ended) -> None:
    """Check that later requests of a user end in words, and bring the honest pod's files."""
    for request in (ended.runner.fetch, ended.runner.bring, ended.runner.stacks):
        with suppress(WorkbenchError):
            request()


def check_next_keeper(ended: Ended) -> None:
    """Check that the next keeper finds the run as it ended."""
    trained = len(ended.sim.trained)
    runners, over = ended.sim.taken_over()
    for runner in runners.values():
        assert runner.over
    assert not over or over[RUN]["state"] == ended.state
    assert read_json(result_file(ended.sim.paths))["state"] in (ended.state, "succeeded")
    assert len(ended.sim.trained) == trained


def came_from(ended: Ended, pod: int) -> bool:
    """Whether the file of a script on a pod is here."""
    place = "" if pod == 0 else f"pod-{pod}/"
    return (ended.sim.paths.outputs / f"{place}answer-{pod}.txt").is_file()


def always(answer: object) -> Lie:
    return lambda _: answer


def told(**fields: object) -> Lie:
    """Change fields of the answer."""
    return lambda honest: {**honest, **fields}


def without(name: str) -> Lie:
    return lambda honest: {key: value for key, value in honest.items() if key != name}


def ranks(**fields: object) -> Lie:
    """Change fields of each rank in an answer to a poll."""

    def lie(honest: Mapping[str, Any]) -> Any:
        return {**honest, "ranks": [{**rank, **fields} for rank in honest.get("ranks", ())]}

    return lie


def listed(*names: str, kind: str = "script") -> Lie:
    """Name files of two bytes beside the honest ones."""
    return lambda honest: {**honest, kind: [*honest[kind], *([name, 2, SHA] for name in names)]}


@dataclass(frozen=True, kw_only=True)
class Trick:
    """Lies of a pod, and what they lead to."""

    lies: Mapping[str, Lie]
    hostile: tuple[int, ...] = (0, 1)
    """Numbers of the pod that lies."""
    state: str = "failed"
    says: str = ""
    """Words of the message."""
    blames: bool = True
    """Whether the fault names the hostile pod."""
    keeper_dies: bool = False
    """Whether another keeper takes over after the start of the ranks."""
    plan: Plan = field(default_factory=Plan)


TWO_BYTES: Mapping[str, Lie] = {"size": always(2), "read": always(b"42")}
RUNS_ON = Plan(others=Fate())
TRICKS: dict[str, Trick] = {
    "no port": Trick(lies={"free_port": without("port")}, hostile=(0,), says="no free port"),
    "a port that is text": Trick(
        lies={"free_port": told(port="x")}, hostile=(0,), says="names no free port"
    ),
    "a port above the last": Trick(
        lies={"free_port": told(port=10**30)}, hostile=(0,), says="names no free port"
    ),
    "prepared without a word": Trick(lies={"prepared": without("mine")}, state="succeeded"),
    "a refusal of escape sequences": Trick(
        lies={"prepare": always({"ok": False, "error": "\x1b[2J\ud800" * 9000})}, says="[2J"
    ),
    "no JSON": Trick(lies={"stage": always(b"\xff\xfe")}, says="lost the line"),
    "no object": Trick(lies={"start": always([])}, says="lost the line"),
    "no stamp": Trick(lies={"stamp": without("stamp")}, state="succeeded"),
    "a stamp of no form": Trick(lies={"holds": always("[]")}, says="does not answer about a file"),
    "a disk that is full of odd numbers": Trick(
        lies={"holds": always('{"full": {"folder": 1, "needed": "x", "free": []}}')},
        says="is full",
        blames=False,
    ),
    "ranks of no form": Trick(lies={"poll": told(ranks=[{"phase": "exited"}])}, says="number"),
    "a negative rank": Trick(lies={"poll": ranks(rank=-1)}, says="rank -1"),
    "the rank of the other pod, done": Trick(
        lies={"poll": lambda honest: ranks(rank=1, done=True, phase="exited")(honest)},
        hostile=(0,),
        says="reports rank 1, and the rank runs on another pod",
    ),
    "done while the other pod runs": Trick(
        lies={"poll": ranks(done=True, phase="exited", exit_code=0)},
        plan=RUNS_ON,
        state="cancelled",
    ),
    "no logs in the first answer": Trick(lies={"poll": told(chunks=5)}, says="not an object"),
    "an error of 17 MiB": Trick(
        lies={"poll": ranks(phase="exited", exit_code=1, error={"message": "x" * (17 << 20)})},
        hostile=(1,),
        says="xxx",
    ),
    "an error of half a letter": Trick(
        lies={"poll": ranks(phase="exited", exit_code=1, error={"message": "\ud800"})},
        says="�",
    ),
    "ends at no time": Trick(
        lies={"poll": ranks(ended_s=float("nan"), cpu_s=float("inf"), rss_bytes=1 << 70)},
        state="succeeded",
    ),
    "a full disk of half a letter": Trick(
        lies={"poll": told(full="\ud800", removed="a\0b" * 9000)},
        state="succeeded",
        says="logs are incomplete: �",
    ),
    "millions of processes": Trick(
        lies={"poll": told(live_processes=10**7)}, state="cancelled", plan=RUNS_ON
    ),
    "no ranks": Trick(lies={"poll": told(ranks=[])}, state="cancelled"),
    "ranks two hundred times": Trick(
        lies={"poll": lambda honest: {**honest, "ranks": honest["ranks"] * 200}},
        state="succeeded",
    ),
    "phases of no form": Trick(
        lies={"rejoin": told(phases=5)}, keeper_dies=True, says="does not name the ranks"
    ),
    "phases in a list": Trick(
        lies={"rejoin": told(phases=[[]])}, keeper_dies=True, says="does not name the ranks"
    ),
    "an attempt that is text": Trick(
        lies={"rejoin": told(attempt="x")}, keeper_dies=True, says="does not name the ranks"
    ),
    "an attempt without an end": Trick(
        lies={"rejoin": told(attempt=10**15)}, keeper_dies=True, says="does not name the ranks"
    ),
    "a billion restarts": Trick(
        lies={"rejoin": told(attempt=2, restart=10**9)},
        keeper_dies=True,
        says="does not name the ranks",
    ),
    "a later attempt": Trick(
        lies={"rejoin": told(attempt=5)}, keeper_dies=True, says="had begun on", blames=False
    ),
    "a file outside the run": Trick(
        lies={"list_outputs": listed("../evil", kind="out"), **TWO_BYTES},
        hostile=(0,),
        says="names a file outside the run",
    ),
    "names that no file may have": Trick(
        lies={
            "list_outputs": listed(
                "../evil", "/evil", "a\0b", "\ud800", "x" * 300, "d/" * 200 + "x"
            ),
            "read": always(b"42"),
        },
        state="succeeded",
        says="the name is not allowed here",
    ),
    "results of names that no file may have": Trick(
        lies={
            "list_outputs": listed("files/a\0b", "files/\ud800", "model/" + "d/" * 200, kind="out"),
            "read": always(b"42"),
        },
        hostile=(0,),
        state="succeeded",
        says="not copied back, as only",
    ),
    "a file that is also a folder": Trick(
        lies={"list_outputs": listed("a", "a/b", "a/b/c", "a"), **TWO_BYTES},
        state="succeeded",
    ),
    "a file in place of the other pod's folder": Trick(
        lies={"list_outputs": listed("pod-1"), **TWO_BYTES},
        hostile=(0,),
        state="succeeded",
    ),
    "sizes of no form": Trick(
        lies={
            "list_outputs": told(script=[["a", 10**30, SHA], ["b", -1, SHA], ["c", "2", SHA], 5])
        },
        state="succeeded",
    ),
    "lists of no form": Trick(
        lies={"list_outputs": always({"ok": True, "out": 5, "script": {}, "links": [[]]})},
        state="succeeded",
    ),
    "a file with other bytes": Trick(
        lies={"read": always(b"other")}, hostile=(0,), says="with a wrong checksum"
    ),
}


@pytest.mark.parametrize(
    ("name", "hostile"), [(name, pod) for name, trick in TRICKS.items() for pod in trick.hostile]
)
def test_a_run_with_a_hostile_pod_ends_in_words(name: str, hostile: int, tmp_path: Path) -> None:
    trick = TRICKS[name]
    ended = carry_out(tmp_path, hostile, trick.lies, plan=trick.plan, keeper_dies=trick.keeper_dies)
    assert (ended.state, trick.says in ended.message) == (trick.state, True), ended.message
    if ended.state == "failed" and trick.blames:
        assert ended.blames == f"pod-{hostile}"
    # The honest pod has not lost a file, and is cleared after a success.
    honest = 1 - hostile
    if ended.sim.trained and trick.state != "cancelled":
        assert came_from(ended, honest)
    if ended.state == "succeeded":
        assert ended.sim.pods[honest].cleared


@pytest.mark.parametrize(
    "odd", [5, {"0": "x", "1": "y"}, {"1": 3}, {"1": "\ud800"}, {"1": "x" * (1 << 20)}]
)
def test_odd_stacks_hide_no_other_stack_and_are_not_asked_for_again(
    odd: object, tmp_path: Path
) -> None:
    lies = {"poll": ranks(cpu_s=0.0), "stacks": always({"ok": True, "stacks": odd})}
    ended = carry_out(tmp_path, 1, lies, plan=RUNS_ON)
    assert ended.state == "cancelled"
    stacks = ended.sim.paths.stacks.read_text()
    assert "rank 0 on pod-0\nFile train.py" in stacks
    assert len(stacks) < 1 << 19
    # Once in the run, and once by the user.
    assert ended.sim.asked_of("pod-1").count("stacks") == 2


def test_fetch_copies_the_files_of_each_pod_that_answers(tmp_path: Path) -> None:
    sim = HostileSimulation(tmp_path, script_job(path="/home/me/train.py"), [Plan()], lies={})
    runner = sim.submitted()
    assert runner.run() == "succeeded"
    there = sim.paths.outputs / "pod-1" / "answer-1.txt"
    assert not there.exists(), "no option names the file"
    sim.pods[0].vanish()
    with pytest.raises(RemoteError, match="pod-0"):
        runner.fetch()
    assert there.read_bytes() == b"42"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a fine-tuning run over two pods."""
    rows = {"kind": "wikisql-mini", "train_rows": 16, "eval_rows": 4}
    spec = RunSpec(cluster=ClusterSpec(count=2), job=FineTune(dataset=rows, technique="zero1"))
    return prepare_run(spec, root=tmp_path_factory.mktemp("prepared") / "run").paths.root


def trainer(prepared: Path) -> FineTune:
    return FineTune.from_dict(read_json(prepared / "inputs" / "job.json")["job"])  # type: ignore[arg-type]


PARTS = f"/pods/pod-1/runs/{RUN}/checkpoints"


def manifests(*parts: str) -> str:
    return "".join(f"{PARTS}/{part}/manifest.json\0" for part in parts)


@pytest.mark.parametrize(
    ("lies", "steps"),
    [
        ({}, [3]),
        ({"find": always("no path")}, []),
        # The part of the other pod stays its own, whatever this pod names.
        ({"find": always(manifests("step-3/rank-1", "step-3/rank-0"))}, [3]),
        ({"find": always(manifests("step-9/rank-1", "step-9/rank-0"))}, []),
        ({"find": always(manifests("step-" + "9" * 5000 + "/rank-1"))}, []),
        ({"find": always(manifests("step-²/rank-1"))}, []),
        ({"read": always(b"")}, []),
        ({"read": always(b'{"files": {"../evil": {"bytes": 2, "sha256": "x"}}}')}, []),
        ({"read": always(b'{"files": {"a\\u0000": {"bytes": 2, "sha256": "x"}}}')}, []),
        ({"read": always(b'{"files": {"\\ud800": {"bytes": 2, "sha256": "x"}}}')}, []),
        ({"read": always(b'{"files": {"a": {"bytes": 9000000000000000000, "sha256": ""}}}')}, []),
        ({"size": always(1 << 62)}, []),
    ],
)
def test_a_checkpoint_of_a_hostile_pod_is_whole_or_is_left_out(
    lies: Mapping[str, Lie], steps: list[int], prepared: Path, tmp_path: Path
) -> None:
    plan = Plan(prints=TRAINS)
    ended = carry_out(tmp_path, 1, lies, job=trainer(prepared), template=prepared, plan=plan)
    assert ended.state == "succeeded"
    here = ended.sim.paths.checkpoints
    assert [path.name for path in sorted(here.glob("step-*"))] == [f"step-{n}" for n in steps]
    if steps:
        parts = newest_good(ended.sim.paths.root).parts
        assert {rank: path.parent.name for rank, path in parts.items()} == {0: "pod-0", 1: "pod-1"}


ODD = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 3),
        st.sampled_from([1 << 62, 10**30, -(10**30), 1e308, float("nan"), float("-inf")]),
        st.sampled_from(["", "x", "running", "exited", "../evil", "/evil", "a\0b", "\ud800"]),
        st.sampled_from(["pod-0", "pod-1", "\x1b[2J<b>", "0", "1", "x" * 5000, SHA]),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=8,
)
NAMES = (
    *("port", "mine", "pid", "time_s", "replaced", "interface", "stamp", "stacks", "phases"),
    *("inherited", "attempt", "restart", "out", "script", "links", "unread", "chunks", "ranks"),
    *("live_processes", "gpus", "full", "removed", "ok", "error", "task"),
)
RANK_NAMES = (
    *("rank", "phase", "exit_code", "done", "stopped", "asked", "forced", "ended_s", "error"),
    *("rss_bytes", "cpu_s", "halted"),
)


def _changed(change: Mapping[str, object], honest: Any) -> Any:
    return {**honest, **change}


def _renamed(change: Mapping[str, object], honest: Any) -> Any:
    return ranks(**change)(honest)


def _odd_entries(entries: list[object], honest: Any) -> Any:
    return {**honest, "out": entries, "script": entries}


LIES: st.SearchStrategy[Lie] = st.one_of(
    st.builds(always, ODD),
    st.builds(partial, st.just(_changed), st.dictionaries(st.sampled_from(NAMES), ODD, max_size=4)),
    st.builds(
        partial,
        st.just(_renamed),
        st.dictionaries(st.sampled_from(RANK_NAMES), ODD, min_size=1, max_size=4),
    ),
    st.builds(
        partial, st.just(_odd_entries), st.lists(st.lists(ODD, min_size=3, max_size=3), max_size=3)
    ),
)
TEXTS = st.builds(always, st.one_of(ODD.map(json.dumps), st.text(max_size=20)))
FILES = {
    "size": st.builds(always, st.sampled_from([0, 2, 1 << 40, 1 << 63])),
    "read": st.builds(always, st.binary(max_size=20)),
}


@tries(80)
@given(
    hostile=st.sampled_from([0, 1]),
    agent=st.dictionaries(st.sampled_from(AGENT_OPS), LIES, min_size=1, max_size=4),
    shell=st.dictionaries(st.sampled_from(SHELL_OPS), TEXTS, max_size=2),
    files=st.fixed_dictionaries({}, optional=FILES),
    honest_until=st.sampled_from([0, 0, 6, 12, 20, 40]),
    keeper_dies=st.booleans(),
)
def test_random_answers_at_any_operation_end_the_run_in_words(
    hostile: int,
    agent: Mapping[str, Callable[[Any], Any]],
    shell: Mapping[str, Lie],
    files: Mapping[str, Lie],
    honest_until: int,
    keeper_dies: bool,
) -> None:
    lies = {**agent, **shell, **files}
    with example_folder() as folder:
        carry_out(
            Path(folder),
            hostile,
            lies,
            honest_until=honest_until,
            keeper_dies=keeper_dies,
            plan=Plan(others=Fate(3.0)),
        )
