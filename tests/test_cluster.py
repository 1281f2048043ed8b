"""The journey of a job over two local pods: the real sshd, pdsh, mpirun, DeepSpeed; no fakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest

from tests.support.poll import until
from tests.support.sentences import sentence
from workbench import Cluster, FineTune, LocalPods, Run, Script
from workbench.base.errors import ConfigError, RunError, RunFailed
from workbench.client.result import RunResult
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState

pytestmark = pytest.mark.slow
MESH = str(Path(__file__).parent / "scripts" / "mesh.py")  # without torch: ranks that start at once
TINY = FineTune(
    dataset={"kind": "wikisql-mini", "train_rows": 200, "eval_rows": 20},
    max_steps=4,
    predict_rows=6,
    profile_step=2,
    per_device_train_batch_size=4,
)
LAUNCHERS = ["ssh", "pdsh", "openmpi"]
# Where each pod imports DeepSpeed, the same training and the same fault are for `make test-all`.
each_launcher = pytest.mark.parametrize(
    "launcher", ["ssh", *(pytest.param(name, marks=pytest.mark.long) for name in LAUNCHERS[1:])]
)


def trained(cluster: Cluster, launcher: str) -> RunResult:
    return cluster.submit(TINY.replace(launcher=launcher)).wait(300, progress=False)


@pytest.fixture(scope="module")
def result(cluster: Cluster) -> RunResult:
    """What a job came to by SSH."""
    return trained(cluster, "ssh").raise_for_status()


@pytest.mark.long
def test_same_job_gives_the_same_losses_through_every_launcher(
    cluster: Cluster, result: RunResult
) -> None:
    results = {"ssh": result, **{name: trained(cluster, name) for name in LAUNCHERS[1:]}}
    for name, each in results.items():
        each.raise_for_status()
        assert (each.launcher, each.world_size, each.steps) == (name, 2, 4)
        assert each.left_processes == 0
    curves = {
        name: [e.data["loss"] for e in Run.load(each.path).events() if e.kind == "step"]
        for name, each in results.items()
    }
    assert len(curves["ssh"]) == 4
    assert curves["ssh"] == curves["pdsh"] == curves["openmpi"]
    assert len({each.eval_loss for each in results.values()}) == 1


@pytest.mark.long
def test_real_questions_halve_the_loss(cluster: Cluster, shared_data: Path, tmp_path: Path) -> None:
    asked = (shared_data / "eval.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "eval.jsonl").write_text("".join(asked[::8]))  # 500 of them, all over the file
    data = {
        "kind": "files",
        "train": str(shared_data / "train.jsonl"),
        "eval": str(tmp_path / "eval.jsonl"),
    }
    job = FineTune(
        dataset=data,
        technique="zero1",
        max_steps=80,
        per_device_train_batch_size=12,
        per_device_eval_batch_size=64,
        learning_rate=5e-3,
        predict_rows=12,
    )
    result = cluster.submit(job).wait(600, progress=False).raise_for_status()
    assert result.first_eval_loss is not None
    assert result.eval_loss is not None
    assert result.eval_loss <= result.first_eval_loss / 2


def test_a_result_holds_every_field_of_the_design(result: RunResult) -> None:
    run = Run.load(result.path)
    raw = json.loads(run.paths.result.read_text())
    fields = [
        "state",
        "hosts",
        "world_size",
        "technique",
        "launcher",
        "steps",
        "global_batch_size",
        "train_runtime_s",
        "train_samples_per_s",
        "train_loss",
        "eval_loss",
        "exact_match",
        "peak_memory_gib",
        "time_to_first_step_s",
        "versions",
        "command",
    ]
    assert [name for name in fields if raw.get(name) in (None, "", [], {})] == []
    assert [host["address"] for host in raw["hosts"]] == ["127.0.0.2", "127.0.0.3"]
    assert set(raw["peak_memory_gib"]) == {"127.0.0.2", "127.0.0.3"}
    assert raw["global_batch_size"] == 8
    assert (run.path / "model" / "model.safetensors").stat().st_size > 1000
    assert run.result.profile is not None
    assert run.result.predictions is not None
    assert len(run.result.predictions) == 6
    assert list(run.paths.tensorboard.glob("events.out.tfevents.*"))
    assert run.paths.manifest.exists()


@each_launcher
def test_a_pasted_line_starts_the_ranks(cluster: Cluster, launcher: str) -> None:
    command = cluster.command(
        Script(path=MESH, args=["--steps", "5", "two words", "$HOME"], launcher=launcher)
    )
    done = subprocess.run(
        ["bash", "-c", str(command)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("words ['two words', '$HOME']") == 2
    assert done.stdout.count("step 4 sum 2") == 2


@each_launcher
def test_the_rank_that_raised_is_named_with_its_own_traceback(
    cluster: Cluster, launcher: str
) -> None:
    job = Script(path=MESH, args=["--fail", "raise"], launcher=launcher)
    result = cluster.submit(job).wait(300, progress=False)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert (result.error.rank, result.error.host, result.error.kind) == (
        1,
        "127.0.0.3",
        "ValueError",
    )
    assert "row 17 is bad" in result.error.message
    assert "mesh.py" in result.error.traceback
    assert result.left_processes == 0
    with pytest.raises(RunFailed, match="rank 1 on pod-1") as raised:
        result.raise_for_status()
    assert raised.value.result == result


@each_launcher
def test_a_killed_rank_is_named_and_its_children_are_gone(cluster: Cluster, launcher: str) -> None:
    # The grandchild sleeps for 600 s and holds stdout: it must not keep the run.
    job = Script(path=MESH, args=["--fail", "kill"], launcher=launcher)
    result = cluster.submit(job).wait(300, progress=False)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert result.error.rank == 1
    assert "SIGKILL" in result.error.message
    assert result.left_processes == 0


def test_cancel_ends_ranks_that_do_not_listen(cluster: Cluster) -> None:
    run = cluster.submit(Script(path=MESH, args=["--fail", "deaf"]))
    until(lambda: "step 1" in _log(run), 120)
    run.cancel()
    result = run.wait(300, progress=False)
    assert result.state is RunState.CANCELLED
    assert result.message == "stopped when asked: ranks [1] did not end when asked and were killed"
    assert result.left_processes == 0


def test_a_script_that_we_did_not_write_runs_unchanged(cluster: Cluster) -> None:
    script = Path(accelerate.__file__).parent / "test_utils" / "scripts" / "test_ops.py"
    run = cluster.submit(Script(path=str(script)))
    result = run.wait(300, progress=False).raise_for_status()
    assert "Num processes: 2" in _log(run)  # its ranks found each other
    assert "testing sending tensors across devices" in _log(run)
    assert "alone" not in result.message


def test_ranks_that_open_no_group_are_named(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "apart.py"
    script.write_text(
        "import os\nfrom accelerate import Accelerator\nassert Accelerator().num_processes == 1\n"
        "print(os.environ.get('ACCELERATE_USE_CPU'))\n"
    )
    run = cluster.submit(Script(script, env={"ACCELERATE_USE_CPU": "false"}))
    result = run.wait(300, progress=False).raise_for_status()
    assert _log(run).split() == ["false"]
    said = "no process group of torch connects two ranks: each of the 2 ranks worked alone"
    assert said in result.message
    assert said in run.message


STEPS = """
import json, time
for step in (998, 999, 1000):
    event = {"time_s": time.time(), "rank": 0, "kind": "step", "step": step, "loss": 1000.0}
    print("@workbench " + json.dumps(event), flush=True)
