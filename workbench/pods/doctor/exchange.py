"""Speed of collectives between the ranks of pods.

The processes end with their stdin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from subprocess import Popen, TimeoutExpired
from tempfile import TemporaryFile
from typing import IO, Any

from workbench.base import entries
from workbench.base.child import close_input
from workbench.base.messages.lines import from_line, to_line
from workbench.pods.pod import Pod, interface_variables
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import NO_CLIENT, start_ssh

_LIMIT_S = 60.0
_END_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Measurements between the pods, with a process for every slot of every pod."""

    pods: int
    ranks: int = 0
    """Number of processes. 0: one per pod."""
    transports: tuple[str, ...] = ()
    """Ways of the data, by NCCL's own log lines: NVLink, InfiniBand, sockets and others. On CPUs
    gloo, and its interface if known."""
    backend: str = ""
    """nccl or gloo; empty if no measurement was made."""
    latency_s: float | None = None
    """Median seconds of an all-reduce of four bytes."""
    sizes: tuple[tuple[int, float], ...] = ()
    """Pairs of size in bytes and median seconds of an all-reduce, in growing size. The first size
    above 0.5 s is the last."""
    problem: str = ""

    @property
    def bandwidth_gb_per_s(self) -> float | None:
        """Return the bus bandwidth of the largest all-reduce, in 10^9 bytes per second.

        See `bus_bytes_per_s`.
        """
        if not self.sizes:
            return None
        size, took_s = self.sizes[-1]
        return bus_bytes_per_s(size, took_s, self.ranks or self.pods) / 1e9


def bus_bytes_per_s(size: int, took_s: float, ranks: int) -> float:
    """Return the bytes a second that a link carries in an all-reduce.

    The bus bandwidth of NVIDIA's nccl-tests (doc/PERFORMANCE.md): 2 (n - 1) / n times the size for
    each second, with n ranks.

    Example:
        >>> bus_bytes_per_s(3_000_000, 0.5, 3)
        8000000.0
    """
    return 2 * (ranks - 1) / ranks * size / took_s


def measure_exchange(
    pods: Sequence[Pod],
    identity: Identity,
    package: str,
    interfaces: Mapping[str, str],
    env: Mapping[str, str],
) -> Exchange:
    """Measure the all-reduce; takes some seconds, most of them for importing torch on the pods."""
    start = ["env", f"PYTHONPATH={package}", "OMP_NUM_THREADS=1"]
    # One command per pod. Its process starts one more for every further slot.
    commands = {
        pod.name: [*start, pod.python, "-P", "-m", entries.ALLREDUCE, pod.root] for pod in pods
    }
    with ExitStack() as opened:
        errors = {
            pod.name: opened.enter_context(TemporaryFile("w+", errors="replace")) for pod in pods
        }
        try:
            started = [
                start_ssh(pod, identity, commands[pod.name], stderr=errors[pod.name])
                for pod in pods
            ]
            processes = [process for process, _ in started]
        except FileNotFoundError:
            return Exchange(pods=len(pods), problem=NO_CLIENT)
        # A silent pod must not hold the others: all processes end at the limit.
        alarm = threading.Timer(_LIMIT_S, _kill, [processes])
        ends_s = time.monotonic() + _LIMIT_S
        alarm.start()
        try:
            lines = _converse(pods, processes, started[0][1], interfaces, env)
        except (OSError, ValueError, KeyError) as error:
            lines = [{"problem": f"{type(error).__name__}: {error}"}]
        finally:
            alarm.cancel()
            _end(processes)
        exchange = replace(_read(lines, len(pods)), ranks=sum(pod.slots for pod in pods))
        if exchange.problem:
            # The pods' own last words say more than the line that broke off.
            words = []
            for name, file in errors.items():
                text = _last_line(file)
                if text:
                    words.append(f"{name}: {text}")
            problem = "; ".join(words) or exchange.problem
            if time.monotonic() >= ends_s:
                problem = f"no end within {_LIMIT_S:g} s: {problem}"
            return replace(exchange, problem=problem)
    return exchange


def _converse(
    pods: Sequence[Pod],
    processes: Sequence[Popen[str]],
    marker: str,
    interfaces: Mapping[str, str],
    env: Mapping[str, str],
) -> list[Mapping[str, Any]]:
    rank = 0
    for pod, process in zip(pods, processes, strict=True):
        interface = interfaces.get(pod.name, "")
        request = {
            "rank": rank,
            "slots": pod.slots,
            "world_size": sum(each.slots for each in pods),
            "address": pods[0].address,
            "defaults": interface_variables([interface] if interface else []),
            "env": dict(env),
        }
        _tell(process, request)
        rank += pod.slots
    first = processes[0].stdout
    assert first is not None
    for line in first:  # what the login prints by itself
        if line.endswith(f"{marker}\n"):
            break
    opened = from_line(first.readline() or "{}")
    if "port" not in opened:
        return [{"problem": f"{pods[0].name} did not open a store"}]
    for process in processes[1:]:
        _tell(process, opened)
    lines: list[Mapping[str, Any]] = []
    for line in first:
        if marker in line:  # the program has ended
            break
        message = from_line(line)
        lines.append(message)
        if message.get("over"):
            break
    return lines


def _tell(process: Popen[str], message: Mapping[str, object]) -> None:
    assert process.stdin is not None
    process.stdin.write(to_line(message).decode())
    process.stdin.flush()


def _read(lines: Sequence[Mapping[str, Any]], pods: int) -> Exchange:
    fields: dict[str, Any] = {}
    sizes = []
    for line in lines:
        if "latency_s" in line:
            fields["backend"] = line["backend"]
            fields["latency_s"] = line["latency_s"]
        elif "transports" in line:
            fields["transports"] = tuple(map(str, line["transports"]))
        elif "bytes" in line:
            sizes.append((line["bytes"], line["took_s"]))
        elif "problem" in line:
            fields["problem"] = line["problem"]
    if not any(line.get("over") for line in lines):
        fields.setdefault("problem", "the measurement broke off")
    return Exchange(pods=pods, sizes=tuple(sizes), **fields)


def _kill(processes: Sequence[Popen[str]]) -> None:
    for process in processes:
        process.kill()


def _end(processes: Sequence[Popen[str]]) -> None:
    for process in processes:
        close_input(process)
    for process in processes:
        try:
            process.wait(_END_S)
        except TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    for line in reversed(file.readlines()):
        words = line.strip()
        if words:
            return words
    return ""
