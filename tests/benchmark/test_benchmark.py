"""A benchmark on real pods: every outcome is a row, and a killed kernel loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench import Benchmark, Cluster, FineTune, LocalPods, PodSpec, Script
from workbench.base.errors import ConfigError, RunError
from workbench.benchmark.finished_rows import data_of, kept_rows
from workbench.benchmark.forecast import forecast_memory
from workbench.benchmark.result import BenchmarkResult
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.benchmark.schedule import Schedule
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.totals import Progress

SCRIPTS = Path(__file__).parent.parent / "scripts"
KERNEL = """
import sys
from pathlib import Path
from workbench import Benchmark, Cluster, LocalPods, Script
script, folder, cluster, end = sys.argv[1:]
jobs = [Script(path=script, args=["--lines", "1"]), Script(path=script, args=["--until", end]),
        Script(path=script, args=["--lines", "2"])]
with Cluster(LocalPods(), count=1, path=cluster, warm=False, idle_timeout_s=120) as pods:
    table = Benchmark(jobs, path=folder).run(pods)
print([(str(row.outcome), row.from_disk, row.path.name) for row in table.rows])
"""


def script(tmp_path: Path, text: str = "print('well')", name: str = "work") -> Script:
    folder = tmp_path / f"script-{name}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    return Script(path=str(path))


def outcomes(table: BenchmarkResult) -> list[tuple[Outcome, int, bool]]:
    return [(row.outcome, row.pods, row.from_disk) for row in table.rows]


@pytest.mark.slow
def test_every_outcome_is_a_row_and_what_stands_is_taken_from_disk(
    cluster: Cluster, tmp_path: Path
) -> None:
    good, bad = script(tmp_path), script(tmp_path, "raise ValueError('no such column')", "bad")
    gone = script(tmp_path, "", "gone")
    Path(gone.path).unlink()
    with pytest.raises(ConfigError, match=r"gone\.py does not exist"):
        Benchmark([good, gone], path=tmp_path / "b").run(cluster)
    assert not (tmp_path / "b").exists()
    grid = Benchmark([good, bad], pods=[1, 2], path=tmp_path / "b", price_per_pod_hour=3600.0)
    table = grid.run(cluster)
    assert outcomes(table) == [
        (Outcome.SUCCEEDED, 1, False),
        (Outcome.SUCCEEDED, 2, False),
        (Outcome.FAILED, 1, False),
        (Outcome.FAILED, 2, False),
    ]
    assert "no such column" in table.rows[2].reason
    two = table.rows[1]
    assert two.duration_s is not None and two.cost == pytest.approx(2 * two.duration_s)
    again = grid.run(cluster)  # a failed row is tried again, in a folder of its own
    assert [row.from_disk for row in again.rows] == [True, True, False, False]
    assert [row.path for row in again.rows[:2]] == [row.path for row in table.rows[:2]]
    assert again.rows[2].path != table.rows[2].path
    assert says(repr(again), "rows, {}; {} from disk", 2)

    (tmp_path / "script-work" / "work.py").write_text(
        "print('better')"
    )  # other code is another run
    changed = Benchmark([good], path=tmp_path / "b").run(cluster)
    assert outcomes(changed) == [(Outcome.SUCCEEDED, 1, False)]
    assert changed.rows[0].path in [row.path for row in kept_rows(tmp_path / "b")]

    assert (
        two.path is not None
    )  # one row reruns alone from its spec.json, and so does a spec written by hand
    hand = tmp_path / "hand.json"
    hand.write_text(
        json.dumps(
            {"job": {"kind": "script", "path": good.path}, "pods": 2, "cluster": {"count": 2}}
        )
    )
    both = Benchmark.from_specs([two.path / "spec.json", hand], path=tmp_path / "b")
    assert outcomes(both.run(cluster)) == [
        (Outcome.SUCCEEDED, 2, False)
    ]  # the two files ask for one and the same


@pytest.mark.slow
def test_an_interrupt_cancels_the_row_that_runs_and_keeps_the_rest_waiting(
    cluster: Cluster, tmp_path: Path
) -> None:
    beat = Script(path=str(SCRIPTS / "beat.py"))
    grid = Benchmark(
        [script(tmp_path), beat, script(tmp_path, "print(2)", "after")], path=tmp_path / "b"
    )
    schedule = Schedule(grid.grid.rows, cluster, grid.path)

    def show(rows: Sequence[BenchmarkRow], progress: Mapping[str, Progress]) -> None:
        if rows[1].outcome is Outcome.RUNNING and progress:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        schedule.run(show)
    assert [row.outcome for row in schedule.rows] == [
        Outcome.SUCCEEDED,
        Outcome.CANCELLED,
        Outcome.WAITING,
    ]
    assert [row.outcome for row in kept_rows(grid.path)] == [row.outcome for row in schedule.rows]
    with pytest.raises(ConfigError, match=sentence("or give smaller numbers of pods", 3, 2)):
        Benchmark([beat], pods=[3], path=tmp_path / "b").run(cluster)


@pytest.mark.long
@pytest.mark.slow
def test_a_kernel_that_is_killed_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    folder, end = tmp_path / "b", tmp_path / "end"

    def kernel(number: int) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            KERNEL,
            str(SCRIPTS / "beat.py"),
            str(folder),
            str(tmp_path / f"c{number}"),
        ]
        return subprocess.Popen(
            [*command, str(end)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def beats() -> bool:
        logs = list(folder.glob("*/logs/attempt-0/rank-0.stdout.log"))
        return len(logs) == 2 and any(" line 3" in log.read_text() for log in logs)

    killed = kernel(1)
    try:
        until(lambda: beats() or killed.poll() is not None)
        assert killed.poll() is None, "the first kernel ended by itself"
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=300)
        second = kernel(2)
        try:
            until(
                lambda: (
                    (tmp_path / "c2" / "state.json").exists()
                    and "ready" in (tmp_path / "c2" / "state.json").read_text()
                )
            )
            end.touch()  # the row that the first kernel left ends while the second waits for it
            said, _ = second.communicate(timeout=300)
        finally:
            second.kill()
            second.wait()
    finally:
        end.touch()
        killed.kill()
        killed.wait()
        with suppress(RunError):  # it never started
            Cluster.attach(tmp_path / "c1").close()
    assert second.returncode == 0
    rows = eval(said.strip().splitlines()[-1])  # what KERNEL printed
    assert [row[:2] for row in rows] == [
        ("succeeded", True),
        ("succeeded", True),
        ("succeeded", False),
    ]
    assert len(list(folder.glob("*/run.json"))) == 3  # nothing ran twice


def test_a_row_that_cannot_fit_is_skipped_unless_forced(tmp_path: Path) -> None:
    job = FineTune(per_device_train_batch_size=4)
    small = RunSpec(cluster=ClusterSpec(pods=PodSpec(memory_gib=0.1)), job=job, pods=1)
    memory = forecast_memory(small)
    assert memory.gib is not None and memory.gib > 0.5
    assert says(
        memory.refusal, "predicted {} GiB of each {}'s memory; a {} has {} GiB", "pod", "0.10"
    )
    roomy = small.replace(cluster=ClusterSpec(pods=PodSpec(memory_gib=1e4)))
    assert forecast_memory(roomy).refusal == ""
    forecast = Benchmark(
        [job], ["zero1"], pods=[1, 2], pod=PodSpec(memory_gib=0.1), path=tmp_path / "b"
    ).forecast()
    assert (forecast.runs, forecast.to_go) == (2, 0)
    assert says(forecast, "will be skipped", "predicted") and says(
        forecast._repr_html_(), "will be skipped"
    )


def test_what_a_job_names_is_identified_by_its_content(tmp_path: Path) -> None:
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"source": "a", "target": "b"}\n')
    job = FineTune(dataset={"kind": "files", "train": str(rows)})
    before = data_of(job)
    os.utime(rows, (1, 1))
    assert data_of(job) == before != data_of(FineTune())
    rows.write_text('{"source": "a", "target": "c"}\n')
    assert data_of(job) != before


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=sentence("price_per_pod_hour is {}; give a number, 0 or more, or None", "-1"),
    ):
        Benchmark([FineTune()], price_per_pod_hour=-1)
    with pytest.raises(
        ConfigError, match=sentence("specs is empty; give paths of SPEC.json files")
    ):
        Benchmark.from_specs([])
    with pytest.raises(RunError, match=sentence("call start() first")):
        Benchmark([FineTune()]).run(Cluster(LocalPods(), path=tmp_path / "c"))
