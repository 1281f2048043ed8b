"""A pod that shares the cluster's directory gets no program run, and no key, through it."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.kubeconfig import write_kubeconfig
from tests.support.runstores import list_runs
from tests.support.sentences import sentence
from tests.support.takeover import kill_keeper
from workbench import Cluster, LocalPods, PodSpec
from workbench.base.files import read_json, write_json
from workbench.base.files.private import cluster_folder
from workbench.client import lifecycle
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import ssh_argv
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import registration
from workbench.rundir.register.store import KnownRun, runs_in
from workbench.rundir.status import cluster_status

pytestmark = pytest.mark.slow
OWN = {
    "store.db",
    "identity",
    "keeper.sock",
    "keeper.lock",
    "store.db-journal",
    "state.json",
}


def test_key_configuration_and_socket_are_not_in_the_clusters_directory(tmp_path: Path) -> None:
    canary, root = tmp_path / "canary", tmp_path / "c"
    with Cluster(LocalPods(), PodSpec(cpus=1), path=root, warm=False) as cluster:
        paths = ClusterPaths(root)
        own = cluster_folder(root)
        assert not list(root.rglob("id_ed25519*")) or all(
            "pods" in key.parts for key in root.rglob("id_ed25519*")
        )
        assert not (root / "keeper.sock").exists()
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert {each.name for each in own.iterdir()} == OWN
        assert not {"store.db", "keeper.lock"} & {each.name for each in root.iterdir()}
        # What a pod puts there is not believed, while the cluster runs
        planted = Identity.create(root / "identity")
        planted.ssh_config.write_text(f"Host *\n  ProxyCommand touch {canary}\n")
        (root / "keeper.sock").touch()
        assert paths.socket.parent == paths.identity.parent == own
        assert str(root) not in " ".join(
            ssh_argv(cluster.pods[0], Identity(paths.identity), ["true"])[:4]
        )
        list_runs(root / "store.db", KnownRun(id="r", path=Path("/")))
        (root / "keeper.lock").touch()
        write_json(
            paths.state, {**read_json(paths.state), "phase": "closing", "pid": 1, "start_time": 1}
        )
        assert (cluster_status(root).phase, cluster_status(root).alive) == ("ready", True)
        assert list(runs_in(paths.store)) == []
        cluster.doctor(bandwidth=False)
        attached = Cluster.attach(root)
        attached.doctor(bandwidth=False)
    assert not canary.exists()
    left = {each.name for each in own.iterdir()}
    assert left == {"keeper.lock", "state.json", "store.db", "store.db-journal"}
    # A state that a pod left there is not believed after the end either,
    write_json(
        paths.state, {**read_json(paths.state), "phase": "closing", "pid": 1, "start_time": 1}
    )
    assert cluster_status(root).phase == "closed"
    # nor once it is started again.
    with Cluster(LocalPods(), PodSpec(cpus=1), path=root, warm=False) as cluster:
        cluster.doctor(bandwidth=False)
        assert {each.name for each in own.iterdir()} == OWN
    assert not canary.exists()


def test_a_folder_for_keys_that_cannot_be_had_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.base.errors import ConfigError

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    unknown = replace(cluster_status(tmp_path / "none"), phase="unknown", alive=True)
    # As with HOME=/root after `su`: nothing in the folder can be read.
    monkeypatch.setattr(lifecycle, "cluster_status", lambda _root: unknown)
    with pytest.raises(ConfigError, match=sentence("no folder for the keys of the cluster in")):
        Cluster(LocalPods(), PodSpec(cpus=1), path=tmp_path / "c", warm=False).start()


def test_what_a_pod_changes_there_changes_no_cluster(tmp_path: Path) -> None:
    """The specification names the place, and by its options programs and keys."""
    canary, root = tmp_path / "canary", tmp_path / "c"
    with Cluster(LocalPods(), PodSpec(cpus=1), path=root, warm=False) as cluster:
        paths = ClusterPaths(root)
        kill_keeper(cluster)
        config = tmp_path / "kubeconfig"
        write_kubeconfig(config, canary)
        backend = {"kind": "kubernetes", "kubeconfig": str(config)}
        write_json(paths.config, {**read_json(paths.config), "backend": backend})
        write_json(root / "kubernetes.json", {"base": "wb-c"})
        (root / "hosts").mkdir()
        write_json(root / "hosts" / "left.json", {"folder": "c-0123456789abcdef", "pods": []})
        attached = Cluster.attach(root)
        assert (attached.phase, attached.spec.backend["kind"]) == ("ready", "local")
    assert not canary.exists()
    assert (root / "hosts" / "left.json").exists()
    assert (root / "kubernetes.json").exists()
    assert registration(root) is None
