"""`ResultRecord`: the frozen facts of a run, as the keeper writes them into `result.json`. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from workbench.base.errors import RunError
from workbench.base.files import load_json, read_json
from workbench.base.json_values import number
from workbench.base.redact import Redactor
from workbench.base.words import counted, printable
from workbench.rundir.figures.workers import EpochTime, GpuUse, WorkerUse
from workbench.rundir.paths import RunPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import result_file
from workbench.rundir.tolerant import Number, TolerantRecord, Whole


def submitted_rows(paths: RunPaths) -> Mapping[str, object]:
    """Return what was found of a run's rows when it was submitted: `not_read` and `empty_answers`, where known."""
    raw = read_json(paths.job, within=paths.root)
    return {name: raw[name] for name in ("not_read", "empty_answers") if raw.get(name) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSlots(TolerantRecord):
    address: str
    """The pod's address."""
    slots: Whole
    """Ranks on it."""
    pod: str = ""
    """The pod's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFault(TolerantRecord):
    """Where and why a run failed: the first cause, not its echoes."""

    host: str = ""
    """Address of the pod; empty where no pod is to blame."""
    pod: str = ""
    """Name of the pod."""
    rank: Whole | None = None
    """The rank that failed first; None where no rank is to blame."""
    kind: str = ""
    """Exception class, or `signal`, `exit`, `launcher`, `pod`, `keeper`, `stall`."""
    message: str = ""
    """What happened, in one line."""
    traceback: str = ""
    """The failing rank's own traceback; empty where there is none."""
    others: str = ""
    """What became of the other ranks, folded: "2 ranks lost their peer"."""

    def __str__(self) -> str:
        where = (
            f"rank {self.rank} on {self.pod} ({self.host})"
            if self.rank is not None
            else self.pod or "the run"
        )
        text = f"{where}: {self.kind}: {self.message}"
        return printable(
            "\n".join(part for part in (text, self.others, self.traceback.rstrip()) if part)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart(TolerantRecord):
    what: str = ""
    """What was lost: "pod-2 was lost"."""
    why: str = ""
    """What became of it, as its place says."""
    lost_step: Whole | None = None
    """The last optimizer step before that; None before the first, and for a script that tells of none."""
    step: Whole | None = None
    """The step of the checkpoint that the run went on from; 0 from the beginning, None for a script."""
    fresh: str = ""
    """Why the run began again, though a checkpoint had been saved; empty where that was not so."""
    pods: Whole = 0
    """Pods that it went on with."""
    ranks: Whole = 0
    """Ranks on them."""
    batch: Whole | None = None
    """Rows of a step from then on, where they cannot share the global batch evenly; None where it stays."""
    lost_s: Number | None = None
    """When the loss was noticed, in seconds since 1970."""
    took_s: Number | None = None
    """Seconds from then to the next optimizer step; for a script, to its ranks' new start."""

    def __str__(self) -> str:
        """Write it as a sentence.

        Example:
            >>> str(Restart(what="pod-2 was lost", lost_step=120, step=100, pods=2, took_s=14.2))
            'pod-2 was lost at step 120; went on from step 100 with 2 pods after 14 s'
        """
        batch = f" and {self.batch} rows a step" if self.batch else ""
        at = "" if self.lost_step is None else f" at step {self.lost_step}"
        fresh = f" ({self.fresh})" if self.fresh else ""
        how = f"went on from step {self.step}" if self.step else f"began again{fresh}"
        after = "" if self.took_s is None else f" after {self.took_s:.0f} s"
        return f"{self.what}{at}; {how} with {counted(self.pods, 'pod')}{batch}{after}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements(TolerantRecord):
    """What was measured of a run. A figure that was not measured is None."""

    steps: Whole | None = None
    """Optimizer steps taken."""
    epochs: Number | None = None
    """Passes over the training rows."""
    duration_s: Number | None = None
    """Seconds from the first rank's start being asked for to the last rank's end and the results' return."""
    time_to_first_step_s: Number | None = None
    """Seconds from the first rank's start being asked for to the end of the first optimizer step."""
    train_runtime_s: Number | None = None
    """Seconds in the training loop, by the Trainer's clock."""
    train_loss: Number | None = None
    """Mean training loss over the steps."""
    eval_loss: Number | None = None
    """Loss on the evaluation rows after `eval_step`; None where nothing was evaluated after the first step."""
    perplexity: Number | None = None
    """e to the power of `eval_loss`: among how many tokens the model still wavers. None for encoder-decoder models."""
    exact_match: Number | None = None
    """Share of answered evaluation rows whose text is exactly right, 0 to 1."""
    useful_tokens_per_s: Number | None = None
    """Tokens a second that are not padding, source and target, all ranks together."""
    padded_tokens_per_s: Number | None = None
    """The same with the padding."""
    step_s: Number | None = None
    """Seconds of an optimizer step of mean length: the median seconds of a token, padding counted in, times the mean
    tokens of a step. The first step, the profiled one and evaluations are left out. Under `local-sgd` the median is of
    the means from one synchronisation to the next."""
    micro_batch_s: Number | None = None
    """Seconds of a micro-batch's forward and backward pass in these steps, made out alike, mean of all ranks. Of
    several a step the last is left out, in which techniques send; where there is but one, DeepSpeed's has the optimizer
    step in it."""
    sent_bytes_per_step: Number | None = None
    """Bytes that a pod sent to others per optimizer step, mean over the pods, from the third step on; evaluations and
    checkpoints left out. None where the kernel cannot count them, as with InfiniBand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRecord(Measurements):
    """The frozen facts of a run. A figure that was not measured is None."""

    path: Path
    """The run directory."""
    state: RunState
    """How it ended; `running` in a look at a run that has not."""
    message: str = ""
    """One line on the state, for people."""
    hosts: tuple[HostSlots, ...] = ()
    """The pods that it ran on."""
    world_size: Whole = 0
    """Number of ranks."""
    technique: str = ""
    """The technique that was asked for and ran; `script` for a script."""
    peft: str = ""
    """Which weights were trained: `none` for all of the model's own, `lora`, `qlora`."""
    launcher: str = ""
    """How ranks started."""
    precision: str = ""
    """Number format of the arithmetic."""
    not_read: tuple[str, ...] = ()
    """Columns of the rows that were there and that no row's form reads."""
    empty_answers: Whole | None = None
    """Rows whose answer is empty, to train or to evaluate on; None if they were not counted."""
    learning_rate: Number | None = None
    """Highest learning rate of the schedule."""
    model: str = ""
    """What was trained."""
    parameters: Whole | None = None
    """Parameters of the whole model, adapters included."""
    trainable_parameters: Whole | None = None
    """Those of them that were trained."""
    epoch_times: tuple[EpochTime, ...] = ()
    """What each pass over the training rows took."""
    workers: tuple[WorkerUse, ...] = ()
    """Time and memory of each rank; after a restart, of its ranks since."""
    gpus: tuple[GpuUse, ...] = ()
    """Memory and load of each GPU, by its driver."""
    restarts: tuple[Restart, ...] = ()
    """What it lost on its way, and how it went on; empty where it lost nothing."""
    resumed_step: Whole | None = None
    """The step of the checkpoint that it went on from: run time and training loss are of the steps after it."""
    global_batch_size: Whole | None = None
    """Rows per optimizer step: micro-batch x accumulation x ranks."""
    train_samples_per_s: Number | None = None
    """Rows a second in the training loop, all ranks together."""
    first_eval_loss: Number | None = None
    """Loss on the evaluation rows before the first step."""
    eval_step: Whole | None = None
    """The optimizer step of the evaluation of `eval_loss`: the step of the model that is saved, where one is."""
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """What else that evaluation measured, by name: `rouge1`, `accuracy`, what a function of one's own returned."""
    peak_memory_gib: Mapping[str, Number] = field(default_factory=dict)
    """By host, GiB: the highest sum over its ranks of resident memory, or of reserved CUDA memory on GPUs."""
    memory_kind: str = "resident"
    """What `peak_memory_gib` counts: `resident` or `cuda`."""
    host_memory_gib: Mapping[str, Number] = field(default_factory=dict)
    """By host, GiB: the highest sum over its ranks of resident memory, whatever device trained."""
    profiled_tokens: Whole | None = None
    """Tokens, padding counted in, of the micro-batch that the FLOPS profiler looked at."""
    device: str = ""
    """Name of the processor that trained."""
    devices: Whole | None = None
    """How many of them: one a rank. Ranks on CPUs may share one."""
    package: str = ""
    """File name of this package as it was sent to the pods; it holds a hash of the content."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """By package."""
    command: str = ""
    """The launch command as a shell line."""
    started_s: Number | None = None
    """When it started, in seconds since 1970."""
    ended_s: Number | None = None
    """When it ended."""
    output_files: Whole | None = None
    """Files that a script wrote into its folder and that came back, into `outputs/`."""
    output_bytes: Whole | None = None
    """Bytes of them together."""
    left_processes: Whole | None = None
    """Processes of the run still alive on its pods when it was over; 0 is right."""
    error: RunFault | None = None
    """Where and why it failed."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the `result.json` of a run directory; a RunError where the run has not ended."""
        file = result_file(RunPaths(path))
        if not os.path.lexists(file):
            raise RunError(
                f"{path} holds no result.json: the run has not ended, or it is not a run directory"
            )
        return cls.at(path, Redactor().json(load_json(file)))

    @classmethod
    def at(cls, path: Path, raw: Mapping[str, Any]) -> Self:
        """Read the JSON form of the run in a directory."""
        return cls._read_at(path, raw)

    @classmethod
    def _read_at(cls, path: Path, raw: Mapping[str, Any]) -> Self:
        try:
            return cls.read({**raw, "path": path})
        except ValidationError as error:
            raise RunError(
                f"{RunPaths(path).result} does not say in which state the run is"
            ) from error

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, without the path."""
        data = asdict(self)
        del data["path"]
        return data

    @property
    def trained(self) -> str:
        """What was trained and how, in a few words; `none` is left unsaid."""
        adapters = "" if self.peft == "none" else self.peft
        return " ".join(
            part for part in (self.model, self.technique, adapters, self.precision) if part
        )

    @property
    def predicted_memory_gib(self) -> float | None:
        """GiB that each pod was predicted to need, on its GPUs where it computes there; None where nobody could say.

        It is the planner's figure for the longest rows that the job allows; shorter rows need less.
        """
        raw = read_json(RunPaths(self.path).prediction)
        on_gpu = (
            number(raw.get("pod_gpu_gib"))
            if self.memory_kind == "cuda" or not self.peak_memory_gib
            else None
        )
        return number(raw.get("host_gib")) if on_gpu is None else on_gpu
