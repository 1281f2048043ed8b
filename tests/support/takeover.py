"""What tests of a keeper that is killed, and of the one that takes its place, have in common."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.poll import until
from workbench import Cluster, FineTune, Run, Script
from workbench.base.files.locks import is_locked
from workbench.base.messages.lines import to_line
from workbench.base.process import find
from workbench.pods.place import Place
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.status import cluster_status

COUNT = Path(__file__).parents[1] / "scripts" / "count.py"


def counting(
    cluster: Cluster, *args: str, pods: int | None = None, path: Path = COUNT, **more: object
) -> Run:
    """Submit the script whose lines and events `exact` knows."""
    return cluster.submit(Script(path=str(path), args=list(args), **more), pods=pods)  # type: ignore[arg-type]


def kill_keeper(cluster: Cluster) -> int:
    """Kill a cluster's keeper, and return what its pid was."""
    status = cluster_status(cluster.path)
    assert status.pid is not None
    os.kill(status.pid, signal.SIGKILL)
    until(
        lambda: (
            find(status.pid or 0) is None and not is_locked(ClusterPaths(cluster.path).keeper_lock)
        )
    )
    return status.pid


def under_another_keeper(cluster: Cluster, code: str, *args: str) -> subprocess.Popen[bytes]:
    """Kill a cluster's keeper, and have this program take over as the next one."""
    kill_keeper(cluster)
    keeper = subprocess.Popen(
        [sys.executable, "-c", code, str(cluster.path), *args], stdin=subprocess.PIPE
    )
    assert keeper.stdin is not None
    keeper.stdin.write(to_line(cluster.spec.to_dict()) + b"stay\n")
    keeper.stdin.close()
    return keeper


def printed(run: Run, rank: int) -> str:
    """Return what has come of a rank's output, in all attempts."""
    logs = [run.paths.rank_log(attempt, rank, "stdout") for attempt in range(10)]
    return "".join(log.read_text(errors="replace") for log in logs if log.exists())


def exact(run: Run, lines: int, ranks: int = 2) -> None:
    """Hold that every line and every event of every rank is there, once and in order."""
    for rank in range(ranks):
        ours = [line for line in printed(run, rank).splitlines() if line.startswith("rank")]
        assert ours == [f"rank {rank} line {n}" for n in range(lines)]
        steps = [
            event.whole("step")
            for event in run.events()
            if event.kind == "step" and event.rank == rank
        ]
        assert steps == list(range(1, lines + 1))
    assert curve(run) == sorted([*range(1, lines + 1)] * ranks)


def curve(run: Run) -> list[int]:
    """Return the steps of the loss as TensorBoard has them."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = run.paths.tensorboard.glob("events.out.tfevents.*")
    events = [event for file in files for event in EventFileLoader(str(file)).Load()]
    return sorted(e.step for e in events for value in e.summary.value if value.tag == "train/loss")


NOTEBOOK = """
import json
import sys
from workbench import Cluster, FineTune, PodSpec
from workbench.pods.backends import backend_from_dict

place, path, job = backend_from_dict(json.loads(sys.argv[1])), *sys.argv[2:]
cluster = Cluster(place, PodSpec(), count=2, path=path, warm=False)
cluster.start(wait=False)
run = cluster.submit(FineTune.from_dict(json.loads(job)))
print(run.path, flush=True)
sys.stdin.read()
"""


def notebook(place: Place, path: Path, job: FineTune) -> tuple[subprocess.Popen[str], Run]:
    """Submit a job from another process to a cluster that waits for its pods."""
    kernel = process(NOTEBOOK, json.dumps(place.to_dict()), path, json.dumps(job.to_dict()))
    assert kernel.stdout is not None
    return kernel, Run.load(kernel.stdout.readline().strip())


def process(code: str, *words: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
