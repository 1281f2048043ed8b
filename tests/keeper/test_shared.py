"""Folders that pods share with this machine: found by a probe of each pod, and used in place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.sshhosts import SSHHost
from tests.support.sentences import sentence
from workbench import Cluster, PodSpec, Script, SSHPods
from workbench.base.errors import ConfigError, RemoteError
from workbench.keeper.link.shared import folders_to_probe, is_within, seen_by
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.pod import Pod
from workbench.pods.ssh.channel import Completed
from workbench.pods.ssh.identity import Identity
from workbench.rundir.spec import ClusterSpec

POD = Pod(name="pod-1", root="/nowhere/pods/pod-1", python=sys.executable)


class Ssh:
    """What a probe asks of a connection, answered on this machine; its disk may be another."""

    def __init__(self, before: Sequence[str] = ()) -> None:
        self.before = before

    def run(self, argv: Sequence[str], timeout_s: float = 0.0) -> Completed:
        done = subprocess.run([*self.before, *argv], capture_output=True, text=True, timeout=300)
        return Completed(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


class Broken(Ssh):
    def run(self, argv: Sequence[str], timeout_s: float = 0.0) -> Completed:
        raise RemoteError("no line", host="")


class Stale(Ssh):
    """A folder of the same name with other files: it reads them; its writes are not seen here."""

    def run(self, argv: Sequence[str], timeout_s: float = 0.0) -> Completed:
        token = Path(argv[-2]).read_text()
        return Completed(exit_code=0, stdout=token, stderr="")


def seen(ssh: Ssh, *folders: Path) -> tuple[Path, ...]:
    return seen_by(ssh, POD, folders)  # type: ignore[arg-type]


def test_a_folder_is_shared_when_both_sides_read_what_the_other_wrote(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert seen(Ssh(), tmp_path, tmp_path / "none", tmp_path / "other") == (
        tmp_path,
        tmp_path / "other",
    )
    assert seen(Broken(), tmp_path) == ()
    assert seen(Stale(), tmp_path) == ()
    assert seen(Ssh(["false"]), tmp_path) == ()
    assert [path.name for path in tmp_path.iterdir()] == ["other"], "a probe leaves nothing"


def test_local_pods_are_asked_only_when_that_is_said(tmp_path: Path) -> None:
    def folders(kind: str, shared: bool | str | None) -> list[Path]:
        return folders_to_probe(
            ClusterSpec(backend={"kind": kind}, shared=shared), tmp_path / "cluster"
        )

    cluster = tmp_path / "cluster"
    assert folders("local", None) == folders("ssh", False) == []
    assert (
        folders("local", True) == folders("ssh", None) == folders("kubernetes", True) == [cluster]
    )
    assert folders("local", str(tmp_path)) == [cluster, tmp_path]
    with pytest.raises(
        ConfigError,
        match=sentence("give a path that is equal here and on the pods", "/no/such"),
    ):
        folders("ssh", "/no/such")
    with pytest.raises(
        ConfigError,
        match=sentence("true, false, null or the path of a folder", "shared is 3")
        + sentence("it must be"),
    ):
        ClusterSpec.from_dict({"shared": 3})


def test_a_link_that_leads_out_of_a_shared_folder_is_not_in_it(tmp_path: Path) -> None:
    for name in ("nfs", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "nfs" / "model").symlink_to(tmp_path / "home")
    assert is_within(tmp_path / "nfs" / "data", [tmp_path / "nfs"])
    assert not is_within(tmp_path / "nfs" / "model", [tmp_path / "nfs"])
    assert not is_within(tmp_path / "nfs" / ".." / "home", [tmp_path / "nfs"])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[SSHPods, Path]]:
    """Three hosts, and a folder that the last one sees as an empty one of its own."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    hide = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh"]
    if os.geteuid() != 0 or subprocess.run([*hide, "true"], capture_output=True).returncode != 0:
        pytest.skip("another view of the disk needs root and mount namespaces")
    user = Identity.create(tmp_path / "user")
    addresses = [f"127.0.0.{n}" for n in (2, 3, 4)]
    port = free_port(addresses)
    with ExitStack() as undo:
        started = []
        for number, address in enumerate(addresses):
            prefix = tuple(hide) if number == 2 else ()
            host = SSHHost(
                tmp_path / f"host-{number}", address, port, user.public_key, prefix=prefix
            )
            started.append(host.start())
            undo.callback(host.stop)
        trust = {host.address: host.fingerprint for host in started}
        root = str(tmp_path / "root")
        yield (
            SSHPods(
                addresses,
                port=port,
                key=user.key,
                trust=trust,
                python=sys.executable,
                root=root,
                connect_timeout_s=60,
            ),
            folder,
        )


@pytest.mark.slow
def test_each_pod_is_asked_and_used_on_its_own(hosts: tuple[SSHPods, Path], tmp_path: Path) -> None:
    backend, folder = hosts
    script = tmp_path / "work" / "say.py"
    script.parent.mkdir()
    script.write_text("import os, sys\nprint(os.getcwd(), sys.path[0])\n")
    with Cluster(backend, PodSpec(), count=3, path=folder, warm=False) as cluster:
        assert cluster.message == f"3 pods are ready; pod-0, pod-1 share {folder}"
        run = cluster.submit(Script(path=str(script)))
        run.wait(300, progress=False).raise_for_status()
        for rank, pod in enumerate(cluster.pods):
            assert f"{pod.root}/runs/{run.id}/script" in run.logs(rank, "stdout")
        sent = {path.suffix for path in (tmp_path / "root").glob("*/store/*")}
        assert sent == {".zip"}, "the one that sees nothing was sent the package and the script"
        here = sorted(path.name for path in (folder / "store").iterdir())
        assert len(here) == 2
        assert here[-1].startswith("workbench-")
