"""Rows of `make bench` on pods at a slow link, each with an equal share of a CPU.

A pod is a network namespace and a CPU cgroup of its own. The link's rate is set so that a step of
ZeRO-1 with one micro-batch on three pods spends three times as long on the network as on the
micro-batch: the ratio R of the public walk-through's figures. Then every way trains on the same
global batches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from tests.fakes.namespaces import Namespace, joined
from tests.fakes.sshhosts import SSHHost
from tests.support.poll import until
from tools.bench.pair import Pair
from workbench import Cluster, FineTune, PodSpec, SSHPods
from workbench.pods.ssh.identity import Identity

__all__ = ["link"]

RATIO = 3.0
"""The network's time over a micro-batch's, as ZeRO-1 with one micro-batch on three pods has it."""
MICRO_BATCHES = 18
"""Micro-batches of a global batch: 6 a step for each of three pods."""
CORES = float(os.environ.get("BENCH_CORES", "0.4"))
"""Share of a core that each pod has."""
_CPU = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 20_000
_JOB = FineTune(
    precision="fp32",
    per_device_train_batch_size=8,
    eval_strategy="no",
    predict_rows=0,
    profile_step=0,
    logging_steps=100,
)
WAYS: Sequence[tuple[str, int, str, dict[str, object]]] = (
    ("ZeRO-1", 3, ">= 2 x", {"technique": "zero1"}),
    ("ZeRO-1", 2, ">= 1.5 x", {"technique": "zero1"}),
    ("ZeRO-2", 3, ">= 2 x", {"technique": "zero2"}),
    ("DDP", 3, ">= 2 x", {"technique": "ddp"}),
    ("ZeRO-1, LoRA", 3, ">= 2.6 x", {"technique": "zero1", "peft": "lora"}),
    ("local-sgd, 10 steps apart", 3, ">= 2.6 x", {"technique": "local-sgd", "max_steps": 12}),
)
"""What each is called, its pods, what is wanted of it, and its options."""


def link(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare rows a second of several pods with one pod's, where sending takes thrice as long."""
    if os.geteuid() != 0 or not shutil.which("tc") or not os.access(_CPU, os.W_OK):
        print("  link: needs root, tc and the CPU cgroup of version 1", file=sys.stderr)
        return
    with _pods(root / "link") as measured:
        for what, pods, bound, options in WAYS:
            steps = f"{MICRO_BATCHES // pods} micro-batches a step, R = {measured.ratio:.1f}"
            yield [
                Pair(
                    what=f"rows/s, {pods} pods, {what}, {steps}",
                    ours=partial(measured.rate, pods, **options),
                    plain=partial(measured.alone, options.get("peft", "none")),
                    plain_is="one pod, as many rows a step",
                    bound=bound,
                    more_is_better=True,
                    turns=1,
                )
            ]


class _Link:
    """Three pods, and the link between them."""

    def __init__(self, cluster: Cluster, namespaces: list[Namespace]) -> None:
        self._cluster, self._namespaces = cluster, namespaces
        self.alone = cache(lambda peft: self.rate(1, peft=peft))
        self.ratio = 0.0
        """R as measured."""
        self._calibrate()

    def rate(self, pods: int, *, micro_batches: int = MICRO_BATCHES, **options: object) -> float:
        """Return samples a second of all ranks; `micro_batches` are those of a global batch."""
        how = {"technique": "single", "max_steps": 5, **options}
        job = _JOB.replace(gradient_accumulation_steps=micro_batches // pods, **how)
        result = self._cluster.submit(job, pods=pods).wait(progress=False).raise_for_status()
        assert result.step_s is not None
        return job.global_batch(pods) / result.step_s

    def _calibrate(self) -> None:
        rows = _JOB.per_device_train_batch_size
        one_s = rows / self.rate(1, micro_batches=1, max_steps=20)
        mbit = 300.0
        for _ in range(4):
            self._limit(mbit)
            three_s = (
                3
                * rows
                / self.rate(
                    3, micro_batches=3, max_steps=10, technique="zero1", communication="fp32"
                )
            )
            self.ratio = three_s / one_s - 1
            print(
                f"  {mbit:.0f} Mbit/s: R = {self.ratio:.2f}, {one_s:.3f} s alone",
                file=sys.stderr,
                flush=True,
            )
            if abs(self.ratio - RATIO) < 0.3:
                return
            mbit *= self.ratio / RATIO

    def _limit(self, mbit: float) -> None:
        for each in self._namespaces:
            tbf = ["tbf", "rate", f"{mbit * 1000:.0f}kbit", "burst", "128kb", "latency", "50ms"]
            command = ["tc", "-n", each.name, "qdisc", "replace", "dev", "eth0", "root", *tbf]
            subprocess.run(command, check=True, timeout=10)


@contextmanager
def _pods(root: Path) -> Iterator[_Link]:
    """Bring three pods up, and set the link's rate."""
    user = Identity.create(root / "user")
    with joined(3) as namespaces, ExitStack() as undo:
        hosts = []
        for each in namespaces:
            words = (*undo.enter_context(_share(each.name)), *each.prefix)
            undo.callback(each.end_what_is_left)
            host = SSHHost(
                root / each.name, each.address, 22, user.public_key, prefix=words
            ).start()
            undo.callback(host.stop)
            hosts.append(host)
        trust = {host.address: host.fingerprint for host in hosts}
        addresses = [host.address for host in hosts]
        place = SSHPods(
            addresses, key=user.key, trust=trust, python=sys.executable, root=str(root / "root")
        )
        with Cluster(place, PodSpec(), count=3, path=root / "cluster") as cluster:
            yield _Link(cluster, namespaces)


@contextmanager
def _share(name: str) -> Iterator[tuple[str, ...]]:
    """Make a CPU cgroup; give the words that start a program in it."""
    group = _CPU / name
    group.mkdir()
    try:
        (group / "cpu.shares").write_text("262144")  # the most: other load of the machine waits
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(_PERIOD_US * CORES)))
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    finally:
        until(
            lambda: not (group / "cgroup.procs").read_text(), why=lambda: f"{group} has processes"
        )
        group.rmdir()
