"""Run directories as the keeper writes them, made without one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.files import write_json
from workbench.base.process import process_start_time
from workbench.rundir.figures.samples import Sample
from workbench.rundir.paths import ClusterPaths, RunPaths

T0 = 1_795_269_773.0  # when the events begin, in seconds since 1970


@dataclass(slots=True)
class WrittenRun:
    """A run directory and the cluster it belongs to, whose keeper is this very process."""

    paths: RunPaths
    cluster: ClusterPaths
    pods: int = 3
    slots: int = 1
    """Ranks of a pod."""

    def state(self, state: str, message: str = "", hint: str = "") -> None:
        write_json(self.paths.state, {"state": state, "message": message, "hint": hint})

    def event(self, kind: str, time_s: float = T0, rank: int | None = 0, **data: object) -> None:
        with self.paths.events.open("a") as out:
            out.write(json.dumps({"time_s": time_s, "rank": rank, "kind": kind, **data}) + "\n")

    def sample(
        self,
        time_s: float = T0,
        *,
        rss_gib: float,
        pod: str = "pod-0",
        host: str = "127.0.0.2",
        gpus: Sequence[Mapping[str, object]] = (),
    ) -> None:
        sample = Sample.of_look(time_s, pod=pod, host=host, rss_gib=rss_gib, gpus=gpus)
        is_new = not self.paths.samples.exists()
        with self.paths.samples.open("ab") as out:
            out.write(b'{"generation": 1, "gpus": []}\n' if is_new else b"")
            out.write(sample.to_line())

    def step(self, step: int, max_steps: int = 100, **data: object) -> None:
        figures = {
            "loss": 8.0 / step,
            "grad_norm": 2.0,
            "learning_rate": 1e-3,
            "samples_per_s": 120.0,
        }
        self.event(
            "step",
            T0 + step,
            step=step,
            max_steps=max_steps,
            epoch=step / 50,
            **{**figures, **data},
        )

    def log(self, rank: int, text: str, stream: str = "stdout", attempt: int = 0) -> None:
        path = self.paths.rank_log(attempt, rank, stream)
        path.parent.mkdir(exist_ok=True)
        with path.open("a", newline="") as out:
            out.write(text)

    def keeper(
        self, phase: str = "ready", *, alive: bool = True, arrived: int | None = None
    ) -> None:
        pid = os.getpid()
        write_json(self.cluster.config, {"count": self.pods})
        pods = [
            {
                "name": f"pod-{n}",
                "phase": "Running",
                "address": f"127.0.0.{n + 2}",
                "ssh_port": 2222,
                "slots": self.slots,
            }
            for n in range(self.pods)
        ]
        write_json(
            self.cluster.state,
            {
                "phase": phase,
                "message": f"{self.pods} pods are ready",
                "pid": pid,
                "pods": pods if arrived is None else [],
                "arrived": pods[: arrived or 0],
                "start_time": process_start_time(pid) if alive else 1,
            },
        )

    def end(
        self, state: str = "succeeded", message: str = "all ranks finished", **facts: object
    ) -> None:
        hosts = [
            {"address": f"127.0.0.{n + 2}", "slots": self.slots, "pod": f"pod-{n}"}
            for n in range(self.pods)
        ]
        result: Mapping[str, object] = {
            "state": state,
            "message": message,
            "hosts": hosts,
            "world_size": self.pods * self.slots,
            "technique": "zero1",
            "launcher": "ssh",
            "precision": "fp32",
            "model": "tiny-t5",
            "duration_s": 25.5,
            "left_processes": 0,
        }
        write_json(self.paths.result, {**result, **facts})
        self.state(state, message)


def write_run(
    folder: Path, job: Mapping[str, object] | None = None, *, pods: int = 3, slots: int = 1
) -> WrittenRun:
    cluster = ClusterPaths(folder / "cluster")
    paths = RunPaths(cluster.runs / "20261121-140252-zero1-6c8c")
    paths.rank_log(0, 0, "stdout").parent.mkdir(parents=True)
    run = WrittenRun(paths, cluster, pods, slots)
    run.keeper()
    write_json(
        paths.info,
        {"id": paths.root.name, "cluster": str(cluster.root), "submitted_s": time.time()},
    )
    finetune = {
        "kind": "finetune",
        "technique": "zero1",
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
    }
    write_json(paths.spec, {"cluster": {"count": pods}, "job": dict(job or finetune)})
    lines = [f"127.0.0.{n + 2} slots={slots}\n" for n in range(pods)]
    paths.hostfile.write_text("".join(lines))
    paths.events.touch()
    for rank in range(pods * slots):
        for stream in ("stdout", "stderr"):
            paths.rank_log(0, rank, stream).touch()
    run.state("queued")
    return run
