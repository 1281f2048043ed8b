"""A function of the notebook on two real pods."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy
import pytest

from tests.support.poll import until
from tests.support.sentences import sentence
from workbench import Cluster, Function, Run
from workbench.errors import ConfigError, RunError, RunFailed
from workbench.rundir.state import RunState

pytestmark = pytest.mark.slow
GATE = (letter for letter in "no generator travels")


def measure(scale: float, *, name: str) -> dict[str, object]:
    rank, world = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
    Path(f"wrote-{rank}.txt").write_text(name)
    return {"rank": rank, "world": world, "row": numpy.full(4, scale * rank)}


def fail_on_the_second(wanted: int) -> int:
    if os.environ["RANK"] == "1":
        raise ValueError(f"{wanted} is too much")
    return wanted


def labelled(item: int) -> tuple[int, str]:
    print(item, "done")
    return item, os.environ["RANK"]


class Refused(Exception):
    def __init__(self, *, item: int) -> None:
        super().__init__(f"not {item}")


def refuse_three(item: int) -> int:
    if item == 3:
        raise Refused(item=item)
    return item


def wait_long() -> None:
    time.sleep(600)


def draw_from_the_gate() -> str:
    return next(GATE)


def test_every_rank_is_called_and_what_each_returns_comes_back(cluster: Cluster) -> None:
    first, second = cluster.run(measure, 2.5, name="mine", progress=False)
    assert isinstance(first, dict) and isinstance(second, dict)
    assert [(each["rank"], each["world"]) for each in (first, second)] == [(0, 2), (1, 2)]
    assert numpy.array_equal(second["row"], numpy.full(4, 2.5))
    run = cluster.runs[-1]
    assert (run.paths.outputs / "wrote-0.txt").read_text() == "mine"  # as those of a script
    assert "measurecall" in run.id
    assert {path.stat().st_mode & 0o077 for path in (cluster.path / "functions").rglob("*")} == {0}
    # Its spec starts it again.
    again = cluster.submit(run.spec.job, pods=1)
    again.wait(300, progress=False).raise_for_status()
    assert [each["world"] for each in again.returned if isinstance(each, dict)] == [1]


def test_a_raise_fails_the_run_with_the_functions_own_line(cluster: Cluster) -> None:
    with pytest.raises(RunFailed) as failed:
        cluster.run(fail_on_the_second, 7, progress=False)
    run = cluster.runs[-1]
    error = run.result.error
    assert error is not None
    assert (error.rank, error.kind, error.message) == (1, "ValueError", "7 is too much")
    assert 'raise ValueError(f"{wanted} is too much")' in error.traceback
    assert "call.py" not in error.traceback
    assert "7 is too much" in str(failed.value)
    cause = failed.value.__cause__
    assert (type(cause), str(cause)) == (ValueError, "7 is too much")
    assert 'raise ValueError(f"{wanted} is too much")' in run._repr_mimebundle_()[
        "text/html"
    ].replace("&#34;", '"')
    with pytest.raises(RunError, match=sentence("it was no function")):
        _ = run.returned


def test_items_are_shared_out_over_the_ranks_and_come_back_in_their_order(
    cluster: Cluster,
) -> None:
    values = cluster.map(labelled, iter(range(5)), progress=False)
    assert values == [(item, str(item % 2)) for item in range(5)]
    run = cluster.runs[-1]
    assert "labelledcall" in run.id
    assert sorted([*run.follow()]) == ["0 done", "2 done", "4 done"]
    with pytest.raises(RunFailed) as failed:
        cluster.map(refuse_three, range(5), progress=False)
    assert isinstance(failed.value.__cause__, Refused)
    assert str(failed.value.__cause__) == "not 3"
    before = len(cluster.runs)
    assert cluster.map(labelled, []) == []
    assert len(cluster.runs) == before


def test_what_cannot_travel_starts_nothing_and_a_late_run_is_cancelled(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(cluster.runs)
    with monkeypatch.context() as patch:
        patch.setattr(
            "workbench.rundir.make.function._PYTHON", "3.1"
        )  # the notebook's, not that of the pods
        with pytest.raises(
            ConfigError,
            match=sentence("would be pickled by Python", "measure", "3.1"),
        ):
            cluster.run(measure, 2.5, name="mine")
    with pytest.raises(
        ConfigError,
        match="the variable 'GATE' in draw_from_the_gate, of type generator, cannot travel",
    ):
        cluster.run(draw_from_the_gate)
    assert len(cluster.runs) == before
    with pytest.raises(TimeoutError, match=sentence("was cancelled after {} s; see", "0.5")):
        cluster.run(wait_long, timeout_s=0.5, progress=False)
    late = cluster.runs[-1]
    until(lambda: late.state.is_terminal, 120)
    assert late.state is RunState.CANCELLED
    run = cluster.submit(Function(measure, (1,), {"name": "x"}, env={"SOME": "value"}))
    assert isinstance(run, Run)
    assert len([*run.wait(300, progress=False).hosts]) == len(run.returned) == 2
