"""Network namespaces joined by a bridge: several hosts, as far as one machine has such."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import pytest

_TAGS = itertools.count()  # a namespace goes a little after its last process


def ip(*words: str) -> None:
    """Run `ip`; an OSError with its own words."""
    _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Namespace:
    """One host's network."""

    name: str
    address: str
    port: str
    """Its end at the bridge."""

    @property
    def bridge(self) -> str:
        """This machine's address in its network."""
        return self.address.rpartition(".")[0] + ".1"

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before those of a program that is to run in it."""
        return ("ip", "netns", "exec", self.name)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Have every packet vanish, both ways, without a word to anybody."""
        _run("bridge", "link", "set", "dev", self.port, "state", "0")
        try:
            yield
        finally:
            _run("bridge", "link", "set", "dev", self.port, "state", "3")

    def end_what_is_left(self) -> None:
        """End what still runs in it: sshd's sessions whose line broke learn of it late."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=300
        )
        for pid in map(int, listed.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _free_net() -> str:
    """Return the first three numbers of addresses that nobody has.

    Two bridges with the same ones take the route from one another. A session of tests that was
    killed leaves its bridges behind. Two sessions that look at the same time choose at random.
    """
    taken = _run("ip", "-oneline", "-4", "address")
    free = [net for net in (f"10.213.{number}" for number in range(256)) if f" {net}." not in taken]
    if not free:
        raise OSError("every network 10.213.N is taken; `ip link` lists their bridges")
    return secrets.choice(free)


@contextmanager
def joined(count: int) -> Iterator[list[Namespace]]:
    """Make namespaces, each with an address that the bridge, and so this machine, reaches."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"wb{os.getpid() % 100_000}{next(_TAGS)}"
    with ExitStack() as undo:
        try:
            net = _free_net()
            ip("link", "add", tag, "type", "bridge")
            undo.callback(ip, "link", "del", tag)
            ip("addr", "add", f"{net}.1/24", "dev", tag)
            ip("link", "set", tag, "up")
            made = [Namespace(f"{tag}n{n}", f"{net}.{n + 2}", f"{tag}v{n}") for n in range(count)]
            for each in made:
                ip("netns", "add", each.name)
                undo.callback(ip, "netns", "del", each.name)
                ip(
                    "link",
                    "add",
                    each.port,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    each.name,
                )
                ip("link", "set", each.port, "master", tag, "up")
                ip("-n", each.name, "addr", "add", f"{each.address}/24", "dev", "eth0")
                ip("-n", each.name, "link", "set", "eth0", "up")
                ip("-n", each.name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"this machine allows no network namespaces: {error}")
        yield made
