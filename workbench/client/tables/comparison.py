"""`compare`: curves, different options and final figures of several runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.display_protocol import LiveDisplayable
from workbench.base.errors import ConfigError, check_type
from workbench.base.files import read_json
from workbench.base.json_values import as_str
from workbench.base.table import Grid, data_frame
from workbench.base.words import UNKNOWN, middle_cut, strip_controls
from workbench.client.plot import Axis, PlotOptions
from workbench.client.result import RunResult
from workbench.client.run import Run
from workbench.client.tables.run_rows import (
    columns,
    different_options,
    differing,
    flat_options,
    jobs_of,
    rows_of,
)
from workbench.client.tables.run_table import FIGURES, Format, figure, grid_of
from workbench.client.tensorboard.board import Board, board_folder, show_tensorboard
from workbench.rundir.catalog.label import read_label
from workbench.rundir.catalog.store import RunRecord, record_of
from workbench.rundir.figures.metrics import columns_of
from workbench.rundir.figures.reported import facts_of_kinds
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import run_at
from workbench.rundir.view import RunView

if TYPE_CHECKING:
    from pandas import DataFrame

_BY_DEFAULT = re.compile(r"\d{8}-\d{6}-.*-[0-9a-f]{4}")  # name of a run directory
_NAMING = 3  # options in a name
_NAME_LETTERS = 24  # of a value in a name
_LONGEST = 60  # letters of an option's value
_BEFORE_METRICS = ("steps", "train_loss", "first_eval_loss", "eval_loss", "eval_step")
_BEHIND_METRICS = ("train_samples_per_s", "peak_memory_gib", "duration_s")
_UNSET = {"", "None", "[]", "{}", "()"}
AnyRun = Run | RunResult | RunRecord | str | Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """A compared run, as stored on disk at the time of the comparison."""

    name: str
    record: RunRecord
    """Facts of the run; for a live run, the facts so far."""
    view: RunView
    """Curves and specification of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison(LiveDisplayable):
    """A comparison of runs. Prints as tables; a notebook shows the loss curves above the tables."""

    runs: tuple[ComparedRun, ...]

    def to_dataframe(self) -> DataFrame:
        """Return the runs as a pandas DataFrame, with the columns of `history().to_dataframe()`.

        The column `name` has the names of the comparison.
        """
        return data_frame(self._rows(), columns())

    def _rows(self) -> list[dict[str, object]]:
        rows = rows_of([run.record for run in self.runs])
        for row, run in zip(rows, self.runs, strict=True):
            row["name"] = run.name
        return rows

    def options(self) -> Grid:
        """Return the options with different values, without environment variables.

        Options of a kind of job are compared between the runs of the same kind.
        """
        asked = self._asked()
        different = differing(asked)
        caption = "Options that differ" if different else "No option differs"
        return self._option_grid(asked, different, caption)

    def equal_options(self) -> Grid:
        """Return the set options with equal values in all runs that have the option."""
        asked = self._asked()
        different = differing(asked)
        equal: dict[str, None] = {}
        for options in asked:
            for name, value in options.items():
                if name not in different and value not in _UNSET:
                    equal[name] = None
        return self._option_grid(asked, list(equal), "Equal options")

    def _asked(self) -> list[Mapping[str, str]]:
        return [_options(run.view.spec) for run in self.runs]

    def _option_grid(
        self, asked: Sequence[Mapping[str, str]], names: Sequence[str], caption: str
    ) -> Grid:
        rows = []
        for name in names:
            values = [options.get(name, UNKNOWN) for options in asked]
            rows.append(tuple(middle_cut(cell, _LONGEST) for cell in (name, *values)))
        run_names = [run.name for run in self.runs]
        return Grid(columns=("option", *run_names), rows=rows, caption=caption, stay=("option",))

    def figures(self) -> Grid:
        """Return the final figures, a run per row."""
        metrics = [run.record.metrics for run in self.runs]
        step_figures = [run.record.step_figures for run in self.runs]
        formats = [Format(name="name", title="run"), Format(name="state", title="state")]
        formats += [FIGURES[name] for name in _BEFORE_METRICS]
        for name, fact in facts_of_kinds().items():
            if fact.title:
                formats.append(figure(name, fact.title, fact.write))
        for column in columns_of(metrics, step_figures):
            if column.in_tables:
                formats.append(figure(column.key, column.title, column.write))
        formats += [FIGURES[name] for name in _BEHIND_METRICS]
        return grid_of(self._rows(), formats, caption="Results", stay=("run", "state"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences by which the runs are hard to compare, a sentence per difference."""
        views = [run.view for run in self.runs]
        records = [run.record for run in self.runs]
        # Each row: what cannot be compared, and the facts of each run that would have to be equal.
        checks = {
            "Losses are not comparable: the runs use different training or evaluation rows": [
                _data_of(view) for view in views
            ],
            "Losses may not be comparable: the jobs are of different kinds": [
                view.spec.job.kind if view.spec else "" for view in views
            ],
            "Losses are not comparable: the runs use different models, prompts or loss settings": [
                _loss_of(view.spec) for view in views
            ],
            "Steps are not comparable: options of the runs change the work of a step": [
                _work_of(view.spec) for view in views
            ],
            "The runs trained on different numbers of rows": [
                _rows_of(record) for record in records
            ],
            "Speed and memory are not comparable: the runs used different devices": [
                _devices_of(record) for record in records
            ],
        }
        # Unknown values are no difference.
        notes = []
        for what, values in checks.items():
            known = {*values} - {""}
            if len(known) > 1:
                notes.append(f"{what}.")
        # Figures of a failed or running run are of its last step.
        unended = []
        for run in self.runs:
            state = run.record.state
            if state != RunState.SUCCEEDED:
                unended.append(f"{run.name} ({state})")
        if unended:
            notes.append(f"Incomplete runs (figures up to the last step): {', '.join(unended)}.")
        return tuple(notes)

    def plot(
        self,
        *,
        x: Axis | None = None,
        log: bool = False,
        steps: tuple[float | None, float | None] | None = None,
        smooth: float | Mapping[str, float] = 0.0,
    ) -> ComparisonPlot:
        """Return the plot of the losses alone. Curves are drawn as logged.

        Args:
            x: X axis, `steps` or `time` since the start of each run. Default: optimizer steps.
            log: Whether the y axis is logarithmic.
            steps: First and last optimizer step to draw, such as `(100, 200)` or `(100, None)`.
                Default: all steps.
            smooth: Weight of the earlier values in a moving average, as in TensorBoard, from 0 to
                below 1. A mapping such as `{"first": 0.8}` smooths the lines of single runs. The
                logged values stay as pale lines. Default: 0, as logged.

        Raises:
            ConfigError: An argument is out of range, or `smooth` names no run of the comparison.
        """
        options = PlotOptions(x=x, log=log, steps=steps, smooth=smooth)
        options.check_lines("the comparison", [run.name for run in self.runs])
        if not options.needs_all:
            return ComparisonPlot(self, options)
        runs = [replace(run, view=RunView(run.view.paths.root, whole=True)) for run in self.runs]
        return ComparisonPlot(RunComparison(runs=tuple(runs)), options)

    def __repr__(self) -> str:
        names = ", ".join(run.name for run in self.runs)
        return strip_controls(f"RunComparison({names})")


@dataclass(frozen=True, slots=True)
class ComparisonPlot(LiveDisplayable):
    """The losses of compared runs as a plot of their own."""

    comparison: RunComparison
    options: PlotOptions


def compare(runs: Sequence[AnyRun], *, names: Sequence[str] = ()) -> RunComparison:
    """Compare runs: loss curves in one picture, different options, and final figures.

    Nothing is started. Only the files of the run directories are read.

    Args:
        runs: Runs in any state, in a list: directories, `Run`, `RunResult` or rows of `history`.
        names: Names of the runs. Default: the runs' own names, or the names of the directories.

    Raises:
        RunError: A directory is no run directory.
        ConfigError: There are fewer than two runs, or two have the same name.
    """
    if isinstance(runs, str | Path | Run | RunResult):
        raise ConfigError("compare takes runs in a list: compare([one, other])")
    paths = _paths(runs)
    if len(paths) < 2:
        raise ConfigError(f"compare takes two runs or more, and was given {len(paths)}")
    if names and len(names) != len(paths):
        raise ConfigError(
            f"compare was given {len(paths)} runs and {len(names)} names; give as many"
        )
    return compare_views([RunView(path) for path in paths], names=names)


def compare_views(views: Sequence[RunView], *, names: Sequence[str] = ()) -> RunComparison:
    """Compare runs already read. See `compare`."""
    keepers: dict[Path, bool] = {}
    records = [record_of(view.paths, keepers) for view in views]
    named = tuple(names)
    if not named:
        named = tuple(_distinct([record.path for record in records], _names(records)))
    if len(set(named)) < len(named):
        raise ConfigError(
            f"two of the names are the same: {', '.join(map(str, named))}; give names of their own"
        )
    compared = []
    for name, record, view in zip(named, records, views, strict=True):
        run = ComparedRun(name=strip_controls(name), record=record, view=view)
        compared.append(run)
    return RunComparison(runs=tuple(compared))


def tensorboard(runs: AnyRun | Iterable[AnyRun]) -> Board:
    """Return a TensorBoard of the given runs by name. The server ends with the kernel.

    At the end of a cell the value is shown as a button for the page.

    Args:
        runs: Runs in any state: directories, `Run`, `RunResult` or rows of `history`.

    Raises:
        RunError: A directory is no run directory.
        BackendError: TensorBoard did not start.
    """
    some = [runs] if isinstance(runs, str | Path | Run | RunResult | RunRecord) else runs
    paths = [run_at(path) for path in _paths(some)]
    if not paths:
        raise ConfigError("tensorboard takes a run or several in a list, and was given none")
    given = [read_label(run).name for run in paths]
    names = _distinct([run.root for run in paths], given)
    folders = {name: board_folder(run) for name, run in zip(names, paths, strict=True)}
    return show_tensorboard(folders)


def _paths(runs: Iterable[AnyRun]) -> list[Path]:
    wanted = "runs, or the paths of their directories"
    check_type("the call", runs, Iterable, f"a list of {wanted}")
    paths = []
    for run in runs:
        check_type("the list", run, (str, Path, Run, RunResult, RunRecord), wanted)
        if isinstance(run, str | Path):
            paths.append(Path(run))
        else:
            paths.append(run.path)
    return paths


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Return the runs' own names; a run without a name and folder has its different options.

    Empty: neither names the run.
    """
    options = different_options(jobs_of(records), ("kind", "env"))
    written = []
    for place, record in enumerate(records):
        words = []
        for option, values in list(options.items())[:_NAMING]:
            value = values[place]
            # A word such as zero2 says what it is; a number does not.
            is_word = isinstance(value, str)
            words.append(middle_cut(str(value), _NAME_LETTERS) if is_word else f"{option} {value}")
        written.append(record.name or ", ".join(words))
    # Options that do not tell the runs apart are no names.
    if len({*written}) < len(written):
        return [record.name for record in records]
    return [
        name if record.name or _BY_DEFAULT.fullmatch(record.path.name) else ""
        for name, record in zip(written, records, strict=True)
    ]


def _distinct(paths: Sequence[Path], names: Sequence[str] = ()) -> list[str]:
    """Return the runs' names, or directory names extended by parent folders until distinct."""
    given = names or [""] * len(paths)
    distinct = [name or path.name for name, path in zip(given, paths, strict=True)]
    deepest = max((len(path.parts) for path in paths), default=0)
    for depth in range(2, deepest):
        longer = []
        for name, path in zip(distinct, paths, strict=True):
            if distinct.count(name) > 1:
                longer.append("/".join(path.parts[-depth:]))
            else:
                longer.append(name)
        distinct = longer
    return distinct


def _options(spec: RunSpec | None) -> Mapping[str, str]:
    if spec is None:
        return {}
    cluster = spec.cluster
    asked = {
        **spec.job.to_dict(),
        "pods (cluster)": spec.pods or cluster.count,
        "cpus (cluster)": cluster.pods.cores,
        "gpus (cluster)": cluster.pods.gpus,
    }
    return {name: strip_controls(str(value)) for name, value in flat_options(asked).items()}


def _loss_of(spec: RunSpec | None) -> str:
    """Return the options behind the meaning of the loss; empty for jobs without such options."""
    facts = spec.job.views.loss_facts(spec.job.to_dict()) if spec else {}
    return str(dict(facts)) if facts else ""


def _work_of(spec: RunSpec | None) -> str:
    """Return the options behind the work of a step; empty for jobs without such options."""
    facts = spec.job.views.work_facts(spec.job.to_dict()) if spec else {}
    return str(dict(facts)) if facts else ""


def _data_of(view: RunView) -> str:
    origin = read_json(view.paths.origin)
    return as_str(origin.get("data"))


def _rows_of(record: RunRecord) -> str:
    steps = record.steps or 0
    return str(steps * (record.global_batch_size or 0))


def _devices_of(record: RunRecord) -> str:
    if not record.device:
        return ""
    return f"{record.device} x {record.devices}"
