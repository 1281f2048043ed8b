"""Rows of `make bench` on starts, on many pods, and on what our watching costs a training."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchpair import Pair
from benchwork import ROWS, write_model

from workbench import Cluster, FineTune, LocalPods, PodSpec, RunResult, Script
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import pdsh_environment
from workbench.results.recipe import recipe_of

PODS = int(os.environ.get("BENCH_PODS", "64"))
JOB = {"max_steps": 2, "predict_rows": 0, "per_device_train_batch_size": 4}
BIN = Path(sys.executable).parent
LOSS = re.compile(r"'loss'")


def first_steps(root: Path) -> Iterator[Pair]:
    """Compare the time from asking for a three-rank run to its first step's end, pods already there."""
    with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / "cluster") as cluster:
        zero1 = cluster.submit(FineTune(technique="zero1", **JOB)).wait().raise_for_status()
        folder = recipe_in(root / "plain", zero1)
        torchrun = ["torchrun", "--nproc-per-node", "3", "train.py"]
        for technique, bound in (("zero1", 1.5), ("zero3", 2.5), ("zero3-offload", 2.5), ("fsdp", 2.5)):
            job = FineTune(technique=technique, **JOB)
            cluster.submit(job).wait().raise_for_status()  # then the warm servers are ready
            yield Pair(
                what=f"seconds to the first step, 3 ranks, {technique}",
                ours=lambda job=job: first_step_of(cluster, job),
                plain=lambda: until_first_step(torchrun, folder),
                plain_is="torchrun, ZeRO-1",
                bound=f"<= {bound} s",
            )


def launchers(root: Path) -> Iterator[Pair]:
    """Compare the first step through DeepSpeed's launchers with that of the `deepspeed` command by hand."""
    with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / "launchers") as cluster:
        for launcher in ("pdsh", "openmpi"):
            job = FineTune(technique="zero1", launcher=launcher, **JOB)
            folder = recipe_in(root / launcher, cluster.submit(job).wait().raise_for_status())
            yield Pair(
                what=f"seconds to the first step, 3 ranks, ZeRO-1, {launcher}",
                ours=lambda job=job: first_step_of(cluster, job),
                plain=lambda folder=folder: deepspeed_by_hand(cluster, folder),
                plain_is="deepspeed by hand over the pods",
                bound="<= 3.5 s",
            )


def from_nothing(root: Path) -> Iterator[Pair]:
    """Compare a cluster's start and its first step with the `deepspeed` command over pods that are there."""
    number = itertools.count()
    with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / "by-hand", warm=False) as pods:
        job = FineTune(technique="zero1", **JOB)
        folder = recipe_in(root / "cold", pods.submit(job).wait().raise_for_status())

        def ours() -> float:
            began = time.monotonic()
            with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / f"cold-{next(number)}") as cluster:
                ready = time.monotonic()
                return ready - began + first_step_of(cluster, job)

        yield Pair(
            what="seconds from nothing to the first step, 3 pods, ZeRO-1",
            ours=ours,
            plain=lambda: deepspeed_by_hand(pods, folder),
            plain_is="deepspeed by hand, pods there",
            bound=">= 2.86 x",
        )


def many_pods(root: Path) -> Iterator[Pair]:
    """Compare the start of many pods, and a script on all of them, with sshd and pdsh by hand."""
    number, script = itertools.count(), root / "script"
    script.mkdir()
    (script / "hello.py").write_text("import os\nprint('rank', os.environ.get('RANK'))\n")

    def start() -> float:
        began = time.monotonic()
        with Cluster(LocalPods(), PodSpec(cpus=1), count=PODS, path=root / f"many-{next(number)}"):
            return time.monotonic() - began

    yield Pair(
        what=f"seconds until {PODS} pods are ready",
        ours=start,
        plain=lambda: daemons_by_hand(root / f"daemons-{next(number)}"),
        plain_is="a key and a daemon each, no login",
        bound="<= 12 s",
    )
    with (
        Cluster(LocalPods(), PodSpec(cpus=1), count=PODS, path=root / "many") as many,
        Cluster(LocalPods(), PodSpec(cpus=1), count=1, path=root / "one") as one,
    ):
        job = Script(str(script / "hello.py"))

        def run() -> float:
            began = time.monotonic()
            many.submit(job).wait().raise_for_status()
            return time.monotonic() - began

        yield Pair(
            what=f"seconds for a script on {PODS} pods",
            ours=run,
            plain=lambda: over_pdsh(many, [sys.executable, str(script / "hello.py")]),
            plain_is="pdsh, the script there",
            bound="<= 8 s",
        )
        for name, read in (("MiB", memory_mib), ("threads", threads)):
            yield Pair(
                what=f"{name} of the keeper for each of {PODS} pods",
                ours=lambda read=read: read(many) / PODS,
                plain=lambda read=read: read(one),
                plain_is="the keeper of one pod",
            )


