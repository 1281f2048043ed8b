"""`SlurmPods` beyond the contract, on a real Slurm: its refusals and limits; only ours is ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import workbench
import workbench.places
from tests.fakes.slurmplace import SlurmPlace
from tests.pods.test_contract import meet
from tests.support.hurried import HurriedClock
from tests.support.poll import until
from tests.support.sentences import says, sentence
from tests.support.takeover import counting, printed
from workbench import Cluster, Function, Run, Script
from workbench.base.display_protocol import as_text
from workbench.base.errors import BackendError, ConfigError, PodError, PodTimeout
from workbench.client.checkup import more_pods
from workbench.pods.backends import backend_from_dict, remove_left
from workbench.pods.bootstrap.guardian import WorkerConfig
from workbench.pods.bootstrap.process import session_environment
from workbench.pods.bootstrap.worker import _completed
from workbench.pods.notes import read_note, write_note
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.rendezvous import listener
from workbench.pods.slurm import commands, worker
from workbench.pods.slurm.container import Container, Runner
from workbench.pods.slurm.job import sbatch_options, script
from workbench.pods.slurm.nodes import node_of, nodes
from workbench.pods.slurm.pods import JOBS, SlurmPods, _StartWatch
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity
from workbench.results import RunResult
from workbench.rundir.spec import ClusterSpec

REBOOT = "it will reboot when it is idle"
DOWN = "it is down, and does not answer (Not responding)"
TOLD = Path(__file__).parent.parent / "scripts" / "told.py"


PLACE = "slurm"


QUEUED = re.compile(r"PENDING \((Resources|Priority)\)")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "spec", "words"),
    [
        ({"partition": "nope"}, {}, "Invalid partition name specified"),
        ({"time": "soon"}, {}, "Invalid --time specification"),
        ({"account": "nobody"}, {}, "Invalid account or account/partition combination specified"),
        ({"options": ["--qos=nosuch"]}, {}, "Invalid qos specification"),
        ({"options": ["--constraint=ib"]}, {}, "Invalid feature specification"),
        ({"gpu_type": "h100"}, {"gpus": 1}, "Requested node configuration is not available"),
    ],
)
def test_slurm_refuses_in_its_own_words_and_nothing_is_left(
    place: SlurmPlace,
    context: LaunchContext,
    options: dict[str, Any],
    spec: dict[str, Any],
    words: str,
) -> None:
    backend = place.backend(**options)
    with pytest.raises(BackendError) as caught:
        backend.launch(PodSpec(**spec), 1, context)
    assert says(str(caught.value), "Slurm refused", "sbatch")
    assert words in str(caught.value)
    assert place.left(context) == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("options", "count"), [({"time": "3-00:00:00"}, 1), ({}, 9)])
def test_a_job_that_slurm_will_never_start_is_refused_at_once(
    place: SlurmPlace, context: LaunchContext, options: dict[str, Any], count: int
) -> None:
    with pytest.raises(BackendError) as caught:
        place.backend(**options).launch(PodSpec(), count, context)
    assert says(str(caught.value), "Slurm will not start the job")
    # PartitionConfig at first, and later the limit by name.
    assert re.search(r"\(Partition(Config|TimeLimit|NodeLimit)\)", str(caught.value))
    assert place.left(context) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_job_in_the_queue_says_why_it_waits(
    place: SlurmPlace, context: LaunchContext, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    awaited: list[str] = []
    backend = place.backend()
    clock = HurriedClock()
    monkeypatch.setattr(listener, "time", clock)

    def report(line: str) -> None:
        told.append(line)
        if QUEUED.search(line):
            clock.ahead_s = 2 * context.timeout_s

    listening = replace(
        context,
        report=report,
        arrived=lambda pods: awaited.extend(pod.message for pod in pods),
    )
    with pytest.raises(PodTimeout) as caught:
        backend.launch(PodSpec(), 2, listening)
    assert QUEUED.search(str(caught.value))
    assert "start_timeout_s=3000" in str(caught.value)
    assert any(map(QUEUED.search, told))
    assert any(map(QUEUED.search, awaited))
    assert place.left(context) == [filled], "another job must live on"


@pytest.mark.slow
@pytest.mark.long
def test_a_pod_has_the_limits_and_the_gpus_of_its_job(
    place: SlurmPlace, context: LaunchContext, identity: Identity
) -> None:
    backend = place.backend(
        gpu_type="a100",
        partition="main",
        time="10",
        connect_timeout_s=9,
        setup=["export CUDA_HOME=/opt/cuda PATH=/opt/cuda/bin:$PATH"],
    )
    spec = PodSpec(memory_gib=0.5, gpus=2)  # the nodes have two cores for each GPU
    (pod,) = backend.launch(spec, 1, context)
    try:
        identity.pin([pod])
        job = place.slurm.do("squeue", "--noheader", "--format=%P|%l|%C|%m|%b|%k")
        with SSHConnection(pod, identity) as connection:
            gpus = connection.run(["printenv", "CUDA_VISIBLE_DEVICES"]).stdout.strip()
            cuda = connection.run(["sh", "-c", "echo $CUDA_HOME $PATH"]).stdout
            groups = connection.run(["cat", "/proc/self/cgroup"]).stdout
        (seen,) = backend.refresh()
        assert seen.ends_s is not None
        assert 0 < seen.ends_s - time.time() <= 600, "the time limit of the job"
    finally:
        backend.stop()
    assert job.startswith("main|10:00|4|512M|gres:gpu:a100:2|DeepSpeed Workbench, cluster test")
    assert (pod.slots, pod.connect_timeout_s, gpus) == (2, 9, "0,1")
    assert cuda.startswith("/opt/cuda ")
    assert ":/opt/cuda/bin:" in cuda
    if place.slurm.limits_memory:
        assert "memory:/slurm_" in groups


@pytest.mark.slow
@pytest.mark.long
def test_a_pod_that_cannot_start_is_named_with_the_lines_of_its_log(
    place: SlurmPlace, context: LaunchContext
) -> None:
    with pytest.raises(PodError) as caught:  # no folder can be made below a file
        place.backend(root="/dev/null").launch(PodSpec(), 1, context)
    assert says(str(caught.value), "ended with exit code {} during its start.", "pod-0", 1)
    assert "Not a directory" in str(caught.value)
    assert place.left(context) == []


@pytest.mark.slow
@pytest.mark.long
def test_the_jobs_of_a_dead_keeper_are_cancelled(place: SlurmPlace, context: LaunchContext) -> None:
    backend = place.backend()
    backend.launch(PodSpec(), 1, context)
    (number,) = place.slurm.jobs()
    note = read_note(context.directory, JOBS)
    for _ in range(2):  # another process, which knows the backend's JSON form alone
        remove_left(backend.to_dict(), context.directory)
    assert place.left(context) == []
    # A keeper that died between Slurm's acceptance and the note of the id.
    (name,) = note["ids"]  # type: ignore[misc]
    again = place.slurm.do("sbatch", "--parsable", f"--job-name={name}", text=SLEEP)
    other = place.slurm.do("sbatch", "--parsable", "--job-name=other", text=SLEEP)
    write_note(context.directory, JOBS, {"ids": {name: ""}, "job_of": {"pod-0": name}})
    remove_left(backend.to_dict(), context.directory)
    assert number not in (again, other)
    assert place.left(context) == [other]


LINES = 5
SLEEP = "#!/bin/sh\n#SBATCH --output=/dev/null\nsleep 600\n"


def at_work(cluster: Cluster, end: Path, **more: Any) -> Run:
    """Start a run whose ranks print lines and then wait for a file; return after the lines."""
    run = counting(cluster, "--lines", f"{LINES}", "--until", str(end), **more)
    last = f" line {LINES - 1}"
    until(
        lambda: all(last in printed(run, rank) for rank in (0, 1)),
        every_s=0.2,
        why=lambda: run.message,
    )
    return run


def continued(run: Run, end: Path) -> RunResult:
    """Have the ranks end once the run has restarted."""
    until(
        lambda: any(event.kind == "restarted" for event in run.events()),
        every_s=0.2,
        why=lambda: run.message,
    )
    end.touch()
    return run.wait(300, progress=False).raise_for_status()


@pytest.mark.slow
@pytest.mark.long
def test_a_run_survives_preemption_and_the_time_limit_and_names_a_foreign_scancel(
    place: SlurmPlace, tmp_path: Path
) -> None:
    backend = place.backend(partition="main", time="30")
    with Cluster(backend, PodSpec(), count=2, path=tmp_path / "cluster", warm=False) as cluster:
        # The ranks of a training meet as on other places.
        met = cluster.submit(Function(meet))
        met.wait(300, progress=False).raise_for_status()
        assert met.returned == ["met", "met"]
        # A job of a higher partition takes the nodes; Slurm cancels ours.
        run = at_work(cluster, tmp_path / "preempted", restarts=1)
        urgent = ["--partition=urgent", "--exclusive", "--nodes=3", "--output=/dev/null"]
        place.slurm.do("sbatch", *urgent, text="#!/bin/sh\nsleep 2\n")
        result = continued(run, tmp_path / "preempted")
        (restart,) = result.restarts
        assert restart.what == "pod-0 and pod-1 were lost"
        assert "DUE TO PREEMPTION" in restart.why
        # Ranks hear of the time limit before it comes, and a run continues in another job.
        run = cluster.submit(Script(path=str(TOLD), restarts=1))
        until(lambda: "at work" in printed(run, 1), 120, every_s=0.2, why=lambda: run.message)
        (job,) = place.slurm.jobs()
        place.slurm.do("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        result = run.wait(300, progress=False).raise_for_status()
        (restart,) = result.restarts
        assert says(restart.why, "Slurm will end this job soon")
        assert printed(run, 1).count("told") == 1
        # An administrator has Slurm queue the job again.
        run = at_work(cluster, tmp_path / "requeued", restarts=1)
        (job,) = place.slurm.jobs()
        place.slurm.do("scontrol", "update", f"JobId={job}", "Requeue=1")
        place.slurm.do("scontrol", "requeue", job)
        result = continued(run, tmp_path / "requeued")
        (restart,) = result.restarts
        assert restart.what == "pod-0 and pod-1 were lost"
        assert place.slurm.jobs() != [job]
        # Another person cancels the job, of a run without restarts.
        run = at_work(cluster, tmp_path / "cancelled")
        place.slurm.do("scancel", *place.slurm.jobs())
        message = run.wait(300, progress=False).message
        assert "CANCELLED AT" in message
        context = LaunchContext(cluster_id="", directory=cluster.path, public_key="")
    assert place.left(context) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_run_waits_for_its_requeued_job(place: SlurmPlace, tmp_path: Path) -> None:
    backend = place.backend(partition="main", time="30", requeue=True)
    with Cluster(backend, PodSpec(), count=2, path=tmp_path / "cluster", warm=False) as cluster:
        run = at_work(cluster, tmp_path / "end", restarts=1)
        (job,) = place.slurm.jobs()
        urgent = ["--partition=urgent", "--exclusive", "--nodes=3", "--output=/dev/null"]
        place.slurm.do("sbatch", *urgent, text="#!/bin/sh\nsleep 2\n")
        result = continued(run, tmp_path / "end")
        (restart,) = result.restarts
        assert restart.what == "pod-0 and pod-1 were lost"
        assert all(f" line {LINES - 1}" in printed(run, rank) for rank in (0, 1))
        assert place.slurm.jobs() == [job], "no other job was submitted"
        # The requeued job ends like any other.
        context = LaunchContext(cluster_id="", directory=cluster.path, public_key="")
    assert place.left(context) == []


@pytest.mark.slow
@pytest.mark.long
def test_the_nodes_of_the_partition_and_what_would_fit(place: SlurmPlace, tmp_path: Path) -> None:
    do = place.slurm.do
    first, second, third = sorted(place.slurm.nodes)
    do("sbatch", f"--nodelist={first}", "--gpus-per-node=1", text=SLEEP)
    do("scontrol", "update", f"NodeName={third}", "State=DRAIN", "Reason=broken fan")
    try:
        until(lambda: do("squeue", "--noheader", "--format=%T") == "RUNNING", 20)
        table = workbench.places.nodes(place.backend(), pod=PodSpec(memory_gib=2, gpus=2), count=2)
        spec = ClusterSpec.from_dict({"backend": place.backend().to_dict(), "pods": {"gpus": 2}})
        more = more_pods(spec)
        none = workbench.places.nodes(place.backend(partition="nope"))
    finally:
        do("scontrol", "update", f"NodeName={third}", "State=RESUME")
    assert [(n.name, n.product, n.gpus, n.taken, n.fits) for n in table.nodes] == [
        (first, "a100", 2, 1, 0),
        (second, "a100", 2, 0, 1),
        (third, "a100", 2, 0, 0),
    ]
    assert [node.why for node in table.nodes] == [
        "cores: 4 asked, 3 free of 4, GPUs: 2 asked, 1 free of 2",
        "",
        "it is drained (broken fan)",
    ]
    assert table.nodes[0].free_cpus == 3
    assert table.nodes[0].free_memory_gib == pytest.approx((8000 - 1000) / 1024)
    assert says(as_text(table), "of {} pods could be scheduled now", 1, 2)
    assert more.startswith("1 more pod like these")
    assert says(none.verdict, "Slurm lists no node of partition", "nope")


ROW = {
    "Partition": "gpu*",
    "NodeList": "n1",
    "StateLong": "mixed",
    "CPUsState": "56/8/0/64",
    "Memory": "524288",
    "AllocMem": "516096",
    "Gres": "gpu:a100:4(S:0-1),gpu:t4:2",
    "GresUsed": "gpu:a100:3(IDX:0-2),gpu:t4:0(IDX:N/A)",
    "Reason": "none",
}


@pytest.mark.parametrize(
    ("row", "asked", "gpu_type", "gpus", "why"),
    [
        ({}, {"cpus": 8, "memory_gib": 8, "gpus": 3}, "", 6, ""),
        ({}, {"gpus": 2, "cpus": 4}, "a100", 4, "GPUs: 2 asked, 1 free of 4"),
        ({"GresUsed": "gpu:0"}, {"gpus": 2}, "a100", 4, "cores: 16 asked, 8 free of 64"),
        ({"CPUsState": "0/12/0/12", "GresUsed": ""}, {"gpus": 4}, "a100", 4, ""),
        ({}, {"cpus": 9}, "", 6, "cores: 9 asked, 8 free of 64"),
        ({}, {"memory_gib": 9}, "", 6, "memory: 9 GiB asked, 8 free of 512"),
        ({"StateLong": "idle~"}, {}, "", 6, ""),
        ({"StateLong": "down*", "Reason": "Not responding"}, {}, "", 6, DOWN),
        ({"StateLong": "allocated"}, {}, "", 6, "it is allocated"),
        ({"StateLong": "allocated+"}, {}, "", 6, "it is allocated"),
        ({"StateLong": "draining@", "Reason": "fan"}, {}, "", 6, "it is draining (fan)"),
        ({"StateLong": "planned"}, {}, "", 6, "it is planned"),
        ({"StateLong": "mixed#"}, {}, "", 6, ""),
        ({"StateLong": "mixed-"}, {}, "", 6, "it is planned for a job with a higher priority"),
        ({"StateLong": "idle*"}, {}, "", 6, "it does not answer"),
        ({"StateLong": "idle!"}, {}, "", 6, "it will be powered down"),
        ({"StateLong": "idle%"}, {}, "", 6, "it is being powered down"),
        ({"StateLong": "mixed@", "Reason": "new kernel"}, {}, "", 6, f"{REBOOT} (new kernel)"),
        ({"StateLong": "idle^"}, {}, "", 6, "it is rebooting"),
        ({"StateLong": "idle$"}, {}, "", 6, "it is reserved for maintenance"),
        ({"CPUsState": "N/A"}, {}, "", 6, "sinfo shows no number of free cores"),
        ({"CPUsState": "N/A/N/A/N/A/N/A"}, {}, "", 6, "sinfo shows no number of free cores"),
        ({"CPUsState": "1/N/A"}, {}, "", 6, "sinfo shows no number of free cores"),
        ({"AllocMem": "N/A"}, {"memory_gib": 512}, "", 6, ""),
        ({"Memory": "N/A"}, {}, "", 6, ""),
        ({"Memory": "N/A"}, {"memory_gib": 1}, "", 6, "sinfo shows no amount of memory"),
        ({"Gres": "(null)", "GresUsed": "(null)"}, {}, "", 0, ""),
    ],
)
def test_a_line_of_sinfo_is_read(
    row: dict[str, str], asked: dict[str, Any], gpu_type: str, gpus: int, why: str
) -> None:
    node = node_of({**ROW, **row}, PodSpec(**asked), gpu_type)
    assert (node.gpus, node.why, node.fits) == (gpus, why, 0 if why else 1)


def test_gpus_of_several_types_are_counted_together() -> None:
    node = node_of({**ROW, "Gres": "gpu:a100:4(S:0-1),gpu:t4:2,nic:1"}, PodSpec(), "")
    assert (node.product, node.gpus) == ("a100, t4", 6)


LIVES = Pod(name="pod-0", phase=Phase.RUNNING, address="10.0.0.1")


@pytest.fixture
def watched(tmp_path: Path) -> SlurmPods:
    """A backend with a pod in job 7, without Slurm."""
    backend = SlurmPods()
    backend._folder = tmp_path
    backend._ids = {"workbench-test": "7"}
    backend._job_of = {"pod-0": "workbench-test"}
    backend._pods = [LIVES]
    return backend


def test_pods_stay_as_they_were_while_the_controller_is_away(
    watched: SlurmPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_ids: object) -> None:
        raise BackendError("Unable to contact slurm controller")

    monkeypatch.setattr(commands, "jobs", away)
    assert watched.refresh() == [LIVES]


def job(state: str, reason: str = "") -> commands.Job:
    return commands.Job(id="7", state=state, reason=reason, start="", nodes="n1")


@pytest.mark.parametrize(
    ("found", "log", "phase", "words"),
    [
        (job("RUNNING"), "", Phase.RUNNING, ""),
        (job("SUSPENDED"), "", Phase.RUNNING, "job 7 is SUSPENDED"),
        (job("PENDING", "BeginTime"), "", Phase.FAILED, "job 7 is PENDING (BeginTime)"),
        (job("NODE_FAIL", "NodeDown"), "", Phase.FAILED, "job 7 is NODE_FAIL (NodeDown)"),
        (
            job("TIMEOUT", "TimeLimit"),
            "*** JOB 7 ON n1 CANCELLED AT 12:00 DUE TO TIME LIMIT ***",
            Phase.FAILED,
            "job 7 is TIMEOUT (TimeLimit): JOB 7 ON n1 CANCELLED AT 12:00 DUE TO TIME LIMIT",
        ),
        (
            job("CANCELLED"),
            "*** Slurm will end this job soon ***\n*** JOB 7 ON n1 CANCELLED AT 12:00 ***",
            Phase.FAILED,
            "job 7 is CANCELLED: Slurm will end this job soon; JOB 7 ON n1 CANCELLED AT 12:00",
        ),
        (job("RUNNING"), "*** pod-1 has ended with exit code 1 ***", Phase.RUNNING, ""),
        (
            job("RUNNING"),
            "*** pod-0 has ended with exit code 137 ***",
            Phase.FAILED,
            "its step of job 7 has ended with exit code 137: STEP 7.1 ON n2 CANCELLED",
        ),
        (None, "", Phase.FAILED, "Slurm no longer lists job 7"),
    ],
)
def test_a_pods_phase_has_slurms_reason(
    watched: SlurmPods,
    monkeypatch: pytest.MonkeyPatch,
    found: commands.Job | None,
    log: str,
    phase: Phase,
    words: str,
) -> None:
    monkeypatch.setattr(commands, "jobs", lambda _ids: {"7": found} if found else {})
    (watched._folder / "job-7.log").write_text(f"{log}\n")
    own = "*** STEP 6.0 ON n9 CANCELLED ***\n*** STEP 7.1 ON n2 CANCELLED ***\nanother line\n"
    (watched._folder / "pod-0.log").write_text(own if "137" in log else "")
    (pod,) = watched.refresh()
    assert (pod.phase, pod.message) == (phase, words)


@pytest.mark.parametrize(
    ("state", "end", "limit", "known"),
    [
        ("RUNNING", "2026-11-29T08:00:00", "1-00:00:00", True),
        ("RUNNING", "2026-11-29T08:00:00", "10:00", True),
        ("RUNNING", "2027-11-29T08:00:00", "UNLIMITED", False),
        ("RUNNING", "N/A", "10:00", False),
        ("PENDING", "2026-11-29T08:00:00", "10:00", False),
        ("RUNNING", "", "", False),
    ],
)
def test_a_pod_ends_at_the_time_limit_of_its_job(
    watched: SlurmPods,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    end: str,
    limit: str,
    known: bool,
) -> None:
    line = f"7|{state}|None|2026-11-29T07:00:00|n1|{end}|{limit}\n"
    monkeypatch.setattr(commands, "call", lambda *_words: line)
    (pod,) = watched.refresh()
    expected = datetime(2026, 11, 29, 8).timestamp() if known else None
    assert pod.ends_s == expected


SINFO = """main*|2/62/0/64|gpu:a100:8(S:0-1)
main*|0/8/0/8|gpu:a100:8
main*|0/n/a|gpu:a100:8
old|0/16/0/16|gpu:t4:4
main*|0/32/0/32|(null)
"""


@pytest.mark.parametrize(
    ("partition", "gpu_type", "spec", "cores", "few"),
    [
        ("main", "", {"gpus": 8}, 8, "8 cores for 8 GPUs"),  # the smallest fitting node
        (None, "", {"gpus": 8}, 8, "8 cores for 8 GPUs"),  # the default partition
        ("old", "", {"gpus": 4}, 16, ""),
        ("old", "", {"gpus": 2}, 8, ""),
        ("old", "a100", {"gpus": 2}, 16, ""),  # no node is known: the default
        ("main", "", {"gpus": 8, "cpus": 48}, 48, ""),
        ("main", "", {}, 1, ""),
    ],
)
def test_a_job_asks_for_the_cores_that_its_nodes_have_for_each_gpu(
    watched: SlurmPods,
    context: LaunchContext,
    monkeypatch: pytest.MonkeyPatch,
    partition: str | None,
    gpu_type: str,
    spec: dict[str, Any],
    cores: int,
    few: str,
) -> None:
    """`--cpus-per-gpu` of sbatch would refuse a node with fewer; this asks for what is there."""
    watched = SlurmPods(partition=partition, gpu_type=gpu_type or None)
    watched._folder = context.directory
    asked: list[str] = []
    lines: list[str] = []
    monkeypatch.setattr(commands, "call", lambda *_words: SINFO)
    monkeypatch.setattr(commands, "submit", lambda options, _script: asked.extend(options) or "8")
    there = replace(context, report=lines.append)
    watched._submit("workbench-x", ["pod-0"], PodSpec(**spec), there, [])
    assert f"--cpus-per-task={cores}" in asked
    assert [line for line in lines if " cores for " in line] == (
        [f"the nodes have {few}: a rank needs 2 or more"] if few else []
    )


def test_a_job_that_left_no_log_names_the_folder_that_the_nodes_must_share(
    watched: SlurmPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "jobs", lambda _ids: {"7": job("FAILED", "RaisedSignal")})
    with pytest.raises(PodError) as caught:
        _StartWatch(watched, "7", ["pod-0"], context).look()
    assert says(
        str(caught.value), "path=…) a folder that they share", watched._folder, "RaisedSignal"
    )


def test_a_job_that_replaces_no_pod_in_time_is_cancelled(
    watched: SlurmPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would start later, for no one."""
    cancelled: list[str] = []
    monkeypatch.setattr(commands, "jobs", lambda _ids: {"8": waits})
    monkeypatch.setattr(commands, "submit", lambda _options, _script: "8")
    monkeypatch.setattr(commands, "cancel", cancelled.extend)
    monkeypatch.setattr(commands, "node_addresses", lambda _partition="": ["127.0.0.1"])
    waits = replace(job("PENDING", "Priority"), id="8")
    brief = replace(context, timeout_s=0.2)
    with pytest.raises(PodTimeout, match=re.escape("PENDING (Priority)")):
        watched.restore(["pod-0"], PodSpec(), brief)
    assert cancelled == ["7", "8"]
    (pod,) = watched.refresh()
    assert (pod.phase, "Priority" in pod.message) == (Phase.FAILED, True)
    watched.stop()


