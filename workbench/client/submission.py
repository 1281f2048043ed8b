"""`Submission`: the part of a cluster that takes jobs."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from workbench.base.errors import (
    ConfigError,
    DiskFull,
    RunError,
    RunFailed,
    check_type,
    shortened,
    suggests,
)
from workbench.base.files import check_working_directory, write_json
from workbench.base.files.folders import remove_folder
from workbench.base.messages.wire import Unanswered, ask
from workbench.client.returned import raised_by
from workbench.client.run import Run
from workbench.jobs.job import Job
from workbench.jobs.script import Function
from workbench.keeper.launch import LaunchCommand
from workbench.rundir.figures.deadline import said_at_submit
from workbench.rundir.format import FORMAT
from workbench.rundir.make.function import as_script
from workbench.rundir.make.prepare import PreparedRun, prepare_run
from workbench.rundir.make.unstarted import keep_reason
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.spec import ClusterSpec, RunSpec, resolved
from workbench.rundir.status import cluster_status, has_result, no_keeper
from workbench.rundir.stores.address import store_variables

logger = logging.getLogger(__name__)
# Pods that hang in the folder have a minute.
_PROBED_S = 180.0
_ANSWER_S = 30.0  # usually the keeper takes a run in milliseconds
_WORDS = 4  # requests to the keeper in each idle limit


@contextmanager
def kept_up(cluster: Path, limit_s: float | None) -> Iterator[None]:
    """Keep the idle pods of a cluster up: the check of a large dataset takes more than the limit.

    `limit_s`: the cluster's `idle_timeout_s`.
    """
    socket = ClusterPaths(cluster).socket
    over = threading.Event()

    def send() -> None:
        while limit_s and not over.wait(limit_s / _WORDS):
            with suppress(RunError):
                ask(socket, {"op": "status"})

    threading.Thread(target=send, name="kept up", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Submission:
    """Base class with the methods that submit jobs to a cluster's pods."""

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
        """Check a job, prepare its data and submit it to the keeper. Return before the start.

        Runs start in the order of submission, as soon as enough pods are free. On a cluster of
        several pods, runs of one pod run at the same time. A dead keeper is replaced first.

        Args:
            job: The job to run.
            pods: Number of pods; the first free pods are used. Default: all; one for technique
                `single`.
            path: The run directory, new or empty. Default: a new folder below the cluster's `runs`.

        Raises:
            ConfigError: The job, its data or its DeepSpeed JSON is refused; nothing has started.
            RunError: The cluster is not ready, or its dead keeper cannot be replaced.
        """
        self._check_ready()
        prepared = self._prepare(job, pods, self._paths.runs, path)
        return self.submit_prepared(prepared)

    def run(
        self,
        function: Callable[..., object],
        *args: object,
        pods: int | None = None,
        timeout_s: float | None = None,
        progress: bool = True,
        **kwargs: object,
    ) -> list[object]:
        """Call a function of the notebook on every rank, with a progress line. Return the values.

        The function may return numbers, text, None, lists, tuples, dicts, and arrays of numpy or
        torch, which arrive as numpy arrays. `submit` of a `Function` does the same without waiting,
        and has more options.

        Args:
            function: A function of the notebook. The function may use other functions, and
                variables that can be pickled.
            *args: Positional arguments of the function.
            pods: Number of pods; the first free pods are used. Default: all.
            timeout_s: Seconds until the run is cancelled; None: no limit.
            progress: Whether to show the line.
            **kwargs: Keyword arguments of the function.

        Returns:
            The returned values in the order of ranks.

        Raises:
            ConfigError: An object, named in the message, cannot be pickled, or the pods have
                another Python. Nothing has started.
            RunFailed: The function raised, or a rank failed. The message has the traceback; a
                notebook shows the card. `__cause__` is an exception of the raised type with its
                text, notes and causes.
            TimeoutError: The time is over.
            Detached: An interrupt came; the run continues.
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
        try:
            result.raise_for_status()
        except RunFailed as failed:
            raise failed from raised_by(run.paths, result.error.rank if result.error else None)
        return run.returned

    def map(
        self,
        function: Callable[[Any], object],
        items: Iterable[object],
        *,
        pods: int | None = None,
        timeout_s: float | None = None,
        progress: bool = True,
    ) -> list[object]:
        """Call a function of the notebook for every item, shared out over all ranks of a run.

        Args:
            function: A function of one argument, as for `run`.
            items: The items. Rank 0 of 4 ranks takes the first, the fifth, and so on.
            pods: Number of pods; the first free pods are used. Default: all.
            timeout_s: Seconds until the run is cancelled; None: no limit.
            progress: Whether to show the line.

        Returns:
            The returned values in the order of the items.

        Raises:
            ConfigError: As for `run`.
            RunFailed: The function raised for an item, or a rank failed. No value is returned.
            TimeoutError: The time is over.
            Detached: An interrupt came; the run continues.
        """
        if not callable(function):
            raise ConfigError(f"{shortened(function)} is not a function")
        whole = list(items)

        # The user's module and name: a function of an own module takes the module along.
        @functools.wraps(function)
        def share() -> list[object]:
            import os

            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            return [function(item) for item in whole[rank::ranks]]

        if not whole:
            return []
        shares = self.run(share, pods=pods, timeout_s=timeout_s, progress=progress)
        values = []
        for number in range(len(whole)):
            turn, rank = divmod(number, len(shares))
            values.append(cast("list[object]", shares[rank])[turn])
        return values

    def submit_prepared(
        self, prepared: PreparedRun, note: Mapping[str, object] | None = None
    ) -> Run:
        """Submit a run from `prepare_run` to the keeper. The note is added to the run's `run.json`.

        If the keeper's answer is late, a warning is shown and the run is returned. The run is
        queued until the keeper answers, and `wait` asks the keeper for the run.

        Raises:
            ConfigError: A pod cannot use the shared folder of the checkpoints. Nothing stays.
            RunError: The cluster is not ready, or has fewer pods than the run needs.
        """
        self._try_folder(prepared)
        info = {
            **(note or {}),
            "format": FORMAT,
            "id": prepared.run_id,
            "cluster": str(self.path),
            "submitted_s": time.time(),
        }
        job = prepared.spec.job
        paths = prepared.paths
        try:
            write_json(paths.info, info)
        except DiskFull:
            remove_folder(paths.root)  # no room even for the error of the run
            raise
        request = {"op": "submit", "run": prepared.run_id, "path": str(paths.root)}
        try:
            store = job.rules.checkpoints.store
            asked = {
                **request,
                "job": resolved(job).to_dict(),
                "pods": prepared.spec.pods,
                "environment": store_variables(store) if store else {},
            }
            ask(self._paths.socket, asked, timeout_s=_ANSWER_S)
        # The request may still wait in the keeper's socket: the run may start later.
        except Unanswered as error:
            late = (
                f"{error}. Run {prepared.run_id} starts once the "
                "keeper takes it; run.wait() asks the keeper for it"
            )
            warnings.warn(late, RuntimeWarning, stacklevel=2)
        except RunError as error:  # the directory must have the reason why the run never started
            # A run that has ended is refused too, and its result stays.
            if not has_result(paths):
                keep_reason(paths, prepared.spec, error)
            raise
        words = said_at_submit(prepared.spec, cluster_status(self.path).pods)
        if words:
            warnings.warn(words, RuntimeWarning, stacklevel=4)  # at the line that calls submit
        return Run.load(paths.root)

    def _try_folder(self, prepared: PreparedRun) -> None:
        """Refuse a run whose shared folder a running pod cannot use."""
        if not prepared.spec.job.rules.checkpoints.folder:
            return
        root = prepared.paths.root
        request = {"op": "folder", "path": str(root)}
        try:
            problem = ask(self._paths.socket, request, timeout_s=_PROBED_S)["problem"]
        except RunError as error:  # the submit asks the same keeper
            logger.info("%s", error)
            return
        if problem:
            remove_folder(root)
            raise ConfigError(str(problem))

    def command(self, job: Job | Function, *, pods: int | None = None) -> LaunchCommand:
        """Return the command that starts the ranks of a job, without starting it: the dry run.

        The job waits on the pods, so the command works in a terminal while the cluster lives. The
        command's output goes to the terminal alone, and there is no `Run`.

        Raises:
            ConfigError: As for `submit`.
            RunError: The cluster is not ready.
        """
        self._refuse_without_keeper()
        prepared = self._prepare(job, pods, self.path / "dry")
        job_form = resolved(prepared.spec.job).to_dict()
        request = {
            "op": "dry",
            "run": prepared.run_id,
            "path": str(prepared.paths.root),
            "job": job_form,
            "pods": pods,
        }
        answer = ask(self._paths.socket, request)
        return LaunchCommand(argv=answer["argv"], env=answer["env"])

    def _refuse_without_keeper(self) -> None:
        if words := no_keeper(RunPaths(self.path)):
            raise RunError(f"{words}. Submit jobs to another cluster")

    def _prepare(
        self, job: Job | Function, pods: int | None, parent: Path, root: str | Path | None = None
    ) -> PreparedRun:
        check_type("the call", job, (Job, Function), "a job, such as FineTune(…) or Script(…)")
        check_working_directory()
        status = cluster_status(self.path)
        script = as_script(job, self.path / "functions", status.pods)
        spec = RunSpec(cluster=self.spec, job=script, pods=pods)
        cluster = self.path
        with kept_up(cluster, self.spec.idle_timeout_s):
            return prepare_run(spec, root=root, parent=parent, cluster=cluster, pods=status.pods)
