"""`Run`: a handle to read the run directory in any process. Few calls need the keeper."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from workbench.base.display_protocol import LiveDisplayable, as_live, follow
from workbench.base.errors import (
    ConfigError,
    RunError,
    Unreadable,
    WorkbenchError,
    check_type,
    one_of,
)
from workbench.base.files import is_missing, read_text
from workbench.base.messages.wire import ask
from workbench.base.redact import mask_secrets
from workbench.base.words import short_list, strip_controls
from workbench.client.batch_job import end_job
from workbench.client.kinds import class_for, missing_attribute
from workbench.client.plot import Axis, PlotOptions, RunPlot
from workbench.client.result import RunResult
from workbench.client.stacks import Stacks
from workbench.client.takeover import reattach, settle_handover
from workbench.pods.hostfile import Hostfile
from workbench.rundir.catalog.label import read_label, write_label
from workbench.rundir.events import Events
from workbench.rundir.figures.deadline import early_end, end_of
from workbench.rundir.output.attempts import attempts_in
from workbench.rundir.output.tail import LogLines, read_logs
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
    known_cluster_of,
    refuse_another,
)
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    cluster_status,
    has_result,
    id_of,
    message_of,
    no_keeper,
    run_at,
    state_of,
    state_or_problem,
)
from workbench.rundir.totals import Progress, TotalsTail

if TYPE_CHECKING:
    from workbench.client.tensorboard.board import Board
    from workbench.handover.kubeflow.kinds import ManifestKind
    from workbench.handover.kubeflow.manifest import Manifest
    from workbench.handover.slurm import SbatchScript
    from workbench.pods.pod_spec import PodSpec
    from workbench.pods.slurm.pods import SlurmPods

Stream = Literal["both", "stdout", "stderr"]
_LOOK_S = 0.2
_ASK_S = 2.0
_READ_S = 30.0  # limit for reading a result whose state was readable
_SUCCESSORS = 3  # new keepers for dead ones during a wait
_LOST_S = 3.0  # a run must be lost for this time before `wait` returns
_TURN_S = 10.0  # a thread of a cancelled task ends by then
_ADOPTED_S = 120.0  # a new keeper knows the runs of a dead keeper by then


class Detached(KeyboardInterrupt):
    """The notebook stopped waiting; the run continues."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(slots=True, unsafe_hash=True)  # frozen, `name` and `note` could not be set
