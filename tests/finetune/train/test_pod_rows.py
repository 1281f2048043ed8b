"""Rows are tokenized once on each pod: in order, in one file, in memory that no rank adds to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sentences import says
from workbench.agent.rank import collectives
from workbench.base.errors import RunError
from workbench.finetune.data.rows import Example
from workbench.finetune.data.training import pod_rows
from workbench.finetune.data.training.pod_rows import PodRanks, SharedRows, rows_of_pod
from workbench.finetune.data.training.tokens import TokenRows, packed
from workbench.finetune.options.text.lengths import TextLengths

ROWS = 5000
Made = dict[str, list[int]]


def examples_of(count: int) -> list[Example]:
    return [Example(source=str(n), target="") for n in range(count)]


def make(some: Sequence[Example], first: int) -> list[Made]:
    """Make one or two rows of an example, as a long text is cut into several rows."""
    assert not some or some[0].source == str(first - 1), "the number of the row in errors"
    numbers = [int(example.source) for example in some]
    return [{"input_ids": [n] * times, "labels": [-100, n]} for n in numbers for times in (1, 2)]


EXPECTED = make(examples_of(ROWS), 1)


class Taken:
    """What an encoder knows about the texts since the last question."""

    def __init__(self) -> None:
        self.texts = TextLengths()

    def make(self, some: Sequence[Example], first: int) -> list[Made]:
        self.texts = TextLengths(questions=len(some), longest_question=first)
        return make(some, first)

    def take(self) -> TextLengths:
        return self.texts


class Ranks:
    """Ranks as threads of this process; every collective of a real group fails, save a barrier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, pods: Sequence[int]) -> None:
        self.pods: list[PodRanks] = []
        for pod, count in enumerate(pods):
            for number in range(count):
                place = PodRanks(folder=root / f"pod-{pod}", number=number, count=count)
                self.pods.append(place)
        self.met = threading.Barrier(len(self.pods), timeout=300)
        self.barriers = 0

        def meet() -> None:
            if self.met.wait() == 0:
                self.barriers += 1

        monkeypatch.setattr(collectives, "barrier", meet)
        for name in ("gather_bytes", "broadcast_bytes", "sums", "add_up"):
            monkeypatch.setattr(collectives, name, refused)

    def run(self, work: Callable[[PodRanks], Any]) -> list[Any]:
        def one(pod: PodRanks) -> Any:
            try:
                return work(pod)
            except BaseException:
                self.met.abort()
                raise

        with ThreadPoolExecutor(len(self.pods)) as threads:
            return list(threads.map(one, self.pods))


def refused(*_: object) -> None:
    raise AssertionError("rows travel between ranks")


@pytest.mark.parametrize("pods", [[1], [2], [1, 1], [3, 2], [1, 5, 2]])
def test_every_rank_has_the_rows_of_a_single_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pods: list[int]
) -> None:
    group = Ranks(monkeypatch, tmp_path, pods)

    def work(pod: PodRanks) -> TokenRows:
        taken = Taken()
        return rows_of_pod(SharedRows(examples_of(ROWS), taken.make, pod, taken.take))

    for rows in group.run(work):
        assert list(rows) == EXPECTED and not rows.kept
        assert rows.texts.questions == ROWS, "the texts of a pod are all texts, once"
    assert list(tmp_path.iterdir()) == [], "no file is left"


def test_the_ranks_of_a_pod_open_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group = Ranks(monkeypatch, tmp_path, [2, 2])
    opened = group.run(lambda pod: rows_of_pod(SharedRows(examples_of(ROWS), make, pod)))
    files = [os.fstat(rows._file.fileno()).st_ino for rows in opened]
    assert files[0] == files[1] != files[2] == files[3]


def test_rows_follow_rows_although_a_folder_is_removed_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = Ranks(monkeypatch, tmp_path, [3])
    remove = shutil.rmtree

    def late(*args: Any, **options: Any) -> None:
        time.sleep(0.3)
        remove(*args, **options)

    monkeypatch.setattr(shutil, "rmtree", late)

    def work(pod: PodRanks) -> list[TokenRows]:
        return [rows_of_pod(SharedRows(examples_of(ROWS), make, pod)) for _ in range(2)]

    assert all(list(rows) == EXPECTED for both in group.run(work) for rows in both)


