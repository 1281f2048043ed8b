"""`run.sbatch()`: a batch script trains on the nodes of a real Slurm, without a keeper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.slurmplace import SlurmPlace
from tests.support.poll import until
from workbench import Cluster, FineTune, LocalPods, PodSpec, Run, Script, SlurmPods, history
from workbench.base.display_protocol import as_text
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import write_json
from workbench.handover.slurm import SbatchScript
from workbench.jobs.job import Job
from workbench.pods.place import Place
from workbench.pods.slurm import commands
from workbench.rundir.checkpoints import newest_good
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import RunState

TINY = FineTune(
    dataset={"kind": "wikisql-mini", "train_rows": 64, "eval_rows": 4},
    max_steps=4,
    save_steps=2,
    per_device_train_batch_size=2,
)


PLACE = "slurm"


def run_of(folder: Path, job: Job, place: Place | None = None, **pod: Any) -> Run:
    backend = (place or SlurmPods()).to_dict()
    cluster = ClusterSpec(backend=backend, pods=PodSpec(**pod), count=2)
    prepared = prepare_run(RunSpec(cluster=cluster, job=job), root=folder / "runs" / "first")
    write_json(prepared.paths.info, {"id": "20261130-140000-first-0a1b", "cluster": str(folder)})
    return Run.load(prepared.paths.root)


def started(place: SlurmPlace, script: SbatchScript) -> tuple[str, Run]:
    """Submit a script, and return the job's id and the run once rank 0 has made its directory."""
    job = place.slurm.do("sbatch", "--parsable", str(script.path))
    return job, _await_run(script)


def _await_run(script: SbatchScript) -> Run:
    def log() -> str:
        return "\n".join(each.read_text() for each in script.path.parent.glob("job-*.log"))

    until((script.run / "run.json").exists, 300, every_s=0.2, why=log)
    return Run.load(script.run)