def test_a_replacement_stays_off_the_nodes_of_the_other_pods(
    watched: SlurmPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    asked: list[str] = []

    def refuse(options: Sequence[str], _script: str) -> str:
        asked.extend(options)
        raise BackendError("Slurm refused sbatch")

    running = {
        "workbench-test-pod-0": commands.Step(id="7.0", nodes="n1"),
        "workbench-test-pod-1": commands.Step(id="7.1", nodes="n2"),
    }
    backend = SlurmPods(options=["--exclud=n9"])  # sbatch takes an unambiguous beginning
    backend._folder, backend._ids = watched._folder, watched._ids
    backend._job_of = {"pod-0": "workbench-test", "pod-1": "workbench-test"}
    backend._pods = [LIVES, replace(LIVES, name="pod-1")]
    monkeypatch.setattr(commands, "steps", lambda _job: running)
    monkeypatch.setattr(commands, "cancel", ended.extend)
    monkeypatch.setattr(commands, "jobs_named", lambda _name: [])
    monkeypatch.setattr(commands, "node_addresses", lambda _partition="": ["127.0.0.1"])
    monkeypatch.setattr(commands, "submit", refuse)
    with pytest.raises(BackendError):
        backend.restore(["pod-0"], PodSpec(), context)
    assert ended == ["7.0"], "the step of the other pod must live on"
    assert asked[-2:] == ["--exclud=n9", "--exclude=n9,n2"]
    monkeypatch.setattr(commands, "jobs", lambda _ids: {"7": job("RUNNING")})
    assert [pod.phase for pod in backend.refresh()] == [Phase.FAILED, Phase.RUNNING]


def test_slurm_is_asked_at_most_every_five_seconds(
    watched: SlurmPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(commands, "jobs", lambda ids: asked.append(ids) or {"7": job("RUNNING")})
    for _ in range(3):
        watched.refresh()
    assert asked == [["7"]]


@pytest.mark.parametrize("before", ["", "**** maintenance tonight ****\nnode\n7x\n", "\x1b[1mhi\n"])
@pytest.mark.parametrize(
    "id_line", ["42", "42;cluster", "Submitted batch job 42", "Submitted batch job 42 on cluster c"]
)
def test_a_sites_own_commands_may_print_more_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, id_line: str
) -> None:
    row = "gpu*|n1|idle|0/8/0/8|16000|0|gpu:2|gpu:0|none|"
    answers = {"sbatch": id_line, "squeue": "42", "sinfo": f"{row}\nnode:n1"}
    for name, line in answers.items():
        (tmp_path / f"{name}.out").write_text(f"{before}{line}\nThank you\n")
        (tmp_path / name).write_text(f"#!/bin/sh\ncat >/dev/null\ncat {tmp_path}/{name}.out\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert commands.submit([], "#!/bin/sh") == "42"
    assert commands.jobs_named("workbench") == ["42"]
    assert commands.node_addresses() == ["n1"]
    assert [node.name for node in nodes(SlurmPods(), PodSpec(cpus=1), 1).nodes] == ["n1"]
    (tmp_path / "sbatch.out").write_text(f"{before}Thank you\n")
    with pytest.raises(BackendError, match=sentence("sbatch printed no id of a job", "Thank you")):
        commands.submit([], "#!/bin/sh")


def test_without_slurms_commands_the_error_says_so(
    context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        ConfigError,
        match=sentence("SlurmPods works on a login node or inside an allocation", "sinfo"),
    ):
        SlurmPods().launch(PodSpec(), 1, context)


@pytest.mark.parametrize(
    ("backend", "spec", "words"),
    [
        (
            SlurmPods(gpu_type="a100"),
            {},
            sentence("and PodSpec.gpus is 0", "a100"),
        ),
    ],
)
def test_an_option_without_effect_is_refused(
    backend: SlurmPods, spec: dict[str, Any], words: str, context: LaunchContext
) -> None:
    with pytest.raises(ConfigError, match=words):
        backend.launch(PodSpec(**spec), 1, context)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"options": ["-p", "main"]},
            sentence("Write each option of sbatch as one text in the long form", "-p"),
        ),
        (
            {"options": ["high"]},
            sentence("Write each option of sbatch as one text in the long form", "high"),
        ),
        ({"options": ["--part=main"]}, "SlurmPods(partition=…)"),
        ({"options": ["--mem=4G"]}, "PodSpec(memory_gib=…)"),
        ({"options": ["--gpus-per-node=2"]}, "PodSpec(gpus=…)"),
        ({"options": ["--gres=gpu:h100:8,nvme:1"]}, "PodSpec(gpus=…)"),
        ({"options": ["--gre=gpu"]}, "PodSpec(gpus=…)"),
        *(
            ({"options": [f"--{name}=1"]}, r"PodSpec\(")
            for each in ("cpus-per-gpu", "gpus-per-task", "gpus-per-socket", "mem-per-gpu")
            for name in (each, each[:-1])
        ),
        ({"options": ["--tres-per-task=gres/gpu:1"]}, "PodSpec(cpus=…, gpus=…)"),
        (
            {"options": ["--ntasks-per-gpu=1"]},
            sentence("which the workbench sets itself"),
        ),
        *(
            (
                {"options": [word]},
                sentence("Write each option of sbatch as one text in the long form", word),
            )
            for word in ("--qos high", "--container-image x", "--time 10")
        ),
        *(({"options": [word]}, "SlurmPods(requeue=…)") for word in ("--requeue", "--req")),
        ({"requeue": "yes"}, "requeue is 'yes'"),
        ({"options": ["--signal=TERM@30"]}, "SlurmPods(notice_s=…)"),
        ({"notice_s": 20}, "notice_s is 20; it must be a whole number from 60 to 65535"),
        (
            {"options": ["--arr=1-4"]},
            sentence("which the workbench sets itself"),
        ),
        *(
            (
                {"options": [word]},
                sentence("The job's script would run in the container", word),
            )
            for word in (
                "--container-image=nvcr.io/x",
                "--container=/images/x",
                "--cont=x",
                "--no-container-mount-home",
                "--no-cont",
            )
        ),
        ({"setup": "module load cuda"}, "setup is 'module load cuda'"),
        ({"setup": [" "]}, sentence("Write each shell command as one text of one line", "' '")),
        (
            {"setup": ["module load a\nmodule load b"]},
            sentence("Write each shell command as one text of one line"),
        ),
        ({"root": "tmp"}, sentence("it must be an absolute path on the nodes", "tmp")),
        ({"root": "/s/$USER"}, sentence("it must be an absolute path on the nodes", "USER")),
        ({"time": 60}, "time is 60"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words) if "=…" in words else words):
        SlurmPods(**options)


