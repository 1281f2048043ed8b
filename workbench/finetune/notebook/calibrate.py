"""Measure a shallow copy of a job's model on a pod, to compare the plan with a real step."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping

from workbench.base.allocator import preloaded
from workbench.base.errors import RunError
from workbench.client.submission import Submission
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.shapes import model_config
from workbench.finetune.plan.calibration import Calibration, shallow_config, unmeasured
from workbench.finetune.plan.memory import need_of
from workbench.finetune.plan.plan import as_planned
from workbench.finetune.plan.setting import request_of, setting_of
from workbench.finetune.plan.table import GIB
from workbench.finetune.plan.tracing import trace_step
from workbench.finetune.techniques.registry import YARDSTICK
from workbench.jobs.script import Function
from workbench.rundir.state import RunState

_ENTRY = "workbench.finetune.plan.trace.shallow"
_LIMIT_S = 300.0
# On a CPU the measured memory is off by some 20 MiB, which the allocator keeps or libraries take.
_LEAST_BYTES = 100 << 20


def calibrate(cluster: Submission, job: FineTune, *, gpus: int) -> Calibration:
    """Measure some steps of a shallow copy on the first pod, and plan the same steps.

    A copy that cannot be measured is a calibration with a reason and without a scale.
    """
    why = unmeasured(job)
    config = shallow_config(model_config(job.model, job.model_revision))
    if config is None:
        why = f"the configuration of {job.model!r} has no known number of layers"
    if why or config is None:
        return Calibration(why=why)
    job = choose(as_planned(job, YARDSTICK), gpus=gpus)
    setting = setting_of(job, pods=1, gpus=gpus, model=config)
    request = request_of(job, config, [setting.arithmetic], gpus=gpus, lengths=None)
    rows = job.per_device_train_batch_size
    need = need_of(setting, trace_step(request), rows)
    planned = need.gpu or need.host
    if need.gpu is None and planned.tensors < _LEAST_BYTES:
        return Calibration(
            why=f"a copy needs {planned.tensors / 2**20:.0f} MiB; below "
            f"{_LEAST_BYTES / 2**20:.0f} MiB the process's own memory would decide"
        )
    function = Function(measure, (request, rows, str(job.optimizer)))
    name = f"shallow-{secrets.token_hex(3)}"
    run = cluster.submit(function, pods=1, path=cluster.path / "timed" / name)
    try:
        result = run.wait(_LIMIT_S, progress=False)
    except TimeoutError:
        run.stop()
        run.wait(progress=False)
        return Calibration(why=f"the copy took more than {_LIMIT_S:.0f} s; see {run.path}")
    if result.state is not RunState.SUCCEEDED:
        return Calibration(why=f"the steps of the copy failed; see {result.path}")
    try:
        found = run.returned[0]
    except RunError as error:
        return Calibration(why=str(error))
    assert isinstance(found, Mapping)
    return Calibration(
        planned_gib=planned.tensors / GIB,
        measured_gib=found["peak_bytes"] / GIB,
        step_s=found["step_s"],
    )


def measure(request: Mapping[str, object], rows: int, optimizer: str) -> object:
    """Measure on a pod, in a child process with the allocator of ranks; the first rank measures."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    child = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", _ENTRY],
        input=json.dumps([request, rows, optimizer]),
        env={**os.environ, **preloaded(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(child.stdout)
