"""Ranks without keeper and agents: the manifests' commands, what they leave, what goes wrong."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import write_json
from workbench.client.result import RunResult
from workbench.client.run import Run
from workbench.finetune.job.finetune import FineTune
from workbench.handover.kubeflow.manifest import Manifest
from workbench.handover.unattended.rendezvous import FileRendezvous
from workbench.jobs.job import Job
from workbench.jobs.script import Script
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import RunState

SCRIPT = """
import os, sys, time
from helper import WORD
print(WORD, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"], *sys.argv[1:],
      flush=True)
event = '{"time_s": 1.0, "rank": %s, "kind": "mine", "x": 1}'
print("@workbench " + event % os.environ["RANK"], flush=True)
if os.environ["RANK"] == os.environ.get("BAD_RANK"):
    raise ValueError("no such thing")
time.sleep(float(os.environ.get("NAP", "0")))
"""


def run_of(folder: Path, job: Job, count: int = 3) -> Run:
    return run_from(RunSpec(cluster=ClusterSpec(pods=PodSpec(), count=count), job=job), folder)


def run_from(spec: RunSpec, folder: Path) -> Run:
    prepared = prepare_run(spec, root=folder / "run")
    write_json(prepared.paths.info, {"id": "20261121-140252-test-6c8c", "cluster": str(folder)})
    return Run.load(prepared.paths.root)


def script_run(folder: Path, count: int = 3, **env: str) -> Run:
    own = folder / "own"
    own.mkdir()
    (own / "train.py").write_text(SCRIPT)
    (own / "helper.py").write_text("WORD = 'hello'\n")
    (own / "spec.json").write_text("[]")  # not ours
    return run_of(folder, Script(path=str(own / "train.py"), args=["a b"], env=env), count)


def mounted(manifest: Manifest, folder: Path) -> tuple[Path, Path]:
    """Put the ConfigMap's files and the claim where this machine has them; give both folders."""
    config, claim = folder / "config", folder / "claim"
    config.mkdir()
    claim.mkdir()
    held: Any = manifest.objects[0]
    for name, text in held["data"].items():
        (config / name).write_text(text)
    for name, text in held["binaryData"].items():
        (config / name).write_bytes(base64.b64decode(text))
    return config, claim


def start(
    command: list[str], config: Path, claim: Path, env: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start a container's command, with its paths as they are here."""
    moved = [
        word.replace("/etc/workbench", str(config)).replace("/results", str(claim))
        for word in command
    ]
    own = {
        "PYTHONPATH": str(config / "workbench.zip"),
        "PATH": os.environ["PATH"],
        "HOME": str(claim),
        **env,
    }
    return subprocess.Popen(
        moved, env=own, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks(
    run: Run, folder: Path, count: int = 3, **env: str
) -> tuple[list[subprocess.Popen[str]], Path]:
    """Start one rank for each node, as torchrun would; give them and the run directory to be."""
    manifest = run.manifest("pytorchjob", image="x", env=env)
    config, claim = mounted(manifest, folder)
    command = rank_command(manifest)
    places = [{"RANK": str(n), "LOCAL_RANK": "0", "WORLD_SIZE": str(count)} for n in range(count)]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **env}
    return [
        start(command, config, claim, {**given, **place}) for place in places
    ], claim / manifest.name


def rank_command(manifest: Manifest) -> list[str]:
    """What torchrun starts for each rank."""
    job: Any = manifest.objects[-1]
    command: list[str] = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"][
        "containers"
    ][0]["command"]
    return [sys.executable, *command[command.index("-m", command.index("torch.distributed.run")) :]]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def test_a_script_runs_as_under_torchrun(tmp_path: Path) -> None:
    # The agent measures memory once a second.
    processes, out = ranks(script_run(tmp_path, NAP="2"), tmp_path, NAP="2")
    told = [ended(process) for process in processes]
    assert [code for code, _ in told] == [0, 0, 0], told
    assert "hello 1 3 29500 a b\n" in told[1][1]
    assert "@workbench" not in told[1][1], "the container's log is for people"
    run = Run.load(out)
    assert (run.state, run.result.launcher, run.result.world_size) == (
        RunState.SUCCEEDED,
        "torchrun",
        3,
    )
    assert run.logs(rank=2, stream="stdout") == "hello 2 3 29500 a b"
    assert sorted(event.rank or 0 for event in run.events() if event.kind == "mine") == [0, 1, 2]
    assert sum(run.result.peak_memory_gib.values()) > 0
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name], (
        "something was left beside it"
    )