@pytest.mark.parametrize(
    "word",
    [
        "--gres=nvme:1",
        "--gres-flags=enforce-binding",
        "--mem-per-cpu=4G",
        "--time-min=10",
        "--contiguous",
        "--constraint=h100&ib",
        "--cons=a",
        "--exclusive",
        "--hint=nomultithread",
        "--reservation=lab",
        "--dependency=singleton",
        "--gpu-bind=none",
    ],
)
def test_other_options_reach_sbatch_as_they_are(word: str) -> None:
    assert SlurmPods(options=[word]).to_dict()["options"] == [word]


def test_it_comes_back_from_json() -> None:
    backend = SlurmPods(partition="gpu", options=["--qos=high"], setup=["module load cuda"])
    written = "SlurmPods(partition='gpu', options=['--qos=high'], setup=['module load cuda'])"
    assert repr(backend) == written
    assert repr(backend_from_dict(backend.to_dict())) == written


def test_the_environment_of_an_allocation_and_secrets_stay_out_of_the_job() -> None:
    own = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "ml",
        "SLURM_JOB_ID": "1",
        "SBATCH_ARRAY_INX": "1-9",
        "SQUEUE_PARTITION": "x",
        "HF_TOKEN": "secret",
        "TMPDIR": "/scratch/1",
        "SLURM_TMPDIR": "/scratch/1",
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_AUTH_TOKEN": "secret",
        "SCRATCH_PASSWORD": "secret",
        "OMPI_COMM_WORLD_RANK": "3",
    }
    assert sorted(commands.environment(own)) == ["PATH", "SBATCH_ACCOUNT", "SLURM_CONF"]


