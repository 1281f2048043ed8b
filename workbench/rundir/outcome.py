"""Decide how a run ended.

A run succeeded if every rank has a done-record, because exit codes and blame of launchers are
unreliable. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from pydantic.dataclasses import dataclass

from workbench.base.json_values import as_int, as_objects
from workbench.base.record.tolerant import Number, TolerantRecord, Whole
from workbench.base.words import pluralize, truncate
from workbench.pods.pod import Pod
from workbench.rundir.events import Event
from workbench.rundir.result import RunFault

_GIB = 1024**3
_END_SEEN_S = 2.0
# An agent keeps less. A result with longer texts could not be read again.
_KIND_LETTERS = 200
_MESSAGE_LETTERS = 8 << 10
_TRACEBACK_LETTERS = 128 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError(TolerantRecord):
    """Failure of a rank, recorded by the rank or its agent."""

    kind: str = "exit"
    """Exception class, `signal` or `exit`."""
    message: str = ""
    """Description in a line. Empty: only the exit code is known."""
    traceback: str = ""
    time_s: Number | None = None
    echo: bool = False
    """Whether the rank only lost a peer, so the cause is another rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus(TolerantRecord):
    """State of a rank from the agent's last report, with times on the local clock."""

    rank: Whole
    pod: Pod
    phase: str = "waiting"
    """`waiting`, `running` or `exited`."""
    exit_code: Whole | None = None
    """Exit code. Negative: the number of a signal."""
    done: bool = False
    stopped: bool = False
    """Whether the rank stopped on request."""
    asked: str = ""
    """Way in which a script's rank was asked to stop: a signal, or Trainer. Empty: not asked."""
    forced: bool = False
    """Whether the rank had to be killed after a request to stop."""
    ended_s: Number | None = None
    error: RankError | None = None
    rss_bytes: Whole = 0
    """Resident memory of the rank and its children."""
    cpu_s: Number = 0.0
    """CPU time of the rank and its children, seconds."""
    halted: bool = False
    """Whether a signal (SIGSTOP) has suspended the rank."""
    alone: bool = False
    """Whether a script's rank imported torch and has opened no process group."""

    @property
    def shown(self) -> str:
        """The phase, or `halted` while a signal has suspended the rank."""
        return "halted" if self.halted and self.phase == "running" else self.phase

    @property
    def failed(self) -> bool:
        if self.done or self.stopped:
            return False
        return self.error is not None or self.phase == "exited"


def rank_statuses(
    pod: Pod,
    answer: Mapping[str, object],
    clock_offset_s: float,
    own: Collection[int] | None = None,
) -> list[RankStatus]:
    """Read the states of the ranks from an agent's answer to `poll`.

    `own` are the ranks on the pod; None: any. Raise ValueError for a rank without a number, and for
    a rank of another pod.
    """
    rows = as_objects(answer.get("ranks"))
    for raw in rows:
        rank = as_int(raw.get("rank"))
        if rank is None:
            raise ValueError(f"{pod.name} reports a rank without a number")
        if own is not None and rank not in own:
            raise ValueError(f"{pod.name} reports rank {rank}, and the rank runs on another pod")
    return [_status(pod, raw, clock_offset_s) for raw in rows]


def _status(pod: Pod, raw: Mapping[str, object], clock_offset_s: float) -> RankStatus:
    status = RankStatus.read({**raw, "pod": pod})
    ended_s = status.ended_s
    error = status.error
    if error is not None:
        when_s = error.time_s
        error = replace(
            error,
            kind=truncate(error.kind, _KIND_LETTERS),
            message=truncate(error.message, _MESSAGE_LETTERS),
            traceback=truncate(error.traceback[-_TRACEBACK_LETTERS:], _TRACEBACK_LETTERS),
            time_s=None if when_s is None else when_s - clock_offset_s,
        )
    if ended_s is not None:
        ended_s = ended_s - clock_offset_s
    asked = truncate(status.asked, _KIND_LETTERS)
    return replace(status, ended_s=ended_s, error=error, asked=asked)


def first_cause(ranks: Iterable[RankStatus]) -> RunFault | None:
    """Return the fault of the rank that failed first. Ranks that only lost a peer come last."""
    ranks = list(ranks)
    failed = _failed(ranks)
    failed.sort(key=_order)
    if not failed:
        return None
    # Where all failed ranks only lost a peer, the cause may be a rank that ended too early.
    if only_echoes(ranks):
        early = _ended_early(ranks, failed[0])
        if early is not None:
            error = RankError(message="ended early with 0 while others waited for it")
            return _fault(early, error, failed)
    cause, *others = failed
    error = cause.error or RankError()
    return _fault(cause, error, others)


def only_echoes(ranks: Iterable[RankStatus]) -> bool:
    """Whether at least a rank failed and all failed ranks only lost a peer."""
    failed = _failed(ranks)
    if not failed:
        return False
    return all(_is_echo(status) for status in failed)