def doctor_and_close(root: Path) -> Iterator[Pair]:
    """Compare an examination of many pods, and their end, with a look over pdsh."""
    number, closed, look = itertools.count(), list[float](), list[float]()

    def examine() -> float:
        with Cluster(LocalPods(), PodSpec(cpus=1), count=PODS, path=root / f"doctor-{next(number)}") as cluster:
            began = time.monotonic()
            assert cluster.doctor(bandwidth=False).ok
            took = time.monotonic() - began
            look.append(over_pdsh(cluster, ["df", "-h"]))
            began = time.monotonic()
        closed.append(time.monotonic() - began)
        return took

    yield Pair(
        what=f"seconds of the doctor on {PODS} pods, no all-reduce",
        ours=examine,
        plain=lambda: look[-1],
        plain_is="df over pdsh",
        bound="<= 5 s",
    )
    yield Pair(
        what=f"seconds to close {PODS} pods",
        ours=lambda: closed.pop(),
        plain=lambda: look[-1],
        plain_is="df over pdsh",
        bound="<= 2 s",
    )


def overhead(root: Path) -> Iterator[Pair]:
    """Compare samples/s with all that we watch, with those of the recipe's bare script, one rank."""
    with Cluster(LocalPods(), PodSpec(cpus=1), path=root / "overhead") as cluster:
        for model, steps in (("tiny-t5", 150), ("t5-small", 6)):
            named = model
            if model == "t5-small":
                if not ROWS.exists():
                    continue  # a model of its shape is made with a vocabulary of these rows
                write_model(root / "made", model)
                named = str(root / "made" / "model")
            job = FineTune(
                model=named, technique="single", max_steps=steps, predict_rows=0, eval_strategy="no",
                per_device_train_batch_size=32,
            )  # fmt: skip
            folder = recipe_in(root / model, cluster.submit(job).wait().raise_for_status())

            def ours(job: FineTune = job) -> float:
                return cluster.submit(job).wait().raise_for_status().train_samples_per_s or 0.0

            def plain(folder: Path = folder) -> float:
                done = printed(["torchrun", "--nproc-per-node", "1", "train.py"], folder)
                return float(re.findall(r"'train_samples_per_second': '?([\d.]+)", done)[-1])

            yield Pair(
                what=f"samples/s of one rank, {model}, all watched",
                ours=ours,
                plain=plain,
                plain_is="the same script, bare",
                more_is_better=True,
                bound=">= 0.98 x",
            )


PRINTER = """
import time
began, due = time.process_time(), time.monotonic()
work = 0
for second in range(20):
    for line in range(1000):
        print("step", line, "loss 0.123456789, learning rate 0.00001, gradient norm 1.23456", flush=True)
    work += sum(i * i for i in range(150_000))
    due += 0.1
    time.sleep(max(0.0, due - time.monotonic()))
print("@took", time.process_time() - began)
"""


def output(root: Path) -> Iterator[Pair]:
    """Compare the CPU time of a rank that prints 10,000 lines a second with that of the same program into a file."""
    folder = root / "printer"
    folder.mkdir()
    (folder / "printer.py").write_text(PRINTER)
    with Cluster(LocalPods(), PodSpec(cpus=1), path=root / "output") as cluster:

        def ours() -> float:
            run = cluster.submit(Script(str(folder / "printer.py")))
            run.wait().raise_for_status()
            return took((run.path / "logs" / "rank-0.stdout.log").read_text())

        def plain() -> float:
            with (folder / "out.log").open("w") as log:
                subprocess.run([sys.executable, str(folder / "printer.py")], stdout=log, check=True)
            return took((folder / "out.log").read_text())

        yield Pair(
            what="CPU seconds of a rank that prints 10,000 lines/s",
            ours=ours,
            plain=plain,
            plain_is="the same program into a file",
            bound=">= 0.95 x",
        )