def test_each_example_is_tokenized_once_on_a_pod(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = Ranks(monkeypatch, tmp_path, [4, 2])

    def work(pod: PodRanks) -> list[str]:
        seen: list[str] = []

        def counted(some: Sequence[Example], first: int) -> list[Made]:
            seen.extend(example.source for example in some)
            return make(some, first)

        rows_of_pod(SharedRows(examples_of(ROWS), counted, pod))
        return seen

    seen = group.run(work)
    every = sorted(example.source for example in examples_of(ROWS))
    for pod in (seen[:4], seen[4:]):
        assert sorted(source for share in pod for source in share) == every
        assert max(map(len, pod)) - min(map(len, pod)) < 20, "shares of equal size"


def test_packed_rows_are_those_of_a_single_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = Ranks(monkeypatch, tmp_path, [2, 1])
    work = [SharedRows(examples_of(ROWS), make, pod) for pod in group.pods]
    rows = group.run(
        lambda pod: rows_of_pod(work[group.pods.index(pod)], lambda rows: packed(rows, 7))
    )
    expected = list(packed(EXPECTED, 7))
    assert all(list(each) == expected for each in rows) and "position_ids" in expected[0]


def test_columns_that_are_no_tokens_arrive_as_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = [{"prompt_ids": [1, 70_000], "label": True, "row": '{"a": 1}', "empty": []}]
    group = Ranks(monkeypatch, tmp_path, [2])

    def work(pod: PodRanks) -> list[Any]:
        with pod.shared_folder():
            return list(SharedRows(examples_of(2), lambda some, _: given * len(some), pod))

    (first, second), others = group.run(work)
    assert first == given[0] and others == []
    assert {name: list(v) if isinstance(v, array) else v for name, v in second.items()} == first


def _peak(monkeypatch: pytest.MonkeyPatch, root: Path, pods: list[int]) -> tuple[int, int]:
    """Return the most bytes of Python's memory in all ranks together, and the barriers."""
    root.mkdir()
    group = Ranks(monkeypatch, root, pods)
    monkeypatch.setattr(pod_rows, "_AT_ONCE", 64)
    examples = examples_of(256)

    def long(some: Sequence[Example], _: int) -> list[Made]:
        return [{"input_ids": list(range(2000)), "labels": list(range(2000))} for _ in some]

    tracemalloc.start()
    try:
        group.run(lambda pod: len(rows_of_pod(SharedRows(examples, long, pod))))
        return tracemalloc.get_traced_memory()[1], group.barriers
    finally:
        tracemalloc.stop()


def test_the_peak_of_a_host_does_not_grow_with_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few, met = _peak(monkeypatch, tmp_path / "few", [4])
    many, met_by_many = _peak(monkeypatch, tmp_path / "many", [64])
    assert met == met_by_many
    # A gather on every rank had sixteen times the bytes, for each of sixteen times the ranks.
    assert many < 1.25 * few, (few, many)


def test_the_peak_of_a_pod_does_not_grow_with_the_pods(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, met = _peak(monkeypatch, tmp_path / "one", [1])
    four, met_by_four = _peak(monkeypatch, tmp_path / "four", [1] * 4)
    assert met == met_by_four
    assert four < 4 * 1.25 * one, (one, four)


def test_a_rank_without_neighbours_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(collectives, "barrier", lambda: None)
    pod = PodRanks(folder=tmp_path / "tokens-0", number=0, count=2)
    with pytest.raises(RunError) as failed:
        rows_of_pod(SharedRows(examples_of(3), make, pod))
    assert says(
        failed.value,
        "a rank of this pod wrote its rows elsewhere",
        "share-1-0",
        str(pod.folder),
    )
    other = PodRanks(folder=pod.folder, number=1, count=2)
    with pytest.raises(RunError) as failed:
        rows_of_pod(SharedRows(examples_of(3), make, other))
    assert says(
        failed.value,
        "although the first rank of this pod has written them",
        str(pod.folder / "rows"),
    )


def test_the_place_of_a_rank_is_read_from_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(collectives, "rank", lambda: 13)
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    pod = PodRanks.of(tmp_path / "rank-13")
    assert pod == PodRanks(folder=tmp_path / "tokens-8", number=5, count=8) and not pod.leads


def _rank(rank: int, store: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=3)
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="1" if rank == 2 else "2")
    pod = PodRanks.of(Path(folder) / f"rank-{rank}")
    rows = rows_of_pod(SharedRows(examples_of(ROWS), make, pod))
    assert list(rows) == EXPECTED
    torch.distributed.destroy_process_group()
    print(json.dumps([rank, os.fstat(rows._file.fileno()).st_ino]), flush=True)


@pytest.mark.slow
def test_real_ranks_of_a_pod_share_their_file(tmp_path: Path) -> None:
    argv = [sys.executable, __file__, str(tmp_path / "store"), str(tmp_path)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 0
    told = dict(json.loads(line) for line in done.stdout.splitlines())
    assert told[0] == told[1] != told[2]


def _ranks(store: str, folder: str) -> int:
    """Fork the ranks from this process, which has imported torch, and return how many failed."""
    pids = []
    for rank in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                _rank(rank, store, folder)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        pids.append(pid)
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(_ranks(*sys.argv[1:]))
