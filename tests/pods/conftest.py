"""Places that pods come from, the identity they must accept, and launched pods, later stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import pytest

from tests.fakes.cmlplace import CMLPlace
from tests.fakes.kubeplace import KubernetesPlace
from tests.fakes.slurmplace import InsidePlace, SlurmPlace
from tests.fakes.sshhosts import HostsPlace
from workbench.base.errors import ConfigError
from workbench.base.process import Process, find, with_mark
from workbench.pods.local.pods import LocalPods
from workbench.pods.place import Place
from workbench.pods.pod import LaunchContext, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity


class Platform(Protocol):
    """A platform, real or emulated, that a backend takes its pods from; one for each test."""

    owns_daemons: bool
    """Whether the SSH daemons are the backend's own, so that `stop` ends them."""
    launchers: Sequence[str]
    """The launchers to try a run with."""

    def __enter__(self) -> Self:
        """Bring the platform up."""
        ...

    def __exit__(self, *_exc: object) -> None:
        """Take it down."""
        ...

    def backend(self) -> Place:
        """Give a backend that has launched nothing."""
        ...

    def left(self, context: LaunchContext) -> list[str]:
        """List what launches with this context have left on the platform, processes apart."""
        ...


class LocalPlace:
    """This machine."""

    owns_daemons = True
    launchers = ("ssh",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def backend(self) -> Place:
        return LocalPods()

    def left(self, context: LaunchContext) -> list[str]:
        return [str(path) for path in (context.directory / "pods").glob("pod-?")]


class NamelessPlace(LocalPlace):
    """This machine for a user whom OpenSSH's daemon would not let in."""

    def __enter__(self) -> Self:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr("workbench.pods.local.pods.login_user", self._refuse)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._patch.undo()

    def _refuse(self) -> None:
        raise ConfigError("the user id has no name")


PLACES: dict[str, type[Platform]] = {
    "local": LocalPlace,
    "ssh": HostsPlace,
    "kubernetes": KubernetesPlace,
    "cml": CMLPlace,
    "slurm": SlurmPlace,
    "slurm inside a job": InsidePlace,
}
"""By kind of place, the maker of its platform in an empty folder, for the contract suite."""

NAMELESS: dict[str, type[Platform]] = {"nameless": NamelessPlace}

_OTHERS: list[Process] = []


@pytest.fixture(autouse=True)
def others() -> None:
    """Note what other tests keep running in this session: a model server or a browser's driver."""
    note_others()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Platform]:
    """Where pods come from: the module's `PLACE`, else this machine."""
    with PLACES[getattr(request.module, "PLACE", "local")](tmp_path / "place") as made:
        yield made


@pytest.fixture
def filled(place: SlurmPlace) -> str:
    """A job of another user that has every node."""
    return place.fill()


@pytest.fixture
def backend(place: Platform) -> Iterator[Place]:
    """A backend that has launched nothing. Stopped afterwards."""
    made = place.backend()
    yield made
    made.stop()


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.create(tmp_path / "identity")


@pytest.fixture
def context(tmp_path: Path, identity: Identity) -> LaunchContext:
    return LaunchContext(
        cluster_id="test",
        directory=tmp_path,
        public_key=identity.public_key,
        lease_s=600.0,  # between two logins a busy machine takes its time
        timeout_s=300.0,
    )


@dataclass(frozen=True)
class Launched:
    backend: Place
    identity: Identity
    pods: Sequence[Pod]
    context: LaunchContext

    def connect(self, index: int = 0) -> SSHConnection:
        return SSHConnection(self.pods[index], self.identity)


@pytest.fixture
def launched(backend: Place, identity: Identity, context: LaunchContext) -> Launched:
    """Two pods that run, their host keys pinned."""
    pods = backend.launch(PodSpec(), 2, context)
    identity.pin(pods)
    return Launched(backend, identity, pods, context)


@contextmanager
def launching(place: Platform, count: int, folder: Path) -> Iterator[Launched]:
    """Launch pods that no keeper logs in to, and trust them."""
    identity = Identity.create(folder / "identity")
    context = LaunchContext(
        cluster_id="test",
        directory=folder,
        public_key=identity.public_key,
        lease_s=600.0,
        timeout_s=300.0,
    )
    backend = place.backend()
    try:
        pods = backend.launch(PodSpec(), count, context)
        identity.pin(pods)
        yield Launched(backend, identity, pods, context)
    finally:
        backend.stop()


def note_others() -> None:
    """Count the processes that this one has started so far as others'."""
    _OTHERS[:] = []
    _OTHERS[:] = children()


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