def test_the_site_s_own_settings_reach_the_nodes_and_their_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = {
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_NET_PLUGIN": "ofi",
        "FI_PROVIDER": "efa",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "CUDA_HOME": "/opt/cuda",
        "OMPI_MCA_btl_tcp_if_include": "ib0",
        "MODULEPATH": "/opt/modules",
        "CC": "gcc-12",
        "CPATH": "/opt/include",
        "GLOO_SOCKET_IFNAME": "ib0",
        "SLINGSHOT_VNIS": "4711",
        "PSM2_MULTIRAIL": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "CUDACXX": "/opt/cuda/bin/nvcc",
        "SCRATCH": "/scratch/ada",
        "PSCRATCH": "/pscratch/ada",
        "TRITON_CACHE_DIR": "/scratch/ada/triton",
    }
    assert commands.environment(site) == site
    of_node = {"TMPDIR": "/local/7", "SLURM_TMPDIR": "/local/7"}
    for name, value in {**site, **of_node}.items():
        monkeypatch.setenv(name, value)
    assert {**site, **of_node}.items() <= session_environment().items()


def test_a_setup_variable_that_sshd_cannot_take_is_named(tmp_path: Path) -> None:
    config = WorkerConfig(
        name="pod-0",
        address="",
        port=2222,
        slots=1,
        root=str(tmp_path),
        log=str(tmp_path / "log"),
        public_key="",
        environment={},
        lease_s=1,
        timeout_s=1,
        rendezvous=("127.0.0.1", 1),
        token="",
    )
    given = {"LAB": "a b", "OPTIONS": '{"a": 1}', "PATTERN": "\\d"}
    whole = _completed(config, "127.0.0.1", given)
    assert whole.environment["LAB"] == "a b"
    assert whole.environment.keys().isdisjoint({"OPTIONS", "PATTERN"})
    assert "left out of the pods: OPTIONS, PATTERN. sshd takes no" in (tmp_path / "log").read_text()


