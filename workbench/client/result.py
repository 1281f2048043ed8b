"""`RunResult`: what the notebook gets of a run that has ended: the record, and what can be read beside it."""

from __future__ import annotations

from pathlib import Path

from pydantic.dataclasses import dataclass

from workbench.base.errors import RunFailed
from workbench.base.shown import Shown
from workbench.base.table import Grid
from workbench.base.words import counted, plain, printable
from workbench.jobs.choices import Peft
from workbench.results import speed
from workbench.results.answers.predictions import Predictions, read_predictions
from workbench.results.profile.parse import Profile, read_profile
from workbench.results.profile.trace import read_trace
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord
from workbench.rundir.state import RunState


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunResult(Shown, ResultRecord):
    """The frozen facts of a run, its profile and its answers. A figure that was not measured is None."""

    def raise_for_status(self) -> RunResult:
        """Return this result if the run succeeded.

        Raises:
            RunFailed: It did not; the message is the first cause, and says where the logs are.
        """
        if self.state is RunState.SUCCEEDED:
            return self
        why = str(self.error) if self.error else printable(self.message)
        raise RunFailed(f"the run {self.state}: {why}\nIts logs are in {RunPaths(self.path).logs}", result=self)

    @property
    def tflops_per_device(self) -> float | None:
        """10^12 floating-point operations a second that training needed of each device; see `results/speed.py`."""
        return speed.tflops_per_device(
            forward_flops=speed.forward_flops(RunPaths(self.path).profile),
            profiled_tokens=self.profiled_tokens,
            padded_tokens_per_s=self.padded_tokens_per_s,
            devices=self.devices or 0,
            adapters=self.peft not in ("", Peft.NONE),
        )

    @property
    def mfu(self) -> float | None:
        """That over the device's peak at this precision, 0 to 1; None where the peak is not known, as of CPUs."""
        return speed.mfu(self.tflops_per_device, self.device, self.precision)

    @property
    def profile(self) -> Profile | None:
        """The FLOPS profile, parsed; None where the profiler did not run."""
        path = RunPaths(self.path).profile
        return read_profile(path, self.train_samples_per_s) if path.exists() else None

    @property
    def trace(self) -> Grid | None:
        """The costliest operators of the steps that `trace_steps` had traced; None where none were."""
        return read_trace(RunPaths(self.path))

    @property
    def predictions(self) -> Predictions | None:
        """The answers to the evaluation rows beside the expected ones; None where there are none."""
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
        from workbench.client.card import write_card

        return write_card(self, path)

    def __repr__(self) -> str:
        figures = {
            "steps": self.steps,
            "eval_loss": self.eval_loss,
            "exact_match": self.exact_match,
            "samples_per_s": self.train_samples_per_s,
        }
        measured = "".join(f", {k}={v:.4g}" for k, v in figures.items() if v is not None)
        return plain(f"RunResult({self.state}, {self.technique} on {counted(len(self.hosts), 'pod')}{measured})")