def fold_failures(ranks: Iterable[RankStatus]) -> str:
    """Summarise the failed ranks, for a run with its cause elsewhere."""
    return _fold(_failed(ranks))


def _failed(ranks: Iterable[RankStatus]) -> list[RankStatus]:
    return [status for status in ranks if status.failed]


def _ended_early(ranks: Sequence[RankStatus], echo: RankStatus) -> RankStatus | None:
    # A rank's sockets close before the rank ends, and a busy pod notices the end late.
    latest_s = _order(echo)[1] + _END_SEEN_S
    done: list[RankStatus] = []
    for status in ranks:
        ended_s = status.ended_s
        if not status.done or status.exit_code != 0 or ended_s is None:
            continue
        if ended_s <= latest_s:
            done.append(status)
    return min(done, key=lambda status: status.ended_s or 0.0, default=None)


def _is_echo(status: RankStatus) -> bool:
    if status.error is None:
        return False
    return status.error.echo


def _fault(cause: RankStatus, error: RankError, others: Sequence[RankStatus]) -> RunFault:
    message = error.message
    if not message:
        message = f"exited with {cause.exit_code}"
    return RunFault(
        host=cause.pod.address,
        pod=cause.pod.name,
        rank=cause.rank,
        kind=error.kind,
        message=message,
        traceback=error.traceback,
        exit_code=cause.exit_code,
        others=_fold(others),
    )


def _order(status: RankStatus) -> tuple[bool, float, int]:
    when_s = None
    if status.error is not None:
        when_s = status.error.time_s
    if when_s is None:
        when_s = status.ended_s or float("inf")
    return _is_echo(status), when_s, status.rank


def _fold(others: Sequence[RankStatus]) -> str:
    if not others:
        return ""
    lost: list[int] = []
    by_message: dict[str, list[int]] = {}
    for status in others:
        if _is_echo(status):
            lost.append(status.rank)
            continue
        message = ""
        if status.error is not None:
            message = status.error.message
        if not message:
            message = f"exit {status.exit_code}"
        by_message.setdefault(message, []).append(status.rank)
    clauses = []
    if lost:
        clauses.append(f"{pluralize(len(lost), 'rank')} lost their peer ({_numbers(lost)})")
    for message, ranks in by_message.items():
        clauses.append(f"also {_numbers(ranks)}: {message}")
    return "; ".join(clauses)


def _numbers(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"{word} {numbers}"


class MemoryPeaks:
    """Track the peak of the summed memory of a host's ranks.

    Resident memory is sampled. A run too short for a sample has the sum of its ranks' own peaks.
    """

    def __init__(self) -> None:
        self._sampled: dict[str, float] = {}
        self._own: dict[str, dict[int, float]] = {}
        self._cuda: dict[str, dict[int, float]] = {}

    def record(self, ranks: Sequence[RankStatus]) -> None:
        sizes: dict[str, int] = {}
        for rank in ranks:
            address = rank.pod.address
            size = sizes.get(address, 0)
            sizes[address] = size + rank.rss_bytes
        for address, size in sizes.items():
            self._record_resident(address, size / _GIB)

    def record_event(self, event: Event, address: str) -> None:
        if event.rank is None:
            return
        for peaks, figure in ((self._own, "peak_rss_gib"), (self._cuda, "cuda_reserved_gib")):
            peak = event.number(figure)
            if peak is not None:
                ranks = peaks.setdefault(address, {})
                ranks[event.rank] = max(peak, ranks.get(event.rank, 0.0))

    def recall(
        self,
        events: Iterable[Event],
        addresses: Mapping[int, str],
        sampled_gib: Mapping[str, float],
    ) -> None:
        """Restore the peaks from the files of a run.

        `addresses` has the address of every rank, and `sampled_gib` the highest sample of a host.
        """
        for event in events:
            if event.rank is not None:
                address = addresses.get(event.rank, "")
                self.record_event(event, address)
        for address, gib in sampled_gib.items():
            self._record_resident(address, gib)

    def _record_resident(self, address: str, now_gib: float) -> None:
        peak_before = self._sampled.get(address, 0.0)
        self._sampled[address] = max(now_gib, peak_before)

    @property
    def kind(self) -> str:
        return "cuda" if self._cuda else "resident"

    @property
    def resident_gib(self) -> dict[str, float]:
        """Return peaks of resident memory in GiB by host, for any `kind`.

        Only hosts with reports are included.
        """
        peaks = {address: peak for address, peak in self._sampled.items() if peak}
        return _rounded(_sums(self._own) | peaks)

    @property
    def gib(self) -> dict[str, float]:
        return _rounded(_sums(self._cuda)) if self._cuda else self.resident_gib


def _sums(peaks: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    return {address: sum(ranks.values()) for address, ranks in peaks.items()}


def _rounded(peaks: Mapping[str, float]) -> dict[str, float]:
    return {address: round(peak, 4) for address, peak in peaks.items()}
