"""Times between pods from measured ones: other numbers of pods, other sizes, other ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from workbench.pods.doctor import exchange
from workbench.pods.doctor.exchange import Exchange, measure_exchange
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity

SHARED = Exchange(pods=4, latency_s=0.1, slowdowns=((2, 1.5), (4, 2.5)))


@pytest.mark.parametrize(
    ("pods", "factor"), [(1, 1.0), (2, 1.5), (3, 2.0), (4, 2.5), (6, 3.5), (0, 1.0)]
)
def test_a_slowdown_follows_the_measured_line_and_goes_on_beyond_it(
    pods: int, factor: float
) -> None:
    assert SHARED.slowdown(pods) == pytest.approx(factor)


def test_pods_with_processors_of_their_own_are_never_faster_than_alone() -> None:
    assert Exchange(pods=3).slowdown(3) == 1.0
    assert Exchange(pods=3, slowdowns=((3, 0.8),)).slowdown(3) == 1.0


def test_busy_ranks_meet_and_wait_longer_as_far_as_their_pods_share_a_processor() -> None:
    busy = Exchange(pods=4, latency_s=0.1, slowdowns=SHARED.slowdowns, meeting_s=0.4, waited_s=0.7)
    # Two of four pods have a third of the slowdown.
    assert busy.meet_s(2) == pytest.approx(0.1 + 0.3 / 3)
    assert busy.meet_s(4) == pytest.approx(0.4)
    assert busy.wait_s(2) == pytest.approx(0.6 / 3)
    assert (busy.wait_s(1), busy.meet_s(1)) == (0.0, pytest.approx(0.1))
    # Without a slowdown the whole time counts, and nothing is faster than the latency.
    apart = Exchange(pods=4, latency_s=0.1, meeting_s=0.05, waited_s=0.3)
    assert apart.meet_s(2) == pytest.approx(0.1) and apart.wait_s(2) == pytest.approx(0.2)
    assert (SHARED.meet_s(4), SHARED.wait_s(4)) == (0.1, 0.0)
    assert (Exchange(pods=2).meet_s(2), Exchange(pods=2).wait_s(2)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("size", "ranks", "seconds"),
    [
        (0, 2, 0.1),
        (500, 2, 0.2),
        (1000, 2, 0.3),
        (2000, 2, 0.6),
        (3000, 2, 0.9),
        (4000, 2, 1.2),
        # Three ranks send 4/3 of the bytes of two, and wait for the latency once.
        (1000, 3, 0.1 + 0.2 * 4 / 3),
        (4000, 3, 1.2 * 4 / 3),
    ],
)
def test_an_all_reduce_is_interpolated_and_beyond_the_largest_size_goes_by_the_byte(
    size: float, ranks: int, seconds: float
) -> None:
    measured = Exchange(pods=2, latency_s=0.1, sizes=((1000, 0.3), (3000, 0.9)))
    assert measured.all_reduce_s(size, ranks) == pytest.approx(seconds)


def test_an_all_reduce_that_was_quicker_than_the_latency_takes_the_latency() -> None:
    assert Exchange(pods=2, latency_s=0.1, sizes=((10, 0.05),)).all_reduce_s(10, 2) == 0.1


def test_the_bandwidth_is_of_the_largest_all_reduce() -> None:
    assert Exchange(pods=2).bandwidth_gb_per_s is None
    measured = Exchange(pods=2, latency_s=0.0, sizes=((10**6, 9.0), (4 * 10**9, 2.0)))
    # Two ranks send as many bytes as they reduce: 2 (n - 1) / n.
    assert measured.bandwidth_gb_per_s == pytest.approx(2.0)


def test_what_a_login_prints_is_no_part_of_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = """echo '{"port": 1}'; echo '{"over": true}'"""
    program = f"echo Welcome; printf 'last login: '; echo the mark; read request; {answers}"

    def start(*_args: object, stderr: int) -> tuple[subprocess.Popen[str], str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            ["sh", "-c", program], stdin=pipe, stdout=pipe, stderr=stderr, text=True
        )
        return process, "the mark\n"

    monkeypatch.setattr(exchange, "start_ssh", start)
    measured = measure_exchange([Pod(name="pod-0")], Identity(tmp_path), "/package", {}, {})
    assert (measured.pods, measured.problem) == (1, "")
