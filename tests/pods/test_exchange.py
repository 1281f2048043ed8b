"""The measurement between pods: what it keeps, and what it reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from workbench.pods.doctor import exchange
from workbench.pods.doctor.exchange import Exchange, measure_exchange
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity


def test_the_bandwidth_is_of_the_largest_all_reduce() -> None:
    assert Exchange(pods=2).bandwidth_gb_per_s is None
    measured = Exchange(pods=2, latency_s=0.0, sizes=((10**6, 9.0), (4 * 10**9, 2.0)))
    # Two ranks send as many bytes as they reduce: 2 (n - 1) / n.
    assert measured.bandwidth_gb_per_s == pytest.approx(2.0)


def test_what_a_login_prints_is_no_part_of_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = """echo '{"port": 1}'; echo '{"slowdown": 1.5}'; echo '{"over": true}'"""
    program = f"echo Welcome; printf 'last login: '; echo the mark; read request; {answers}"

    def start(*_args: object, stderr: int) -> tuple[subprocess.Popen[str], str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            ["sh", "-c", program], stdin=pipe, stdout=pipe, stderr=stderr, text=True
        )
        return process, "the mark\n"

    monkeypatch.setattr(exchange, "start_ssh", start)
    measured = measure_exchange([Pod(name="pod-0")], Identity(tmp_path), "/package", {}, {})
    assert (measured.pods, measured.slowdown, measured.problem) == (1, 1.5, "")
