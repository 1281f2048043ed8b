"""Rows of `make bench` on starts, on many pods, and on the cost of reading a rank's output."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

from tools.bench.pair import Laps, Pair
from workbench import Cluster, FineTune, LocalPods, PodSpec, Script
from workbench.finetune.export.recipe import recipe_of
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import pdsh_environment
from workbench.results import RunResult

PODS = int(os.environ.get("BENCH_PODS", "64"))
JOB = {"max_steps": 2, "predict_rows": 0, "per_device_train_batch_size": 4}
BIN = Path(sys.executable).parent
LOSS = re.compile(r"'loss'")


def first_steps(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare the time from asking for a three-rank run to its first step's end, on ready pods."""
    with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / "cluster") as cluster:
        zero1 = cluster.submit(FineTune(technique="zero1", **JOB)).wait().raise_for_status()
        folder = recipe_in(root / "plain", zero1)

        def torchrun() -> float:
            return loss_times(["torchrun", "--nproc-per-node", "3", "train.py"], folder)[0]

        yield [
            Pair(
                what=f"seconds to the first step, 3 ranks, {technique}",
                ours=partial(first_step_of, cluster, FineTune(technique=technique, **JOB)),
                plain=torchrun,
                plain_is="torchrun, ZeRO-1",
                bound=f"<= {bound} s",
            )
            for technique, bound in (
                ("zero1", 1.5),
                ("zero3", 2.5),
                ("zero3-offload", 2.5),
                ("fsdp", 2.5),
            )
        ]


