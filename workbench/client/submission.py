"""`Submission`: the part of a cluster that takes jobs."""

from __future__ import annotations

import shutil
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from workbench.base.errors import DiskFull, RunError, suggests
from workbench.base.files import check_working_directory, write_json
from workbench.base.wire import Unanswered, ask
from workbench.client.kinds import class_for
from workbench.client.run import Run
from workbench.client.takeover import checkpoint_on_pods
from workbench.jobs.job import Job
from workbench.jobs.script import Function
from workbench.keeper.launch import LaunchCommand
from workbench.rundir.journal import fail_unstarted
from workbench.rundir.make.function import as_script
from workbench.rundir.make.prepare import PreparedRun, prepare_run
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec, RunSpec, resolved
from workbench.rundir.status import cluster_status

_ANSWER_S = 30.0  # the keeper takes a run over in milliseconds


class Submission:
    """What is run on the pods, and how; whoever inherits has them."""

    spec: ClusterSpec
    _paths: ClusterPaths

    @property
    def path(self) -> Path:
        """The cluster's directory."""
        return self._paths.root

    @abstractmethod
    def _check_ready(self) -> None: ...

    @suggests("submit")
    def submit(
        self, job: Job | Function, *, pods: int | None = None, path: str | Path | None = None
    ) -> Run:
        """Check a job, prepare its data, and hand it to the keeper. Returns before the run starts.

        Runs start in the order of submission, each once as many pods are free as it takes: runs of one pod go beside
        each other on a cluster of several.

        Args:
            job: What to run.
            pods: How many of the pods it takes, the first that are free. Default: all; one for technique `single`.
            path: The run directory, new or empty. Default: a new folder below the cluster's `runs`.

        Raises:
            ConfigError: The job, its data or its DeepSpeed JSON is refused; nothing has started.
            RunError: The cluster is not ready.
        """
        self._check_ready()
        return self.submit_prepared(self._prepare(job, pods, self._paths.runs, path))

    def run(
        self,
        function: Callable[..., object],
        *args: object,
        pods: int | None = None,
        timeout_s: float | None = None,
        progress: bool = True,
        **kwargs: object,
    ) -> list[object]:
        """Call a function of the notebook on every rank, wait with a line of progress, and return what each returned.

        What it may return: numbers, text, None, lists, tuples, dicts, and arrays of numpy or torch, which come back as
        arrays of numpy. It travels as a `Function`, with which `submit` does not wait and more can be asked.

        Args:
            function: A function of the notebook; it may use others, and variables that can be pickled.
            *args: Its arguments by place.
            pods: How many of the pods it takes, the first that are free. Default: all.
            timeout_s: Seconds after which the run is cancelled; None for as long as it takes.
            progress: Whether to show the line.
            **kwargs: Its arguments by name.

        Returns:
            What each rank returned, in the order of ranks.

        Raises:
            ConfigError: Something, which the message names, cannot be pickled, or the pods have another Python; nothing
                has started.
            RunFailed: It raised, or a rank failed; the message has its traceback, a notebook shows the card.
            TimeoutError: The time is over.
            Detached: An interrupt came; the run goes on.
        """
        run = self.submit(Function(function, args, kwargs), pods=pods)
        try:
            result = run.wait(timeout_s, progress=progress)
        except TimeoutError:
            run.cancel()
            raise TimeoutError(
                f"{run.id} was cancelled after {timeout_s} s; see {run.paths.logs}"
            ) from None
        if progress and result.error is not None:
            run.show()
        result.raise_for_status()
        return run.returned

    def submit_prepared(
        self, prepared: PreparedRun, note: Mapping[str, object] | None = None
    ) -> Run:
        """Hand a run that `prepare_run` made to the keeper; the note goes into its `run.json`.

        Where the keeper's answer is late, a warning says so and the run is returned: it is queued until the keeper
        answers, and `wait` asks the keeper whether it has the run.

        Raises:
            RunError: The cluster is not ready, or the run wants more pods than it has.
        """
        info = {
            **(note or {}),
            "id": prepared.run_id,
            "cluster": str(self.path),
            "submitted_s": time.time(),
        }
        job, paths = prepared.spec.job, prepared.paths
        run_class = class_for(paths.root, "run_class", Run)
        try:
            write_json(paths.info, info)
        except DiskFull:
            shutil.rmtree(paths.root, ignore_errors=True)  # it could not even say why it never ran
            raise
        pods = prepared.spec.pods or self.spec.count
        gpus, memory_gib = self.spec.pods.gpus, self.spec.pod_memory_gib(pods)
        run_class.before_submit(job, paths, pods=pods, gpus=gpus, memory_gib=memory_gib)
        request = {"op": "submit", "run": prepared.run_id, "path": str(paths.root)}
        try:
            asked = {**request, "job": resolved(job).to_dict(), "pods": prepared.spec.pods}
            ask(self._paths.socket, asked, timeout_s=_ANSWER_S)
        except (
            Unanswered
        ) as error:  # the request may still lie in the keeper's socket: the run may start later
            late = f"{error}. Run {prepared.run_id} starts once the keeper takes it; run.wait() asks the keeper for it"
            warnings.warn(late, RuntimeWarning, stacklevel=2)
        except RunError as error:  # its directory must say why it never ran
            with suppress(OSError):
                fail_unstarted(paths, prepared.spec, error)
            raise
        return Run.load(paths.root)

    def command(self, job: Job | Function, *, pods: int | None = None) -> LaunchCommand:
        """Return the command that starts the ranks of a job, without starting it: the dry run.

        The job waits on the pods, so the line works in a terminal for as long as the cluster lives. It is nobody's run:
        its output goes to that terminal alone.

        Raises:
            ConfigError: As for `submit`.
            RunError: The cluster is not ready.
        """
        prepared = self._prepare(job, pods, self.path / "dry")
        request = {"op": "dry", "run": prepared.run_id, "path": str(prepared.paths.root)}
        answer = ask(
            self._paths.socket,
            {**request, "job": resolved(prepared.spec.job).to_dict(), "pods": pods},
        )
        return LaunchCommand(argv=answer["argv"], env=answer["env"])

    def _prepare(
        self, job: Job | Function, pods: int | None, parent: Path, root: str | Path | None = None
    ) -> PreparedRun:
        check_working_directory()
        script = as_script(job, self.path / "functions", cluster_status(self.path).pods)
        spec = RunSpec(cluster=self.spec, job=script, pods=pods)
        return prepare_run(
            spec, root=root, parent=parent, ask_pods=partial(checkpoint_on_pods, self.path)
        )