def test_a_path_reaches_slurm_and_the_shell_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "it's 100% $HOME"
    options = sbatch_options(
        "name", "comment", folder, PodSpec(), 1, cores=1, gpu_type="", notice_s=600
    )
    assert "--signal=B:USR1@600" in options
    assert f"--output={tmp_path}/it's 100%% $HOME/job-%j.log" in options
    folder.mkdir()
    fake = tmp_path / "srun"
    fake.write_text('#!/bin/sh\nfor last; do :; done; echo "step $last"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["sh"],
        input=script("workbench-test-ab12", ["pod-0", "pod-1"], folder, 1.5),
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"},
        timeout=300,
    )
    ended = [f"*** pod-{number} has ended with exit code 0 ***" for number in (0, 1)]
    assert (sorted(done.stdout.splitlines()), done.stderr) == (ended, "")
    assert (folder / "pod-1.log").read_text() == f"step {folder}/pod-1-ab12.json\n"


SETUP = """#!/bin/sh
exec "{python}" -c '
import os, sys
from pathlib import Path
from workbench.pods.slurm.worker import set_by_setup
print(sys.argv[1:4], Path(sys.argv[4]).name)
print(sorted(set_by_setup(Path(f"/dev/fd/{{sys.argv[5]}}").read_bytes(), os.environ).items()))
' "$@"
"""
PROFILE = """
echo "Welcome to the lab"
export OF_PROFILE=1
module() { test "$2" != none && export CUDA_HOME="/opt/$2" LD_LIBRARY_PATH=/opt/lib; }
"""


