"""Measure shallow copies of a job's model on a pod, to compare the plan with real steps."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.base.allocator import preloaded
from workbench.base.errors import RunError
from workbench.client.submission import Submission
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.shapes import model_config
from workbench.finetune.options.choices import LossOn
from workbench.finetune.plan.calibration import (
    LAYERS,
    Calibration,
    CopyTime,
    depth_of,
    shallow_config,
    unmeasured,
    untimed,
)
from workbench.finetune.plan.memory import need_of
from workbench.finetune.plan.plan import as_planned
from workbench.finetune.plan.setting import request_of, setting_of
from workbench.finetune.plan.table import GIB
from workbench.finetune.plan.tracing import trace_step
from workbench.finetune.techniques.registry import YARDSTICK
from workbench.jobs.script import Function
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState

_ENTRY = "workbench.finetune.plan.trace.shallow"
_LIMIT_S = 300.0
# On a CPU the measured memory is off by some 20 MiB, which the allocator keeps or libraries take.
_LEAST_BYTES = 100 << 20


def calibrate(
    cluster: Submission,
    job: FineTune,
    *,
    gpus: int,
    lengths: tuple[int, int] | None = None,
) -> Calibration:
    """Measure some steps of shallow copies on the first pod, and plan the same steps.

    Memory or times that cannot be measured have a reason in their place.
    """
    why = unmeasured(job)
    config = model_config(job.model, job.model_revision)
    depth = depth_of(config)
    if depth is None:
        why = f"the configuration of {job.model!r} has no known number of layers"
    if why or depth is None:
        return Calibration(why=why, untimed=why)
    job = choose(as_planned(job, YARDSTICK), gpus=gpus)
    setting = setting_of(job, pods=1, gpus=gpus, model=config)

    def request(shape: Mapping[str, object]) -> dict[str, object]:
        return request_of(job, shape, [setting.arithmetic], gpus=gpus, lengths=lengths)

    # The copy whose memory is measured comes first.
    depths = list(range(min(LAYERS, depth), 0, -1))
    requests = [request(shallow_config(config, layers)) for layers in depths]
    rows = job.per_device_train_batch_size
    need = need_of(setting, trace_step(requests[0]), rows)
    planned = need.gpu or need.host
    if need.gpu is None and planned.tensors < _LEAST_BYTES:
        why = (
            f"a copy needs {planned.tensors / 2**20:.0f} MiB; below "
            f"{_LEAST_BYTES / 2**20:.0f} MiB the process's own memory would decide"
        )
    why_untimed = untimed(job, trace_step(request(config)).layers, depth)
    if why and why_untimed:
        return Calibration(why=why, untimed=why_untimed)
    step = {
        "rows": rows,
        "optimizer": str(job.optimizer),
        "max_grad_norm": job.max_grad_norm,
        "answers": job.loss_on == LossOn.ANSWER,
    }
    found = _measured(cluster, requests, step)
    if isinstance(found, str):
        return Calibration(why=found, untimed=found)
    memory: dict[str, Any] = {"why": why}
    if not why:
        memory = {
            "planned_gib": planned.tensors / GIB,
            "measured_gib": found["peak_bytes"] / GIB,
        }
    if why_untimed:
        return Calibration(**memory, untimed=why_untimed)
    return Calibration(
        **memory,
        rounds=[_times(depths, round_s) for round_s in found["rounds"]],
        layers=depth,
        rows=rows,
        lengths=lengths or job.planned_lengths,
    )


def _measured(
    cluster: Submission, requests: Sequence[Mapping[str, object]], step: Mapping[str, object]
) -> Mapping[str, Any] | str:
    """Run `measure` on the first pod, and return its answer, or the reason why there is none."""
    name = f"shallow-{secrets.token_hex(3)}"
    run = cluster.submit(
        Function(measure, (requests, step)), pods=1, path=ClusterPaths(cluster.path).timed / name
    )
    try:
        result = run.wait(_LIMIT_S, progress=False)
    except TimeoutError:
        run.stop()
        run.wait(progress=False)
        return f"the copies took more than {_LIMIT_S:.0f} s; see {run.path}"
    if result.state is not RunState.SUCCEEDED:
        return f"the steps of the copies failed; see {result.path}"
    try:
        found = run.returned[0]
    except RunError as error:
        return str(error)
    assert isinstance(found, Mapping)
    return found


def _times(depths: Sequence[int], round_s: Sequence[Sequence[float]]) -> list[CopyTime]:
    """Return the times of the copies of a round."""
    times = []
    for layers, (micro_batch_s, update_s) in zip(depths, round_s, strict=True):
        times.append(CopyTime(layers=layers, micro_batch_s=micro_batch_s, update_s=update_s))
    return times


def measure(requests: Sequence[Mapping[str, object]], step: Mapping[str, object]) -> object:
    """Measure on a pod, in a child process with the allocator of ranks; the first rank measures."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    child = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", _ENTRY],
        input=json.dumps([requests, step]),
        env={**os.environ, **preloaded(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(child.stdout)
