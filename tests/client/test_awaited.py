"""Runs as concurrent.futures and asyncio know their work: as they end, and beside other tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from workbench import Cluster, Function, Run
from workbench.base.errors import ConfigError
from workbench.results import as_completed
from workbench.rundir.state import RunState

pytestmark = pytest.mark.slow


def wait_for(file: str) -> str:
    from pathlib import Path
    from time import sleep

    while not Path(file).exists():
        sleep(0.05)
    if "broken" in file:
        raise ValueError("broken")
    return file


def submit(cluster: Cluster, file: Path) -> Run:
    return cluster.submit(Function(wait_for, (str(file),)), pods=1)


def test_runs_come_in_the_order_in_which_they_end(cluster: Cluster, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "broken")]
    first, second = (submit(cluster, file) for file in files)
    files[1].touch()
    order = as_completed([first, second, first])
    assert next(order) is second
    assert second.state is RunState.FAILED
    assert first.state is not RunState.FAILED
    files[0].touch()
    assert [run.id for run in order] == [first.id]
    assert first.returned == [str(files[0])]
    # Ended runs come at once, in the given order.
    assert [*as_completed([second, first], timeout_s=0)] == [second, first]


def test_a_run_that_continues_is_named_after_the_time(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(cluster, tmp_path / "a")
    try:
        with pytest.raises(TimeoutError, match=f"continue after 0.5 s: {run.id}"):
            list(as_completed([run], timeout_s=0.5))
    finally:
        run.cancel()
        run.wait(300, progress=False)
    with pytest.raises(ConfigError, match="as_completed"):
        next(as_completed([run], timeout_s="soon"))  # type: ignore[arg-type]


def test_a_run_is_awaited_beside_other_tasks(cluster: Cluster, tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    runs = [submit(cluster, file) for file in files]

    async def touch() -> str:
        for file in files:
            await asyncio.sleep(0.1)
            file.touch()
        return "touched"

    async def both() -> tuple[object, ...]:
        return await asyncio.gather(*runs, touch())

    *results, touched = asyncio.run(both())
    assert touched == "touched"
    assert results == [run.result for run in runs]


def test_a_cancelled_task_leaves_the_run(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "a"
    run = submit(cluster, file)

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(run), 0.3)

    asyncio.run(impatient())
    assert not run.state.is_terminal
    file.touch()
    run.wait(300, progress=False).raise_for_status()