@pytest.mark.parametrize(
    ("lines", "code", "log"),
    [
        (
            ["module load cuda", "export LAB='a b'; set -- x", "export PYTHONPATH=/opt/site"],
            0,
            "[('LAB', 'a b')]",
        ),
        (["true", "module load none"], 1, "the setup line module load none ended with exit code 1"),
        (["echo 'open", "true"], 2, "the setup line echo 'open ended with exit code"),
        (["nosuch"], 127, "nosuch: command not found"),
        (["exit 3"], 3, "the setup lines ended with exit code 3"),
        (["exit 0"], 0, "the setup lines ended with exit code 0"),
        (["ROOT=/opt/x", "LAB=$ROOT/lib"], 0, "[('LAB', '/opt/x/lib'), ('ROOT', '/opt/x')]"),
        (["set -eu", "cd /tmp", "echo hello", "LAB=1"], 0, "[('LAB', '1')]"),
    ],
)
def test_setup_lines_run_on_a_node_before_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], code: int, log: str
) -> None:
    folder = tmp_path / "it's"
    folder.mkdir()
    fakes = {
        "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
        "python": SETUP.format(python=sys.executable),
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".bash_profile").write_text(PROFILE)
    monkeypatch.setattr("workbench.pods.slurm.job.sys.executable", str(tmp_path / "python"))
    done = subprocess.run(
        ["sh"],
        input=script("workbench-test-ab12", ["pod-0"], folder, 1, lines),
        capture_output=True,
        text=True,
        env={
            "PATH": f"{tmp_path}:/bin:/usr/bin",
            "SLURM_JOB_ID": "7",
            "HOME": str(tmp_path),
        },
        timeout=300,
    )
    assert done.stdout == f"*** pod-0 has ended with exit code {code} ***\n"
    written = (folder / "pod-0.log").read_text()
    assert log in written
    assert ("pod-0-ab12.json" in written) == (code == 0 and "setup" not in log)


