"""`Benchmark`: a grid of runs, a row per run, before and during its execution."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import NoneType

from workbench.base.display_protocol import Displayable, follow
from workbench.base.errors import ConfigError, RunError, check_type, suggests
from workbench.base.files import user_path
from workbench.benchmark.finished_rows import FinishedRows
from workbench.benchmark.forecast import (
    BenchmarkForecast,
    ForecastRow,
    forecast_memory,
)
from workbench.benchmark.grid import PlannedRun, make_grid
from workbench.benchmark.read import skipped_row
from workbench.benchmark.result import DEFAULT_NAME, BenchmarkResult
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.benchmark.schedule import Schedule
from workbench.client.cluster import Cluster
from workbench.jobs.job import Job
from workbench.jobs.launcher import Launcher
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.make.prepare import check_launcher
from workbench.rundir.spec import ClusterSpec, RunSpec


class Stopped(KeyboardInterrupt):
    """Report an interrupted benchmark: the current row is cancelled, later rows wait."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Benchmark(Displayable):
    """A grid of jobs x techniques x pod counts x further options, a row per run.

    The rows run in turn on a cluster, or side by side on request. A second `run` reuses finished
    rows on disk with equal spec, code, data and versions that succeeded or ran out of memory, and
    runs the rest.

    Example:
        grid = Benchmark([FineTune(max_steps=20)], ["single", "ddp", "zero1"], pods=[1, 2, 3],
                         vary={"global_batch_size": [24]})
        table = grid.run(cluster)
    """

    @suggests("Benchmark")
    def __init__(
        self,
        jobs: Sequence[Job],
        techniques: Sequence[str] | None = None,
        pods: Sequence[int] = (1,),
        vary: Mapping[str, Sequence[object]] | None = None,
        *,
        repeats: int = 1,
        pod: PodSpec | None = None,
        gpu_memory_gib: float | None = None,
        price_per_pod_hour: float | None = None,
        path: str | Path = "runs/benchmark",
        name: str = DEFAULT_NAME,
    ):
        """Build the grid; nothing starts.

        Args:
            jobs: Jobs.
            techniques: Techniques for every fine-tuning job. Default: the job's own.
            pods: Numbers of pods.
            vary: Options of a job by name and their values, such as `{"precision": ["fp32",
                "bf16"]}`;
                `global_batch_size` divides the rows of an optimizer step among the ranks.
            repeats: Number of runs per row, for a median and a spread.
            pod: Resources of a pod, for forecasts without a cluster. Default: one core.
            gpu_memory_gib: Memory of a GPU, to skip rows that cannot fit. Default None: no row is
                skipped for memory.
            price_per_pod_hour: Price of a pod-hour. Default None: costs are in pod-hours only.
            path: Folder of the run directories. An older folder of the same benchmark is continued.
            name: Name of the benchmark.

        Raises:
            ConfigError: The grid is empty, or a name in it is unknown.
        """
        self._pod = pod or PodSpec()
        self.grid = make_grid(jobs, techniques, pods, vary, repeats, self._pod.slots)
        """The runs, and the runs that are left out."""
        self.path = user_path(path).absolute()
        """The folder of the run directories."""
        self.name = name
        self.result: BenchmarkResult | None = None
        """Rows after the last `run`, also after an interrupt; None before."""
        self._gpu_memory_gib = gpu_memory_gib
        self._price = price_per_pod_hour
        if price_per_pod_hour is not None and not price_per_pod_hour >= 0:
            raise ConfigError(
                f"price_per_pod_hour is {price_per_pod_hour!r}; give a number, 0 or more, or None"
            )

    @classmethod
    def from_specs(
        cls, specs: Sequence[str | Path], *, path: str | Path = "runs/benchmark"
    ) -> Benchmark:
        """Make a benchmark of `SPEC.json` files, a row per file; only jobs and pod counts are read.

        Args:
            specs: The files: of run directories, or written by hand.
            path: As for `Benchmark`.

        Raises:
            ConfigError: A file is missing, is no JSON, or asks for something unknown.
        """
        check_type("Benchmark.from_specs", specs, Iterable, "a list of paths")
        made = []
        for file in specs:
            spec = RunSpec.load(user_path(file))
            cluster = spec.cluster
            pods = spec.job.rules.capped(spec.pods or cluster.count)
            benchmark = cls([spec.job], pods=[pods], pod=cluster.pods, path=path)
            made.append(benchmark)
        if not made:
            raise ConfigError("specs is empty; give paths of SPEC.json files")
        return reduce(operator.add, made)

    def __add__(self, other: Benchmark) -> Benchmark:
        """Append the rows of another benchmark; folder, price and name stay."""
        both = copy.copy(self)
        both.grid = self.grid + other.grid
        both.result = None
        return both

    def forecast(self, cluster: Cluster | None = None) -> BenchmarkForecast:
        """Return the number of runs and the predicted memory of every run, before the start.

        The planner needs seconds for a new model.

        Args:
            cluster: Cluster for the runs, started or not. Default: pods of the benchmark's options,
                on this machine.
        """
        check_type("forecast", cluster, (Cluster, NoneType), "a Cluster")
        spec = (
            cluster.spec
            if cluster is not None
            else ClusterSpec(pods=self._pod, count=self._most_pods)
        )
        before = FinishedRows(self.path).rows()
        rows = [self._forecast(row, spec, before) for row in self.grid.rows if row.repeat == 0]
        return BenchmarkForecast(
            name=self.name,
            rows=tuple(rows),
            left_out=self.grid.left_out,
        )

    @suggests("Benchmark.run")
    def run(
        self, cluster: Cluster, *, force: bool = False, side_by_side: bool = False
    ) -> BenchmarkResult:
        """Run all unfinished rows; blocks until the last row has ended.

        A row that fails, runs out of memory or cannot fit is a result like any other. A running row
        is awaited.

        Args:
            cluster: Cluster for the runs; it is started.
            force: Also run rows that cannot fit according to the planner.
            side_by_side: Run rows together that fit on the pods: for a sweep, where losses count.
                Default: in turn, since speeds are comparable only without other load on machine and
                network.

        Returns:
            All rows.

        Raises:
            ConfigError: The cluster has too few pods, or its pods cannot run a row; nothing has
                started.
            RunError: The cluster is not ready, or ended; finished rows stay.
            Stopped: The user interrupted; the current row is cancelled, and `result` holds the rows
                so far.
        """
        check_type("Benchmark.run", cluster, Cluster, "a Cluster")
        self._check(cluster)
        schedule = Schedule(
            self.grid.rows, cluster, self.path, gpu_memory_gib=self._gpu_memory_gib, force=force
        )
        try:
            with follow(self) as draw:
                schedule.run(draw, side_by_side=side_by_side)
        except KeyboardInterrupt:
            waiting = sum(not row.outcome.is_terminal for row in schedule.rows)
            raise Stopped(
                f"Stopped: the running rows are cancelled, and {waiting} rows wait. Run the "
                "benchmark again to continue; .result holds the rows so far."
            ) from None
        finally:
            price = self._price
            rows = schedule.rows
            if price is not None:
                rows = tuple(
                    replace(row, cost=row.pod_hours and row.pod_hours * price) for row in rows
                )
            self.result = BenchmarkResult(
                name=self.name, folder=self.path, rows=rows, left_out=self.grid.left_out
            )
        return self.result

    @property
    def _most_pods(self) -> int:
        return max(row.pods for row in self.grid.rows)

    def _check(self, cluster: Cluster) -> None:
        if cluster.phase != "ready":
            raise RunError(
                f"the cluster is {cluster.phase}: {cluster.message or 'call start() first'}"
            )
        if self._most_pods > cluster.spec.count:
            raise ConfigError(
                f"a row wants {self._most_pods} pods; the cluster has {cluster.spec.count}. "
                "Start a cluster with more pods, or give smaller numbers of pods"
            )
        # Errors that are quick to find are refused here; others appear when the row starts.
        for row in self.grid.rows:
            try:
                check_launcher(Launcher(row.job.launcher))
                spec = RunSpec(cluster=cluster.spec, job=row.job, pods=row.pods)
                gpus = spec.cluster.pods.gpus
                row.job.views.check_early(gpus=gpus, ranks=spec.world_size)
            except ConfigError as error:
                raise ConfigError(f"{row.name}: {error}") from error

    def _forecast(
        self, planned: PlannedRun, cluster: ClusterSpec, before: Sequence[BenchmarkRow]
    ) -> ForecastRow:
        spec = RunSpec(cluster=cluster, job=planned.job, pods=planned.pods)
        key = skipped_row(spec, "").key
        repeats = []
        for other in self.grid.rows:
            if other.job == planned.job and other.pods == planned.pods:
                repeats.append(other.repeat)
        done = set()
        for earlier in before:
            if earlier.key == key and earlier.outcome is Outcome.SUCCEEDED:
                done.add(earlier.repeat)
        return ForecastRow(
            name=planned.name,
            runs=len(repeats),
            memory=forecast_memory(spec, gpu_memory_gib=self._gpu_memory_gib),
            finished=sum(repeat in done for repeat in repeats),
        )

    def __repr__(self) -> str:
        return f"Benchmark({self.name}: {len(self.grid.rows)} runs, in {self.path})"
