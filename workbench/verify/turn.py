"""A row's turn on the pods: waits end with the row's limit, and the devices are noted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.base.errors import RunError
from workbench.base.words import counted
from workbench.verify.bench import Bench, Facts, cancel
from workbench.verify.outcome import Broken, Cannot

if TYPE_CHECKING:
    from workbench import Cluster, FineTune, Function, Run
    from workbench.results import FineTuneRun


T = TypeVar("T")
_FREE_S = 20.0
_LOOK_S = 0.5


class Turn:
    """Access of a single row to the pods. Refuses new work after the row's limit."""

    def __init__(self, bench: Bench, limit_s: float) -> None:
        self.bench = bench
        self._deadline_s = time.monotonic() + limit_s
        self._ran_on: dict[str, set[int]] = {}

    @property
    def left_s(self) -> float:
        """Seconds until the limit of the row."""
        return max(0.0, self._deadline_s - time.monotonic())

    @property
    def ran_on(self) -> str:
        parts = []
        for device, counts in self._ran_on.items():
            *some, most = sorted(counts)
            ranks = ", ".join([*(str(count) for count in some), counted(most, "rank")])
            parts.append(f"{ranks} on {device}")
        return "; ".join(parts)

    @property
    def ranks(self) -> int:
        """Number of ranks on all pods of the main cluster."""
        return len(self.bench.facts)

    @property
    def first(self) -> Facts:
        """Facts of the first rank."""
        return self.bench.first

    @property
    def has_gpus(self) -> bool:
        return self.bench.has_gpus

    def need_gpus(self, why: str = "") -> None:
        """Raise Cannot without GPUs. `why` completes the reason."""
        if not self.has_gpus:
            raise Cannot(f"no CUDA device on the pods{why and f'; {why}'}")

    def need_ranks(self, count: int) -> None:
        if self.ranks < count:
            only = "one GPU only" if self.has_gpus else "one rank only"
            raise Cannot(f"{only}, and the claim needs {count} ranks")

    def need_package(self, module: str, package: str) -> None:
        if module not in self.first.packages:
            raise Cannot(f"package {package} is missing on the pods")

    def need_compiler(self) -> None:
        """Raise Cannot if DeepSpeed would compile its host AdamW and has no compiler."""
        if self.has_gpus and not self.first.compiler:
            raise Cannot("the pods have no C++ compiler, and DeepSpeed compiles its host AdamW")

    def call(
        self,
        function: Callable[..., object],
        *args: object,
        pods: int | None = None,
        cluster: Cluster | None = None,
    ) -> list[Any]:
        """Call a function on every rank, and return the values in the order of ranks."""
        from workbench import Function

        on = cluster or self.bench.main
        run = self.submit(Function(function, args), pods=pods, cluster=on)
        self.wait(run)
        returned: list[Any] = run.returned
        self.note(len(returned), on)
        return returned

    def train(
        self,
        job: FineTune,
        *,
        pods: int | None = None,
        cluster: Cluster | None = None,
    ) -> FineTuneRun:
        """Train, and return the successful run. An equal job of an earlier row is not repeated."""
        on = cluster or self.bench.main
        if cluster is None:
            known = self.bench.known_run(job, pods)
            if known is not None:
                self.note(known.result.world_size, on)
                return known
        run: FineTuneRun = self.submit(job, pods=pods, cluster=on)
        self.wait(run)
        self.note(run.result.world_size, on)
        if cluster is None:
            self.bench.keep_run(job, pods, run)
        return run

    def submit(
        self,
        job: FineTune | Function,
        *,
        pods: int | None = None,
        cluster: Cluster | None = None,
    ) -> Any:
        if not self.left_s:
            raise TimeoutError("the row is over its limit")
        return (cluster or self.bench.main).submit(job, pods=pods)

    def wait(self, run: Run, *, must_succeed: bool = True) -> Any:
        """Wait for the end of a run, at most until the row's limit, and return the result."""
        try:
            result = run.wait(self.left_s, progress=False)
        except TimeoutError:
            cancel(run)
            raise TimeoutError(f"{run.id} was not done in time; see {run.paths.logs}") from None
        return result.raise_for_status() if must_succeed else result

    def once_free(self, action: Callable[[], T]) -> T:
        """Repeat an action that needs free pods: the last run may still be cleared from the pods.

        The action raises RunError while a run uses the pods.
        """
        deadline_s = time.monotonic() + min(_FREE_S, self.left_s)
        while True:
            try:
                return action()
            except RunError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_LOOK_S)

    def note(self, ranks: int, cluster: Cluster) -> None:
        """Note device and ranks for the table."""
        # All other clusters of a bench with GPUs are of the same machine.
        on_gpus = self.has_gpus and (cluster is self.bench.main or cluster.spec.pods.gpus > 0)
        device = self.first.name if on_gpus else "CPU"
        self._ran_on.setdefault(device, set()).add(ranks)


def curve(run: Run, name: str) -> list[float]:
    """Return the values of a figure at all steps, from rank 0."""
    values = []
    for event in run.events():
        if event.kind == "step":
            value = event.number(name)
            if value is not None:
                values.append(value)
    return values


def engine(run: Run) -> Mapping[str, Any]:
    """Return what the first rank counted on its tensors after the first step."""
    for event in run.events():
        if event.kind == "engine":
            return event.data
    raise RunError(f"{run.id} reported no state of its engine; see {run.paths.logs}")


def difference(got: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two curves.

    Example:
        >>> difference([2.0, 1.1], [2.0, 1.0])  # doctest: +ELLIPSIS
        0.1...
    """
    if len(got) != len(expected) or not got:
        raise Broken(f"{len(got)} steps have a figure, and {len(expected)} were expected")
    largest = 0.0
    for one, other in zip(got, expected, strict=True):
        off = abs(one - other) / max(abs(other), 1e-12)
        # NaN compares as unequal to everything, so a maximum would lose it.
        if off != off:
            raise Broken("a figure is not a number")
        largest = max(largest, off)
    return largest


def at_most(what: str, value: float, limit: float) -> str:
    """Return the figure in words, or raise Broken if the figure is above the limit."""
    words = f"{what} {value:.3g}"
    if not value <= limit:
        raise Broken(f"{words}, at most {limit:g} allowed")
    return words