APPTAINER = """#!/bin/sh
# Apptainer's command line: `exec`, options, the image, and the command.
test "$1" = exec || exit 9
shift
while :; do
    case $1 in
        --nv) echo "with GPUs"; shift ;;
        --bind) echo "folders $2"; shift 2 ;;
        *) break ;;
    esac
done
echo "image $1, $MODULE"
shift
exec "$@"
"""


def run_script(folder: Path, text: str, **programs: str) -> str:
    """Run a batch script with stand-ins of programs, and return the log of the pod."""
    srun = '#!/bin/sh\necho "srun $*"\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
    tools = folder / "tools"
    tools.mkdir()
    for name, code in {"srun": srun, **programs}.items():
        (tools / name).write_text(code)
        (tools / name).chmod(0o755)
    (folder / ".bash_profile").write_text(f"PATH={tools}:$PATH\n")
    subprocess.run(
        ["sh"],
        input=text,
        text=True,
        check=True,
        env={"PATH": f"{tools}:/bin:/usr/bin", "SLURM_JOB_ID": "7", "HOME": str(folder)},
        timeout=300,
    )
    return (folder / "pod-0.log").read_text()


PYTHON = '#!/bin/sh\necho "python $* with $PYTHONPATH and ${CUDA_HOME-nothing}"\n'


def contained(folder: Path, runner: Runner, **changes: Any) -> Container:
    given = {"image": "nvcr.io/a/b:1", "mounts": [folder, Path("/local")], "gpus": True, **changes}
    return Container(runner=runner, **given)


