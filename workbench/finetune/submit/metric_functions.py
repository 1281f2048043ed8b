"""Write metric functions of a notebook as files for the pods."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from workbench.base import entries
from workbench.base.files import write_bytes
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.metrics import Metric, function_name, metric_text
from workbench.jobs.script import Function
from workbench.rundir.make.function import cloudpickle_files, pickled_function

_METRIC_FILE = """\
# The function {name} of a notebook, as it was when a run was submitted:
# its pickle, and what reads it.
from {module} import load as _load

{name} = _load(
    {facts!r},
    {pickled!r},
)[0]
"""


def with_metric_files(job: FineTune, folder: Path) -> FineTune:
    """Return the job with each function of its metrics and rewards written to a file."""
    if not any(map(callable, (*job.metrics, *job.rewards))):
        return job
    named: list[Metric] = []
    for number, metric in enumerate((*job.metrics, *job.rewards)):
        is_text = isinstance(metric, str)
        named.append(metric if is_text else _metric_file(metric, folder, number))
    count = len(job.metrics)
    return job.replace(metrics=named[:count], rewards=named[count:])


def _metric_file(function: Any, folder: Path, number: int) -> str:
    pickled, facts = pickled_function(Function(function))
    brought = {name: content.decode() for name, content in cloudpickle_files().items()}
    name = function_name(function)
    content = {
        "name": name,
        "module": entries.CALL,
        "facts": {**facts, "files": brought},
    }
    path = folder / f"{number}-{metric_text(function).rpartition(':')[0]}"
    write_bytes(
        path, _METRIC_FILE.format(**content, pickled=base64.b64encode(pickled).decode()).encode()
    )
    return f"{path}:{name}"
