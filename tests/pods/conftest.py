"""Backends to test, the identity they must accept, and launched pods that are stopped again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from workbench.pods.identity import Identity
from workbench.pods.local import LocalPods
from workbench.pods.pod import LaunchContext, Pod, PodBackend, PodSpec
from workbench.pods.processes import Process, find, with_mark
from workbench.pods.ssh import SSHConnection

BACKENDS: dict[str, Callable[[], PodBackend]] = {"local": LocalPods}


_OTHERS: list[Process] = []


@pytest.fixture(autouse=True)
def others() -> None:
    """Take note of what other tests keep running in this session: a model server, say, or a browser's driver."""
    _OTHERS[:] = []
    _OTHERS[:] = children()


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Iterator[PodBackend]:
    """A backend that has launched nothing; the contract suite runs against each. Stopped afterwards."""
    made = BACKENDS[request.param]()
    yield made
    made.stop()


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.create(tmp_path / "identity")


@pytest.fixture
def context(tmp_path: Path, identity: Identity) -> LaunchContext:
    return LaunchContext(
        cluster_id="test", directory=tmp_path, public_key=identity.public_key, lease_s=2.0, timeout_s=30.0
    )


@dataclass(frozen=True)
class Launched:
    backend: PodBackend
    identity: Identity
    pods: Sequence[Pod]

    def connect(self, index: int = 0) -> SSHConnection:
        return SSHConnection(self.pods[index], self.identity)


@pytest.fixture
def launched(backend: PodBackend, identity: Identity, context: LaunchContext) -> Launched:
    """Two pods that run, their host keys pinned."""
    pods = backend.launch(PodSpec(), 2, context)
    identity.pin(pods)
    return Launched(backend, identity, pods)


def children() -> list[Process]:
    """The live processes that this one started since the test began."""
    mine = f"PPid:\t{os.getpid()}\n"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mine in (folder / "status").read_text() and (process := find(int(folder.name))):
                found.append(process)
        except OSError:
            continue
    return [process for process in found if process not in _OTHERS]


def on_pods(pods: Sequence[Pod]) -> list[Process]:
    """The live processes that carry the mark of one of these pods."""
    return with_mark("WORKBENCH_POD", [pod.root for pod in pods])
