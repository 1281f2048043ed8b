"""Define `RunView`, which reads a run directory step by step.

Every `refresh` reads only new data, so a long run costs no more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json
from workbench.base.json_values import as_float, as_int, as_str
from workbench.base.words import pluralize
from workbench.rundir.catalog.hosts import hosts_in
from workbench.rundir.events import Event, EventKind, EventTail
from workbench.rundir.figures import metrics
from workbench.rundir.figures.curves import Curve, HostMemory, MemoryBook
from workbench.rundir.figures.deadline import early_end, end_of
from workbench.rundir.figures.samples import SampleTail
from workbench.rundir.figures.workers import GpuUse
from workbench.rundir.output.attempts import attempts_in, last_logs
from workbench.rundir.output.tail import LogTail
from workbench.rundir.register.registered import (
    cluster_of,
)
from workbench.rundir.result import HostSlots, ResultRecord, submitted_rows
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    cluster_status,
    has_result,
    id_of,
    message_of,
    run_at,
    silence_of,
    state_or_problem,
)
from workbench.rundir.thinned import ThinnedTail
from workbench.rundir.totals import Progress, RunTotals


class RunView:
    """State and figures of a run as of the last `refresh`."""

    def __init__(self, path: str | Path, curves: Sequence[str] = (), *, whole: bool = False):
        """Read the run. `curves` names the curves to keep besides the known metrics.

        `whole` curves have every point of a long run, for a part of a plot or smoothed values.
        """
        self.paths = run_at(path)
        self.id = id_of(self.paths)
        """Id of the run, unique in its cluster."""
        self.state: RunState = RunState.QUEUED
        self.message = ""
        self.hint = ""
        """Temporary remark of the keeper, such as silence or no step for a while."""
        self.totals = RunTotals()
        names = [metric.name for metric in metrics.rows()]
        names.extend(curves)
        self.curves: dict[str, Curve] = {name: Curve() for name in names}
        """Curves over optimizer steps, by name.

        Known metrics and requested curves come first, then other numbers that the run reports.
        """
        self.result: ResultRecord | None = None
        self.cluster_phase = ""
        """Phase of the run's cluster; `closed` if the keeper is gone."""
        # Each tail reads only what is new at every refresh.
        tail = EventTail if whole else ThinnedTail
        self._events = tail(self.paths.events)
        self._samples = SampleTail(self.paths.samples)
        self._logs: dict[tuple[int, int], list[LogTail]] = {}
        self._book = MemoryBook()
        self.memory: Mapping[str, HostMemory] = self._book.hosts
        self.hosts: Sequence[HostSlots] = ()
        """Pods of the run, in rank order. Empty before the start."""
        info = read_json(self.paths.info)
        self._submitted_s = as_float(info.get("submitted_s"))
        self._first_s: float | None = None
        self._seen: tuple[object, ...] = ()
        self.spec: RunSpec | None = None
        with suppress(WorkbenchError):
            self.spec = RunSpec.load(self.paths.spec, of_run=True)
        """Spec of the run. None: `spec.json` is missing or of an unsupported version."""
        self.submitted_rows = submitted_rows(self.paths)
        """Findings on the run's rows at submission. The ranks report the findings again."""
        self.refresh()

    def refresh(self) -> bool:
        """Read new data and return whether anything changed. `log` reads the logs."""
        if self.result is not None and self.state.is_terminal:
            return self._look_at_cluster()
        # Read the state before the events: a run that has ended has written all its events.
        state, problem = state_or_problem(self.paths)
        events = list(self._events.read())
        for event in events:
            self._take(event)
        samples, anew = self._samples.read()
        self._book.take_samples(samples, anew=anew)
        self._read_state(state, problem)
        has_new_phase = self._look_at_cluster()
        seen = (self.state, self.message, self.hint)
        has_new_state = seen != self._seen
        self._seen = seen
        return bool(events or samples) or has_new_state or has_new_phase

    @property
    def is_over(self) -> bool:
        """Whether the run and its cluster have ended."""
        return self.state.is_terminal and self.cluster_phase in ("closed", "failed", "")

    @property
    def progress(self) -> Progress:
        return self.totals.progress(self.state, self.message)

    @property
    def start(self) -> Mapping[str, object]:
        """Report of rank 0 at the start of training, with model, world_size, max_steps and more."""
        return self.totals.start

    @property
    def memory_kind(self) -> str:
        """Kind of memory in `memory`: `resident` or `cuda` (on GPUs)."""
        return self._book.kind

    @property
    def gpus(self) -> Sequence[GpuUse]:
        """Memory and load of every GPU so far, from its driver."""
        return self._samples.gpus.uses

    @property
    def world_size(self) -> int:
        """Number of ranks. 0: unknown so far."""
        reported = as_int(self.start.get("world_size"))
        if reported is not None:
            return reported
        if self.result is not None:
            return self.result.world_size
        return sum(host.slots for host in self.hosts)

    @property
    def batch(self) -> str:
        """Global batch as a product. Empty: unknown, or rank 0 reported another batch."""
        if self.spec is None or not self.world_size:
            return ""
        batch = self.spec.job.batch_on(self.world_size)
        if batch is None or not batch.factors:
            return ""
        reported = self.start.get("global_batch_size")
        if reported is not None and reported != batch.rows:
            return ""
        product = " x ".join(str(factor) for factor in batch.factors)
        return f"{product} = {batch.rows}"

    @property
    def elapsed_s(self) -> float | None:
        """Seconds from the submission to now or to the end.

        For a lost run, to its last event or sample. None: unknown.
        """
        if self.result is not None:
            return self.result.duration_s
        until_s: float | None = time.time()
        if self.state.is_terminal:
            last = (self.totals.last_s, self._samples.last_s)
            until_s = max((time_s for time_s in last if time_s is not None), default=None)
        if self._submitted_s is None or until_s is None:
            return None
        return max(0.0, until_s - self._submitted_s)

    @property
    def began_s(self) -> float | None:
        """Time of submission in seconds since 1970, or of the first event if earlier."""
        if self._submitted_s is None:
            return self._first_s
        if self._first_s is None:
            return self._submitted_s
        return min(self._submitted_s, self._first_s)

    @property
    def ranks(self) -> list[int]:
        """Ranks with a log in the last attempt."""
        return sorted({rank for rank, _ in last_logs(self.paths, "std*")})

    @property
    def _attempt(self) -> int:
        """Number of the last attempt, whose logs are shown."""
        with suppress(OSError):
            return max(attempts_in(self.paths), default=0)
        return 0

    def log(self, rank: int) -> list[str]:
        """Return a rank's last output lines without event lines: standard output, then stderr.

        The lines are of the last attempt.
        """
        key = (self._attempt, rank)
        if key not in self._logs:
            self._logs[key] = [
                LogTail(self.paths.rank_log(*key, stream)) for stream in ("stdout", "stderr")
            ]
        lines: list[str] = []
        for tail in self._logs[key]:
            tail.refresh()
            lines += tail.lines
        return lines

    def pod_name(self, address: str) -> str:
        """Return the name of the pod at an address, or the address if the name is unknown."""
        for host in self.hosts:
            if host.address == address and host.pod:
                return host.pod
        return address

    def _read_state(self, state: RunState, problem: str) -> None:
        if problem:
            self.state = state
            self.message = problem
            self.hint = ""
            return
        if state.is_terminal and has_result(self.paths):
            self.result = ResultRecord.load(self.paths.root)
            self.state = state
            self.message = self.result.message
            damaged = pluralize(self._events.damaged, "line")
            left_out = f"{damaged} of {self.paths.events} left out: the checksums are wrong"
            self.hint = left_out if self._events.damaged else ""
            self.hosts = self.result.hosts or self.hosts
            return
        raw = read_json(self.paths.state)
        self.state = state
        hints = (self._silence(state), as_str(raw.get("hint")), self._early_end())
        self.hint = next(filter(None, [*hints, self.totals.book.slow_rank]), "")
        if state is RunState.LOST:
            self.message = message_of(self.paths, state)
        else:
            self.message = as_str(raw.get("message"))

    def _silence(self, state: RunState) -> str:
        if state.is_terminal:
            return ""
        cluster = cluster_of(self.paths)
        return silence_of(cluster, cluster_status(cluster))

    def _early_end(self) -> str:
        """Return that the platform ends the pods before the run, at the run's own pace."""
        pods = cluster_status(cluster_of(self.paths)).pods
        return early_end(self.progress, self.totals.saved_step, end_of(pods), time.time())

    def _look_at_cluster(self) -> bool:
        before = self.cluster_phase
        cluster = cluster_status(cluster_of(self.paths))
        if cluster.alive:
            self.cluster_phase = cluster.phase
        else:
            self.cluster_phase = "closed"
        # The names of the pods are known only once the cluster has reported the pods.
        has_names = any(host.pod for host in self.hosts)
        if not has_names:
            hosts = hosts_in(self.paths.hostfile, cluster.pods)
            self.hosts = hosts or self.hosts
        return before != self.cluster_phase

    def _take(self, event: Event) -> None:
        if self._first_s is None:
            self._first_s = event.time_s
        self.totals.take(event)
        if event.kind == EventKind.MEMORY and event.rank is not None:
            self._book.take(event.rank, event, *self._place(event.rank))
        if event.kind == EventKind.RESTARTED:
            self.hosts = ()
            went_on = event.whole("step")
            for curve in self.curves.values():
                if went_on is None:
                    curve.repeat()
                else:
                    curve.cut(went_on)
        step = event.whole("step")
        # Another rank may be a step behind.
        late = event.rank not in (None, 0)
        # Steps of a new training return to the first step. Evaluations may be at other steps.
        training = self.totals.ended_trainings if event.kind == EventKind.EVAL else 0
        for name, value in metrics.figures_of(event).items():
            # The totals bound the number of names.
            if name in self.totals.curve_names and name not in self.curves:
                self.curves[name] = Curve()
            if name in self.curves:
                curve = self.curves[name]
                curve.follow(step, value, event.time_s, late=late, training=training)

    def _place(self, rank: int) -> tuple[str, int]:
        if not self.hosts:
            self._look_at_cluster()
        first = 0
        for host in self.hosts:
            after_last = first + host.slots
            if first <= rank < after_last:
                # A job of technique `single` uses a single slot, though its pod may have several.
                remaining = max(1, self.world_size - first)
                return host.address, min(host.slots, remaining)
            first = after_last
        return f"rank {rank}", 1
