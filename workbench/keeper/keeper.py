"""Run the keeper, a detached process per cluster that owns its pods and runs.

Notebooks read the state of cluster and runs from files.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from workbench.base import errors
from workbench.base.clock import now_s
from workbench.base.errors import RunError, WorkbenchError
from workbench.base.files import KeptFile
from workbench.base.redact import Redactor
from workbench.base.words import pluralize
from workbench.jobs.launcher import Launcher
from workbench.jobs.registry import job_from_dict
from workbench.keeper.awake import uptime_clock
from workbench.keeper.boundary import isolate_run_errors
from workbench.keeper.checkpoints import newest_in_place, part_reader
from workbench.keeper.decisions import DecisionLog
from workbench.keeper.fleet import Fleet
from workbench.keeper.launch import check_launcher_fits
from workbench.keeper.link.files import TransferProgress
from workbench.keeper.link.in_place import problem_at_submit
from workbench.keeper.private_dir import PrivateDir
from workbench.keeper.recovery import inherited_runs, run_context, wanted_pods
from workbench.keeper.requests import (
    Close,
    NewestCheckpoint,
    OfRun,
    Request,
    RequestServer,
    SharedFolder,
    Status,
    Submit,
)
from workbench.keeper.resource_limits import missing, retry_on_exhaustion
from workbench.keeper.run.runner import Runner
from workbench.keeper.run_queue import IdleTime, RunQueue
from workbench.keeper.spawn import STAY, TAKEN, log_to, process_facts, take_lock
from workbench.rundir.checkpoints import CHECKPOINT, newest_good, shared_run
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.store import DecisionKind, KnownRun
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    ClusterStatus,
    cluster_status,
    has_result,
    write_cluster_state,
)

logger = logging.getLogger(__name__)
_MEND_S = 2.0
_BROKEN_OFF = "closed: its start was broken off"
_NEVER_STARTED = "the cluster was closed before it started"


class Keeper:
    """Own a cluster from its launch to its end."""

    def __init__(
        self,
        paths: ClusterPaths,
        spec: ClusterSpec,
        redact: Redactor,
        before: ClusterStatus | None = None,
    ):
        """Own a cluster whose lock is taken. `before` is the last status of a dead keeper."""
        self._paths = paths
        self._spec = spec
        self._closing = threading.Event()
        self._fleet = Fleet(
            paths,
            spec,
            report=self._report,
            changed=self._write_state,
            closing=self._closing,
        )
        # Masks the secrets of the cluster and its jobs in everything written to disk.
        self._redact = redact
        redact.learn(spec.pods.env)
        self._log = DecisionLog(paths.store, redact)
        self._phase = "starting"
        self._message = "starting pods"
        self._error: str | None = None
        self._runners: dict[str, Runner] = {}
        # Results of runs that could not be taken over.
        self._failed_runs: dict[str, Mapping[str, object]] = {}
        self._was_ready = False
        self._ready_s: float | None = None
        self._over = False  # Whether at most the final state remains to be written.
        self._idle = IdleTime(spec.idle_timeout_s, self._write_state)
        self._queue = RunQueue(self._fleet, self._idle, self._closing)
        self._before = before
        self._states = [KeptFile(path) for path in (paths.own_state, paths.state)]
        self._process = process_facts(os.getpid())
        self._own_folder = PrivateDir(paths)
        self._fleet.pods = before.pods if before is not None else ()

    def serve(self) -> bool:
        """Launch the pods, answer requests until closed or idle, and clean up.

        Returns:
            False after an internal error. Pods that were ready then stay for the next keeper.
        """
        self._say(
            "starting",
            "starting pods" if self._before is None else "taking over from a keeper that died",
        )
        server = RequestServer(self._paths.socket, self._do, self._redact)
        threading.Thread(target=self._mend, args=(server,), daemon=True).start()
        threading.Thread(
            target=uptime_clock.keep, args=(threading.Event(),), name="awake", daemon=True
        ).start()
        last = ("closed", "closed")
        try:
            if self._before is not None:
                self._take_over(self._before)
            elif not self._closing.is_set():
                self._log.replay()
                self._fleet.launch()
            with self._queue.lock:
                if not self._closing.is_set():
                    taken = "taken over from a keeper that died" if self._before is not None else ""
                    ready = len(self._fleet.pods)
                    are = "is" if ready == 1 else "are"
                    parts = [f"{pluralize(ready, 'pod')} {are} ready", taken, self._fleet.shared]
                    self._ready_s = now_s()
                    self._say("ready", "; ".join(filter(None, parts)))
                self._was_ready = True
            self._keep_pods(self._closing)
            never = "the cluster was closed before it went on" if self._before else _NEVER_STARTED
            self._queue.run_in_order(self._end_idle, never)
        except WorkbenchError as error:
            last = self._failed(error, str(error))
        except Exception as error:  # Process boundary: the state file has the reason.
            last = self._failed(error, f"{type(error).__name__}: {error}")
        finally:
            asked = self._closing.is_set()
            self._closing.set()
            self._own_folder.close()
            self._keep_states()
            lost = last[0] == "lost" and not asked
            if asked or (self._fleet.owned and not lost):
                self._bring_held()
                phase = self._phase
                message = self._message
                self._fleet.remove_environments(lambda how: self._say(phase, f"{message}; {how}"))
                self._say(phase, message)
                self._fleet.take_down()
        server.close()
        with self._queue.lock:
            self._over = True
            self._say(*(("closed", self._message) if self._phase == "closing" else last))
        return not lost

    def _mend(self, server: RequestServer) -> None:
        last = ""
        while not self._closing.wait(_MEND_S):
            parts: list[Callable[[], object]] = [
                self._own_folder.mend,  # First: state and socket lie in the folder.
                *(partial(file.mend, beat=True) for file in self._states),
                server.mend,
                self._log.keep,
            ]
            for mend in parts:
                try:
                    mend()
                except Exception as error:  # Thread boundary: the directory may be gone.
                    if str(error) != last:
                        logger.warning("trying again every %g s: %s", _MEND_S, error)
                    last = str(error)
            self._keep_states()

    def _keep_states(self) -> None:
        for run_id, runner in list(self._runners.items()):
            with isolate_run_errors(run_id, "keeping the state of the run"):
                runner.keep_state()

    def _take_over(self, before: ClusterStatus) -> None:
        self._log.replay()
        # The store has the pods as they are. The state file masks secrets, also in paths.
        self._fleet.pods = ClusterStatus.read({"pods": self._log.pods}).pods or self._fleet.pods
        self._fleet.adopt()
        self._runners, self._failed_runs = inherited_runs(
            self._fleet, self._redact, before, self._log
        )
        for run_id, runner in self._runners.items():
            with isolate_run_errors(run_id, "entering the run into the queue", end=runner.fail):
                if not runner.over:
                    self._queue.add(runner)

    def _failed(self, error: Exception, words: str) -> tuple[str, str]:
        logger.error("the keeper ends", exc_info=error)
        with self._queue.lock:
            # The notebook asked to close, so the launch was given up.
            if self._closing.is_set():
                self._queue.end_waiting(_NEVER_STARTED)
                return "closed", "closed"
            self._over = True
        # The notebook raises the nearest class of `workbench.base.errors` again.
        public = [kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__)]
        self._error = public[0] if public else type(error).__name__
        # The pods are training. Another keeper finds the pods as after a kill.
        if self._was_ready:
            return "lost", f"the keeper ended because of an internal error: {words}"
        # The obstacle may be temporary.
        if self._before is not None:
            return "lost", f"another keeper could not take over: {words}"
        self._queue.end_waiting(words, error)
        return "failed", words

    def close(self, why: str = "closed by a signal") -> None:
        """Ask the keeper to cancel all runs and stop the pods. Returns soon; idempotent."""
        with self._queue.lock:
            # Keep the final state with its reason.
            if self._over:
                return
            launching = self._phase == "starting"
            self._closing.set()
            self._say("closing", why)
            for runner in self._queue.running:
                with isolate_run_errors(runner.context.run_id, "cancelling the run"):
                    runner.cancel()
            self._queue.lock.notify_all()
        if launching:
            self._fleet.give_up()

    def _keep_pods(self, over: threading.Event) -> None:
        threading.Thread(
            target=self._fleet.renew_leases, args=(over, lambda: self._queue.busy), daemon=True
        ).start()

    def _end_idle(self) -> None:
        self._closing.set()
        limit_s = self._spec.idle_timeout_s or 0
        self._say(
            "closing", f"closed after {limit_s:.0f} s without a run or a word from a notebook"
        )

    def _bring_held(self) -> None:
        # The agents' leases must be renewed until the end.
        over = threading.Event()
        self._keep_pods(over)
        for run_id, runner in self._runners.items():
            with isolate_run_errors(run_id, "bringing the last checkpoint back"):
                if not (runner.holds and runner.failed):
                    continue
                what = f"{self._message}; bringing the last checkpoint of {run_id} back"
                links = runner.context.links
                with TransferProgress(
                    links, lambda how: self._say("closing", how) if how else None, what
                ):
                    runner.bring()
        over.set()

    def _do(self, request: Request) -> dict[str, object]:
        self._idle.use()
        match request:
            case Status():
                return self._status()
            case Submit(op="dry"):
                return self._runner_for(request).dry()
            case Submit():
                return self._submit(request)
            case OfRun():
                return self._of_run(request)
            case NewestCheckpoint():
                links = self._fleet.first_live(self._spec.count)
                shared = shared_run(RunPaths(request.path))
                if shared is not None:
                    good = newest_in_place(links, shared, request.last_step)
                else:
                    good = newest_good(
                        request.path, last_step=request.last_step, on_pods=part_reader(links)
                    )
                return {"checkpoint": CHECKPOINT.dump_python(good, mode="json")}
            case SharedFolder():
                return {"problem": self._folder_problem(RunPaths(request.path))}
            case Close():
                self.close("closed by the notebook")
                return {}

    def _folder_problem(self, run: RunPaths) -> str:
        """Return why the pods cannot use the shared folder of a run. Empty: they can, or not yet.

        The start of the ranks tries again: pods may come later, or be lost now.
        """
        shared = shared_run(run)
        if shared is None or self._phase != "ready":
            return ""
        try:
            return problem_at_submit(self._fleet.first_live(self._spec.count), shared)
        except WorkbenchError as error:
            logger.warning("trying the folder %s: %s", shared.root.parent, error)
            return ""

    def _of_run(self, request: OfRun) -> dict[str, object]:
        if request.run in self._failed_runs:
            return self._of_failed(request, self._failed_runs[request.run])
        if request.run not in self._runners:
            raise RunError(f"the keeper has no run {request.run}")
        runner = self._runners[request.run]
        match request.op:
            case "cancel" | "stop":
                ask = runner.cancel if request.op == "cancel" else runner.stop
                if not self._queue.withdraw(runner):
                    # The call may wait for a pod, so do not hold the lock.
                    ask()
            case "fetch":
                return {"notes": runner.fetch()}
            case "bring":
                returned = runner.bring()
                return {"steps": returned.steps, "notes": returned.notes}
            case "outcome":
                return runner.outcome
            case "stacks":
                if runner not in self._queue.running:
                    raise RunError(f"run {request.run} is not running")
                return {"stacks": runner.stacks()}
        return {}

    def _of_failed(self, request: OfRun, result: Mapping[str, object]) -> dict[str, object]:
        if request.op == "outcome":
            return {
                "state": result.get("state"),
                "message": result.get("message"),
                "result": result,
            }
        if request.op in ("cancel", "stop"):
            return {}
        raise RunError(f"run {request.run} has ended: {result.get('message')}")

    def _status(self) -> dict[str, object]:
        running = [
            run_id for run_id, runner in self._runners.items() if runner in self._queue.running
        ]
        return {
            "phase": self._phase,
            "message": self._message,
            "package": self._fleet.package,
            "running": running,
        }

    def _submit(self, request: Submit) -> dict[str, object]:
        """Take a run, and wait outside the lock for a free thread or descriptor."""
        try:
            return retry_on_exhaustion(partial(self._take, request))
        except Exception as error:
            what = missing(error)
            if not what:
                raise
            raise RunError(
                f"the keeper has no free {what} (see ulimit -n and ulimit -u); "
                "submit the job again when other runs have ended"
            ) from error

    def _take(self, request: Submit) -> dict[str, object]:
        with self._queue.lock:
            runner = self._runners.get(request.run)
            # The answer to an earlier request was lost.
            if runner is not None and not runner.over:
                return {}
            self._check_new(request.run)
            # The submitter has given up the run since.
            if has_result(RunPaths(request.path)):
                raise RunError(
                    f"run {request.run} has ended: {request.path} "
                    "holds a result; submit the job again"
                )
            runner = self._runner_for(request)
            # The next keeper must know of the run before the run's directory tells of the queue.
            self._runners[request.run] = runner
            self._log.add(
                request.run,
                DecisionKind.SUBMITTED,
                path=request.path,
                pods=[link.pod.name for link in runner.context.links],
            )
            try:
                self._queue.add(runner)
            except Exception as error:
                del self._runners[request.run]
                self._log.add(
                    request.run, DecisionKind.WITHDRAWN, state=RunState.FAILED, message=str(error)
                )
                raise
        return {}

    def _check_new(self, run_id: str) -> None:
        """Raise RunError for a run that has ended, here or under an earlier keeper."""
        decided = self._log.of(run_id)
        if decided is not None and decided.over:
            raise RunError(
                f"run {run_id} has ended: {decided.outcome.get('message')}; submit the job again"
            )

    def _runner_for(self, request: Submit) -> Runner:
        """Return the runner of a request, without pods while the cluster waits for its pods."""
        waits = self._phase == "starting" and self._before is None and not self._over
        if waits and request.op == "dry":
            raise RunError(f"the pods have not started: {self._message}; wait with start()")
        if self._phase != "ready" and not waits:
            raise RunError(f"the cluster is {self._phase}: {self._message}; start another cluster")
        job = job_from_dict(request.job)
        run = KnownRun(id=request.run, path=request.path)
        pods = wanted_pods(job, request.pods, self._spec.count)
        links = [] if waits else self._fleet.first_live(pods)
        check_launcher_fits(Launcher(job.launcher), [link.pod for link in links])
        context = run_context(
            self._fleet,
            links,
            run,
            job,
            self._redact,
            self._log,
            pods=pods,
            store_environment=request.environment,
        )
        return Runner(context)

    def _report(self, line: str) -> None:
        if not self._closing.is_set():  # A cancelled launch still reports.
            self._say(self._phase, line)

    def _say(self, phase: str, message: str) -> None:
        self._phase = phase
        self._message = message
        logger.info("%s: %s", phase, message)
        self._write_state()

    def _write_state(self) -> None:
        pods = [pod.to_dict() for pod in self._fleet.pods]
        self._log.set_pods(pods)
        state = {
            "phase": self._phase,
            "message": self._message,
            "idle_end_s": self._idle.end_s if self._phase == "ready" else None,
            "error": self._error,
            "pods": pods,
            "arrived": [pod.to_dict() for pod in self._fleet.arrived],
            **self._process,
            "ready_s": self._ready_s,
            "time_s": now_s(),
        }
        for file in self._states:
            try:
                file.write(self._redact.json(state))
            except OSError as error:
                logger.warning("cannot write the state: %s", error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the keeper of a cluster directory. The spec is read from standard input.

    `--takes-over`: replace a dead keeper.
    """
    root, *options = argv or sys.argv[1:]
    paths = ClusterPaths(Path(root))
    redact = log_to(paths.keeper_log)
    leash = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 (unbuffered, no lock stays)
    line = leash.readline()
    before = cluster_status(paths.root) if "--takes-over" in options else None
    if not line.endswith(b"\n"):
        if before is None:
            write_cluster_state(paths, {"phase": "closed", "message": _BROKEN_OFF})
        return 0
    has_lock = take_lock(paths.keeper_lock)
    before = before and cluster_status(paths.root)
    if not has_lock or (
        before is not None and before.last_phase in ("closing", "closed", "failed")
    ):
        logger.info("another keeper has the cluster, or had the cluster until now")
        return TAKEN
    keeper = Keeper(paths, ClusterSpec.from_dict(json.loads(line)), redact, before)
    # Use a thread, as the handler may interrupt the holder of the keeper's lock.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=keeper.close).start())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The interrupt is meant for the notebook.

    def hold() -> None:
        if leash.readline() != STAY:
            keeper.close(_BROKEN_OFF)

    threading.Thread(target=hold, name="leash", daemon=True).start()
    if not keeper.serve():
        logging.shutdown()
        # Exit as after a kill: no thread of a run may act once another keeper may be running.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
