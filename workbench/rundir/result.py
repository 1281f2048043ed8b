"""Define `ResultRecord`, the facts of a run in `result.json`, written by the keeper. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, field
from os import PathLike
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from workbench.base.errors import RunError, check_type
from workbench.base.files import load_json, read_json
from workbench.base.json_values import as_str
from workbench.base.record.tolerant import Number, TolerantRecord, Whole
from workbench.base.redact import Redactor
from workbench.base.words import pluralize, printable
from workbench.rundir.figures.reported import facts_of_kinds
from workbench.rundir.figures.workers import EpochTime, GpuUse, WorkerUse
from workbench.rundir.paths import RunPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import result_file


def submitted_rows(paths: RunPaths) -> Mapping[str, object]:
    """Return the facts of a run's kind that were known at submission."""
    raw = read_json(paths.job)
    return {name: raw[name] for name in facts_of_kinds() if raw.get(name) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSlots(TolerantRecord):
    address: str
    """Address of the pod."""
    slots: Whole
    """Number of ranks on the pod."""
    pod: str = ""
    """Name of the pod."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFault(TolerantRecord):
    """Place and reason of a run's failure: the first cause, without follow-up failures."""

    host: str = ""
    """Address of the pod. Empty: no pod caused the failure."""
    pod: str = ""
    """Name of the pod."""
    rank: Whole | None = None
    """Rank that failed first. None: no rank caused the failure."""
    kind: str = ""
    """Exception class, or `signal`, `exit`, `launcher`, `pod`, `keeper`, `stall`, `packages`."""
    message: str = ""
    """Description in a line."""
    traceback: str = ""
    """Traceback of the failed rank. Empty: none."""
    exit_code: Whole | None = None
    """Exit code of the failed rank; below 0 the number of a signal. None: unknown."""
    others: str = ""
    """Summary of the other ranks, such as "2 ranks lost their peer"."""

    def __str__(self) -> str:
        where = (
            f"rank {self.rank} on {self.pod} ({self.host})"
            if self.rank is not None
            else self.pod or "the run"
        )
        first = f"{where}: {self.kind}: {self.message}"
        return printable(
            "\n".join(part for part in (first, self.others, self.traceback.rstrip()) if part)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart(TolerantRecord):
    what: str = ""
    """Lost part, such as "pod-2 was lost"."""
    why: str = ""
    """Fate of the lost part, reported by its place."""
    lost_step: Whole | None = None
    """Last optimizer step before the loss.

    None: before the first step, or for a script that reports no steps.
    """
    step: Whole | None = None
    """Step of the checkpoint to continue from. 0: the beginning. None: a script."""
    fresh: str = ""
    """Reason to begin again despite a saved checkpoint. Empty: no such case."""
    pods: Whole = 0
    """Number of pods after the restart."""
    ranks: Whole = 0
    """Number of ranks after the restart."""
    batch: Whole | None = None
    """Rows per step after the restart, if the ranks cannot share the global batch evenly.

    None: unchanged.
    """
    lost_s: Number | None = None
    """Time of noticing the loss, in seconds since 1970."""
    took_s: Number | None = None
    """Seconds from the loss to the next optimizer step, or to the new start of a script's ranks."""

    def __str__(self) -> str:
        """Return the restart as a sentence.

        Example:
            >>> str(Restart(what="pod-2 was lost", lost_step=120, step=100, pods=2, took_s=14.2))
            'pod-2 was lost at step 120; went on from step 100 with 2 pods after 14 s'
        """
        batch = f" and {self.batch} rows a step" if self.batch else ""
        at = "" if self.lost_step is None else f" at step {self.lost_step}"
        fresh = f" ({self.fresh})" if self.fresh else ""
        how = f"went on from step {self.step}" if self.step else f"began again{fresh}"
        after = "" if self.took_s is None else f" after {self.took_s:.0f} s"
        return f"{self.what}{at}; {how} with {pluralize(self.pods, 'pod')}{batch}{after}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements(TolerantRecord):
    """Measurements of a run. None: not measured."""

    steps: Whole | None = None
    """Number of optimizer steps."""
    epochs: Number | None = None
    """Number of passes over the training rows."""
    duration_s: Number | None = None
    """Seconds from the request to start the first rank until all ranks ended.

    The time to copy results back is included.
    """
    time_to_first_step_s: Number | None = None
    """Seconds from the request to start the first rank to the end of the first optimizer step."""
    train_runtime_s: Number | None = None
    """Seconds in the training loop, by the Trainer's clock."""
    train_loss: Number | None = None
    """Mean training loss over the steps."""
    eval_loss: Number | None = None
    """Loss on the evaluation rows after `eval_step`. None: no evaluation after the first step."""
    step_s: Number | None = None
    """Seconds of an optimizer step of mean length.

    Computed as the median seconds per token, padding included, times the mean tokens per step. The
    first step, the profiled step and evaluations are left out. Under `local-sgd` the median is over
    the means between synchronisations.
    """
    micro_batch_s: Number | None = None
    """Seconds of a micro-batch's forward and backward pass, as a mean of all ranks.

    Computed in the same way as `step_s`. If a step has several micro-batches, the last is left out,
    because techniques communicate in the last. With a single micro-batch, DeepSpeed's figure
    includes the optimizer step.
    """
    sent_bytes_per_step: Number | None = None
    """Bytes sent by a pod to others per optimizer step, mean over the pods.

    Counted from the third step on, without evaluations and checkpoints. None: the kernel cannot
    count the bytes, as with InfiniBand.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRecord(Measurements):
    """Facts of a run. A figure without a measurement is None."""

    path: Path
    """The run directory."""
    state: RunState
    """State of the run; `running` for a run in progress."""
    message: str = ""
    """Message on the state in a line."""
    hosts: tuple[HostSlots, ...] = ()
    """Pods of the run."""
    world_size: Whole = 0
    """Number of ranks."""
    technique: str = ""
    """Requested technique of the run; `script` for a script."""
    launcher: str = ""
    """Launcher of the ranks."""
    precision: str = ""
    """Number format of the arithmetic."""
    learning_rate: Number | None = None
    """Highest learning rate of the schedule."""
    model: str = ""
    """Name of the trained model."""
    parameters: Whole | None = None
    """Number of parameters of the whole model, adapters included."""
    trainable_parameters: Whole | None = None
    """Number of trained parameters."""
    epoch_times: tuple[EpochTime, ...] = ()
    """Duration of every pass over the training rows."""
    workers: tuple[WorkerUse, ...] = ()
    """Time and memory of every rank, since the last restart."""
    slow_rank: str = ""
    """Rank that held the others up at the end, as in `run.progress.slow_rank`. Empty: none did."""
    gpus: tuple[GpuUse, ...] = ()
    """Memory and load of every GPU, from its driver."""
    restarts: tuple[Restart, ...] = ()
    """Losses of the run and its restarts. Empty: no loss."""
    resumed_step: Whole | None = None
    """Step of the checkpoint that the run continued from.

    Run time and training loss cover only later steps.
    """
    global_batch_size: Whole | None = None
    """Rows per optimizer step: micro-batch x accumulation x ranks."""
    train_samples_per_s: Number | None = None
    """Rows per second in the training loop, all ranks together."""
    first_eval_loss: Number | None = None
    """Loss on the evaluation rows before the first step."""
    eval_step: Whole | None = None
    """Optimizer step of the evaluation of `eval_loss`. A saved model is of the same step."""
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """Other figures of the evaluation by name:

    `rouge1`, `accuracy`, results of a user's function.
    """
    step_figures: Mapping[str, Number] = field(default_factory=dict)
    """Last value of every figure that the steps reported, by name: `grad_norm`, a script's own."""
    peak_memory_gib: Mapping[str, Number] = field(default_factory=dict)
    """Peak memory by host in GiB: highest sum over the host's ranks.

    Counts resident memory, or reserved CUDA memory on GPUs.
    """
    memory_kind: str = "resident"
    """Kind of memory in `peak_memory_gib`: `resident` or `cuda`."""
    host_memory_gib: Mapping[str, Number] = field(default_factory=dict)
    """Peak resident memory by host in GiB: highest sum over its ranks, for any training device."""
    device: str = ""
    """Name of the training device."""
    devices: Whole | None = None
    """Number of training devices: a device per rank. Ranks on CPUs may share a device."""
    package: str = ""
    """File name of the package as sent to the pods, with a hash of the content."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions by package name."""
    command: str = ""
    """Launch command as a shell line."""
    started_s: Number | None = None
    """Time of the start, in seconds since 1970."""
    ended_s: Number | None = None
    """Time of the end, in seconds since 1970."""
    output_files: Whole | None = None
    """Number of files of a script that were copied into `outputs/`."""
    output_bytes: Whole | None = None
    """Total bytes of the copied files."""
    of_kind: Mapping[str, object] = field(default_factory=dict)
    """Facts of the job's kind by name, as reported. The kind's result has fields for the facts."""
    left_processes: Whole | None = None
    """Number of the run's processes alive on its pods after the end. Expected: 0."""
    error: RunFault | None = None
    """Place and reason of the failure."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the `result.json` of a run directory. Raise RunError if the run has not ended."""
        check_type("a result", path, (str, PathLike), "the path of a run's directory")
        path = Path(path)
        file = result_file(RunPaths(path))
        if not os.path.lexists(file):
            raise RunError(
                f"{path} holds no result.json: the run has not "
                "ended, or the path is not a run directory"
            )
        return cls.at(path, Redactor().json(load_json(file)))

    @classmethod
    def at(cls, path: Path, raw: Mapping[str, Any]) -> Self:
        """Read the JSON form of the run in a directory."""
        return cls._read_at(path, raw)

    @classmethod
    def _read_at(cls, path: Path, raw: Mapping[str, Any]) -> Self:
        try:
            of_kind = {name: raw[name] for name in facts_of_kinds() if name in raw}
            return cls.read({**raw, "path": path, "of_kind": of_kind})
        except ValidationError as error:
            raise RunError(f"{RunPaths(path).result} has no valid state of the run") from error

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, without the path. Facts of the kind stand beside the others."""
        data = asdict(self)
        del data["path"]
        return {**data.pop("of_kind"), **data}

    @property
    def trained(self) -> str:
        """Short description of model, technique, words of the job's kind, and precision."""
        words = [self.model, self.technique]
        for name, fact in facts_of_kinds().items():
            word = as_str(self.of_kind.get(name)) if fact.is_word else ""
            if word != "none":
                words.append(word)
        return " ".join(word for word in (*words, self.precision) if word)
