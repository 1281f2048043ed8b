"""A benchmark whose rows are on disk or cannot start: no pod, no process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.benchrows import write_row
from tests.support.sentences import says, sentence
from workbench import Benchmark, PodSpec, Script
from workbench.base.errors import ConfigError, RunError
from workbench.benchmark.benchmark import Stopped
from workbench.benchmark.finished_rows import data_of
from workbench.benchmark.forecast import MemoryForecast
from workbench.benchmark.read import key_of
from workbench.benchmark.row import Outcome
from workbench.client.cluster import Cluster
from workbench.rundir.spec import ClusterSpec, RunSpec

MakeScript = Callable[[str], Script]
CODE = "c1"


@pytest.fixture(autouse=True)
def known_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the package a fingerprint; to compute it takes a second."""
    monkeypatch.setattr("workbench.benchmark.schedule.code_of", lambda: CODE)


@pytest.fixture
def make_script(tmp_path: Path) -> MakeScript:
    def make(name: str) -> Script:
        folder = tmp_path / f"scripts-{name}"
        folder.mkdir()
        (folder / f"{name}.py").write_text("print('well')")
        return Script(path=str(folder / f"{name}.py"))

    return make


def pods_of(count: int, **other: Any) -> Any:
    """Return the facts of a ready cluster that a benchmark reads before a run is submitted."""
    facts = {
        "spec": ClusterSpec(count=count),
        "phase": "ready",
        "message": "",
        "path": Path("no-cluster"),
        "pods": [SimpleNamespace(versions={"torch": "2.13.0"})] * count,
        **other,
    }
    cluster = object.__new__(type("Ready", (Cluster,), dict.fromkeys(facts)))
    vars(cluster).update(facts)
    return cluster


def finish(grid: Benchmark, cluster: Any, **facts: Any) -> None:
    """Write the run directories of a grid's rows as an earlier kernel would have done."""
    for number, planned in enumerate(grid.grid.rows):
        root = grid.path / f"run{number}"
        write_row(root, pods=planned.pods, **facts)
        spec = RunSpec(cluster=cluster.spec, job=planned.job, pods=planned.pods)
        note = {
            "key": key_of(spec),
            "repeat": planned.repeat,
            "code": CODE,
            "data": data_of(planned.job),
            "versions": {"torch": "2.13.0"},
        }
        info = {"id": root.name, "cluster": "c", "submitted_s": 5.0, "benchmark": note}
        (root / "run.json").write_text(json.dumps(info))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], None]:
    """Make the planner refuse the rows of some scripts on a GPU of 1 GiB."""

    def refuse(names: Sequence[str]) -> None:
        def forecast(spec: RunSpec, *, gpu_memory_gib: float | None = None) -> MemoryForecast:
            if gpu_memory_gib == 1.0 and Path(str(spec.job.to_dict()["path"])).stem in names:
                return MemoryForecast(gib=2.0, refusal="needs 2 GiB")
            return MemoryForecast(gib=0.5)

        for module in ("benchmark", "schedule"):
            monkeypatch.setattr(f"workbench.benchmark.{module}.forecast_memory", forecast)

    return refuse


def test_finished_rows_are_taken_from_disk_with_their_costs(
    make_script: MakeScript, tmp_path: Path
) -> None:
    cluster = pods_of(2)
    grid = Benchmark(
        [make_script("work")], pods=[1, 2], path=tmp_path / "b", price_per_pod_hour=4.0, name="mine"
    )
    finish(grid, cluster, duration_s=1800.0)
    table = grid.run(cluster)
    assert [(row.from_disk, row.pod_hours, row.cost) for row in table.rows] == [
        (True, 0.5, 2.0),
        (True, 1.0, 4.0),
    ]
    assert grid.result is table and table.name == "mine" and table.folder == tmp_path / "b"


def test_without_a_price_no_row_has_a_cost(make_script: MakeScript, tmp_path: Path) -> None:
    cluster = pods_of(1)
    grid = Benchmark([make_script("work")], path=tmp_path / "b")
    finish(grid, cluster, duration_s=1800.0)
    (row,) = grid.run(cluster).rows
    assert row.pod_hours == 0.5 and row.cost is None


def test_a_skipped_row_has_no_cost(
    make_script: MakeScript, refused: Callable[[Sequence[str]], None], tmp_path: Path
) -> None:
    refused(["large"])
    grid = Benchmark(
        [make_script("large")], path=tmp_path / "b", price_per_pod_hour=4.0, gpu_memory_gib=1.0
    )
    (row,) = grid.run(pods_of(1)).rows
    assert (row.outcome, row.reason) == (Outcome.SKIPPED, "needs 2 GiB")
    assert row.pod_hours is None and row.cost is None


@pytest.mark.parametrize("price", [0, 0.5, None])
def test_a_pod_hour_may_cost_nothing_or_a_part(
    make_script: MakeScript, price: float | None
) -> None:
    assert Benchmark([make_script("work")], price_per_pod_hour=price).result is None


def test_a_price_that_is_no_number_is_refused(make_script: MakeScript) -> None:
    with pytest.raises(
        ConfigError,
        match=sentence("price_per_pod_hour is {}; give a number, 0 or more, or None", "nan"),
    ):
        Benchmark([make_script("work")], price_per_pod_hour=float("nan"))