@pytest.mark.parametrize(
    ("image", "by_pyxis", "by_apptainer"),
    [
        (
            "nvcr.io/nvidia/pytorch:25.01-py3",
            "nvcr.io#nvidia/pytorch:25.01-py3",
            "docker://nvcr.io/nvidia/pytorch:25.01-py3",
        ),
        ("nvcr.io#nvidia/pytorch", "nvcr.io#nvidia/pytorch", "docker://nvcr.io/nvidia/pytorch"),
        ("/images/torch.sqsh", "/images/torch.sqsh", "/images/torch.sqsh"),
    ],
)
def test_an_image_has_the_name_that_its_runner_reads(
    tmp_path: Path, image: str, by_pyxis: str, by_apptainer: str
) -> None:
    words = contained(tmp_path, Runner.PYXIS, image=image).srun_words
    assert words[0] == f"--container-image={by_pyxis}"
    program = contained(tmp_path, Runner.APPTAINER, image=image).around("true")
    assert f" {by_apptainer} true" in program


def test_an_image_runs_by_pyxis_with_the_folders_of_the_pods(tmp_path: Path) -> None:
    box = contained(tmp_path, Runner.PYXIS)
    package = tmp_path / "workbench-1.zip"
    text = script("w-test-ab12", ["pod-0"], tmp_path, 4, (), box, package)
    log = run_script(tmp_path, text, python3=PYTHON)
    mounts = f"{tmp_path}:{tmp_path},/local:/local"
    words = f"--container-image=nvcr.io#a/b:1 --container-mounts={mounts}"
    assert f"{words} --no-container-remap-root env PYTHONPATH=" in log
    config = tmp_path / "pod-0-ab12.json"
    assert f"python -P -m workbench.pods.slurm.worker {config} with {package} and nothing" in log


@pytest.mark.parametrize(
    ("setup", "program", "module"),
    [((), "apptainer", ""), (["export MODULE='a b'; set -- x"], "singularity", "a b")],
)
def test_an_image_runs_by_apptainer_around_the_pod(
    tmp_path: Path, setup: list[str], program: str, module: str
) -> None:
    box = contained(tmp_path, Runner.APPTAINER)
    text = script("w-test-ab12", ["pod-0"], tmp_path, 4, setup, box, tmp_path / "w.zip")
    log = run_script(tmp_path, text, python3=PYTHON, **{program: APPTAINER})
    assert "--container" not in log
    assert f"with GPUs\nfolders {tmp_path},/local\nimage docker://nvcr.io/a/b:1, {module}\n" in log
    assert f"worker {tmp_path}/pod-0-ab12.json with {tmp_path}/w.zip" in log


def test_a_node_without_a_program_for_containers_and_a_setup_line_that_fails_are_named(
    tmp_path: Path,
) -> None:
    box = contained(tmp_path, Runner.APPTAINER, gpus=False)
    text = script("w-test-ab12", ["pod-0"], tmp_path, 4, (), box)
    assert "PodSpec.image needs pyxis, or apptainer" in run_script(tmp_path, text, python3=PYTHON)
    (tmp_path / "b").mkdir()
    text = script("w-test-ab12", ["pod-0"], tmp_path / "b", 4, ["nosuch"], box)
    log = run_script(tmp_path / "b", text, python3=PYTHON, apptainer=APPTAINER)
    assert "the setup line nosuch ended with exit code 127" in log
    assert "image docker" not in log


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": "--privileged"}, sentence("or the path of an image file that the nodes share")),
        ({"image": "a\nb"}, sentence("or the path of an image file that the nodes share")),
        ({"mounts": [Path("/a:b")]}, sentence("and cannot be mounted into a container", "/a:b")),
    ],
)
def test_an_image_that_the_runner_would_misread_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        contained(tmp_path, Runner.PYXIS, **changes).check()


def test_setup_lines_with_pyxis_are_refused(
    context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.pods.slurm.pods.runner_here", lambda: Runner.PYXIS)
    words = sentence("pyxis starts the pod inside the container", "module load cuda", "x")
    with pytest.raises(ConfigError, match=words):
        SlurmPods(setup=["module load cuda"]).launch(PodSpec(image="x"), 1, context)


@pytest.mark.slow
@pytest.mark.long
def test_a_pod_starts_in_its_image(
    place: SlurmPlace, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apptainer").write_text(APPTAINER)
    (tools / "apptainer").chmod(0o755)
    (tools / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    backend = place.backend()
    try:
        (pod,) = backend.launch(PodSpec(image="lab/torch"), 1, context)
    finally:
        backend.stop()
    assert pod.python == str(tools / "python3")
    assert "image docker://lab/torch" in (context.directory / "pods" / "pod-0.log").read_text()
    assert place.left(context) == []


@pytest.mark.parametrize(
    ("node", "keeper", "address"),
    [
        ("10.1.2.3", "127.0.0.1", "10.1.2.3"),
        ("127.0.0.12", "127.0.0.1", "127.0.0.12"),
        # A node whose own name is a loopback address has the address of its route to the keeper.
        ("127.0.1.1", "10.9.9.9", "10.1.2.3"),
        ("", "10.9.9.9", "10.1.2.3"),
    ],
)
def test_a_nodes_address_is_the_one_that_slurm_uses(
    node: str, keeper: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_slurm_address", lambda _name: node)
    monkeypatch.setattr(worker, "own_address_to", lambda _host: "10.1.2.3")
    config = WorkerConfig(
        name="pod-0",
        address="",
        port=22,
        slots=1,
        root="/tmp/x",
        log="/tmp/log",
        public_key="",
        environment={},
        lease_s=1,
        timeout_s=1,
        rendezvous=(keeper, 1),
        token="",
    )
    assert worker.node_address(config, {"SLURMD_NODENAME": "no.such.invalid"}) == address
