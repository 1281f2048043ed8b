"""Every printed event is in the journal once, whatever fails between the rank and the file."""

from __future__ import annotations

import json
import resource
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.eventlines import format_event
from tests.support.examples import tries
from tests.support.writtenrun import write_run
from workbench.base.files import write_json
from workbench.base.process import rank_log
from workbench.rundir import events
from workbench.rundir import journal as journal_module
from workbench.rundir.events import (
    MARK,
    Event,
    EventKind,
    Events,
    EventTail,
    log,
    read_events,
    recorded_line,
)
from workbench.rundir.journal import Journal
from workbench.rundir.output.collect import Collector
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

RANKS = (0, 1)


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Let every write beyond a size fail, as on a disk that is full."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def figures_of(events: Iterable[Event]) -> set[tuple[object, ...]]:
    return {(each.time_s, each.rank, each.kind, each.data.get("step")) for each in events}


@given(at=st.integers(0, 1 << 20), bits=st.integers(1, 255))
def test_no_flipped_bit_changes_an_event_that_is_read(
    tmp_path_factory: pytest.TempPathFactory, at: int, bits: int
) -> None:
    path = tmp_path_factory.mktemp("flipped") / "events.jsonl"
    written = [
        Event(time_s=1.5, rank=0, kind="step", data={"step": 12, "crc": 3}),
        Event(time_s=2.5, rank=0, kind="step", data={"step": 34}),
    ]
    data = bytearray("".join(map(recorded_line, written)).encode())
    path.write_bytes(data)
    tail = EventTail(path)
    assert (list(tail.read()), tail.damaged) == (written, 0)
    data[at % len(data)] ^= bits
    path.write_bytes(data)
    assert figures_of(EventTail(path).read()) <= figures_of(written)