class Run(LiveDisplayable):
    """A run of any kind of job, live or finished, from `Cluster.submit` or `Run.load`.

    Both return the class of the job's kind: `FineTuneRun` for a `FineTune`.
    """

    path: Path
    """Run directory, absolute."""
    _home: tuple[Path, str] = field(init=False, repr=False, compare=False)
    """Cluster and id, with which the keeper finds the run even without the run directory."""

    _totals: TotalsTail = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._home = known_cluster_of(self.paths), id_of(self.paths)
        self._totals = TotalsTail(self.paths.events)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Attach to the run in a directory, after a kernel restart or in another notebook.

        If the keeper of your own run died before the run's end, a new keeper continues the run.

        Raises:
            RunError: The path is no run directory, or this class belongs to another kind of job.
        """
        paths = run_at(path)
        found = class_for(paths.root, "run_class", cls)
        reattach(paths)
        settle_handover(paths)
        return found(paths.root)

    @property
    def paths(self) -> RunPaths:
        """All paths in the run directory."""
        return RunPaths(self.path)

    @property
    def result(self) -> RunResult:
        """The facts of the finished run, in the result class of the job's kind.

        Raises:
            RunError: The run has not ended.
        """
        return RunResult.load(self.path)

    def plot(
        self,
        name: str = "loss",
        *,
        x: Axis | None = None,
        log: bool = False,
        steps: tuple[float | None, float | None] | None = None,
        smooth: float | Mapping[str, float] = 0.0,
    ) -> RunPlot:
        """Return a plot with the values under the pointer.

        At the end of a cell the plot is shown, and is updated during the run. Curves are drawn as
        logged.

        Args:
            name: `loss`, `perplexity`, `learning_rate`, `grad_norm`, `samples_per_s`, `memory` of
                every pod, or any other number in the run's steps or evaluations.
            x: X axis, `steps` or `time`. Default: optimizer steps, and time for `memory`.
            log: Whether the y axis is logarithmic.
            steps: First and last optimizer step to draw, such as `(100, 200)` or `(100, None)`.
                Default: all steps.
            smooth: Weight of the earlier values in a moving average, as in TensorBoard, from 0 to
                below 1. A mapping such as `{"loss": 0.8}` smooths single lines. The logged values
                stay as pale lines. Default: 0, as logged.

        Raises:
            ConfigError: The run has not reported the number, or an argument does not fit the plot.
        """
        check_type("plot", name, str, "the name of a number")
        options = PlotOptions(x=x, log=log, steps=steps, smooth=smooth)
        return RunPlot(self.paths.root, name, options)

    @property
    def id(self) -> str:
        """The id of the run, unique in its cluster."""
        if self._is_gone:
            _, run_id = self._home
            return run_id
        return id_of(self.paths)

    @property
    def name(self) -> str:
        """Name of the run in panel, card, `history`, `compare` and reports. Default: empty.

        Raises:
            ConfigError: The new name is not a text of at most 80 letters.
            RunError: The run directory cannot be written.
        """
        return read_label(self.paths).name

    @name.setter
    def name(self, name: str) -> None:
        write_label(self.paths, name=name)

    @property
    def note(self) -> str:
        """Note on the run, shown with the run. Default: empty. At most 2,000 letters."""
        return read_label(self.paths).note

    @note.setter
    def note(self, note: str) -> None:
        write_label(self.paths, note=note)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run, to find the run in the sidebar. Default: none.

        Raises:
            ConfigError: There are more than 20 new tags, or a tag has a comma or over 40 letters.
            RunError: The run directory cannot be written.
        """
        return read_label(self.paths).tags

    @tags.setter
    def tags(self, tags: Sequence[str]) -> None:
        write_label(self.paths, tags=tags)

    @property
    def spec(self) -> RunSpec:
        """Specification of the run from `spec.json`."""
        return RunSpec.load(self.paths.spec, of_run=True)

    @property
    def state(self) -> RunState:
        """State of the run; `lost` if the keeper died before the end and no other has taken over.

        `unknown` if the files of the run cannot be read now: the run may well continue.
        """
        if not self._is_gone:
            return state_of(self.paths)
        outcome = self._outcome()
        if outcome:
            return RunState(outcome["state"])
        # The keeper may be busy, and answers once its socket is restored.
        cluster, _ = self._home
        if cluster_status(cluster).alive:
            return RunState.UNKNOWN
        return state_of(self.paths)

    @property
    def message(self) -> str:
        """One line about the state, for people."""
        if not self._is_gone:
            return message_of(self.paths, self.state)
        how = "its keeper does not answer"
        outcome = self._outcome()
        if outcome:
            how = f"its keeper says: {outcome['message']}"
        return f"the directory of run {self.id}, {self.path}, is gone or damaged; {how}"

    @property
    def returned(self) -> list[object]:
        """Values returned by the ranks of a `Function`, in the order of ranks.

        Raises:
            RunError: A rank returned nothing: the job was no function, has not ended, or failed.
        """
        from workbench.client.returned import returned

        return returned(self.paths, self.result.world_size)

    @property
    def progress(self) -> Progress:
        """Progress of the run: step, loss, speed, time left, and an early end of the pods."""
        totals = self._totals.read()
        progress = totals.progress(self.state, self.message)
        if progress.state.is_terminal:
            return progress
        ends_s = end_of(cluster_status(cluster_of(self.paths)).pods)
        words = early_end(progress, totals.saved_step, ends_s, time.time())
        return replace(progress, early_end=words)

    def events(self) -> Events:
        """Return all events so far in the keeper's order, to iterate over or as a DataFrame."""
        return Events(self.paths.events)

    def logs(
        self,
        rank: int = 0,
        stream: Stream = "both",
        tail: int | None = 200,
        most_bytes: int = 16 << 20,
    ) -> str:
        """Return a rank's output, without event lines. Empty before the first line.

        The output of all attempts is joined, with a line for every restart. A progress bar is its
        last state.

        Args:
            rank: Number of the rank.
            stream: stdout, stderr, or both in the order of output.
            tail: Number of last lines; None for all.
            most_bytes: Number of bytes to read, from the end. If older lines are left out, the
                first line says so.

        Raises:
            ConfigError: There is no such stream.
            RunError: The run has no such rank, or the log cannot be read.
        """
        self._check_log(rank, stream)
        check_type("logs(tail=…)", tail, (int, NoneType), "a number of lines, or None for all")
        check_type("logs(most_bytes=…)", most_bytes, int, "a number of bytes")
        try:
            by_attempt, left_out = read_logs(
                self.paths, rank, _streams(stream), tail, max(0, most_bytes)
            )
        except OSError as error:
            raise RunError(
                f"there is no log of rank {rank}, {stream} "
                f"({error.strerror}); {self.paths.logs} holds what there is"
            ) from error
        lines = []
        if left_out:
            lines.append(f"--- {left_out} bytes before are left out; see {self.paths.logs} ---")
        for attempt, of_attempt in by_attempt.items():
            lines += [*self._restarted(attempt), *of_attempt]
        return mask_secrets("\n".join(lines))

    def _restarted(self, attempt: int) -> Sequence[str]:
        """Return the line between an attempt and the attempt before."""
        if not attempt:
            return []
        restarts = self._totals.read().restarts
        what = f": {restarts[attempt - 1].what}" if attempt <= len(restarts) else ""
        return [f"--- restart {attempt}{what} ---"]

    def follow(self, rank: int = 0, stream: Stream = "both") -> Iterator[str]:
        """Yield new lines of a rank's output until the run has ended.

        Earlier lines come first, with a line for every restart. If both streams have lines at about
        the same time, the order may differ from the order in `logs`.

        Args:
            rank: Number of the rank.
            stream: stdout, stderr, or both.

        Raises:
            ConfigError: There is no such stream.
            RunError: The run has no such rank, or a log cannot be read.
        """
        self._check_log(rank, stream)
        logs: list[LogLines] = []
        followed = -1
        while True:
            ended = self.state.is_terminal
            try:
                attempts = self._attempts()
                for attempt in attempts:
                    if attempt < followed:
                        continue
                    # The logs of a new attempt begin anew, behind a line for the restart.
                    if attempt > followed:
                        yield from self._restarted(attempt)
                        logs = [
                            LogLines(self.paths.rank_log(attempt, rank, name))
                            for name in _streams(stream)
                        ]
                        followed = attempt
                    # An unfinished line is yielded once nothing can follow.
                    last = ended or attempt < attempts[-1]
                    for log in logs:
                        for line in log.take(last=last):
                            yield mask_secrets(line)
            except OSError as error:
                raise RunError(f"{self.paths.logs} cannot be read: {error.strerror}") from error
            if ended:
                return
            time.sleep(_LOOK_S)

    def _attempts(self) -> list[int]:
        try:
            return attempts_in(self.paths)
        except OSError as error:
            raise RunError(f"{self.paths.logs} cannot be read: {error.strerror}") from error

    def _check_log(self, rank: int, stream: str) -> None:
        """Refuse a stream or a rank unknown to the run."""
        check_type("logs(rank=…)", rank, Integral, "the number of a rank")
        if stream not in get_args(Stream):
            raise one_of("stream", stream, get_args(Stream))
        # A run may continue on fewer ranks.
        attempts = self._attempts()
        if any(self.paths.rank_log(each, rank, "stdout").exists() for each in attempts):
            return
        if self._is_gone:
            raise RunError(self.message)
        with suppress(OSError, ConfigError):  # without the hostfile, any rank may come
            ranks = Hostfile.parse(read_text(self.paths.hostfile)).world_size
            if rank not in range(ranks):
                raise RunError(f"the run has no rank {rank}. Its ranks are 0 to {ranks - 1}")

    def manifest(self, kind: ManifestKind, **options: object) -> Manifest:
        """Return the job as a manifest for Kubeflow; `str()` is the YAML. Nothing is sent.

        Args:
            kind: Kind of the Kubeflow job, such as `trainjob`. The handover page lists all kinds.
            options: See `HandoverOptions`. For a run on `KubernetesPods`, the options of the place
                are the default.

        Raises:
            ConfigError: The kind or an option is unknown, the image is missing, or the job cannot
                run on Kubeflow.
        """
        from workbench.handover.kubeflow.manifest import manifest_of

        return manifest_of(self.path, kind, options)

    def sbatch(
        self,
        place: SlurmPods | None = None,
        *,
        pod: PodSpec | None = None,
        count: int | None = None,
        folder: str | Path | None = None,
    ) -> SbatchScript:
        """Write the job as a batch script for Slurm that needs no keeper; `str()` is the text.

        Nothing is submitted. The job writes a new run directory in the folder of the script.

        Args:
            place: Options of the job, such as `SlurmPods(partition=…, time=…, setup=[…])`.
                Default: the run's own place, or Slurm's defaults.
            pod: Resources of a node. Default: the run's pods. `env` and `pip` always come from the
                run.
            count: Number of nodes. Default: the run's pods.
            folder: Folder of the script, shared by the nodes under the same path, new or of an
                earlier script without a job. Default: beside the run directory.

        Raises:
            ConfigError: The folder is of this machine alone, the text would have a secret, an
                option has no effect in a script, or the job cannot run without a keeper.
        """
        from workbench.handover.slurm import sbatch_of

        return sbatch_of(self.path, place, pod, count, folder)

    def wait(self, timeout_s: float | None = None, progress: bool = True) -> RunResult:
        """Wait for the end of the run with a progress line, and return its result.

        Args:
            timeout_s: Maximum seconds to wait; None: no limit.
            progress: Whether to show the line.

        Returns:
            The result, also of a failed run; `raise_for_status` on the result raises.

        Raises:
            TimeoutError: The time is over; the run continues.
            Detached: An interrupt came (the notebook's stop button); the run continues.
        """
        check_type("wait(timeout_s=…)", timeout_s, (Real, NoneType), "seconds, or None")
        return self._waited(timeout_s, progress=progress)

    def _waited(self, timeout_s: float | None, *, progress: bool) -> RunResult:
        """Wait for a public function, whose caller sees the warnings."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        successors = _SUCCESSORS
        asked_s = time.monotonic()
        warned = False
        lost_s: float | None = None  # start of the time that the run is lost
        try:
            with follow(self if progress else None) as draw:
                while True:
                    state = self.state
                    if state is not RunState.LOST:
                        lost_s = None
                        if state.is_terminal:
                            break
                    elif successors and reattach(self.paths):
                        successors = successors - 1
                        lost_s = None
                    else:
                        lost_s = time.monotonic() if lost_s is None else lost_s
                        if time.monotonic() - lost_s >= _LOST_S:
                            break
                    if not self._is_gone:
                        with suppress(OSError):  # unreadable now: the next look draws it
                            draw()
                    elif not warned:
                        warnings.warn(self.message, RuntimeWarning, stacklevel=3)
                        warned = True
                    # The keeper has the result in memory, even if no file could hold it.
                    if time.monotonic() > asked_s + _ASK_S:
                        outcome = self._outcome()
                        raw = outcome.get("result")
                        if raw:
                            return RunResult.at(self.path, raw)
                        settle_handover(self.paths)
                        asked_s = time.monotonic()
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(f"the run continues after {timeout_s} s: {self.message}")
                    time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            back = f"Come back with Run.load({str(self.path)!r}).wait(), stop it with .cancel()."
            raise Detached(f"Stopped waiting; the run continues. {back}") from None
        return self._ended()

    def __await__(self) -> Generator[Any, None, RunResult]:
        """Wait for the end of the run beside other tasks, as in `result = await run`.

        The result and the errors are those of `wait`. A cancelled task leaves the run as it is.
        """
        return self._awaited().__await__()

    async def _awaited(self) -> RunResult:
        import asyncio

        while True:
            with suppress(TimeoutError):
                return await asyncio.to_thread(self.wait, _TURN_S, progress=False)

    def _ended(self) -> RunResult:
        deadline = time.monotonic() + _READ_S
        while True:
            try:
                return self._result_now()
            except Unreadable:  # it was readable a moment ago
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)

    def _result_now(self) -> RunResult:
        if has_result(self.paths):
            return self.result
        outcome = self._outcome()
        raw = outcome.get("result")
        if not raw:
            state = state_of(self.paths)
            raw = {"state": state if state.is_terminal else RunState.LOST, "message": self.message}
        return RunResult.at(self.path, raw)

    def _outcome(self) -> dict[str, Any]:
        """Return the run's outcome from the keeper, or {} without an answer."""
        cluster, run = self._home
        with suppress(RunError):
            refuse_another(self.path, run, cluster)
            return ask(ClusterPaths(cluster).socket, {"op": "outcome", "run": run}, timeout_s=5.0)
        return {}

    @property
    def _is_gone(self) -> bool:
        try:
            return is_missing(self.paths.info)
        except Unreadable:
            return False

    def cancel(self) -> None:
        """Cancel the run and return at once. The run ends in seconds; an ended run is unchanged.

        While a new keeper takes over from a dead keeper, wait until the new keeper knows the run.
        A run of `sbatch` has no keeper, and `scancel` ends its Slurm job.

        Raises:
            RunError: The keeper does not answer, or the cluster has the run in another directory.
                For a run of `sbatch`: this machine's Slurm does not have the job.
        """
        if no_keeper(self.paths) and not self.state.is_terminal:
            end_job(self.paths)
            return
        self._ask_to_end("cancel")

    def stop(self) -> None:
        """Stop the run within two steps, with a checkpoint and the current model. Returns at once.

        Ranks check for the request at the start of a step and end after the step. With `local-sgd`
        ranks check when they synchronise.

        In a script, a Trainer of transformers ends after a step, and the script continues. Ranks
        without a Trainer get SIGTERM if they handle SIGTERM, else SIGINT (KeyboardInterrupt in
        Python). Both have `stop_grace_s` to end. `cancel` works after `stop`.

        Raises:
            RunError: The keeper or the first pod of the run does not answer.
        """
        self._ask_to_end("stop")

    def stacks(self) -> Stacks:
        """Return the Python stacks of every rank, to see why a run is stuck. Takes some seconds.

        Returns:
            Stacks of all threads by rank; "" for a stopped rank or a silent pod. A notebook shows
            a line per rank.

        Raises:
            RunError: The run is not running, or the keeper does not answer.
        """
        if self.state.is_terminal:
            raise RunError(f"run {self.id} is {self.state}; only ranks that run have stacks")
        answer = self._ask("stacks", timeout_s=60)
        stacks = answer["stacks"]
        return Stacks({int(rank): str(text) for rank, text in stacks.items()})

    def fetch(self) -> list[str]:
        """Copy back files that did not fit on the local disk. Return notes on files left on pods.

        The files are the model, outputs, checkpoints and logs.

        Raises:
            RunError: The run has not ended, the cluster is closed, or the disk is still full.
        """
        answer = self._ask("fetch", timeout_s=3600)
        return [str(note) for note in answer["notes"]]

    def delete(self) -> list[str]:
        """Delete the run directory with logs, checkpoints and model.

        Exported copies stay, and so do files of the run in a shared folder or an object store.

        Returns:
            Notes on what stays elsewhere.

        Raises:
            RunError: The run has not ended, its pods are up, or a file cannot be removed. A
                second call continues the deletion.
        """
        from workbench.client.deletion import delete_run

        return delete_run(self.paths)

    def _ask(self, how: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """Send a request about the run to the keeper, and return the answer.

        The keeper knows a run by its id alone, and the author of a given directory chose the id.
        """
        if words := no_keeper(self.paths):
            raise RunError(words)
        cluster = self._cluster
        refuse_another(self.path, self.id, cluster.root)
        return ask(cluster.socket, {"op": how, "run": self.id}, timeout_s=timeout_s)

    def _ask_to_end(self, how: str) -> None:
        deadline = time.monotonic() + _ADOPTED_S
        while True:
            # Read before the request: a new keeper does not know its runs before it is ready.
            status = cluster_status(self._cluster.root)
            adopts = status.phase == "starting" and not no_keeper(self.paths)
            try:
                self._ask(how)
                return
            except WorkbenchError:
                # The run has ended, and its keeper is gone or does not answer.
                if self.state.is_terminal:
                    return
                if not adopts or time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_S)

    def tensorboard(self) -> Board:
        """Return a TensorBoard of the run. The server ends with the kernel.

        At the end of a cell the value is shown as a button for the page. Event files in a script's
        folder are included once copied back. `workbench.tensorboard` takes several runs.

        Raises:
            BackendError: TensorBoard did not start.
        """
        from workbench.client.tensorboard.board import board_folder, show_tensorboard

        name = self.name or self.path.name
        return show_tensorboard({name: board_folder(self.paths)})

    @property
    def _cluster(self) -> ClusterPaths:
        if self._is_gone:
            cluster, _ = self._home
            return ClusterPaths(cluster)
        return ClusterPaths(cluster_of(self.paths))

    def __repr__(self) -> str:
        state, problem = state_or_problem(self.paths)
        return strip_controls(f"{type(self).__name__}({self.id}, {problem or state}, {self.path})")

    if not TYPE_CHECKING:  # a type checker must still find a misspelled name

        def __getattr__(self, name: str) -> object:
            if name.startswith("_") or name == "path":
                raise AttributeError(name)
            raise missing_attribute(self.path, type(self).__name__, "run_class", name)

    def _ipython_display_(self) -> None:
        reattach(self.paths)
        as_live(self)

    def show(self) -> None:
        """Display the panel with buttons, live during the run, also for an ended run."""
        reattach(self.paths)
        as_live(self, buttons=True)


