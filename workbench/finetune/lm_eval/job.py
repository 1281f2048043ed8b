"""`Evaluation`, the job that benchmarks a run's model and its base on the pods with lm-eval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field

from workbench.base import entries
from workbench.base.errors import ConfigError
from workbench.base.files import is_folder, load_json, read_bytes, user_path, write_text
from workbench.base.json_values import as_str, get_object
from workbench.base.record import (
    Allowed,
    Count,
    Environment,
    Exists,
    PathText,
    Positive,
    Size,
    Unit,
)
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.submit.stage import sent_folder, sent_model
from workbench.jobs.job import Job, NewRun, PodStore, PodView, Prepared, Program, Traits, file_in
from workbench.jobs.launcher import LauncherName
from workbench.jobs.registry import job_from_dict
from workbench.jobs.views import JobViews
from workbench.rundir.checkpoints import model_folder
from workbench.rundir.paths import RunPaths

REPORT = "files/benchmarks.json"
"""File of lm-eval's figures in the directory of the evaluation."""


class EvaluationViews(JobViews["Evaluation"]):
    """Answers of an evaluation for tables and panels."""

    def panel_facts(self, start: Mapping[str, object]) -> Sequence[tuple[str, str]]:  # noqa: ARG002
        return [("tasks", ", ".join(self.job.tasks)), ("model of", self.job.run)]

    @classmethod
    def table_columns(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        """Return the cells of an evaluation in tables: the run stands for the model."""
        return {
            "model": Path(as_str(options.get("run"))).name,
            "technique": as_str(options.get("kind")),
        }


class Evaluation(Job):
    """Benchmark the model of a finished run with lm-eval. `run.evaluate` makes and submits it."""

    kind: ClassVar[str] = "evaluation"
    traits: ClassVar[Traits] = Traits(
        success="record",
        events=frozenset({"phase"}),
        views_class=EvaluationViews,
    )

    run: Annotated[PathText, Field(min_length=1), Exists(), Allowed("the path of a run directory")]
    """Run directory with the trained model."""
    tasks: Annotated[Sequence[str], Field(min_length=1), Allowed("a list of names of tasks")]
    """Names of lm-eval's tasks and groups."""
    limit: Size | None = None
    """Number of rows per task. Default None: all rows."""
    num_fewshot: Count | None = None
    """Number of solved rows before each question. Default None: as the task says."""
    include_path: Annotated[PathText | None, Exists()] = None
    """Folder with your own task files, sent to the pods. Paths in the files start there."""
    batch_size: Size = 8
    """Rows per forward pass of a rank."""
    apply_chat_template: bool = False
    """Whether questions are asked as turns in the model's chat template."""
    before: bool = True
    """Whether the base model is evaluated too."""
    launcher: LauncherName = "ssh"
    """One of `LauncherName`."""
    stall_timeout_s: Annotated[Positive | None, Unit("seconds")] = None
    """Same as the option of `Script`."""
    restarts: Annotated[Count, Unit("restarts")] = 0
    """Same as the option of `Script`."""
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed or written down."""

    def found_in(self, folder: Path) -> Self:
        include_path = file_in(folder, self.include_path)
        return self.replace(run=file_in(folder, self.run), include_path=include_path)

    def prepare(self, run: NewRun) -> Prepared:
        if self.limit is not None and self.limit < run.ranks:
            raise ConfigError(
                f"limit is {self.limit}, and lm-eval needs a row for each of the {run.ranks} "
                f"ranks. Give limit={run.ranks} or more, or fewer pods="
            )
        changes = {"run": str(user_path(self.run).absolute())}
        if self.include_path is not None:
            changes["include_path"] = str(checked_folder(self.include_path))
        job = self.replace(**changes)
        resolved = {
            "job": {**job.to_dict(), "env": {}},
            "finetune": {**trained_job(RunPaths(Path(job.run))).to_dict(), "env": {}},
        }
        paths = RunPaths(run.root)
        write_text(paths.job, json.dumps(resolved, indent=1))
        return Prepared(job=job)

    def files_for(self, pod: PodStore, root: Path, gpus: int) -> Mapping[str, str]:
        paths = RunPaths(root)
        resolved = json.loads(read_bytes(paths.job))
        resolved["gpus"] = gpus
        resolved["model"] = sent_model(pod, model_folder(RunPaths(Path(self.run))))
        base = Path(resolved["finetune"]["model"])
        if base.is_dir():
            resolved["finetune"]["model"] = sent_model(pod, base)
        if self.include_path is not None:
            resolved["include"] = sent_folder(pod, Path(self.include_path))
        return {paths.job.name: json.dumps(resolved)}

    def program_on(self, pod: PodView) -> Program:
        return Program(
            argv=["-P", "-m", entries.BENCHMARKS],
            env={"PYTHONPATH": pod.package},
        )


def trained_job(paths: RunPaths) -> FineTune:
    """Return the job that trained the model of a run."""
    job = job_from_dict(get_object(load_json(paths.job), "job"))
    if not isinstance(job, FineTune):
        raise ConfigError(f"the run in {paths.root} is a {job.kind} job, which leaves no model")
    return job


def checked_folder(include_path: str | Path) -> Path:
    """Return the absolute path of a folder of task files."""
    folder = user_path(include_path).absolute()
    if not is_folder(folder):
        raise ConfigError(
            f"include_path {str(include_path)!r} is no folder on this machine. Name the folder "
            "with the YAML files of your tasks"
        )
    return folder
