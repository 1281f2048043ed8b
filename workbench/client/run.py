"""`Run`: a handle like a Future that any process may hold, as it reads the run directory; few calls need the keeper."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workbench.base.errors import RunError, Unreadable, WorkbenchError
from workbench.base.files import is_missing
from workbench.base.redact import mask_secrets
from workbench.base.shown import ShownLive, as_live, follow
from workbench.base.wire import ask
from workbench.base.words import plain
from workbench.client.kinds import class_for, missing_attribute
from workbench.client.plot import RunPlot
from workbench.client.result import RunResult
from workbench.client.takeover import reattach, settle_handover
from workbench.rundir.catalog.store import read_label, write_label
from workbench.rundir.events import Events
from workbench.rundir.output.tail import last_lines, last_of_both
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    cluster_of,
    cluster_status,
    id_of,
    known_cluster_of,
    message_of,
    result_file,
    run_at,
    state_of,
    state_or_problem,
)
from workbench.rundir.totals import Progress, TotalsTail

if TYPE_CHECKING:
    from workbench.client.tensorboard.board import Board
    from workbench.handover.kubeflow.manifest import Manifest
    from workbench.jobs.job import Job

_LOOK_S = 0.2
_ASK_S = 2.0
_READ_S = 30.0  # for a result that was seen to be read
_SUCCESSORS = 3  # of a keeper that died, while somebody waits
_LOST_S = 3.0  # a run must be lost for so long before `wait` returns that
_ADOPTED_S = 120.0  # a keeper that takes over from one that died knows its runs by then


class Detached(KeyboardInterrupt):
    """The notebook stopped waiting while the run goes on."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(slots=True, unsafe_hash=True)  # frozen, `name` and `note` could not be set