def launchers(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare the first step by DeepSpeed's launchers, and one from nothing, with `deepspeed`'s."""
    number = itertools.count()
    with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / "launchers") as cluster:
        pdsh, openmpi = (
            FineTune(technique="zero1", launcher=name, **JOB) for name in ("pdsh", "openmpi")
        )
        folder = recipe_in(root / "by-hand", cluster.submit(pdsh).wait().raise_for_status())

        def from_nothing() -> float:
            began, path = time.monotonic(), root / f"cold-{next(number)}"
            apart = mock.patch.dict(
                os.environ, TORCH_HOME=str(path)
            )  # or it would share the import of `cluster`
            with apart, Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=path) as cold:
                ready = time.monotonic()
                return ready - began + first_step_of(cold, FineTune(technique="zero1", **JOB))

        same = {
            "plain": lambda: deepspeed_by_hand(cluster, folder),
            "plain_is": "deepspeed by hand, pods there",
            "turns": 2,
        }
        step = "seconds to the first step, 3 ranks, ZeRO-1"
        yield [
            Pair(
                what=f"{step}, pdsh",
                ours=partial(first_step_of, cluster, pdsh),
                bound="<= 3.5 s",
                **same,
            ),
            Pair(
                what=f"{step}, openmpi",
                ours=partial(first_step_of, cluster, openmpi),
                bound="<= 3.5 s",
                **same,
            ),
            Pair(
                what="seconds from nothing to the first step, 3 pods, ZeRO-1",
                ours=from_nothing,
                bound=">= 2.86 x",
                **same,
            ),
        ]


def many_pods(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare many pods' start, an examination, a script on all and their end with work by hand.

    A turn is the life of one cluster, so that the first row's seconds are those of all.
    """
    number, script, seen = itertools.count(), root / "script", dict[str, float]()
    script.mkdir()
    (script / "hello.py").write_text("import os\nprint('rank', os.environ.get('RANK'))\n")
    with Cluster(LocalPods(), PodSpec(cpus=1), path=root / "one") as one:
        of_one = {field: keeper_status(one, field) for field in ("VmRSS", "Threads")}

    def life() -> float:
        laps = Laps()
        with Cluster(
            LocalPods(), PodSpec(cpus=1), count=PODS, path=root / f"many-{next(number)}"
        ) as many:
            seen["ready"] = laps.lap()
            if not (diagnosis := many.doctor(bandwidth=False)).ok:
                raise RuntimeError(str(diagnosis))
            seen["doctor"] = laps.lap()
            seen["df"] = over_pdsh(many, ["df", "-h"])
            laps.lap()
            many.submit(Script(str(script / "hello.py"))).wait().raise_for_status()
            seen["script"] = laps.lap()
            seen["pdsh"] = over_pdsh(many, [sys.executable, str(script / "hello.py")])
            seen.update({field: keeper_status(many, field) / PODS for field in of_one})
            laps.lap()
        seen["close"] = laps.lap()
        return seen["ready"]

    yield [
        Pair(
            what=f"seconds until {PODS} pods are ready",
            ours=life,
            plain=lambda: daemons_by_hand(root / f"daemons-{next(number)}"),
            plain_is="a key and a daemon each, no login",
            bound="<= 12 s",
        ),
        *(
            Pair(
                what=f"{what} {PODS} pods",
                ours=partial(seen.__getitem__, ours),
                plain=partial(seen.__getitem__, plain),
                plain_is=plain_is,
                bound=bound,
            )
            for what, ours, plain, plain_is, bound in (
                ("seconds of the doctor, no all-reduce,", "doctor", "df", "df over pdsh", "<= 5 s"),
                ("seconds for a script on", "script", "pdsh", "pdsh, the script there", "<= 8 s"),
                ("seconds to close", "close", "df", "df over pdsh", "<= 2 s"),
            )
        ),
        *(
            Pair(
                what=f"{what} of the keeper for each of {PODS} pods",
                ours=partial(seen.__getitem__, field),
                plain=partial(of_one.__getitem__, field),
                plain_is="the keeper of one pod",
            )
            for what, field in (("MiB", "VmRSS"), ("threads", "Threads"))
        ),
    ]


PRINTER = """
import time
began, due = time.process_time(), time.monotonic()
work = 0
for second in range(20):
    for line in range(1000):
        print("step", line, "loss 0.123456789, learning rate 0.00001, "
              "gradient norm 1.23456", flush=True)
    work += sum(i * i for i in range(150_000))
    due += 0.1
    time.sleep(max(0.0, due - time.monotonic()))
print("@took", time.process_time() - began)
"""


def output(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare the CPU time of a rank with 10,000 lines a second with one that fills a file."""
    folder = root / "printer"
    folder.mkdir()
    (folder / "printer.py").write_text(PRINTER)
    with Cluster(LocalPods(), PodSpec(cpus=1), path=root / "output") as cluster:

        def ours() -> float:
            run = cluster.submit(Script(str(folder / "printer.py")))
            run.wait().raise_for_status()
            return took((run.path / "logs" / "attempt-0" / "rank-0.stdout.log").read_text())

        def plain() -> float:
            with (folder / "out.log").open("w") as log:
                subprocess.run([sys.executable, str(folder / "printer.py")], stdout=log, check=True)
            return took((folder / "out.log").read_text())

        yield [
            Pair(
                what="CPU seconds of a rank that prints 10,000 lines/s",
                ours=ours,
                plain=plain,
                plain_is="the same program into a file",
                bound=">= 0.95 x",
            )
        ]


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
    """Train over a cluster's pods with DeepSpeed's own command; return the seconds to step one."""
    head = [
        "deepspeed",
        "--hostfile",
        str(cluster.path / "hostfile"),
        "--master_addr",
        cluster.pods[0].address,
    ]
    head += ["--launcher", "pdsh", "--force_multi", "--no_ssh_check", "--no_local_rank", "train.py"]
    return loss_times(head, folder, pdsh_environment(Identity(cluster.path / "identity")))[0]


def loss_times(command: Sequence[str], folder: Path, env: Mapping[str, str] = {}) -> list[float]:
    """Run a training and return the seconds from its start until it prints each step's loss."""
    times: list[float] = []
    seen = []
    started = time.monotonic()
    with _started(command, folder, env) as process:
        for line in process.stdout or ():
            seen.append(line)
            if LOSS.search(line):
                times.append(time.monotonic() - started)
    if process.returncode or not times:
        raise RuntimeError(f"{command[0]} did not train:\n" + "".join(seen[-30:]))
    return times


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
    subprocess.run(
        ["pdsh", "-S", "-f", "64", "-w", names, *command], env=env, check=True, capture_output=True
    )
    return time.monotonic() - began


def daemons_by_hand(folder: Path) -> float:
    """Make a key and start a daemon for each pod; end them; return the seconds until all listen."""
    folder.mkdir()
    began = time.monotonic()
    keys = [folder / f"key-{number}" for number in range(PODS)]
    makers = [
        subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
        for key in keys
    ]
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


def keeper_status(cluster: Cluster, field: str) -> float:
    """Read a figure of a cluster's keeper, memory in MiB."""
    pid = json.loads((cluster.path / "state.json").read_text())["pid"]
    text = Path(f"/proc/{pid}/status").read_text()
    number, unit = re.findall(rf"^{field}:\s+(\d+)( kB)?", text, re.MULTILINE)[0]
    return int(number) / (1024 if unit else 1)