"""


def test_secrets_are_nowhere_on_the_disk(cluster: Cluster) -> None:
    canary = "hf_" + "canary" * 4
    run = cluster.submit(Script(path=MESH, args=["--steps", "5"], env={"MY_TOKEN": canary}))
    result = run.wait(300, progress=False)
    result.raise_for_status()
    assert "token hf_" in run.logs(0, "stdout")
    found = []
    # The pods remove the run's folders meanwhile, which `os.walk` passes over.
    for folder, _, names in os.walk(cluster.path):
        for path in (Path(folder) / name for name in names):
            if path.is_file() and canary.encode() in path.read_bytes():
                found.append(path)
    assert found == []


def test_words_of_the_environment_change_no_record(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    env = {
        "TOKENIZERS_PARALLELISM": "true",
        "MAX_TOKENS": "1000",
        "KEY": "local",
        "MY_AUTH": "step",
    }
    run = cluster.submit(Script(path=str(script), env=env), pods=1)
    run.wait(300, progress=False).raise_for_status()
    assert [event.whole("step") for event in run.events() if event.kind == "step"] == [
        998,
        999,
        1000,
    ]
    spec = RunSpec.load(run.paths.spec, of_run=True)
    assert spec.cluster.backend["kind"] == "local" and set(spec.job.env) == set(env)
    assert cluster.phase == "ready"
    script.write_text(f"{STEPS}\nraise SystemExit('step 1000')")
    after = cluster.submit(Script(path=str(script)), pods=1).wait(300, progress=False)
    assert after.error is not None and "step 1000" in after.error.message, after.message


def test_fewer_pods_and_wrong_counts(cluster: Cluster) -> None:
    result = cluster.submit(Script(path=MESH, args=["--steps", "5"]), pods=1).wait(
        300, progress=False
    )
    assert (result.state, result.world_size) == (RunState.SUCCEEDED, 1)
    with pytest.raises(ConfigError, match="has 2"):
        cluster.submit(Script(path=MESH), pods=3)


def test_a_directory_that_holds_another_run_is_refused(cluster: Cluster, result: RunResult) -> None:
    taken = result.path
    before = sorted(p.name for p in taken.iterdir())
    with pytest.raises(ConfigError, match=sentence("already holds a run or a cluster")):
        cluster.submit(TINY, path=taken)
    assert sorted(p.name for p in taken.iterdir()) == before


NOTEBOOK = """
import sys, time
from workbench import Cluster, LocalPods, PodSpec, Script
cluster = Cluster(LocalPods(), PodSpec(), count=2, path=sys.argv[1], idle_timeout_s=12, warm=False)
cluster.start()
run = cluster.submit(Script(path=sys.argv[2], args=["--steps", "40", "--pause-s", "0.1"]))
print("run", run.path, flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_a_kernel_that_dies_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "cluster"
    kernel = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, str(root), MESH],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert kernel.stdout is not None
    # `start` says first what it waits for.
    run = Run.load(next(line.split()[1] for line in kernel.stdout if line.startswith("run ")))
    until(lambda: "step 3" in _log(run), 120)
    os.killpg(kernel.pid, signal.SIGKILL)
    kernel.wait(300)
    result = run.wait(300, progress=False)
    result.raise_for_status()
    assert "step 39 sum 2" in run.logs(1, "stdout")
    state = root / "state.json"
    until(lambda: json.loads(state.read_text())["phase"] == "closed", 60)
    # Both files are the keeper's.
    assert state.stat().st_mtime - run.paths.result.stat().st_mtime > 11
    assert "12 s without a run" in json.loads(state.read_text())["message"]
    until(lambda: _processes_below(root) == [], 30)
    assert not (root / "identity").exists()


