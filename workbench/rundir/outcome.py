"""Decide how a run ended.

A run succeeded if every rank has a done-record, because exit codes and blame of launchers are
unreliable. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pydantic.dataclasses import dataclass

from workbench.base.json_values import parts
from workbench.base.words import counted
from workbench.pods.pod import Pod
from workbench.rundir.events import Event, EventKind
from workbench.rundir.result import RunFault
from workbench.rundir.tolerant import Number, TolerantRecord, Whole

_GIB = 1024**3
_END_SEEN_S = 2.0


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

    @property
    def failed(self) -> bool:
        if self.done or self.stopped:
            return False
        return self.error is not None or self.phase == "exited"


def rank_statuses(
    pod: Pod, answer: Mapping[str, object], clock_offset_s: float
) -> list[RankStatus]:
    """Read the states of the ranks from an agent's answer to `poll`."""
    return [_status(pod, raw, clock_offset_s) for raw in parts(answer.get("ranks"))]


def _status(pod: Pod, raw: Mapping[str, object], clock_offset_s: float) -> RankStatus:
    status = RankStatus.read({**raw, "pod": pod})
    ended_s = status.ended_s
    error = status.error
    if error is not None and error.time_s is not None:
        error = replace(error, time_s=error.time_s - clock_offset_s)
    if ended_s is not None:
        ended_s = ended_s - clock_offset_s
    return replace(status, ended_s=ended_s, error=error)


def first_cause(ranks: Iterable[RankStatus]) -> RunFault | None:
    """Return the fault of the rank that failed first. Ranks that only lost a peer come last."""
    ranks = list(ranks)
    failed = sorted((r for r in ranks if r.failed), key=_order)
    if not failed:
        return None
    early = _ended_early(ranks, failed[0]) if only_echoes(ranks) else None
    if early is not None:
        error = RankError(message="ended early with 0 while others waited for it")
        return _fault(early, error, failed)
    cause, *others = failed
    return _fault(cause, cause.error or RankError(), others)


def only_echoes(ranks: Iterable[RankStatus]) -> bool:
    """Whether at least a rank failed and all failed ranks only lost a peer."""
    failed = [r for r in ranks if r.failed]
    return bool(failed) and all(_is_echo(r) for r in failed)


def fold_failures(ranks: Iterable[RankStatus]) -> str:
    """Summarise the failed ranks, for a run with its cause elsewhere."""
    return _fold([r for r in ranks if r.failed])


def _ended_early(ranks: Sequence[RankStatus], echo: RankStatus) -> RankStatus | None:
    # A rank's sockets close before the rank ends, and a busy pod notices the end late.
    latest_s = _order(echo)[1] + _END_SEEN_S
    done = [
        r
        for r in ranks
        if r.done and r.exit_code == 0 and r.ended_s is not None and r.ended_s <= latest_s
    ]
    return min(done, key=lambda r: r.ended_s or 0.0, default=None)


def _is_echo(status: RankStatus) -> bool:
    return status.error is not None and status.error.echo


def _fault(cause: RankStatus, error: RankError, others: Sequence[RankStatus]) -> RunFault:
    return RunFault(
        host=cause.pod.address,
        pod=cause.pod.name,
        rank=cause.rank,
        kind=error.kind,
        message=error.message or f"exited with {cause.exit_code}",
        traceback=error.traceback,
        others=_fold(others),
    )


def _order(status: RankStatus) -> tuple[bool, float, int]:
    when_s = status.error.time_s if status.error else None
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
        message = status.error.message if status.error else ""
        ranks = by_message.setdefault(message or f"exit {status.exit_code}", [])
        ranks.append(status.rank)
    parts = []
    if lost:
        parts.append(f"{counted(len(lost), 'rank')} lost their peer ({_numbers(lost)})")
    for message, ranks in by_message.items():
        parts.append(f"also {_numbers(ranks)}: {message}")
    return "; ".join(parts)


def _numbers(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"{word} {numbers}"


class MemoryPeaks:
    """Track the peak of the summed memory of a host's ranks."""

    def __init__(self) -> None:
        self._resident: dict[str, float] = {}
        self._cuda: dict[str, dict[int, float]] = {}

    def record(self, ranks: Sequence[RankStatus]) -> None:
        sizes: dict[str, int] = {}
        for rank in ranks:
            address = rank.pod.address
            sizes[address] = sizes.get(address, 0) + rank.rss_bytes
        for address, size in sizes.items():
            self._record_resident(address, size / _GIB)

    def record_event(self, event: Event, address: str) -> None:
        reserved = event.number("cuda_reserved_gib")
        if reserved is not None and event.rank is not None:
            ranks = self._cuda.setdefault(address, {})
            ranks[event.rank] = max(reserved, ranks.get(event.rank, 0.0))

    def recall(self, events: Iterable[Event], addresses: Mapping[int, str]) -> None:
        """Restore the peaks from the events of a run, with the address of every rank."""
        for event in events:
            if event.rank is not None:
                self.record_event(event, addresses.get(event.rank, ""))
                continue
            rss_gib = event.number("rss_gib")
            if event.kind == EventKind.SAMPLE and rss_gib is not None:
                self._record_resident(event.text("host"), rss_gib)

    def _record_resident(self, address: str, now_gib: float) -> None:
        self._resident[address] = max(now_gib, self._resident.get(address, 0.0))

    @property
    def kind(self) -> str:
        return "cuda" if self._cuda else "resident"

    @property
    def resident_gib(self) -> dict[str, float]:
        """Return peaks of resident memory in GiB by host, for any `kind`.

        Only hosts with reports are included.
        """
        return {address: round(peak, 4) for address, peak in self._resident.items() if peak}

    @property
    def gib(self) -> dict[str, float]:
        peaks = self._resident
        if self._cuda:
            peaks = {address: sum(ranks.values()) for address, ranks in self._cuda.items()}
        return {address: round(peak, 4) for address, peak in peaks.items()}
