from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.keeper.watch.pod import PodReport, Sampler
from workbench.pods.pod import Pod
from workbench.rundir.events import Event
from workbench.rundir.figures.curves import MemoryBook
from workbench.rundir.figures.samples import Sample
from workbench.rundir.outcome import RankStatus

GPUS = [
    {"index": 0, "percent": 80.0, "used_gib": 21.0},
    {"index": 1, "percent": 60.0, "used_gib": 22.0},
]
POD = Pod(name="pod-0", address="127.0.0.2")


def look(time_s: float, rss_gib: float, gpus: Sequence[Mapping[str, object]] = ()) -> Sample:
    return Sample.of_look(time_s, pod=POD.name, host=POD.address, rss_gib=rss_gib, gpus=gpus)


def take(book: MemoryBook, time_s: float, data: dict[str, object]) -> None:
    book.take(0, Event(time_s=time_s, rank=0, kind="memory", data=data), "127.0.0.2", 1)


def test_samples_replace_what_ranks_told_and_gpus_replace_both() -> None:
    book = MemoryBook()
    book.take(
        0,
        Event(time_s=1.0, rank=0, kind="memory", data={"rss_gib": 0.5, "peak_rss_gib": 0.75}),
        "127.0.0.2",
        1,
    )
    assert list(book.hosts["127.0.0.2"].gib) == [(1.0, 0.5)]
    book.take_samples([look(2.0, 0.6)], anew=True)
    book.take(
        0,
        Event(time_s=3.0, rank=0, kind="memory", data={"rss_gib": 0.5, "peak_rss_gib": 1.0}),
        "127.0.0.2",
        1,
    )
    assert list(book.hosts["127.0.0.2"].gib) == [(2.0, 0.6)]
    assert (book.hosts["127.0.0.2"].peak_gib, book.kind) == (1.0, "resident")

    book.take(
        0,
        Event(time_s=4.0, rank=0, kind="memory", data={"rss_gib": 9.0, "cuda_reserved_gib": 20.0}),
        "127.0.0.2",
        1,
    )
    assert list(book.hosts["127.0.0.2"].gib) == [(4.0, 20.0)]
    book.take_samples([look(5.0, 9.0, GPUS)], anew=False)
    book.take(
        0,
        Event(time_s=6.0, rank=0, kind="memory", data={"cuda_reserved_gib": 20.0}),
        "127.0.0.2",
        1,
    )
    assert list(book.hosts["127.0.0.2"].gib) == [(5.0, 43.0)]
    assert (book.hosts["127.0.0.2"].gpu_percent, book.kind) == (70.0, "cuda")


def test_a_sample_that_is_broken_or_of_a_slice_tells_what_it_can() -> None:
    book = MemoryBook()
    odd = {"time_s": 1.0, "host": "a", "rss_gib": None, "gpu_gib": [3, 3, 3.0], "gpus": [{}, "x"]}
    sample = Sample.read(odd)
    assert sample is not None and sample.gpus == ({},)
    book.take_samples([sample], anew=True)
    assert list(book.hosts["a"].gib) == [(1.0, 3.0)]
    assert book.hosts["a"].gpu_percent is None


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_pod_is_sampled_every_few_seconds_while_its_ranks_run() -> None:
    clock = Clock()
    sampler = Sampler(clock)
    ranks = [RankStatus(rank=n, pod=POD, phase="running", rss_bytes=1 << 30) for n in (0, 1)]
    report = PodReport(pod=POD, ranks=ranks, gpus=[{"index": 0, "percent": 50.0}])
    sample = sampler.sample(report)
    assert sample is not None
    assert (sample.rss_gib, sample.host) == ((2.0, 2.0, 2.0), "127.0.0.2")
    assert sample.gpus == ({"index": 0, "percent": 50.0},)
    assert sampler.sample(report) is None
    other = PodReport(pod=Pod(name="pod-1", address="127.0.0.3"), ranks=ranks)
    assert sampler.sample(other) is not None
    clock.now += 5
    assert sampler.sample(PodReport(pod=POD, answered=False)) is None
    assert (
        sampler.sample(PodReport(pod=POD, ranks=[RankStatus(rank=0, pod=POD, phase="exited")]))
        is None
    )
    assert sampler.sample(report) is not None
    clock.now += 4000  # a long run is sampled less often
    assert sampler.sample(report) is not None
    clock.now += 5
    assert sampler.sample(report) is None
