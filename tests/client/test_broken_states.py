"""A directory whose files a power cut broke is usable by the advice of its messages."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench import Cluster, LocalPods
from workbench.base.errors import WorkbenchError
from workbench.base.files import write_json
from workbench.client import cluster as cluster_module
from workbench.client import lifecycle
from workbench.keeper.decisions import DecisionLog
from workbench.pods.ssh.identity import Identity
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import register
from workbench.rundir.register.store import DecisionKind, journal_of

FILES: dict[str, Callable[[ClusterPaths], Path]] = {
    "own state": lambda paths: paths.own_state,
    "state": lambda paths: paths.state,
    "both states": lambda paths: paths.own_state,
    "store": lambda paths: paths.store,
    "journal": lambda paths: journal_of(paths.store),
    "lock": lambda paths: paths.keeper_lock,
    "lock of the start": lambda paths: paths.lock,
    "specification": lambda paths: paths.config,
    "key": lambda paths: paths.identity / "id_ed25519",
    "known hosts": lambda paths: paths.identity / "known_hosts",
    "private folder": lambda paths: paths.own_state.parent,
}
BREAKS: dict[str, Callable[[Path], object]] = {
    "is gone": lambda path: shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True),
    "is empty": lambda path: path.write_bytes(b""),
    "is torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}
STEPS = 3
"""Messages that a user follows at most."""


def whole(root: Path, phase: str) -> ClusterPaths:
    """A cluster whose keeper died in a phase, with a run in progress."""
    root.mkdir()
    paths = ClusterPaths(root)
    paths.lock.touch()
    stored = lifecycle._stored(Cluster(LocalPods(), path=root).spec)
    register(paths, stored)
    if phase != "closed":
        Identity.create(paths.identity)
    paths.keeper_lock.touch(0o600)
    facts = {"phase": phase, "pid": 2**22 + 1, "start_time": 1, "host": socket.gethostname()}
    for file in (paths.own_state, paths.state):
        write_json(file, {**facts, "pods": [{"name": "pod-0", "address": "127.0.0.2"}]})
    log = DecisionLog(paths.store)
    log.replay()
    log.add("a", DecisionKind.SUBMITTED, path=paths.runs / "a", pods=["pod-0"])
    return paths


class User:
    """A user who does what the messages say. What would start a keeper is noted alone."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.said: list[str] = []
        self.works = ""
        for place, name in (
            (cluster_module, "take_over"),
            (cluster_module, "await_successor"),
            (lifecycle, "spawn_keeper"),
            (lifecycle, "take_over"),
            (lifecycle, "await_successor"),
        ):
            monkeypatch.setattr(place, name, lambda *_args, **_options: SimpleNamespace())

    def attach(self) -> None:
        Cluster.attach(self.root)
        self.works = "attached"

    def start(self) -> None:
        paths = ClusterPaths(self.root)
        cluster = Cluster(LocalPods(), path=self.root)
        if lifecycle.is_left(paths, cluster.spec):
            self.works = "continued"
            return
        with lifecycle.Leash() as leash:
            lifecycle.spawn(paths, cluster.spec, leash)
            os.close(leash.far_end)
        Identity.create(paths.identity)
        self.works = "started"

    def follow(self, way: Callable[[], None]) -> None:
        for _ in range(STEPS):
            try:
                way()
            except WorkbenchError as error:
                self.said.append(f"{way.__name__}: {error}")
                words = str(error)
                if "another path" in words or "start another" in words or "new directory" in words:
                    self.works = "elsewhere"
                    if "Cluster.attach" not in words:
                        return
                way = self.attach if "Cluster.attach" in words else self.start
            else:
                return


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("what", FILES)
def test_a_message_about_a_broken_cluster_leads_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))
    for phase in ("ready", "starting", "closing", "closed"):
        for begin in ("attach", "start"):
            root = tmp_path / f"{phase}-{begin}"
            paths = whole(root, phase)
            path = FILES[what](paths)
            if how != "is gone" and not path.is_file():
                continue
            BREAKS[how](path)
            if what == "both states":
                BREAKS[how](paths.state)
            user = User(root, monkeypatch)
            user.follow(getattr(user, begin))
            assert user.works, (phase, user.said)