def followed(run: Run, state: RunState) -> None:
    """Check what a person sees of the run from another process."""
    records = [record for record in history(run.path.parent) if record.id == run.id]
    assert [record.state for record in records] == [state]
    words = [sys.executable, "-m", "workbench", "ls", "--json", "-", str(run.path.parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    listed = {row["id"]: row["state"] for row in json.loads(done.stdout)["runs"]}
    assert listed[run.id] == state
    assert Run.load(run.path).state is state
    attached(run, state)


def attached(run: Run, state: RunState) -> None:
    """Check the run's cluster, which shows the job and takes no other."""
    with Cluster.attach(run.path) as cluster:
        assert [each.path for each in cluster.runs] == [run.path]
        assert cluster.phase == ("closed" if state.is_terminal else "ready")
        assert cluster.message
        assert run.path.name in as_text(cluster)
        assert (f"Run in progress: {run.id}" in as_text(cluster)) is not state.is_terminal
        for ask in (
            cluster.start,
            cluster.doctor,
            lambda: cluster.hostfile,
            lambda: cluster.submit(TINY),
            lambda: cluster.command(TINY),
        ):
            with pytest.raises(RunError, match=r"has no keeper.*Submit jobs to another cluster"):
                ask()
    assert Run.load(run.path).state is state, "leaving the cluster ends nothing"


def unattended(folder: Path, **info: str) -> Run:
    """Make the directory of a run that a batch script trains."""
    run = run_of(folder, TINY)
    write_json(run.paths.info, {"id": "a", "cluster": str(run.path), "unattended": "srun", **info})
    write_json(run.paths.state, {"state": "running", "message": "running"})
    return run


def test_a_run_of_a_script_is_attached_to_and_ended_by_its_own_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = unattended(tmp_path, job="77")
    attached(run, RunState.RUNNING)
    asked: list[tuple[str, ...]] = []
    script = run.path.parent / "job.sh"

    def answer(*words: str) -> str:
        asked.append(words)
        return f"JobId=77 JobName=a Command={script} WorkDir=/home/ada"

    monkeypatch.setattr(commands, "call", answer)
    Cluster.attach(run.path).close()
    assert asked[1:] == [("scancel", "77")]
    # The author of a directory may name any job.
    script = tmp_path / "other" / "job.sh"
    with pytest.raises(RunError, match=r"scancel 77\. Slurm's job 77 here is of another script"):
        run.cancel()
    assert ("scancel", "77") not in asked[2:]

    def missing(*_words: str) -> str:
        raise ConfigError("Slurm's command scontrol is not on this machine")

    monkeypatch.setattr(commands, "call", missing)
    with pytest.raises(RunError, match="scancel 77, on a machine of that Slurm"):
        run.cancel()


def test_a_run_without_a_keeper_and_a_job_of_slurm_names_the_way_to_its_end(tmp_path: Path) -> None:
    run = unattended(tmp_path)
    with pytest.raises(RunError, match="End the job itself"):
        Cluster.attach(run.path).close()


def first_step(run: Run) -> int:
    """Return the first step that a run has printed; 0 before."""
    steps = [event.data["step"] for event in run.events() if event.kind == "step"]
    return int(steps[0]) if steps else 0


@pytest.mark.slow
@pytest.mark.long
def test_a_script_trains_on_two_nodes_and_a_cancelled_job_keeps_its_checkpoint(
    place: SlurmPlace, tmp_path: Path
) -> None:
    job = TINY.replace(max_steps=100_000, save_steps=2)
    script = run_of(tmp_path, job, place.backend(time="30")).sbatch()
    number, run = started(place, script)
    until(lambda: (run.progress.step or 0) >= 6, 300, every_s=0.2, why=lambda: run.message)
    assert run.state is RunState.RUNNING
    # Each rank is shown on its node.
    nodes = sorted(place.slurm.nodes)[:2]
    assert all(node in as_text(run) for node in nodes)
    followed(run, RunState.RUNNING)
    for ask in (run.stop, run.stacks, run.fetch):
        with pytest.raises(RunError, match=f"has no keeper.*: scancel {number}"):
            ask()
    Cluster.attach(script.run).close()
    until(lambda: not place.slurm.jobs(), 120, every_s=0.2)
    assert run.state is RunState.CANCELLED, run.message
    followed(run, RunState.CANCELLED)
    run.cancel()  # an ended run is unchanged
    saved = newest_good(run.path)
    assert saved is not None
    assert saved.step >= 4
    # The same script continues from there, and puts the files of the first job aside.
    place.slurm.do("sbatch", str(script.path))
    until((script.run / "attempt-1" / "run.json").exists, 300, every_s=0.2)
    _await_run(script)
    until(lambda: first_step(run) > 0, 300, every_s=0.2, why=lambda: run.message)
    assert first_step(run) == saved.step + 1
    place.slurm.cancel_all()


@pytest.mark.slow
@pytest.mark.long
def test_a_script_leaves_result_logs_and_model(place: SlurmPlace, tmp_path: Path) -> None:
    script = run_of(tmp_path, TINY, place.backend(setup=["export WORD=here"])).sbatch()
    _, run = started(place, script)
    result = run.wait(300, progress=False).raise_for_status()
    followed(run, RunState.SUCCEEDED)
    assert (result.world_size, result.steps, result.launcher) == (2, 4, "srun")
    assert len({host.address for host in result.hosts}) == 2
    assert (run.path / "model").is_dir()
    assert all(run.logs(rank) for rank in (0, 1))
    until(lambda: not place.slurm.jobs(), 120, every_s=0.2)


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_fails_ends_the_others(place: SlurmPlace, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    code = "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('no such thing')\n"
    (own / "train.py").write_text(f"{code}time.sleep(6000)\n")
    script = run_of(tmp_path, Script(path=str(own / "train.py")), place.backend()).sbatch()
    _, run = started(place, script)
    result = run.wait(300, progress=False)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert (result.error.rank, result.error.kind) == (1, "ValueError")
    until(lambda: not place.slurm.jobs(), 120, every_s=0.2)


def test_the_text_is_short_and_has_the_options_of_the_place(tmp_path: Path) -> None:
    run = run_of(tmp_path, TINY)
    slurm = SlurmPods(
        partition="gpu",
        time="8:00:00",
        account="ml",
        gpu_type="a100",
        options=["--qos=high"],
        setup=["module load cuda"],
        requeue=True,
    )
    script = run.sbatch(slurm, pod=PodSpec(cpus=16, gpus=4, memory_gib=100), count=3)
    lines = str(script).splitlines()
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {
        "--nodes=3",
        "--ntasks-per-node=4",
        "--cpus-per-task=4",
        "--mem=102400M",
        "--gpus-per-node=a100:4",
        "--partition=gpu",
        "--time=8:00:00",
        "--account=ml",
        "--qos=high",
        "--requeue",
        "--export=NONE",
    } <= set(asked)
    assert "eval 'module load cuda' || exit 1" in lines
    assert len(lines) < 35
    assert script.path.read_text() == script.text
    # Another script replaces the first, as no job has used it.
    assert "--time=1:00" in str(run.sbatch(SlurmPods(time="1:00")))
    script.run.mkdir()
    with pytest.raises(ConfigError, match="has the run or the log of a job"):
        run.sbatch()


@pytest.mark.parametrize(
    ("given", "pod", "words"),
    [
        ({"place": SlurmPods(port=2223)}, {}, "SlurmPods.port is for pods with a keeper"),
        ({"place": SlurmPods(setup=["export HF_TOKEN=hf_abc"])}, {}, "setup sets HF_TOKEN"),
        ({"place": SlurmPods(options=["--comment-x=Bearer abc123def"])}, {}, "has a secret"),
        ({"pod": PodSpec(image="nvcr.io/x")}, {}, "without image"),
        ({}, {"env": {"HF_TOKEN": "hf_abc"}}, "the run takes HF_TOKEN from the environment"),
        ({"folder": "/tmp/of-this-machine-alone"}, {}, "each node has for itself"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(
    tmp_path: Path, given: dict[str, Any], pod: dict[str, Any], words: str
) -> None:
    run = run_of(tmp_path, TINY, **pod)
    with pytest.raises(ConfigError, match=words):
        run.sbatch(**given)
    assert not run.path.with_name("first-sbatch").exists()
    assert not Path("/tmp/of-this-machine-alone").exists()


def test_the_folder_of_a_run_on_this_machine_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="each node has for itself"):
        run_of(tmp_path, TINY, LocalPods()).sbatch()


def test_a_variable_that_a_setup_line_sets_is_no_secret_in_the_text(tmp_path: Path) -> None:
    run = run_of(tmp_path, TINY, env={"HF_TOKEN": "hf_abc"})
    script = run.sbatch(SlurmPods(setup=["export HF_TOKEN=$(cat ~/.token)"]))
    written = [each for each in script.path.parent.iterdir() if each.is_file()]
    assert all(b"hf_abc" not in each.read_bytes() for each in written)


def test_a_run_without_a_keeper_is_lost_once_it_gives_no_sign_of_life(tmp_path: Path) -> None:
    run = run_of(tmp_path, TINY)
    write_json(run.paths.info, {"id": "a", "cluster": str(run.path), "unattended": "srun"})
    write_json(run.paths.state, {"state": "running", "message": "running"})
    assert run.state is RunState.RUNNING
    os.utime(run.paths.state, (time.time() - 3600,) * 2)
    assert run.state is RunState.LOST
    assert "its ranks ended without a result" in run.message
