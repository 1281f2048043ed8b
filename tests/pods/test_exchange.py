"""The measurement between pods: what it keeps, and what it reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sentences import says
from workbench.agent.probe.allreduce import nccl_transports
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
    figure = '{"latency_s": 0.5, "backend": "gloo"}'
    answers = f"""echo '{{"port": 1}}'; echo '{figure}'; echo '{{"over": true}}'"""
    program = f"echo Welcome; printf 'last login: '; echo the mark; read request; {answers}"

    def start(*_args: object, stderr: int) -> tuple[subprocess.Popen[str], str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            ["sh", "-c", program], stdin=pipe, stdout=pipe, stderr=stderr, text=True
        )
        return process, "the mark"

    monkeypatch.setattr(exchange, "start_ssh", start)
    measured = measure_exchange([Pod(name="pod-0")], Identity(tmp_path), "/package", {}, {})
    assert (measured.pods, measured.latency_s, measured.problem) == (1, 0.5, "")


def on_this_machine(
    pod: Pod, _identity: Identity, command: list[str], stderr: int
) -> tuple[subprocess.Popen[str], str]:
    pipe = subprocess.PIPE
    argv = ["sh", "-c", 'echo the mark; exec "$@"', "sh", *command]
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=stderr, text=True)
    return process, "the mark"


@pytest.mark.parametrize("slots", [(2, 2), (1, 2)])
def test_all_ranks_of_all_pods_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: tuple[int, ...]
) -> None:
    monkeypatch.setattr(exchange, "start_ssh", on_this_machine)
    monkeypatch.setattr(exchange, "_LIMIT_S", 1200.0)  # of a busy machine
    pods = [
        Pod(name=f"pod-{n}", address=f"127.0.0.{n + 2}", slots=each, python=sys.executable)
        for n, each in enumerate(slots)
    ]
    package = str(Path(__file__).parents[2])
    interfaces = {pod.name: "lo" for pod in pods}
    measured = measure_exchange(pods, Identity(tmp_path), package, interfaces, {})
    assert (measured.pods, measured.ranks, measured.problem) == (2, sum(slots), "")
    assert (measured.backend, measured.transports) == ("gloo", ("gloo over lo",))
    assert measured.bandwidth_gb_per_s
    size, took_s = measured.sizes[-1]
    ranks = sum(slots)
    rate = 2 * (ranks - 1) / ranks * size / took_s / 1e9
    assert measured.bandwidth_gb_per_s == pytest.approx(rate)


def test_a_measurement_without_an_end_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_LIMIT_S", 0.5)

    def start(*_args: object, stderr: int) -> tuple[subprocess.Popen[str], str]:
        pipe = subprocess.PIPE
        argv = ["sleep", "600"]
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=stderr, text=True)
        return process, "the mark"

    monkeypatch.setattr(exchange, "start_ssh", start)
    measured = measure_exchange([Pod(name="pod-0")], Identity(tmp_path), "/package", {}, {})
    assert says(measured.problem, "no end within {} s", 0.5)


def test_a_rank_that_fails_ends_the_measurement_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "start_ssh", on_this_machine)
    monkeypatch.setattr(exchange, "_LIMIT_S", 1200.0)  # of a busy machine
    pods = [Pod(name="pod-0", address="127.0.0.2", slots=2, python=sys.executable)]
    env = {"GLOO_SOCKET_IFNAME": "no-such-one"}
    package = str(Path(__file__).parents[2])
    measured = measure_exchange(pods, Identity(tmp_path), package, {}, env)
    assert "no-such-one" in measured.problem


HEAD = "node-1:71:71 [0] NCCL INFO "


@pytest.mark.parametrize(
    ("lines", "ways"),
    [
        (["Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA"], ["InfiniBand or RoCE"]),
        (
            [
                "Pattern 4, crossNic 0, nChannels 12, bw 20.0/20.0, type NVL/PIX, sameChannels 1",
                "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
                "Channel 01/0 : 0[0] -> 8[0] [receive] via NET/IB/3",
            ],
            ["InfiniBand or RoCE", "NVLink"],
        ),
        (
            [
                "Pattern 4, crossNic 0, nChannels 2, bw 12.0/12.0, type PHB/PIX, sameChannels 1",
                "Channel 00 : 0[1a000] -> 1[1b000] via P2P/IPC",
            ],
            ["PCIe (P2P)"],
        ),
        (["Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"], ["shared memory"]),
        (
            [
                "NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.1.0.1<0>",
                "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0",
            ],
            ["sockets over eth0, eth1"],
        ),
        (
            [
                "NET/OFI Selected provider is efa, fabric is efa (found 4 nics)",
                "Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0/GDRDMA",
            ],
            ["EFA"],
        ),
        (["Channel 00/0 : 0[0] -> 8[0] [send] via NET/FasTrak/0"], ["FasTrak"]),
        (["NCCL version 2.27.3+cuda12.9"], []),
    ],
)
def test_the_transport_is_in_nccls_own_lines(lines: list[str], ways: list[str]) -> None:
    assert nccl_transports("".join(f"{HEAD}{line}\n" for line in lines)) == ways
