"""`Benchmark`: a grid of runs, one row each, before it runs and while it does."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

from workbench.base.errors import ConfigError, RunError, suggests
from workbench.base.shown import Shown, follow
from workbench.benchmark.finished_rows import FinishedRows
from workbench.benchmark.forecast import (
    BenchmarkForecast,
    ForecastRow,
    forecast_memory,
    forecast_time,
)
from workbench.benchmark.grid import PlannedRun, make_grid
from workbench.benchmark.read import skipped_row
from workbench.benchmark.result import BenchmarkResult
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.benchmark.schedule import Schedule
from workbench.client.cluster import Cluster
from workbench.finetune.techniques.registry import runs_alone
from workbench.jobs.data.sources.dataset import dataset_from
from workbench.jobs.finetune import FineTune
from workbench.jobs.job import Job
from workbench.jobs.launcher import Launcher
from workbench.jobs.model import model_kind
from workbench.jobs.refusals import check_at_submit
from workbench.jobs.script import Script
from workbench.jobs.script_folder import check_script
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.make.prepare import check_launcher
from workbench.rundir.spec import ClusterSpec, RunSpec


class Stopped(KeyboardInterrupt):
    """Say that a benchmark was interrupted: the row that ran is cancelled, those after it wait."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Benchmark(Shown):
    """A grid of jobs x techniques x pod counts x whatever else varies, one row each.

    The rows go one after another on one cluster, or side by side where they may. Run again, it takes from disk the
    rows that hold (same spec, code, data and versions; succeeded or out of memory) and does the rest.

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
        name: str = "benchmark",
    ):
        """Multiply; nothing starts.

        Args:
            jobs: Jobs.
            techniques: Techniques to give each fine-tuning job. Default: its own.
            pods: Numbers of pods.
            vary: Options of a job by name and the values of each, such as `{"precision": ["fp32", "bf16"]}`;
                `global_batch_size` divides the rows of an optimizer step among the ranks.
            repeats: How often each row runs, for a median and a spread.
            pod: What a pod is, for what is said before a cluster is known. Default: one core.
            gpu_memory_gib: Memory of one GPU, to skip what cannot fit. Default None: nothing is skipped for it.
            price_per_pod_hour: Money that an hour of a pod costs. Default None: costs are in pod-hours only.
            path: The folder of the run directories; an older one of the same benchmark goes on.
            name: What to call it.

        Raises:
            ConfigError: Nothing is asked for, or something is not known.
        """
        self._pod = pod or PodSpec()
        self.grid = make_grid(jobs, techniques, pods, vary, repeats, self._pod.slots)
        """The runs, and what is left out of them."""
        self.path = Path(path).expanduser().absolute()
        """The folder of the run directories."""
        self.name = name
        self.result: BenchmarkResult | None = None
        """The rows as the last `run` left them, an interrupted one too; None before."""
        self._gpu_memory_gib, self._price = gpu_memory_gib, price_per_pod_hour
        if price_per_pod_hour is not None and not price_per_pod_hour >= 0:
            raise ConfigError(
                f"price_per_pod_hour is {price_per_pod_hour!r}; it must be a number, 0 or more, or None"
            )

    @classmethod
    def from_specs(
        cls, specs: Sequence[str | Path], *, path: str | Path = "runs/benchmark"
    ) -> Benchmark:
        """Make a benchmark of `SPEC.json` files, one row each, in order: their jobs and numbers of pods count alone.

        Args:
            specs: The files: those of run directories, or written by hand.
            path: As for `Benchmark`.

        Raises:
            ConfigError: A file is missing, is no JSON, or asks for something unknown.
        """
        made = []
        for spec in (RunSpec.load(Path(spec).expanduser()) for spec in specs):
            pods = 1 if runs_alone(spec.job.word) else spec.pods or spec.cluster.count
            made.append(cls([spec.job], pods=[pods], pod=spec.cluster.pods, path=path))
        if not made:
            raise ConfigError("specs is empty; give paths of SPEC.json files")
        return reduce(operator.add, made)

    def __add__(self, other: Benchmark) -> Benchmark:
        """Put the rows of another benchmark behind these; folder, price and name stay this one's."""
        both = copy.copy(self)
        both.grid, both.result = self.grid + other.grid, None
        return both

    def forecast(self, cluster: Cluster | None = None) -> BenchmarkForecast:
        """Return how many runs there are, and what each is predicted to take, before the start.

        Memory is the planner's; a model that was not seen before takes it seconds. Time is from rows on disk.

        Args:
            cluster: Where it will run, started or not. Default: pods as the benchmark was told, on this machine.
        """
        spec = (
            cluster.spec
            if cluster is not None
            else ClusterSpec(pods=self._pod, count=self._most_pods)
        )
        before = FinishedRows(self.path).rows()
        return BenchmarkForecast(
            name=self.name,
            rows=tuple(
                self._forecast(row, spec, before) for row in self.grid.rows if row.repeat == 0
            ),
            left_out=self.grid.left_out,
            folder=self.path,
        )

    @suggests("Benchmark.run")
    def run(
        self, cluster: Cluster, *, force: bool = False, side_by_side: bool = False
    ) -> BenchmarkResult:
        """Run what is not finished yet; blocks until the last row has ended.

        A row that fails, runs out of memory or cannot fit is a row like any other; one left running is waited for.

        Args:
            cluster: Where; it is started.
            force: Run also what the planner says cannot fit.
            side_by_side: Run rows beside each other that fit on the pods together: for a sweep, whose losses count.
                Default: one after another, for speeds are compared only where nothing else runs on machine and network.

        Returns:
            All rows.

        Raises:
            ConfigError: The cluster has too few pods, or its pods cannot do what a row asks; nothing has started.
            RunError: The cluster is not ready, or went away; what was finished stands.
            Stopped: An interrupt came; the row that ran is cancelled, and `result` holds what there is.
        """
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
                f"Stopped: what ran is cancelled, {waiting} wait. Run the benchmark again to go on; .result "
                "holds the rows so far."
            ) from None
        finally:
            price, rows = self._price, schedule.rows
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
                f"a row wants {self._most_pods} pods; the cluster has {cluster.spec.count}"
            )
        # What takes no time to see is refused; whatever else is wrong with a job is found when its row starts.
        for row in self.grid.rows:
            try:
                check_launcher(Launcher(row.job.launcher))
                match row.job:
                    case FineTune() as job:
                        check_at_submit(job, gpus=cluster.spec.pods.gpus)
                        dataset_from(job.dataset)
                        model_kind(job.model)
                    case Script() as job:
                        check_script(Path(job.path).expanduser().absolute())
            except ConfigError as error:
                raise ConfigError(f"{row.name}: {error}") from error

    def _forecast(
        self, planned: PlannedRun, cluster: ClusterSpec, before: Sequence[BenchmarkRow]
    ) -> ForecastRow:
        spec = RunSpec(cluster=cluster, job=planned.job, pods=planned.pods)
        row = skipped_row(spec, "")
        repeats = [
            r.repeat for r in self.grid.rows if (r.job, r.pods) == (planned.job, planned.pods)
        ]
        done = {r.repeat for r in before if r.key == row.key and r.outcome is Outcome.SUCCEEDED}
        return ForecastRow(
            name=planned.name,
            runs=len(repeats),
            memory=forecast_memory(spec, gpu_memory_gib=self._gpu_memory_gib),
            time=forecast_time(row, before),
            finished=sum(repeat in done for repeat in repeats),
        )

    def __repr__(self) -> str:
        return f"Benchmark({self.name}: {len(self.grid.rows)} runs, in {self.path})"