def test_an_interrupt_counts_the_rows_that_wait_and_keeps_the_others(
    make_script: MakeScript,
    refused: Callable[[Sequence[str]], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.benchmark.schedule.prepare_run", interrupt)
    refused(["large"])
    jobs = [make_script(name) for name in ("large", "first", "second", "third")]
    grid = Benchmark(jobs, path=tmp_path / "b", gpu_memory_gib=1.0)
    with pytest.raises(Stopped) as stopped:
        grid.run(pods_of(1))
    assert says(stopped.value, "Run the benchmark again to continue", 3)
    # A notebook shows the sentence without a traceback.
    assert stopped.value._render_traceback_() == [str(stopped.value)]
    assert grid.result is not None
    assert [row.outcome for row in grid.result.rows] == [Outcome.SKIPPED] + 3 * [Outcome.WAITING]


def test_a_cluster_that_is_not_ready_is_refused_with_its_reason(
    make_script: MakeScript, tmp_path: Path
) -> None:
    grid = Benchmark([make_script("work")], path=tmp_path / "b")
    failed = pods_of(1, phase="failed", message="pod-0 is gone")
    with pytest.raises(RunError, match=sentence("the cluster is", "failed", "pod-0 is gone")):
        grid.run(failed)
    with pytest.raises(RunError, match=sentence("call start() first")):
        grid.run(pods_of(1, phase="new"))
    assert grid.result is None


def test_a_row_that_no_pod_can_start_is_refused_by_its_name(
    make_script: MakeScript, tmp_path: Path
) -> None:
    job = make_script("work")
    grid = Benchmark([job], path=tmp_path / "b")
    Path(job.path).unlink()
    with pytest.raises(ConfigError, match=r"script .*work\.py on 1 pod: .*does not exist"):
        grid.run(pods_of(1))


def test_a_forecast_counts_repeats_and_those_that_succeeded(
    make_script: MakeScript, tmp_path: Path
) -> None:
    cluster = pods_of(3)
    done, failed, new = (make_script(name) for name in ("done", "failed", "new"))
    path = tmp_path / "b"
    earlier = Benchmark([done], pods=[2], repeats=2, path=path)
    finish(earlier, cluster)
    finish(Benchmark([failed], path=path / "failed"), cluster, state="failed")
    grid = Benchmark([done, failed, new], pods=[1, 2, 3], repeats=3, path=path)
    forecast = grid.forecast(cluster)
    assert [(row.runs, row.finished) for row in forecast.rows] == [(3, 0), (3, 2)] + 7 * [(3, 0)]
    assert [row.name for row in forecast.rows[:2]] == [
        f"script {done.path} on 1 pod",
        f"script {done.path} on 2 pods",
    ]


def test_a_forecast_without_a_cluster_is_for_the_pods_of_the_options(
    make_script: MakeScript, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def forecast(spec: RunSpec, *, gpu_memory_gib: float | None = None) -> MemoryForecast:
        seen.append((spec.cluster.count, spec.cluster.pods.slots, spec.pods, gpu_memory_gib))
        return MemoryForecast()

    monkeypatch.setattr("workbench.benchmark.benchmark.forecast_memory", forecast)
    grid = Benchmark(
        [make_script("work")],
        pods=[1, 3],
        pod=PodSpec(gpus=2),
        gpu_memory_gib=5.0,
        path=tmp_path / "b",
    )
    grid.forecast()
    assert seen == [(3, 2, 1, 5.0), (3, 2, 3, 5.0)]
    seen.clear()
    grid.forecast(pods_of(4))
    assert seen == [(4, 1, 1, 5.0), (4, 1, 3, 5.0)]


def test_benchmarks_add_up_to_one_without_rows_so_far(
    make_script: MakeScript, tmp_path: Path
) -> None:
    cluster = pods_of(1)
    first = Benchmark([make_script("first")], path=tmp_path / "b", name="first")
    second = Benchmark([make_script("second")], path=tmp_path / "c", name="second")
    finish(first, cluster)
    first.run(cluster)
    both = first + second
    assert [Path(str(row.job.to_dict()["path"])).stem for row in both.grid.rows] == [
        "first",
        "second",
    ]
    assert (both.name, both.path, both.result) == ("first", tmp_path / "b", None)
    assert len(first.grid.rows) == 1 and first.result is not None


def test_a_spec_without_a_number_of_pods_takes_those_of_its_cluster(
    make_script: MakeScript, tmp_path: Path
) -> None:
    job = make_script("work")
    spec = RunSpec(cluster=ClusterSpec(count=3, pods=PodSpec(gpus=2)), job=job)
    files = [tmp_path / "all.json", tmp_path / "one.json"]
    for file, pods in zip(files, (None, 1), strict=True):
        file.write_text(json.dumps(spec.replace(pods=pods).to_dict()))
    grid = Benchmark.from_specs(files, path=tmp_path / "b")
    assert [row.pods for row in grid.grid.rows] == [3, 1]
    assert grid.path == tmp_path / "b"
    assert says(repr(grid), "Benchmark({}: {} runs, in {})", "", "2", "b")


def test_the_folder_may_be_below_the_home(
    make_script: MakeScript, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Benchmark([make_script("work")], path="~/rows").path == tmp_path / "rows"