def took(text: str) -> float:
    """Read what a printer says of itself."""
    return float(text.rpartition("@took")[2])


def first_step_of(cluster: Cluster, job: FineTune) -> float:
    """Run a job and return the seconds from its submission to its first step's end."""
    seconds = cluster.submit(job).wait().raise_for_status().time_to_first_step_s
    assert seconds is not None
    return seconds


def recipe_in(folder: Path, result: RunResult) -> Path:
    """Write the files that repeat a run without us."""
    for name, content in recipe_of(result).files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def deepspeed_by_hand(cluster: Cluster, folder: Path) -> float:
    """Train over a cluster's pods with DeepSpeed's own command, and return the seconds to the first step."""
    head = ["deepspeed", "--hostfile", str(cluster.path / "hostfile"), "--master_addr", cluster.pods[0].address]
    head += ["--launcher", "pdsh", "--force_multi", "--no_ssh_check", "--no_local_rank", "train.py"]
    return until_first_step(head, folder, pdsh_environment(Identity(cluster.path / "identity")))


def until_first_step(command: Sequence[str], folder: Path, env: Mapping[str, str] = {}) -> float:
    """Start a training and return the seconds until it prints the first step's loss; it runs to its end."""
    took = None
    seen = []
    started = time.monotonic()
    with _started(command, folder, env) as process:
        for line in process.stdout or ():
            seen.append(line)
            if took is None and LOSS.search(line):
                took = time.monotonic() - started
    if process.returncode or took is None:
        raise RuntimeError(f"{command[0]} did not train:\n" + "".join(seen[-30:]))
    return took


def printed(command: Sequence[str], folder: Path) -> str:
    """Run a training and return all that it prints."""
    with _started(command, folder, {}) as process:
        text, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} did not train:\n{text[-3000:]}")
    return text


def _started(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def over_pdsh(cluster: Cluster, command: Sequence[str]) -> float:
    """Run a command on all pods at once and return the seconds."""
    names = ",".join(pod.address for pod in cluster.pods)
    env = {**os.environ, **pdsh_environment(Identity(cluster.path / "identity"))}
    began = time.monotonic()
    subprocess.run(["pdsh", "-S", "-f", "64", "-w", names, *command], env=env, check=True, capture_output=True)
    return time.monotonic() - began


def daemons_by_hand(folder: Path) -> float:
    """Make a key and start a daemon for each pod, all at once, and end them; return the seconds until all listen."""
    folder.mkdir()
    began = time.monotonic()
    keys = [folder / f"key-{number}" for number in range(PODS)]
    makers = [subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]) for key in keys]
    assert not any(maker.wait() for maker in makers)
    daemons = []
    for number, key in enumerate(keys):
        argv = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-h", str(key), "-p", "2299"]
        argv += ["-o", f"ListenAddress=127.0.9.{number + 1}", "-o", "PidFile=none"]
        daemons.append(subprocess.Popen(argv, stderr=subprocess.PIPE, text=True))
    for daemon in daemons:
        assert daemon.stderr is not None
        assert "listening" in daemon.stderr.readline()
    seconds = time.monotonic() - began
    for daemon in daemons:
        daemon.kill()
        daemon.communicate()
    return seconds


def memory_mib(cluster: Cluster) -> float:
    """Read the resident memory of a cluster's keeper."""
    return int(_status_of(cluster, "VmRSS")) / 1024


def threads(cluster: Cluster) -> float:
    """Count the threads of a cluster's keeper."""
    return float(_status_of(cluster, "Threads"))


def _status_of(cluster: Cluster, field: str) -> str:
    pid = json.loads((cluster.path / "state.json").read_text())["pid"]
    text = Path(f"/proc/{pid}/status").read_text()
    return re.findall(rf"^{field}:\s+(\d+)", text, re.MULTILINE)[0]