def test_the_panel_of_an_ended_run_counts_its_damaged_events(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    journal = Journal(run.paths)
    for step in (1, 2, 3):
        journal.event(Event(time_s=step, rank=0, kind=EventKind.STEP, data={"loss": 0.5 + step}))
    run.paths.events.write_text(run.paths.events.read_text().replace("2.5", "2.4"))
    write_json(run.paths.result, {"state": RunState.SUCCEEDED, "message": "all ranks finished"})
    view = RunView(run.paths.root)
    assert view.hint == f"1 line of {run.paths.events} left out: the checksums are wrong"


def told(rank: int, **data: object) -> str:
    """Return a printed event. The lines of a schedule have the same length in every trial."""
    return MARK + Event(time_s=1.5, rank=rank, kind="told", data=data).to_json() + "\n"


class World:
    """Pods whose ranks print, the keeper that reads them, and the run directory between both."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.paths = RunPaths(folder)
        self.now = 0.0
        self.full_at: int | None = None
        self.attempt = 0
        self.numbers = count()
        self.pods = dict.fromkeys(RANKS, b"")
        self.expected: dict[int, list[int]] = {rank: [] for rank in RANKS}
        self.at_risk: set[int] = set()
        """Events that a lost pod has taken along, or that only a keeper's memory had."""
        self.known = dict.fromkeys(RANKS, 0)
        """Number of expected events of earlier attempts."""
        self.own = 0
        self.restarts: list[Event] = []
        self.journal = Journal(self.paths)
        self.collect()

    def collect(self) -> None:
        self.collectors = {}
        for rank in RANKS:
            self.collectors[rank] = Collector(
                self.paths, [rank], clock=lambda: self.now, attempt=self.attempt
            )

    def prints(self, rank: int, what: str) -> None:
        number = next(self.numbers)
        match what:
            case "event":
                line = "\n" + told(rank, n=number)
            case "forged":
                numbers = {"attempt": 0, "offset": 0, "printed_by": 1 - rank}
                line = told(1 - rank, **numbers, n=number)
            case "nonsense":
                line = '@workbench {"kind": 5}\n'
            case "half a line":
                line = '@workbench {"time_s": 1.0, "ra'
            case _:
                line = f"text {number}\n"
        # An event behind half a line is part of the line.
        unfinished = not self.pods[rank].endswith(b"\n") and self.pods[rank] != b""
        if what == "event" or (what == "forged" and not unfinished):
            self.expected[rank].append(number)
        self.pods[rank] += line.encode()

    def poll(self, rank: int, most: int, *, hears: bool = True) -> bool:
        """Read the next output of a rank. A journal that does not hear gets no event of it."""
        name = rank_log(self.attempt, rank, "stdout")
        collector = self.collectors[rank]
        begin = collector.offsets[name]
        piece = self.pods[rank][begin : begin + most]
        if not piece:
            return False
        chunk = {"offset": begin, "data": piece.decode("latin-1")}
        with no_file_beyond(-1 if self.full_at is None else self.full_at):
            for event in collector.take({name: chunk}):
                if hears:
                    self.journal.event(event)
        return True

    def drain(self) -> None:
        for rank in RANKS:
            while self.poll(rank, 4096):
                pass

    def samples(self) -> None:
        self.own += 1
        with no_file_beyond(-1 if self.full_at is None else self.full_at):
            self.journal.event(Event(time_s=1.0, rank=None, kind="note"))

    def dies(self, rank: int, cut: float, in_flight: int = 0) -> None:
        """Let the keeper die with what it had in memory, and another keeper take over.

        The last bytes have reached the log and not the journal.
        """
        if in_flight:
            self.poll(rank, in_flight, hears=False)
        here = self.paths.rank_log(self.attempt, rank, "stdout")
        with here.open("r+b") as file:
            file.truncate(int(here.stat().st_size * cut))
        self.journal._close_scalars()  # its thread would live as long as the tests
        self.journal = Journal(self.paths)
        with no_file_beyond(-1 if self.full_at is None else self.full_at):
            self.journal.recover(restarts=self.restarts)
        self.collect()

    def room(self) -> None:
        self.full_at = None
        self.now += 100
        self.journal.keep()

    def restart(self, drained: bool) -> None:
        """Begin another attempt, whose pods have nothing of the attempt before."""
        if drained:
            self.drain()
        for rank in RANKS:
            here = self.paths.rank_log(self.attempt, rank, "stdout").read_bytes()
            kept = {each for each in self.expected[rank] if f'"n": {each}}}\n'.encode() in here}
            self.at_risk |= set(self.expected[rank][self.known[rank] :]) - kept
            self.known[rank] = len(self.expected[rank])
            self.pods[rank] = b""
        self.attempt += 1
        event = Event(time_s=1.0, rank=None, kind=EventKind.RESTARTED)
        # The log of decisions has the restart as well.
        self.restarts.append(event)
        with no_file_beyond(-1 if self.full_at is None else self.full_at):
            self.journal.event(event)
        self.collect()

    def check(self) -> None:
        """Compare what is in the journal with what was printed, at the end."""
        self.room()
        self.drain()
        self.room()
        self.drain()
        self.journal._close_scalars()
        lines = [json.loads(line) for line in self.paths.events.read_text().splitlines()]
        told = [line for line in lines if line["kind"] == "told"]
        for number, times in Counter(line["n"] for line in told).items():
            assert times == 1, f"event {number} is there {times} times"
        events = list(read_events(self.paths.events))
        assert len(events) == len(lines), "no reader leaves out an event"
        for rank in RANKS:
            ours = [event for event in events if event.output == rank]
            numbers = [event.whole("n") for event in ours]
            safe = [number for number in self.expected[rank] if number not in self.at_risk]
            assert [number for number in numbers if number not in self.at_risk] == safe
            assert numbers == sorted(numbers, key=lambda number: number or 0)
            places = [(event.attempt or 0, event.offset or 0) for event in ours]
            assert places == sorted(set(places))
        begun = [event.attempt for event in events if event.kind == EventKind.RESTARTED]
        assert begun == list(range(1, self.attempt + 1))
        for number, event in enumerate(events):
            before = [each.attempt or 0 for each in events[:number]]
            assert (event.attempt or 0) >= max(before, default=0), "an attempt is over"


ACTS = st.one_of(
    st.tuples(
        st.just("prints"),
        st.sampled_from(RANKS),
        st.sampled_from(("event", "event", "forged", "nonsense", "half a line", "text")),
    ),
    st.tuples(st.just("poll"), st.sampled_from(RANKS), st.integers(1, 400)),
    st.tuples(st.just("full"), st.integers(0, 500)),
    st.tuples(st.just("room")),
    st.tuples(st.just("later"), st.sampled_from((0.5, 5.0))),
    st.tuples(st.just("samples")),
    st.tuples(st.just("dies"), st.sampled_from(RANKS), st.floats(0.0, 1.0), st.integers(0, 400)),
    st.tuples(st.just("dies"), st.sampled_from(RANKS), st.just(1.0), st.integers(0, 400)),
    st.tuples(st.just("restart"), st.booleans()),
)


# The disk takes the events and not the log, then the run restarts. The next attempt prints events
# at the same offsets, and a keeper dies before it has written one.
CLASH = [
    ("prints", 0, "text"),
    ("prints", 0, "text"),
    ("poll", 0, 400),
    ("prints", 0, "event"),
    ("prints", 0, "event"),
    ("full", 0),
    ("poll", 0, 400),
    ("room",),
    ("restart", False),
    ("prints", 0, "event"),
    ("dies", 0, 1.0, 400),
]


def acts(world: World, schedule: list[tuple]) -> None:  # type: ignore[type-arg]
    for act, *details in schedule:
        match act:
            case "full":
                (world.full_at,) = details
            case "later":
                world.now += details[0]
            case _:
                getattr(world, act)(*details)
    world.check()


def scheduled(folder: Path, examples: int) -> int:
    tried = []

    @tries(examples)
    @example(CLASH)
    @given(st.lists(ACTS, max_size=40))
    def each(schedule: list[tuple]) -> None:  # type: ignore[type-arg]
        tried.append(schedule)
        acts(World(folder / f"run-{len(tried)}"), schedule)

    each()
    return len(tried)


def test_each_event_is_there_once_and_in_order(tmp_path: Path) -> None:
    threads = threading.active_count()
    assert scheduled(tmp_path, 150) >= 150
    assert threading.active_count() <= threads, "a writer of curves is left open"


def test_a_disk_that_was_full_for_a_while_and_a_dead_keeper_leave_one_history(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "run")
    for number in range(40):
        if number == 10:
            world.full_at = 700
        if number == 20:
            world.dies(0, 1.0)
        if number == 30:
            world.room()
        for rank in RANKS:
            world.prints(rank, "event")
            world.poll(rank, 4096)
        world.now += 0.3
    world.check()
    steps = [event.whole("n") for event in read_events(world.paths.events) if event.rank == 1]
    assert steps == list(range(1, 80, 2))
    frame = Events(world.paths.events).to_dataframe()
    assert list(frame.columns) == ["time_s", "rank", "kind", "n", "attempt", "offset"]
    log = world.paths.rank_log(0, 0, "stdout").read_bytes()
    for offset in frame[frame["rank"] == 0]["offset"]:
        assert log[offset:].startswith(MARK.encode())


def test_a_rank_cannot_choose_a_number_or_hide_an_event_of_another_rank(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.prints(0, "forged")
    world.prints(1, "event")
    world.drain()
    forged, honest = read_events(world.paths.events)
    assert (forged.rank, forged.printed_by, forged.output, forged.offset) == (1, 0, 0, 0)
    assert (honest.rank, honest.printed_by, honest.output, honest.offset) == (1, None, 1, 1)


def test_events_beyond_the_memory_of_a_keeper_are_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path)
    monkeypatch.setattr(journal_module, "_MOST_LATE", 5)
    journal = Journal(run.paths)
    collector = Collector(run.paths, [0])
    data = "".join(format_event("told", rank=0, n=number) + "\n" for number in range(20))
    run.paths.events.unlink()
    run.paths.events.mkdir()  # takes no event
    for event in collector.take({"attempt-0/rank-0.stdout.log": {"offset": 0, "data": data}}):
        journal.event(event)
    run.paths.events.rmdir()
    journal.finish(
        RunState.SUCCEEDED,
        message="",
        fault=None,
        facts={"started_s": 1.0},
        spec=RunSpec.load(run.paths.spec),
        pods=(),
        world_size=1,
    )
    told = [event.whole("n") for event in read_events(run.paths.events)]
    assert told == list(range(20))


@pytest.mark.parametrize("size", [50_000, 1 << 20, 5 << 20])
def test_a_line_without_end_changes_no_offset(tmp_path: Path, size: int) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    endless = b"@workbench " + b"x" * (3 << 20) + b"@workbench {}\n"
    data = endless + format_event("told", rank=0, n=1).encode() + b"\n"
    events = []
    for number, begin in enumerate(range(0, len(data), size)):
        if number % 10 == 0:  # a collector that continues finds the same offsets
            collector = Collector(paths, [0])
        piece = data[begin : begin + size].decode("latin-1")
        events += collector.take({"attempt-0/rank-0.stdout.log": {"offset": begin, "data": piece}})
    (event,) = events
    assert event.offset == len(endless)


def test_a_figure_with_the_name_of_a_number_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUN", "r")
    for step in range(2):
        log(step, loss=1.0, attempt=3)
    out, err = capfd.readouterr()
    assert err.count("the figure 'attempt' is not recorded") == 1
    assert out.count('"loss": 1.0') == 2
    assert "attempt" not in out


@pytest.mark.parametrize("value", ["much", [1.0], {"a": 1}, 10**400, 1j, b"1.x"])
def test_a_value_that_is_no_number_is_named_once_and_ends_no_training(
    value: object, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUN", "r")
    monkeypatch.setattr(events, "_refused", set())
    for step in range(2):
        log(step, loss=1.0, odd=value, eval_loss=None)
    log(value, loss=7.0)  # type: ignore[arg-type]
    out, err = capfd.readouterr()
    kind = type(value).__name__
    assert err.count(f"the figure 'odd' is not recorded, because a value of type {kind} is no") == 1
    assert out.count('"loss": 1.0') == 2
    assert "odd" not in out and "eval_loss" not in out
    # Python's whole numbers have no largest, so a step may be as large.
    assert ("the figure 'step'" in err) == (not isinstance(value, int))