def as_completed(runs: Iterable[Run], timeout_s: float | None = None) -> Iterator[Run]:
    """Yield runs in the order in which they end, as `concurrent.futures.as_completed` does.

    A failed run is yielded like any other; `run.result` has the outcome. A run that is given twice
    is yielded once.

    Args:
        runs: Runs of one or several clusters.
        timeout_s: Maximum seconds from the call to the last run; None: no limit.

    Raises:
        TimeoutError: The time is over; the other runs continue.

    Example:
        >>> list(as_completed([]))
        []
    """
    check_type("as_completed(timeout_s=…)", timeout_s, (Real, NoneType), "seconds, or None")
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    waiting = {run.path: run for run in runs}
    while waiting:
        for path, run in list(waiting.items()):
            # A lost run may have a new keeper, which `wait` looks for.
            patience_s = 2 * _LOST_S if run.state is RunState.LOST else 0.0
            try:
                run._waited(patience_s, progress=False)
            except TimeoutError:
                continue
            del waiting[path]
            yield run
        if waiting and time.monotonic() > deadline:
            names = short_list([run.id for run in waiting.values()])
            raise TimeoutError(f"runs that continue after {timeout_s} s: {names}")


def _streams(stream: str) -> Sequence[str]:
    return ("stdout", "stderr") if stream == "both" else (stream,)
