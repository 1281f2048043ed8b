"""Checkpoints in a folder that all pods share: written, resumed and restarted from in place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.fakes.sshhosts import SSHHost
from tests.support.haltedruns import JOB, curve, guardian_of, run_for, send
from tests.support.poll import until
from tests.support.rankpids import pids_of
from workbench import Cluster, FineTune, LocalPods, PodSpec, Run, SSHPods
from workbench.base.errors import ConfigError, RunError
from workbench.finetune.answers.server import close_all
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.ssh.identity import Identity
from workbench.rundir.state import RunState

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        LocalPods(), PodSpec(cpus=1), count=2, path=tmp_path_factory.mktemp("c") / "cluster"
    ) as cluster:
        yield cluster
    close_all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lustre")


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Run:
    run = cluster.submit(FineTune(**JOB))  # type: ignore[arg-type]
    run.wait(300, progress=False).raise_for_status()
    return run


def submit(cluster: Cluster, folder: Path, **options: object) -> Run:
    job = {**JOB, "checkpoints": str(folder), **options}
    return cluster.submit(FineTune(**job))  # type: ignore[arg-type]


def steps_in(folder: Path, run: Run) -> list[str]:
    return sorted(path.name for path in (folder / run.id / "checkpoints").iterdir())


def halt_after(run: Run, folder: Path, rank: Path, step: int) -> None:
    """Stop a rank once its part of a step is in the shared folder; it runs by turns before."""
    parts = folder / run.id / "checkpoints" / f"step-{step}" / "pods"

    def has_come() -> bool:
        run_for(rank, 0.02)
        return all((parts / f"rank-{each}" / "manifest.json").exists() for each in (0, 1))

    until(has_come, 240.0, why=lambda: run.message)


def test_ranks_write_and_restart_in_place(cluster: Cluster, folder: Path, whole: Run) -> None:
    run = submit(cluster, folder, save_steps=2, restarts=1)
    pod = cluster.pods[1]
    rank = Path(pod.root) / "runs" / run.id / "rank-1"
    halt_after(run, folder, rank, 4)
    os.kill(guardian_of(pod.root), signal.SIGKILL)
    result = run.wait(300, progress=False)
    assert result.state is RunState.SUCCEEDED, result.message
    assert [restart.step for restart in result.restarts] == [4]
    assert curve(run) == curve(whole)
    assert steps_in(folder, run) == ["step-14", "step-16"]
    assert not run.paths.checkpoints.exists()
    assert not moved_bytes(run, Path(cluster.pods[0].root).parent)


def test_the_trained_model_is_used_where_it_is(
    cluster: Cluster, folder: Path, whole: Run, tmp_path: Path
) -> None:
    run = submit(cluster, folder)
    result = run.wait(300, progress=False).raise_for_status()
    model = folder / run.id / "model"
    assert not moved_bytes(run, Path(cluster.pods[0].root).parent)
    assert (run.path / "model").resolve() == model
    trained = load_file(model / "model.safetensors")
    for name, weight in load_file(run.path / "model" / "model.safetensors").items():
        assert weight.equal(trained[name])
    rows = [{"source": "translate: a b c"}]
    assert run.predict(rows).texts() == whole.predict(rows).texts()
    run.export(tmp_path / "exported", dtype=None)
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == trained.keys()
    assert str(model) in str(run)
    assert len([*(folder / "tokens").iterdir()]) > 0
    later = submit(cluster, folder, model=str(model), max_steps=2)
    later.wait(300, progress=False).raise_for_status()
    assert not moved_bytes(later, Path(cluster.pods[0].root).parent)
    assert not [*Path(cluster.pods[0].root).parent.glob("store/model-*")]
    assert len([*(folder / "store").iterdir()]) > 0
    close_all()
    model.rename(tmp_path / "away")
    with pytest.raises(RunError, match=f"stays in {model}, and this machine cannot read"):
        Run.load(run.path).predict(rows)
    assert result.state is RunState.SUCCEEDED


def moved_bytes(run: Run, root: Path) -> list[Path]:
    """The tensors of checkpoints and models in the run directory or on pods."""
    return [
        *run.path.rglob("*.safetensors"),
        *root.glob(f"*/runs/{run.id}/**/*.safetensors"),
    ]


def test_another_cluster_continues_with_other_ranks_after_everything_else_is_gone(
    cluster: Cluster, folder: Path, whole: Run, tmp_path: Path
) -> None:
    first = submit(cluster, folder, save_steps=2, save_total_limit=3)
    first.wait(300, progress=False).raise_for_status()
    assert steps_in(folder, first) == ["step-12", "step-14", "step-16"]
    torn = folder / first.id / "checkpoints" / "step-14" / "pods" / "rank-1"
    (torn / "state.safetensors").write_bytes(b"torn")
    shutil.rmtree(first.path)
    kept = folder / first.id
    with Cluster(LocalPods(), PodSpec(cpus=1), path=tmp_path / "another", warm=False) as another:
        run = submit(another, folder, resume=str(kept), per_device_train_batch_size=4, save_steps=8)
        result = run.wait(300, progress=False).raise_for_status()
        assert result.resumed_step == 12
        assert "the checkpoint of step 14 was left out: rank-1/state.safetensors has" in (
            result.message
        )
        assert not moved_bytes(run, Path(another.pods[0].root).parent)
    later = {step: figures for step, figures in curve(whole).items() if int(str(step)) > 12}
    for step, (loss, norm) in curve(run).items():
        assert (loss, norm) == pytest.approx(later[step], rel=1e-4)
    assert len(curve(run)) == len(later)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[SSHPods, Path, Path]]:
    """Two hosts that mount a folder where this machine has an empty one."""
    store, mount = tmp_path / "store", tmp_path / "lustre"
    (store / "me").mkdir(parents=True)
    mount.mkdir()
    see = ["unshare", "-m", "sh", "-c", f'mount --bind {store} {mount} && exec "$@"', "sh"]
    if os.geteuid() != 0 or subprocess.run([*see, "true"], capture_output=True).returncode != 0:
        pytest.skip("another view of the disk needs root and mount namespaces")
    user = Identity.create(tmp_path / "user")
    addresses = [f"127.0.0.{n}" for n in (2, 3)]
    port = free_port(addresses)
    with ExitStack() as undo:
        started = []
        for number, address in enumerate(addresses):
            host = SSHHost(
                tmp_path / f"host-{number}", address, port, user.public_key, prefix=tuple(see)
            )
            started.append(host.start())
            undo.callback(host.stop)
        place = SSHPods(
            addresses,
            port=port,
            key=user.key,
            trust={host.address: host.fingerprint for host in started},
            python=sys.executable,
            root=str(tmp_path / "root"),
            connect_timeout_s=60,
        )
        yield place, mount / "me", store / "me"


def test_hosts_share_a_folder_that_this_machine_does_not_see(
    hosts: tuple[SSHPods, Path, Path], tmp_path: Path
) -> None:
    place, folder, behind = hosts
    with Cluster(place, PodSpec(cpus=1), count=2, path=tmp_path / "c", warm=False) as cluster:
        runs = {*cluster.path.glob("runs/*")}
        with pytest.raises(ConfigError, match=f"pod-0 has no folder {folder / 'none'}"):
            submit(cluster, folder / "none", save_steps=2)
        assert {*cluster.path.glob("runs/*")} == runs and not [*behind.iterdir()]
        run = submit(cluster, folder, save_steps=2, restarts=1)
        rank = Path(cluster.pods[1].root) / "runs" / run.id / "rank-1"
        halt_after(run, behind, rank, 4)
        send(signal.SIGKILL, pids_of(rank))
        result = run.wait(300, progress=False).raise_for_status()
        assert [restart.step for restart in result.restarts] == [4]
        assert steps_in(behind, run) == ["step-14", "step-16"]
        again = submit(cluster, folder, max_steps=18, resume=str(run.path))
        assert again.wait(300, progress=False).raise_for_status().resumed_step == 16
        for each in (run, again):
            assert not moved_bytes(each, tmp_path / "root")
        assert not folder.exists()
        with pytest.raises(ConfigError, match="not the directory of a FineTune run"):
            submit(cluster, folder, resume=str(folder / run.id))