class Run(ShownLive):
    """A run of any kind of job, live or finished. Make one with `Cluster.submit` or `Run.load`.

    `Cluster.submit` and `Run.load` return the class that belongs to the job's kind: `FineTuneRun` for a `FineTune`.
    """

    path: Path
    """The run directory, absolute."""
    _home: tuple[Path, str] = field(init=False, repr=False, compare=False)
    """The cluster, and the id by which its keeper knows the run also when its own directory is gone."""

    _totals: TotalsTail = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._home = known_cluster_of(self.paths), id_of(self.paths)
        self._totals = TotalsTail(self.paths.events)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Attach to the run in a directory: after a kernel restart, from another notebook, on another day.

        Where the keeper of a run of your own died before its end, another one is started, which goes on with it.

        Raises:
            RunError: It is not a run directory, or this class belongs to another kind of job than the run.
        """
        paths = run_at(path)
        found = class_for(paths.root, "run_class", cls)
        reattach(paths)
        settle_handover(paths)
        return found(paths.root)

    @property
    def paths(self) -> RunPaths:
        """Every path in the run directory."""
        return RunPaths(self.path)

    @property
    def result(self) -> RunResult:
        """The facts of the finished run, as the class that belongs to the job's kind.

        Raises:
            RunError: It has not ended.
        """
        return RunResult.load(self.path)

    def plot(self, name: str = "loss") -> RunPlot:
        """Return a plot that answers: values under the pointer, zoom, logarithm, steps or time, smoothing.

        A cell that ends with it shows it; of a run that goes on, it follows.

        Args:
            name: `loss`, `perplexity`, `learning_rate`, `grad_norm`, `samples_per_s`, or `memory` of each pod.

        Raises:
            ConfigError: There is no such plot.
        """
        return RunPlot(self.paths.root, name)

    @classmethod
    def before_submit(
        cls, job: Job, paths: RunPaths, *, pods: int, gpus: int, memory_gib: float | None
    ) -> None:
        """Write into a prepared run directory what the kind of the job adds before the keeper gets the run.

        A run directory that cannot be written to fails nothing here.

        Args:
            job: The job of the run.
            paths: The prepared run directory.
            pods: Number of pods that the run takes.
            gpus: Number of GPUs of each pod.
            memory_gib: Memory of each pod, in GiB; None if unknown.
        """

    @property
    def id(self) -> str:
        """The id of the run, unique in its cluster."""
        return self._home[1] if self._is_gone else id_of(self.paths)

    @property
    def name(self) -> str:
        """What the run is called in panel, card, `history`, `compare` and reports; empty until somebody sets it.

        Raises:
            ConfigError: When set to anything but text of at most 80 letters.
            RunError: When set, and the run directory cannot be written.
        """
        return read_label(self.paths).name

    @name.setter
    def name(self, name: str) -> None:
        write_label(self.paths, name=name)

    @property
    def note(self) -> str:
        """What somebody remarked on the run, shown with it; empty until somebody sets it. At most 2,000 letters."""
        return read_label(self.paths).note

    @note.setter
    def note(self, note: str) -> None:
        write_label(self.paths, note=note)

    @property
    def spec(self) -> RunSpec:
        """What was asked, as `spec.json` holds it."""
        return RunSpec.load(self.paths.spec, of_run=True)

    @property
    def state(self) -> RunState:
        """Where it is in its life; `lost` where its keeper died before it ended and no other has taken over.

        `unknown` where the files of the run cannot be read at this moment: the run may well continue.
        """
        outcome = self._outcome() if self._is_gone else {}
        return RunState(outcome["state"]) if outcome else state_of(self.paths)

    @property
    def message(self) -> str:
        """One line on the state, for people."""
        if not self._is_gone:
            return message_of(self.paths, self.state)
        outcome = self._outcome()
        how = f"its keeper says: {outcome['message']}" if outcome else "its keeper does not answer"
        return f"the directory of run {self.id}, {self.path}, is gone or damaged; {how}"

    @property
    def returned(self) -> list[object]:
        """What each rank of a `Function` returned, in the order of ranks.

        Raises:
            RunError: A rank returned nothing: it was no function, has not ended, or failed.
        """
        from workbench.client.returned import returned

        return returned(self.paths, self.result.world_size)

    @property
    def progress(self) -> Progress:
        """How far it is: step, loss, speed, time left."""
        return self._totals.read().progress(self.state, self.message)

    def events(self) -> Events:
        """Return all events so far, in the order in which the keeper read them; to iterate over, or as a DataFrame."""
        return Events(self.paths.events)

    def logs(self, rank: int = 0, stream: str = "both", tail: int | None = 200) -> str:
        """Return what a rank printed, without its event lines.

        Args:
            rank: Which rank.
            stream: stdout, stderr, or both in the order in which they came.
            tail: How many last lines; None for all.

        Raises:
            RunError: There is no such log.
        """
        try:
            if stream == "both":
                lines = last_of_both(self.paths, rank, tail)
            else:
                lines = last_lines(self.paths.rank_log(rank, stream), self.path, tail)
        except OSError as error:
            raise RunError(
                f"there is no log of rank {rank}, {stream} ({error.strerror}); {self.paths.logs} holds what there is"
            ) from error
        return mask_secrets("\n".join(lines))

    def manifest(self, kind: str, **options: object) -> Manifest:
        """Write this job as one that Kubeflow carries out unattended; `str()` is the YAML. Nothing is sent anywhere.

        Args:
            kind: `trainjob`, `pytorchjob` or `mpijob`.
            options: See `HandoverOptions`; where the run came from `KubernetesPods`, theirs are the default.

        Raises:
            ConfigError: The kind or an option is unknown, the image is missing, or the job cannot run there so.
        """
        from workbench.handover.kubeflow.manifest import manifest_of

        return manifest_of(self.path, kind, options)

    def wait(self, timeout_s: float | None = None, progress: bool = True) -> RunResult:
        """Block until the run has ended, with a line of progress, and return its result.

        Args:
            timeout_s: Seconds to wait at most; None for as long as it takes.
            progress: Whether to show the line.

        Returns:
            The result, also of a run that failed; `raise_for_status` on it raises.

        Raises:
            TimeoutError: The time is over; the run goes on.
            Detached: An interrupt came (the notebook's stop button); the run goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        successors, asked_s, warned = _SUCCESSORS, time.monotonic(), False
        lost_s: float | None = None  # since when the run is lost
        try:
            with follow(self if progress else None) as draw:
                while True:
                    state = self.state
                    if state is not RunState.LOST:
                        lost_s = None
                        if state.is_terminal:
                            break
                    elif successors and reattach(self.paths):
                        successors, lost_s = successors - 1, None
                    else:
                        lost_s = time.monotonic() if lost_s is None else lost_s
                        if time.monotonic() - lost_s >= _LOST_S:
                            break
                    if not self._is_gone:
                        with suppress(OSError):  # what cannot be read now is drawn at the next look
                            draw()
                    elif not warned:
                        warnings.warn(self.message, RuntimeWarning, stacklevel=2)
                        warned = True
                    if (
                        time.monotonic() > asked_s + _ASK_S
                    ):  # what no file could take, the keeper has in memory
                        if raw := self._outcome().get("result"):
                            return RunResult.at(self.path, raw)
                        settle_handover(self.paths)
                        asked_s = time.monotonic()
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(f"the run goes on after {timeout_s} s: {self.message}")
                    time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            back = f"Come back with Run.load({str(self.path)!r}).wait(), stop it with .cancel()."
            raise Detached(f"Stopped waiting; the run goes on. {back}") from None
        return self._ended()

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
        if not is_missing(result_file(self.paths)):
            return self.result
        raw = self._outcome().get("result") or {"state": RunState.LOST, "message": self.message}
        return RunResult.at(self.path, raw)

    def _outcome(self) -> dict[str, Any]:
        """Ask its keeper how it stands; empty where that does not answer."""
        cluster, run = self._home
        with suppress(RunError):
            return ask(ClusterPaths(cluster).socket, {"op": "outcome", "run": run}, timeout_s=5.0)
        return {}

    @property
    def _is_gone(self) -> bool:
        try:
            return is_missing(self.paths.info)
        except Unreadable:
            return False

    def cancel(self) -> None:
        """Ask the run to stop; it ends as cancelled within seconds. Returns at once; a run that has ended stays so.

        While another keeper takes over from one that died, it waits until that keeper knows the run.

        Raises:
            RunError: Its keeper does not answer.
        """
        self._ask_to_end("cancel")

    def stop(self) -> None:
        """Ask the run to end as stopped within two steps, with a checkpoint and the model as it is then.

        Ranks look for the request when a step begins, and end after that step; under `local-sgd` they look when they
        synchronise.

        In a script, a Trainer of transformers ends after a step, and the script goes on behind it; ranks without one
        get SIGTERM where they have a handler for it, else SIGINT (KeyboardInterrupt in Python). Either has
        `stop_grace_s` to end. Returns at once; `cancel` works after it.

        Raises:
            RunError: Its keeper or its first pod does not answer.
        """
        self._ask_to_end("stop")

    def stacks(self) -> dict[int, str]:
        """Ask every rank where it is: the answer to why a run is stuck. Takes up to some seconds.

        Returns:
            By rank the Python stacks of all threads; "" where it cannot tell: a stopped rank, a silent pod.

        Raises:
            RunError: The run is not running, or its keeper does not answer.
        """
        if self.state.is_terminal:
            raise RunError(f"run {self.id} is {self.state}; only ranks that run have stacks")
        stacks = ask(self._cluster.socket, {"op": "stacks", "run": self.id}, timeout_s=60)["stacks"]
        return {int(rank): str(text) for rank, text in stacks.items()}

    def fetch(self) -> list[str]:
        """Bring back what found no room here at the end (model, files, checkpoints, logs); return what stays there.

        Raises:
            RunError: The run has not ended, its cluster is closed, or there is no room still.
        """
        return list(
            map(
                str,
                ask(self._cluster.socket, {"op": "fetch", "run": self.id}, timeout_s=3600)["notes"],
            )
        )

    def _ask_to_end(self, how: str) -> None:
        deadline = time.monotonic() + _ADOPTED_S
        while True:
            # Looked at before the request: a keeper that takes over does not know its runs before it is ready.
            adopts = cluster_status(self._cluster.root).phase == "starting"
            try:
                ask(self._cluster.socket, {"op": how, "run": self.id})
                return
            except WorkbenchError:
                if (
                    self.state.is_terminal
                ):  # it has ended, and its keeper is gone or does not answer
                    return
                if not adopts or time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_S)

    def tensorboard(self) -> Board:
        """Return TensorBoard of this run, until this kernel ends; a cell that ends with it has a button for the page.

        Event files that a script wrote into its folder are there too, once they have come back. `workbench.tensorboard`
        takes several runs.

        Raises:
            BackendError: It did not start.
        """
        from workbench.client.tensorboard.board import board_folder, show_tensorboard

        return show_tensorboard({self.name or self.path.name: board_folder(self.paths)})

    @property
    def _cluster(self) -> ClusterPaths:
        return ClusterPaths(self._home[0] if self._is_gone else cluster_of(self.paths))

    def __repr__(self) -> str:
        state, problem = state_or_problem(self.paths)
        return plain(f"{type(self).__name__}({self.id}, {problem or state}, {self.path})")

    if not TYPE_CHECKING:  # a type checker must still find a misspelled name

        def __getattr__(self, name: str) -> object:
            if name.startswith("_") or name == "path":
                raise AttributeError(name)
            raise missing_attribute(self.path, type(self).__name__, "run_class", name)

    def _ipython_display_(self) -> None:
        reattach(self.paths)
        as_live(self)

    def show(self) -> None:
        """Display the panel, live while the run is; its buttons come with it, also for a run that has ended."""
        reattach(self.paths)
        as_live(self, buttons=True)
