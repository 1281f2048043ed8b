"""The samples of the pods' memory: one file of bounded size, for runs of any length."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.writtenrun import T0, WrittenRun, write_run
from workbench.base.files import read_json, records, write_json
from workbench.base.redact import Redactor
from workbench.finetune.job.finetune import FineTune
from workbench.rundir.events import MARK, STATE_EVENTS, parse_event, read_events
from workbench.rundir.figures.samples import Sample, SampleFile, SampleTail, joined, thinned
from workbench.rundir.journal import Journal
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

MOST = 128 << 10  # bytes; twelve hours fill the file many times
PODS = 32


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return write_run(tmp_path)


def look(time_s: float, rss_gib: float, pod: int = 0, gpus: Any = ()) -> Sample:
    host = f"127.0.0.{pod + 2}"
    return Sample.of_look(time_s, pod=f"pod-{pod}", host=host, rss_gib=rss_gib, gpus=gpus)


def gpu(index: int, used_gib: float, percent: float) -> dict[str, object]:
    return {"index": index, "used_gib": used_gib, "total_gib": 80.0, "percent": percent}


def test_a_run_of_32_pods_and_many_hours_has_a_record_of_bounded_size(run: WrittenRun) -> None:
    chance = Random(7)
    samples = SampleFile(run.paths, MOST)
    view = RunView(run.paths.root)
    sizes: dict[str, list[float]] = {}
    loads: list[float] = []
    largest = 0
    for number in range(240):  # twelve hours
        for pod in range(PODS):
            gpus = []
            if pod == 0:
                loads.append(float(chance.randrange(100)))
                gpus = [gpu(0, 40.0 + number / 100, loads[-1])]
            sample = look(T0 + 180 * number, round(20 + chance.random(), 4), pod, gpus)
            assert sample.rss_gib is not None
            sizes.setdefault(sample.host, []).append(sample.rss_gib.median)
            samples.add(sample)
        largest = max(largest, run.paths.samples.stat().st_size)
        if number % 50 == 0:
            view.refresh()
    assert largest <= MOST
    view.refresh()
    read, _ = SampleTail(run.paths.samples).read()
    for host, own in sizes.items():
        found = [sample for sample in read if sample.host == host]
        spreads = [sample.rss_gib for sample in found if sample.rss_gib is not None]
        assert sum(sample.looks for sample in found) == len(own)
        # Minimum and maximum of every pod are exact, and the newest look stays alone.
        assert min(spread.lowest for spread in spreads) == min(own)
        assert max(spread.highest for spread in spreads) == max(own) == samples.highest_gib[host]
        assert median(spread.median for spread in spreads) == pytest.approx(median(own), abs=0.1)
        assert set(spreads[-1]) == {own[-1]}
        assert [one.time_s for one in found] == sorted(one.time_s for one in found)
    # A reader that followed the file knows the same as a reader that comes at the end.
    for reader in (view, RunView(run.paths.root)):
        assert {*reader.memory} == {*sizes}
        of_gpus = reader.memory["127.0.0.2"].gib
        assert of_gpus.last == of_gpus.highest == 42.39
        for host in [*sizes][1:]:
            assert reader.memory[host].gib.last == sizes[host][-1]
            assert reader.memory[host].gib.highest == max(sizes[host])
            assert len(reader.memory[host].gib) > 9
        (use,) = reader.gpus
        assert (use.pod, use.looks, use.peak_gib, use.total_gib) == ("pod-0", 240, 42.39, 80.0)
        assert use.percent == pytest.approx(sum(loads) / len(loads))


@given(st.lists(st.floats(0, 100).map(lambda gib: round(gib, 4)), min_size=1, max_size=30))
def test_joined_looks_have_the_lowest_the_median_and_the_highest(sizes: list[float]) -> None:
    looks = [look(n, gib) for n, gib in enumerate(sizes)]
    whole = joined(looks)
    assert whole.rss_gib is not None
    assert (whole.time_s, whole.until_s, whole.looks) == (0, len(sizes) - 1, len(sizes))
    assert whole.rss_gib == pytest.approx((min(sizes), median(sizes), max(sizes)), abs=1e-4)
    for count in (1, 3, 9, 100):
        few = thinned(looks, count)
        assert sum(sample.looks for sample in few) == len(sizes)
        assert len(few) <= len(sizes) / count + 2
        assert Sample.read(json.loads(few[0].to_line())) == few[0]
        spreads = [sample.rss_gib for sample in few if sample.rss_gib is not None]
        assert min(spread.lowest for spread in spreads) == min(sizes)
        assert max(spread.highest for spread in spreads) == max(sizes)


def test_a_short_run_keeps_every_look_and_events_have_none(run: WrittenRun) -> None:
    journal = Journal(run.paths, Redactor({"HF_TOKEN": "canary-4711"}))
    for n in range(20):
        journal.sample(look(T0 + 5 * n, 1 + n / 10, gpus=[gpu(0, 2 + n / 10, 5.0 * n)]))
    journal.sample(Sample.of_look(T0, pod="canary-4711", host="b", rss_gib=3.0, gpus=[]))
    assert not list(read_events(run.paths.events))
    assert "canary" not in run.paths.samples.read_text()
    view = RunView(run.paths.root)
    points = [(T0 + 5 * n, round(2 + n / 10, 4)) for n in range(20)]
    assert list(view.memory["127.0.0.2"].gib) == points
    assert (view.memory["127.0.0.2"].gpu_percent, view.memory_kind) == (95.0, "cuda")
    assert not view.refresh(), "nothing is new"
    journal.sample(look(T0 + 100, 1.0))
    assert view.refresh(), "a sample is news"


def test_a_lost_run_lasted_until_its_last_sample(run: WrittenRun) -> None:
    write_json(run.paths.info, {**read_json(run.paths.info), "submitted_s": T0})
    run.state("running", "running")
    run.sample(T0 + 100, rss_gib=1.0)
    run.keeper("closed", alive=False)
    view = RunView(run.paths.root)
    assert (view.state, view.elapsed_s) == (RunState.LOST, 100)


def test_the_result_has_the_gpus_and_the_next_keeper_continues_with_the_file(
    run: WrittenRun,
) -> None:
    journal = Journal(run.paths)
    for n in range(3):
        journal.sample(look(T0 + n, 9.0 - n, gpus=[gpu(0, 2.0 + n, 10.0 * n)]))
    whole = run.paths.samples.read_bytes()
    # The keeper dies, and its last line is torn.
    run.paths.samples.write_bytes(whole[:-9])
    again = Journal(run.paths)
    again.recover()
    assert again.sampled_gib == {"127.0.0.2": 9.0}
    again.sample(look(T0 + 9, 1.0, gpus=[gpu(0, 1.0, 50.0)]))
    again.sample(look(T0 + 10, 2.0, gpus=[gpu(0, 1.5, 60.0)]))
    tail = SampleTail(run.paths.samples)
    samples, _ = tail.read()
    assert [sample.until_s - T0 for sample in samples] == [0, 1, 9, 10]
    assert tail.generation == 2
    (use,) = tail.gpus.uses
    assert (use.peak_gib, use.percent, use.looks) == (3.0, 30.0, 4)
    ended: Any = {"message": "done", "fault": None, "facts": {}, "pods": (), "world_size": 1}
    again.finish(RunState.SUCCEEDED, spec=RunSpec.load(run.paths.spec), **ended)
    (known,) = read_json(run.paths.result)["gpus"]  # type: ignore[misc, attr-defined]
    assert (known["peak_gib"], known["percent"], known["looks"]) == (3.0, 30.0, 4)


def test_a_failed_write_loses_no_sample(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = SampleFile(run.paths)
    samples.add(look(T0, 1.0))
    write_all = records.write_all

    def full(out: Any, data: bytes) -> None:
        write_all(out, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as changed:
        changed.setattr(records, "write_all", full)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            samples.add(look(T0 + 5, 2.0))
        samples.add(look(T0 + 10, 3.0))  # the pause is not over
    assert len(SampleTail(run.paths.samples).read()[0]) == 1
    samples.add(look(T0 + 40, 4.0))
    samples.complete()
    read, _ = SampleTail(run.paths.samples).read()
    assert [sample.rss_gib for sample in read] == [(n, n, n) for n in (1.0, 2.0, 3.0, 4.0)]


def test_samples_that_could_not_be_written_are_there_before_the_run_ends(run: WrittenRun) -> None:
    journal = Journal(run.paths)
    run.paths.samples.mkdir()  # takes no line
    journal.sample(look(T0, 1.0))
    run.paths.samples.rmdir()
    ended: Any = {"message": "done", "fault": None, "facts": {}, "pods": (), "world_size": 1}
    journal.finish(RunState.SUCCEEDED, spec=RunSpec.load(run.paths.spec), **ended)
    assert journal.is_synced
    assert len(SampleTail(run.paths.samples).read()[0]) == 1


def test_many_pods_have_a_line_each_even_beyond_the_bound(run: WrittenRun) -> None:
    samples = SampleFile(run.paths, 4 << 10)
    for n in range(6):
        for pod in range(100):
            samples.add(look(T0 + n, float(n), pod))
    read, _ = SampleTail(run.paths.samples).read()
    assert len({sample.pod for sample in read}) == 100
    assert run.paths.samples.stat().st_size < 100 * 4 * 160


def test_a_samples_line_that_a_rank_prints_is_plain_text() -> None:
    line = MARK + '{"time_s": 1.0, "rank": 0, "kind": "sample", "host": "a", "rss_gib": 9.0}'
    assert "sample" in STATE_EVENTS
    for states in (frozenset[str](), FineTune.traits.events):
        assert parse_event(line, states=states) is None


def test_a_damaged_or_huge_file_of_another_run_is_bounded(run: WrittenRun) -> None:
    view = RunView(run.paths.root)
    run.sample(rss_gib=1.0)
    view.refresh()
    good = run.paths.samples.read_bytes()
    for data in (
        b"",
        b"\n",
        b"\0\xff{]\n" * 9,
        b'{"generation": "x", "gpus": [5, {}, {"index": 0, "looks": -1, "percent": 1e999}]}\n',
        good + b'{"time_s": 1, "looks": 0, "until_s": "x", "rss_gib": [1, 2]}\n[]\n5\n',
        good + b"[" * 999 + b"\n",
        good[:-1],
    ):
        run.paths.samples.write_bytes(data)
        for reader in (view, RunView(run.paths.root)):
            reader.refresh()
            assert all(use.looks >= 0 for use in reader.gpus)
    run.paths.samples.write_bytes(good)
    os.truncate(run.paths.samples, 1 << 34)
    assert SampleTail(run.paths.samples).read() == ([], False)
    run.paths.samples.unlink()
    os.mkfifo(run.paths.samples)
    assert SampleTail(run.paths.samples).read() == ([], False)
