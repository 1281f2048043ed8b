"""`RunResult`: the frozen facts of a run, as `result.json` holds them.

Reading and showing only; `outcome.py` works the facts out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import RunError, RunFailed
from workbench.base.files import read_json
from workbench.base.shown import Shown
from workbench.jobs.choices import Peft
from workbench.rundir.paths import RunPaths
from workbench.rundir.state import RunState

if TYPE_CHECKING:
    from workbench.results.answers.judge import Predictions
    from workbench.results.profile.parse import Profile

__all__ = ["HostSlots", "RunFault", "RunResult"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSlots:
    """One line of the hostfile that a run used."""

    address: str
    """The pod's address."""
    slots: int
    """Ranks on it."""
    pod: str = ""
    """The pod's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFault:
    """Where and why a run failed: the first cause, not its echoes."""

    host: str = ""
    """Address of the pod; empty where no pod is to blame."""
    pod: str = ""
    """Name of the pod."""
    rank: int | None = None
    """The rank that failed first; None where no rank is to blame."""
    kind: str = ""
    """Exception class, or `signal`, `exit`, `launcher`, `pod`, `keeper`."""
    message: str = ""
    """What happened, in one line."""
    traceback: str = ""
    """The failing rank's own traceback; empty where there is none."""
    others: str = ""
    """What became of the other ranks, folded: "2 ranks lost their peer"."""

    def __str__(self) -> str:
        """Say it in one paragraph, the traceback beneath."""
        where = f"rank {self.rank} on {self.pod} ({self.host})" if self.rank is not None else self.pod or "the run"
        text = f"{where}: {self.kind}: {self.message}"
        return "\n".join(part for part in (text, self.others, self.traceback.rstrip()) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult(Shown):
    """The frozen facts of a run. A figure that was not measured is None."""

    path: Path
    """The run directory."""
    state: RunState
    """How it ended; `running` in a look at a run that has not."""
    message: str = ""
    """One line on the state, for people."""
    hosts: Sequence[HostSlots] = ()
    """The pods that it ran on."""
    world_size: int = 0
    """Number of ranks."""
    technique: str = ""
    """The technique that was asked for and ran; `script` for a script."""
    peft: str = ""
    """Which weights were trained: `none` for all of the model's own, `lora`, `qlora`."""
    launcher: str = ""
    """How ranks started."""
    precision: str = ""
    """Number format of the arithmetic."""
    model: str = ""
    """What was trained."""
    parameters: int | None = None
    """Parameters of the whole model, adapters included."""
    trainable_parameters: int | None = None
    """Those of them that were trained."""
    steps: int | None = None
    """Optimizer steps taken."""
    resumed_step: int | None = None
    """The step of the checkpoint that it went on from: run time and training loss are of the steps after it."""
    epochs: float | None = None
    """Passes over the training rows."""
    global_batch_size: int | None = None
    """Rows per optimizer step: micro-batch x accumulation x ranks."""
    duration_s: float | None = None
    """Seconds from the first rank's start being asked for to the last rank's end and the results' return."""
    time_to_first_step_s: float | None = None
    """Seconds from there to the end of the first optimizer step."""
    train_runtime_s: float | None = None
    """Seconds in the training loop, by the Trainer's clock."""
    train_samples_per_s: float | None = None
    """Rows a second in the training loop, all ranks together."""
    train_loss: float | None = None
    """Mean training loss over the steps."""
    first_eval_loss: float | None = None
    """Loss on the evaluation rows before the first step."""
    eval_loss: float | None = None
    """The same after the last."""
    perplexity: float | None = None
    """e to the power of `eval_loss`: among how many tokens the model still wavers. None for encoder-decoder models."""
    exact_match: float | None = None
    """Share of answered evaluation rows whose text is exactly right, 0 to 1."""
    peak_memory_gib: Mapping[str, float] = field(default_factory=dict)
    """By host, GiB: the highest sum over its ranks of resident memory, or of reserved CUDA memory on GPUs."""
    memory_kind: str = "resident"
    """What `peak_memory_gib` counts: `resident` or `cuda`."""
    host_memory_gib: Mapping[str, float] = field(default_factory=dict)
    """By host, GiB: the highest sum over its ranks of resident memory, whatever device trained."""
    useful_tokens_per_s: float | None = None
    """Tokens a second that are not padding, source and target, in the steps that `train_samples_per_s` is of."""
    padded_tokens_per_s: float | None = None
    """The same with the padding."""
    profiled_tokens: int | None = None
    """Tokens, padding counted in, of the micro-batch that the FLOPS profiler looked at."""
    sent_bytes_per_step: float | None = None
    """Bytes that a pod sent to others per optimizer step, mean over the pods, from the third step on; evaluations and
    checkpoints left out. None where the kernel cannot count them, as with InfiniBand."""
    device: str = ""
    """Name of the processor that trained."""
    devices: int | None = None
    """How many of them: one a rank. Ranks on CPUs may share one."""
    package: str = ""
    """File name of this package as it was sent to the pods; it holds a hash of the content."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """By package."""
    command: str = ""
    """The launch command as a shell line."""
    started_s: float | None = None
    """When it started, in seconds since 1970."""
    ended_s: float | None = None
    """When it ended."""
    left_processes: int | None = None
    """Processes of the run still alive on its pods when it was over; 0 is right."""
    error: RunFault | None = None
    """Where and why it failed."""

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read the `result.json` of a run directory.

        Raises:
            RunError: There is none: the run has not ended, or this is no run directory.
        """
        try:
            raw = json.loads(RunPaths(path).result.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunError(
                f"{path} holds no result.json: the run has not ended, or this is no run directory"
            ) from error
        known = {f.name for f in fields(cls)}
        data = {name: value for name, value in raw.items() if name in known}
        data["hosts"] = tuple(HostSlots(**host) for host in data.get("hosts", ()))
        data["error"] = RunFault(**data["error"]) if data.get("error") else None
        return cls(**{**data, "path": path, "state": RunState(data["state"])})

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, without the path."""
        data = asdict(self)
        del data["path"]
        return data

    @property
    def trained(self) -> str:
        """What was trained and how, in a few words; `none` is left unsaid."""
        adapters = "" if self.peft == Peft.NONE else self.peft
        return " ".join(part for part in (self.model, self.technique, adapters, self.precision) if part)

    def raise_for_status(self) -> RunResult:
        """Return this result if the run succeeded.

        Raises:
            RunFailed: It did not; the message is the first cause, and says where the logs are.
        """
        if self.state is RunState.SUCCEEDED:
            return self
        why = str(self.error) if self.error else self.message
        raise RunFailed(f"the run {self.state}: {why}\nIts logs are in {RunPaths(self.path).logs}", result=self)

    @property
    def predicted_memory_gib(self) -> float | None:
        """GiB that each pod was predicted to need, on its GPUs where it computes there; None where nobody could say.

        It is the planner's figure for the longest rows that the job allows; shorter rows need less.
        """
        raw = read_json(RunPaths(self.path).prediction)
        on_gpu = self.memory_kind == "cuda" and isinstance(raw.get("pod_gpu_gib"), int | float)
        predicted = raw.get("pod_gpu_gib" if on_gpu else "host_gib")
        return float(predicted) if isinstance(predicted, int | float) else None

    @property
    def tflops_per_device(self) -> float | None:
        """10^12 floating-point operations a second that training needed of each device; see `results/speed.py`."""
        from workbench.results.speed import forward_flops, tflops_per_device

        return tflops_per_device(
            forward_flops=forward_flops(RunPaths(self.path).profile),
            profiled_tokens=self.profiled_tokens,
            padded_tokens_per_s=self.padded_tokens_per_s,
            devices=self.devices or 0,
            adapters=self.peft not in ("", Peft.NONE),
        )

    @property
    def mfu(self) -> float | None:
        """That over the device's peak at this precision, 0 to 1; None where the peak is not known, as of CPUs."""
        from workbench.results.speed import mfu

        return mfu(self.tflops_per_device, self.device, self.precision)

    @property
    def profile(self) -> Profile | None:
        """The FLOPS profile, parsed; None where the profiler did not run."""
        from workbench.results.profile.parse import read_profile

        path = RunPaths(self.path).profile
        return read_profile(path, self.train_samples_per_s) if path.exists() else None

    @property
    def predictions(self) -> Predictions | None:
        """The answers to the evaluation rows beside the expected ones; None where there are none."""
        from workbench.results.answers.judge import read_predictions

        paths = RunPaths(self.path)
        tables = paths.tables if paths.tables.exists() else None
        return read_predictions(paths.predictions, tables) if paths.predictions.exists() else None

    def to_html(self, path: str | Path) -> Path:
        """Write the run card: one HTML file with everything about the run, that needs no network and no script.

        Args:
            path: The file; one that is there is replaced.

        Returns:
            The file, absolute.

        Raises:
            RunError: The run directory is gone, or the file cannot be written.
        """
        from workbench.results.card import write_card

        return write_card(self, path)

    def __repr__(self) -> str:
        """Say the state and the main figures in one line."""
        figures = {
            "steps": self.steps,
            "eval_loss": self.eval_loss,
            "exact_match": self.exact_match,
            "samples_per_s": self.train_samples_per_s,
        }
        said = "".join(f", {k}={v:.4g}" for k, v in figures.items() if v is not None)
        return f"RunResult({self.state}, {self.technique} on {len(self.hosts)} pods{said})"
