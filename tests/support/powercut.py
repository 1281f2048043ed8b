"""A power cut: a file system in an image, of which only what was synced is left.

Each phase runs in a process of its own with its own mounts and processes, which end with the
process. The image is copied while the file system is mounted: the copy has what the disk
would have had.
"""

from __future__ import annotations

import filecmp
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from workbench import Cluster, FineTune, LocalPods, PodSpec, Run, Script
from workbench.base.files import records
from workbench.base.process import process_table
from workbench.rundir.checkpoints import newest_good
from workbench.rundir.figures.samples import SampleTail
from workbench.rundir.paths import RunPaths

_BOOT = "/proc/sys/kernel/random/boot_id"
_SCRIPT = """
import time, workbench
for step in range(100):
    workbench.log(step=step, loss=1 / (step + 1))
    print("line", step, flush=True)
    time.sleep(0.01)
with open("out.bin", "wb") as out:
    out.write(bytes(3_000_000))
"""


def isolated(phase: str, *args: str) -> dict[str, object]:
    """Run a phase in its own mount and process namespaces. Return what the phase told."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.support.powercut", phase, *args],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


def before(image: str, disk: str, cut: str, moment: str) -> dict[str, object]:
    """Start a cluster and a run, and copy the image at the moment: ended or training."""
    _mount(image, disk)
    folder = Path(disk)
    for name in ("home", "job"):
        (folder / name).mkdir()
    (folder / "job" / "train.py").write_text(_SCRIPT)
    cluster = Cluster(
        LocalPods(), PodSpec(cpus=1), path=folder / "cluster", count=2, warm=False
    ).start()
    if moment == "training":
        run = cluster.submit(_training(), pods=1)
        while not records.folders_in(RunPaths(run.path).checkpoints, "step-*"):
            time.sleep(0.05)
        time.sleep(0.5)
    else:
        run = cluster.submit(Script(folder / "job" / "train.py", outputs=["out.bin"]))
        run.wait(progress=False)
    subprocess.run(["cp", "--sparse=always", image, cut], check=True)
    samples, _ = SampleTail(run.paths.samples).read()
    return {"run": str(run.path), "state": str(run.state), "samples": len(samples)}


def at_random(image: str, disk: str, cut: str, seed: str) -> dict[str, object]:
    """Submit two runs, and copy the image some seconds later. Return what was said of each run."""
    _mount(image, disk)
    folder = Path(disk)
    for name in ("home", "job"):
        (folder / name).mkdir()
    script = folder / "job" / "train.py"
    script.write_text(_SCRIPT)
    cluster = Cluster(
        LocalPods(), PodSpec(cpus=1), path=folder / "cluster", count=2, warm=False
    ).start()
    said: dict[str, str] = {}
    moment_s = time.monotonic() + random.Random(seed).uniform(0.0, 12.0)
    for _ in range(2):
        run = cluster.submit(Script(script, outputs=["out.bin"]))
        said[str(run.path)] = "queued"
        if time.monotonic() > moment_s:
            break
    time.sleep(max(0.0, moment_s - time.monotonic()))
    said = {path: str(Run.load(path).state) for path in said}
    # No process syncs anything more; the copy is repeated until the kernel has written its last.
    for pid in process_table():
        if pid not in (1, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
    while True:
        for copy in (cut, f"{cut}.again"):
            subprocess.run(["cp", "--sparse=always", image, copy], check=True)
        if filecmp.cmp(cut, f"{cut}.again", shallow=False):
            break
    return {"said": said}


def after_random(image: str, disk: str, *runs: str) -> dict[str, object]:
    """Come back after the cut. Return what became of each run, and of the cluster."""
    _mount_again(image, disk)
    found: dict[str, object] = {}
    for path in runs:
        run = Run.load(path)
        ended = run.wait(progress=False)
        output = RunPaths(Path(path)).outputs / "out.bin"
        found[path] = {
            "state": str(ended.state),
            "message": ended.message,
            "steps": ended.steps,
            "lines": len(run.logs(0).splitlines()),
            "bytes": output.stat().st_size if output.exists() else 0,
        }
    job = Path(disk, "job", "next.py")
    job.write_text("print('fine')\n")
    cluster = Cluster.attach(Path(disk, "cluster"))
    result = cluster.submit(Script(job)).wait(progress=False)
    cluster.close()
    return {"runs": found, "next": str(result.state)}


def after(image: str, disk: str, path: str, moment: str) -> dict[str, object]:
    """Come back after the cut, on a machine that was booted anew."""
    _mount_again(image, disk)
    run = Run.load(path)
    ended = run.wait(progress=False)
    cluster = Cluster.attach(Path(disk, "cluster"))
    Path(disk, "job", "next.py").write_text("print('fine')\n")
    job: Script | FineTune = Script(Path(disk, "job", "next.py"))
    told: dict[str, object] = {}
    if moment == "training":
        step = newest_good(Path(path)).step
        job = _training().replace(resume=path, max_steps=step + 3)
        told["checkpoint"] = step
    result = cluster.submit(job, pods=1).wait(progress=False)
    cluster.close()
    output = RunPaths(Path(path)).outputs / "out.bin"
    return {
        **told,
        "state": str(ended.state),
        "message": ended.message,
        "steps": ended.steps,
        "lines": len(run.logs(0).splitlines()),
        "bytes": output.stat().st_size if output.exists() else 0,
        "samples": len(SampleTail(run.paths.samples).read()[0]),
        "next": str(result.state),
        "resumed": result.steps,
    }


def _training() -> FineTune:
    rows = {"kind": "wikisql-mini", "train_rows": 64, "eval_rows": 4}
    return FineTune(
        dataset=rows,
        technique="single",
        max_steps=100_000,
        save_steps=10,
        checkpoints="bring",
        predict_rows=0,
        profile_step=0,
    )


def _mount(image: str, disk: str) -> None:
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    os.environ["XDG_STATE_HOME"] = f"{disk}/state"
    os.environ["HOME"] = f"{disk}/home"


def _mount_again(image: str, disk: str) -> None:
    """Mount the copy, and show another boot id."""
    _mount(image, disk)
    boot = Path(disk, "home", "boot_id")
    boot.write_text("11111111-2222-3333-4444-555555555555\n")
    subprocess.run(["mount", "--bind", boot, _BOOT], check=True)


PHASES: Mapping[str, Callable[..., dict[str, object]]] = {
    "before": before,
    "after": after,
    "at_random": at_random,
    "after_random": after_random,
}

if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    answer = PHASES[name](*rest)
    print(json.dumps(answer), flush=True)
    os._exit(0)