def test_leaving_the_context_leaves_nothing(tmp_path: Path) -> None:
    with Cluster(LocalPods(), count=2, path=tmp_path / "cluster", warm=False) as cluster:
        port = cluster.pods[0].ssh_port
        run = cluster.submit(Script(path=MESH))
        until(lambda: "step 3" in _log(run), 120)
    assert run.state is RunState.CANCELLED
    assert cluster.phase == "closed"
    assert re.search(r"ready from \d{4}-\d\d-\d\d \d\d:\d\d to .*with 2 pods", str(cluster))
    assert _processes_below(cluster.path) == []
    assert not list(cluster.path.rglob("id_ed25519*"))
    listening = Path("/proc/net/tcp").read_text()
    assert f":{port:04X} 00000000:0000 0A" not in listening
    with pytest.raises(RunError, match="closed"):
        cluster.submit(Script(path=MESH))
    cluster.close()


def test_a_keeper_that_dies_is_said_and_its_pods_go(tmp_path: Path) -> None:
    cluster = Cluster(
        LocalPods(), count=2, path=tmp_path / "cluster", lease_s=8, warm=False
    ).start()
    run = cluster.submit(Script(path=MESH))
    until(lambda: "step 3" in _log(run), 120)
    os.kill(json.loads((cluster.path / "state.json").read_text())["pid"], signal.SIGKILL)
    until(lambda: run.state is RunState.LOST, 30)
    assert "step 3" in _log(run)
    until(lambda: _processes_below(cluster.path) == [], 60)
    assert cluster.phase == "lost"
    cluster.close()
    assert not (cluster.path / "identity").exists()


def _log(run: Run) -> str:
    path = run.paths.rank_log(0, 0, "stdout")
    return path.read_text() if path.exists() else ""


def _processes_below(root: Path) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if int(folder.name) != os.getpid() and str(root).encode() in text:
            found.append(text[:200].decode(errors="replace"))
    return found
