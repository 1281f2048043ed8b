from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.sentences import says
from workbench.finetune.recipe.order import (
    pad,
)
from workbench.finetune.train.measure.meter import StepMeter, tokens_of
from workbench.finetune.train.measure.traffic import Sent, Traffic, addresses, read_sent, unseen

HOME = "127.0.0.1"


class Wire:
    """Connections whose counts a test sets."""

    def __init__(self) -> None:
        self.sent: dict[tuple[str, ...], int] | None = {("a",): 1000}

    def read(self) -> Sent | None:
        return None if self.sent is None else dict(self.sent)

    def send(self, count: int, link: str = "a") -> None:
        assert self.sent is not None
        self.sent[link,] = self.sent.get((link,), 0) + count


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a real connection."""
    with closing(socket.create_server((HOME, 0))) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        with closing(here), closing(there):
            yield here, there


def told(capfd: pytest.CaptureFixture[str]) -> dict[str, object]:
    (line,) = [line for line in capfd.readouterr().out.splitlines() if '"traffic"' in line]
    return dict(json.loads(line.partition(" ")[2]))


def test_steps_count_from_the_third_on_and_nothing_beside_them(
    wire: Wire, capfd: pytest.CaptureFixture[str]
) -> None:
    traffic = Traffic(wire.read)
    for _ in range(2):
        wire.send(10_000)
        traffic.step()
    for _ in range(3):
        wire.send(70)
        traffic.step()
        traffic.pause()
        wire.send(5_000)  # an evaluation
        traffic.resume()
    traffic.pause()
    traffic.pause()
    traffic.tell()
    assert (traffic.steps, traffic.sent_bytes) == (3, 210)
    assert {"sent_bytes": 210, "steps": 3, "ranks_on_pod": 1}.items() <= told(capfd).items()


def test_a_connection_that_is_opened_meanwhile_counts_whole(wire: Wire) -> None:
    traffic = Traffic(wire.read)
    traffic.step()
    traffic.step()
    wire.send(30)
    wire.send(4, "b")
    traffic.step()
    traffic.pause()
    assert traffic.sent_bytes == 34


@pytest.mark.parametrize(
    "after", [None, {}], ids=["the kernel no longer tells", "a connection is gone"]
)
def test_what_is_not_known_is_told_as_none_with_the_reason(
    wire: Wire, after: dict[tuple[str, ...], int] | None, capfd: pytest.CaptureFixture[str]
) -> None:
    traffic = Traffic(wire.read)
    for _ in range(4):
        traffic.step()
    wire.sent = after
    traffic.pause()
    traffic.resume()
    traffic.pause()
    traffic.tell()
    said = told(capfd)
    assert said["sent_bytes"] is None and says(
        said["reason"], "the kernel does not tell, or a connection was replaced"
    )


def test_two_steps_are_too_few(wire: Wire, capfd: pytest.CaptureFixture[str]) -> None:
    traffic = Traffic(wire.read)
    for _ in range(2):
        traffic.step()
    traffic.pause()
    traffic.tell()
    said = told(capfd)
    assert said["sent_bytes"] is None and said["reason"] == "there were fewer than three steps"


def test_the_kernel_s_count_of_a_real_connection(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    here, there = pair
    ends = tuple(str(part) for part in (*here.getsockname(), *here.getpeername()))
    before = read_sent({HOME}, alone=True)
    here.sendall(b"x" * 12_345)
    left = 12_345
    while left:
        left -= len(there.recv(left))
    after = read_sent({HOME}, alone=True)
    assert before is not None and after is not None
    assert after[ends] - before[ends] == 12_345
    assert HOME in addresses()
    # Within a pod of several ranks, to an address that
    # is no rank's, and to the store: none of it counts.
    assert ends not in (read_sent({HOME}, alone=False) or {})
    assert ends not in (read_sent({"10.0.0.9"}, alone=True) or {})
    monkeypatch.setenv("MASTER_PORT", str(there.getsockname()[1]))
    assert ends not in (read_sent({HOME}, alone=True) or {})


@pytest.mark.parametrize(
    ("backend", "environ", "devices", "known"),
    [
        ("gloo", {}, 0, True),
        ("mpi", {}, 0, False),
        ("nccl", {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, 0, False),
        ("nccl", {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, 0, True),
        ("nccl", {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, 1, False),
        ("nccl", {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4", "NCCL_IB_DISABLE": "1"}, 1, True),
        ("nccl", {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4", "NCCL_NET": "Socket"}, 1, True),
        (
            "nccl",
            {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4", "NCCL_NET": "AWS Libfabric"},
            0,
            False,
        ),
        (
            "cpu:gloo,cuda:nccl",
            {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4", "NCCL_NET_PLUGIN": "ofi"},
            0,
            False,
        ),
    ],
)
def test_bytes_that_no_kernel_counts_are_not_claimed(
    tmp_path: Path, backend: str, environ: dict[str, str], devices: int, known: bool
) -> None:
    for number in range(devices):
        (tmp_path / "infiniband" / f"mlx5_{number}").mkdir(parents=True)
    assert (unseen(backend, environ, tmp_path) == "") is known


def test_tokens_are_those_that_the_model_goes_through() -> None:
    rows = [{"input_ids": [5] * 3, "labels": [6] * 9}, {"input_ids": [5] * 10, "labels": [6] * 2}]
    useful, padded = tokens_of(pad(rows, pad_id=0, start_id=0), causal=False)
    assert (int(useful), padded) == (13 + 11, 2 * 10 + 2 * 9)
    text = [
        {"input_ids": [5] * 3, "labels": [-100, 6, 6]},
        {"input_ids": [5] * 9, "labels": [-100] * 9},
    ]
    useful, padded = tokens_of(pad(text, pad_id=0), causal=True)
    assert (int(useful), padded) == (12, 2 * 9)


def test_rows_that_several_ranks_have_count_once() -> None:
    batch = pad([{"input_ids": [5] * 3, "labels": [6] * 9}], pad_id=0, start_id=0)
    counts = []
    for sharers in (1, 4):
        meter = StepMeter(causal=False, sharers=sharers)
        meter.resume()
        meter.see(batch, profiled=False)
        meter.step(1, profiled=False)
        meter.pause()
        per_s = meter.totals()["useful_tokens_per_s"]
        assert per_s is not None
        counts.append(per_s / meter.samples_per_s)
    assert counts == pytest.approx([12, 3], rel=1e-3)


def test_the_meter_leaves_the_profiled_step_out_of_the_rates(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows = [{"input_ids": [5] * 3, "labels": [6] * 9}, {"input_ids": [5] * 10, "labels": [6] * 2}]
    batch = pad(rows, pad_id=0, start_id=0)
    meter = StepMeter(causal=False)
    assert meter.totals()["useful_tokens_per_s"] is None
    meter.resume()
    for profiled in (False, True, False):
        for _ in range(2):
            meter.see(batch, profiled=profiled)
        meter.step(4, profiled=profiled)
    meter.pause()
    totals = meter.totals()
    assert totals["profiled_tokens"] == 2 * 10 + 2 * 9
    useful, padded = totals["useful_tokens_per_s"], totals["padded_tokens_per_s"]
    assert useful is not None and padded is not None
    # Two of the steps count, as they do for the samples: 12 of 19 tokens a row are useful.
    assert useful / meter.samples_per_s == pytest.approx(12, rel=1e-3)
    assert padded / meter.samples_per_s == pytest.approx(19, rel=1e-3)
    assert '"sent_bytes": 0' in capfd.readouterr().out.splitlines()[-1]