SHOW_THREADS = "import os; print('threads', os.environ['OMP_NUM_THREADS'])"


@pytest.mark.parametrize(("pods", "shown"), [({}, "4"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_the_threads_of_the_pod_stay(tmp_path: Path, pods: dict[str, str], shown: str) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW_THREADS)
    spec = RunSpec(cluster=ClusterSpec(pods=PodSpec(cpus=4), count=1), job=Script(str(script)))
    config, claim = mounted(run_from(spec, tmp_path).manifest("pytorchjob", image="x"), tmp_path)
    out = claim / "out"
    module = ["-m", "workbench.handover.unattended", str(config / "spec.json"), str(out)]
    process = start([sys.executable, *module], config, claim, pods)
    assert ended(process)[0] == 0
    assert Run.load(out).logs(rank=0, stream="stdout") == f"threads {shown}"


def test_torchruns_own_number_of_threads_is_not_the_pods(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW_THREADS)
    spec = RunSpec(
        cluster=ClusterSpec(pods=PodSpec(cpus=6, ranks=2), count=1), job=Script(str(script))
    )
    config, claim = mounted(run_from(spec, tmp_path).manifest("pytorchjob", image="x"), tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for pods, shown in ({}, "3"), ({"OMP_NUM_THREADS": "5"}, "5"):
        out = claim / f"out-{shown}"
        module = ["-m", "workbench.handover.unattended", str(config / "spec.json"), str(out)]
        code, words = ended(start([*torchrun, *module], config, claim, pods))
        assert code == 0, words
        assert Run.load(out).logs(rank=1, stream="stdout") == f"threads {shown}"


STORE = """
import os, socket, sys
import torch.distributed as dist
print("workbench" in sys.modules, [path for path in sys.path if ".zip/" in path])
dist.init_process_group("gloo")
for address in (os.environ["MASTER_ADDR"], "127.0.0.1"):
    with socket.socket() as probe:
        probe.settimeout(20)
        print(address, probe.connect_ex((address, int(os.environ["MASTER_PORT"]))) == 0)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_store_of_a_script_listens_on_one_address(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text(STORE)
    run = run_of(tmp_path, Script(path=str(tmp_path / "own" / "train.py")), count=1)
    manifest = run.manifest("pytorchjob", image="x")
    config, claim = mounted(manifest, tmp_path)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.6"}
    code, printed = ended(start(rank_command(manifest), config, claim, place))
    assert code == 0, printed
    log = Run.load(claim / manifest.name).logs(rank=0, stream="stdout").splitlines()
    assert log == ["False []", "127.0.0.6 True", "127.0.0.1 False"]


def test_the_rank_that_failed_is_named_and_a_second_attempt_puts_the_first_aside(
    tmp_path: Path,
) -> None:
    run = script_run(tmp_path)
    processes, out = ranks(run, tmp_path, BAD_RANK="1")
    assert [ended(process)[0] for process in processes] == [0, 1, 0]
    error = RunResult.load(out).error
    assert error is not None
    assert (error.rank, error.kind, error.message) == (1, "ValueError", "no such thing")
    assert "train.py" in error.traceback
    config, command = (
        tmp_path / "config",
        rank_command(run.manifest("pytorchjob", image="x", env={"BAD_RANK": "1"})),
    )
    places = [
        {"RANK": str(n), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for n in range(3)
    ]
    processes = [start(command, config, out.parent, place) for place in places]
    again = [ended(process)[0] for process in processes]
    assert again == [0, 0, 0]
    assert RunResult.load(out).state is RunState.SUCCEEDED
    assert RunResult.load(out / "attempt-1").state is RunState.FAILED
    code, said = ended(start(command, config, out.parent, {}))
    assert (code, says(said, "holds the result of an earlier attempt that succeeded")) == (0, True)


def test_sigterm_ends_the_rank_and_is_told(tmp_path: Path) -> None:
    (process,), out = ranks(script_run(tmp_path, 1, NAP="300"), tmp_path, 1, NAP="300")
    log = out / "logs" / "attempt-0" / "rank-0.stdout.log"
    until(lambda: log.exists() and "hello" in log.read_text())
    process.send_signal(signal.SIGTERM)
    code, _ = ended(process)
    result = RunResult.load(out)
    assert (code, result.state) == (128 + signal.SIGTERM, RunState.CANCELLED)
    assert says(result.message, "stopped by the platform (SIGTERM)")


def test_a_refusal_is_told_to_all(tmp_path: Path) -> None:
    run = script_run(tmp_path)
    manifest = run.manifest("pytorchjob", image="x")
    config, claim = mounted(manifest, tmp_path)
    (claim / manifest.name).mkdir()
    (claim / manifest.name / "mine.txt").write_text("precious")
    places = [{"RANK": str(n), "WORLD_SIZE": "2"} for n in range(2)]
    processes = [start(rank_command(manifest), config, claim, place) for place in places]
    told = [ended(process) for process in processes]
    assert [code for code, _ in told] == [2, 1]
    assert "refused: " in told[0][1]
    assert all(says(said, "holds something else than an unattended run") for _, said in told)
    assert (claim / manifest.name / "mine.txt").read_text() == "precious"


def test_files_of_an_earlier_attempt_mislead_nobody(tmp_path: Path) -> None:
    for attempt in range(2):  # the second finds all files of the first
        members = [
            FileRendezvous(folder=tmp_path, rank=rank, world_size=3, patience_s=300)
            for rank in range(3)
        ]
        told: dict[int, object] = {}

        def follow(member: FileRendezvous, told: dict[int, object] = told) -> None:
            told[member.rank] = member.follow()

        threads = [threading.Thread(target=follow, args=(member,)) for member in members[1:]]
        for thread in threads:
            thread.start()
        time.sleep(0.3)  # they see only what the attempt before has left
        assert told == {}
        with members[0].leading() as facts:
            facts["attempt"] = attempt
        for thread in threads:
            thread.join(300)
        assert told == {1: {"attempt": attempt}, 2: {"attempt": attempt}}


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    alone = FileRendezvous(folder=tmp_path / "x", rank=0, world_size=3, patience_s=0.3)
    with pytest.raises(
        RunError,
        match=sentence("a claim that several pods use must be ReadWriteMany", "[1, 2]", 0)
        + sentence("ranks {} did not come"),
    ):
        alone.leading().__enter__()
    with pytest.raises(RunError, match=sentence("rank 0 did not come")):
        FileRendezvous(folder=tmp_path / "y", rank=1, world_size=2, patience_s=0.3).follow()
    first = FileRendezvous(folder=tmp_path / "z", rank=0, world_size=1)
    with pytest.raises(ConfigError, match="mine"), first.leading():
        raise ConfigError("mine")


class StatusServer(HTTPServer):
    """Kubeflow Trainer's server for a TrainJob's status, as transformers' callback uses it."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []
        """The Authorization header and the body of each request."""
        super().__init__(("127.0.0.1", 0), StatusHandler)


class StatusHandler(BaseHTTPRequestHandler):
    server: StatusServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.headers["Authorization"], json.loads(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.long
@pytest.mark.slow
def test_a_trainjob_reports_its_progress_to_kubeflow_from_one_rank(tmp_path: Path) -> None:
    data = {"kind": "wikisql-mini", "train_rows": 32, "eval_rows": 4}
    job = FineTune(
        technique="ddp",
        dataset=data,
        max_steps=3,
        predict_rows=0,
        profile_step=0,
        per_device_train_batch_size=4,
    )
    manifest = run_of(tmp_path, job, count=2).manifest("trainjob", image="x")
    config, claim = mounted(manifest, tmp_path)
    trainjob: Any = manifest.objects[-1]
    command = [sys.executable, *trainjob["spec"]["trainer"]["command"][1:]]
    token = tmp_path / "token"
    token.write_text("a-token\n")
    with StatusServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        # The runtime gives torchrun its place by PET_ variables;
        # the controller adds those of the status server.
        env = {
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": "2",
            "GLOO_SOCKET_IFNAME": "lo",
            "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{server.server_port}/status",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
        }
        process = start(command, config, claim, env)
        said, _ = process.communicate(timeout=400)
        server.shutdown()
    assert process.returncode == 0, said[-3000:]
    assert {header for header, _ in server.posted} == {"Bearer a-token"}
    told = [body["trainerStatus"] for _, body in server.posted]
    # One rank alone reports the beginning and the end;
    # what comes between is sent at most every 5 s.
    assert [each["progressPercentage"] for each in (told[0], told[-1])] == [0, 100]
    assert sum(each["progressPercentage"] == 100 for each in told) == 1
    metrics = {each["name"]: float(each["value"]) for each in told[-1]["metrics"]}
    result = RunResult.load(claim / manifest.name)
    assert metrics["train_loss"] == pytest.approx(result.train_loss)
    assert metrics["loss"] > 0


@pytest.mark.long
@pytest.mark.slow
def test_the_same_losses_and_it_goes_on_with_a_rank_less_after_a_failure(tmp_path: Path) -> None:
    data = {"kind": "wikisql-mini", "train_rows": 96, "eval_rows": 6}
    job = FineTune(
        technique="zero1",
        dataset=data,
        max_steps=4,
        save_steps=2,
        predict_rows=0,
        profile_step=0,
        seed=3,
        per_device_train_batch_size=4,
        env={"OMP_NUM_THREADS": "1"},
    )
    run = run_of(tmp_path, job)
    manifest = run.manifest("trainjob", image="x", env=dict(job.env))
    config, claim = mounted(manifest, tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    told = json.loads(run.paths.job.read_text())
    rows = {part: str(run.paths.inputs / told[part]) for part in ("train", "eval")}
    (alone / "job.json").write_text(json.dumps({**told, **rows, "gpus": 0}))
    program = Path(__file__).with_name("forkunattended.py")
    out = claim / manifest.name
    argv = [sys.executable, str(program), str(alone), str(config / "spec.json"), str(out)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=500, env={**os.environ, **job.env}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[0] * ranks for ranks in (3, 3, 2, 3)], (
        done.stderr[-3000:]
    )
    lines = [
        line
        for line in (alone / "rank-0" / "stdout.log").read_text().splitlines()
        if '"kind": "end"' in line
    ]
    wanted = json.loads(lines[0].partition(" ")[2])
    first = json.loads((out / "attempt-1" / "first.json").read_text())
    for name in ("train_loss", "eval_loss", "first_eval_loss"):
        assert first[name] == pytest.approx(wanted[name], abs=1e-6), name
    result = RunResult.load(out)
    assert (result.state, result.steps, result.resumed_step) == (RunState.SUCCEEDED, 4, 2)
    assert (result.world_size, result.global_batch_size) == (2, 12)
    assert result.eval_loss == pytest.approx(wanted["eval_loss"], abs=0.02)  # dropout draws anew
    assert (out / "model" / "model.safetensors").is_file()
    assert not (out / "work").exists()
