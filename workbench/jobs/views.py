"""Answer what tables, panels and benchmarks ask of a job.

`Traits.views_class` of a kind names `JobViews` or a subclass. Keeper and agents need none of these
answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from workbench.base.json_values import as_str

if TYPE_CHECKING:
    from workbench.jobs.job import Job

J = TypeVar("J", bound="Job")
"""Class of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """Predicted memory of a job on every pod, in GiB."""

    gpu_gib: float | None = None
    """GiB on a single GPU. None: no GPUs."""
    pod_gpu_gib: float | None = None
    """GiB on all GPUs of a pod together. None: no GPUs."""
    host_gib: float | None = None
    """GiB of a pod's own memory. None: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Answer of the command `workbench plan`."""

    text: str
    """Plan as text, for a terminal."""
    fits: bool
    """Whether the job fits on the pods."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Plan as JSON, for programs."""


class Forecast(Protocol):
    """Predictions for a job on a number of pods, before the job starts."""

    def memory(self) -> MemoryNeed:
        """Return the memory of every pod. Takes seconds for a new model.

        Raise WorkbenchError if the memory is unknown.
        """

    def plan(self, *, gpu_memory_gib: float | None, memory_gib: float | None) -> Plan:
        """Return the plan for the pods, whose GPUs and own memory have the given sizes."""

    def plan_gpus(self, *, memory_gib: float | None) -> Plan:
        """Return the least GPUs of every kind, on pods with the given memory."""


class JobViews(Generic[J]):
    """Answers of a job, with a default for every kind."""

    def __init__(self, job: J):
        self.job = job

    # Names and facts.

    @property
    def word(self) -> str:
        """Name of the job as part of a file name."""
        return self.job.kind

    @property
    def facts(self) -> Mapping[str, object]:
        """Facts for the result: at least technique, model and launcher."""
        return {"technique": self.job.kind, "model": "", "launcher": self.job.launcher}

    def panel_facts(self, start: Mapping[str, object]) -> Sequence[tuple[str, str]]:
        """Return names and values for the head of the run's panel, without empty values.

        `start` has the report of rank 0 at the start of training, and is empty before.
        """
        return [("job", self.word)]

    @property
    def panel_metrics(self) -> Sequence[str]:
        """Names of the job's own metrics, the most important first.

        The panel draws the metrics after the loss, the first two unfolded.
        """
        return ()

    @property
    def loss_unit(self) -> str:
        """Unit of the loss for the axis of a plot; empty if unknown."""
        return self.job.traits.loss_unit

    @classmethod
    def table_columns(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        """Return the job's cells in tables of runs and benchmarks, from the job's JSON form.

        Names are fields of `BenchmarkRow`, and facts of the kind (`rundir/figures/reported`).
        Another version may have written the JSON form, so every value may be missing or of
        another type.
        """
        return {
            "model": as_str(options.get("model")),
            "technique": as_str(options.get("technique")) or as_str(options.get("kind")),
        }

    @classmethod
    def loss_facts(cls, options: Mapping[str, object]) -> Mapping[str, object]:  # noqa: ARG003
        """Return the options that decide the meaning of the loss, from the job's JSON form.

        Empty: the kind of job does not know.
        """
        return {}

    @classmethod
    def work_facts(cls, options: Mapping[str, object]) -> Mapping[str, object]:  # noqa: ARG003
        """Return the options that decide the work of a step, from the job's JSON form.

        Empty: the kind of job does not know.
        """
        return {}

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of all ranks. 0: unknown."""
        return 0

    # Rows of a benchmark.

    def grid_name(self, options: Mapping[str, object], *, alone: bool) -> str:
        """Return the name of the job in a benchmark's rows, changed by some options.

        `alone`: the benchmark has no other job.
        """
        return self.word

    def in_grid(self, options: Mapping[str, object], *, pods: int, slots: int) -> J:
        """Return the job with a benchmark row's options, on pods with `slots` slots.

        Raises:
            ConfigError: The job has no such row, for the reason in the message.
        """
        return self.job.replace(**options)

    def local_files(self) -> Iterable[tuple[str, Path]]:
        """Return the files of this machine that the job reads, and names for a fingerprint.

        A benchmark runs a finished row again if the content of a file has changed.
        """
        return ()

    def check_early(self, *, gpus: int, ranks: int) -> None:
        """Refuse quickly what `prepare` refuses later for `ranks` ranks on pods with `gpus` GPUs.

        Raises:
            ConfigError: The job cannot work, for the reason in the message.
        """

    def forecast(self, *, pods: int, gpus: int, ranks: int = 0) -> Forecast | None:
        """Return predictions for the job on pods with `gpus` GPUs. None: the kind has none.

        `ranks` counts the ranks of a pod without GPUs; 0 means 1.
        """
        return None
