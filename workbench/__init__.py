"""DeepSpeed Workbench: fine-tune over several pods from a notebook.

The most used names stand here. Further names have a module: `workbench.errors`, `places`,
`results`, `data`, `wikisql`, `deepspeed` and `forms`.

Names are imported on first use, so `import workbench` loads no torch, paramiko or ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.display_protocol import draw_with
from workbench.base.versions import VERSION

if TYPE_CHECKING:
    from workbench.benchmark.benchmark import Benchmark as Benchmark
    from workbench.benchmark.cluster import Cluster as Cluster
    from workbench.client.run import Run as Run
    from workbench.client.tables.comparison import tensorboard as tensorboard
    from workbench.finetune.job.finetune import FineTune as FineTune
    from workbench.finetune.notebook.comparison import compare as compare
    from workbench.finetune.notebook.history import history as history
    from workbench.finetune.plan.gpus import gpus_for as gpus_for
    from workbench.finetune.plan.plan import plan as plan
    from workbench.finetune.plan.reading import preview as preview
    from workbench.jobs.script import Function as Function
    from workbench.jobs.script import Script as Script
    from workbench.pods.cml.pods import CMLPods as CMLPods
    from workbench.pods.hosts.pods import SSHPods as SSHPods
    from workbench.pods.kubernetes.manifests.volumes import Volume as Volume
    from workbench.pods.kubernetes.pods import KubernetesPods as KubernetesPods
    from workbench.pods.local.pods import LocalPods as LocalPods
    from workbench.pods.pod_spec import PodSpec as PodSpec
    from workbench.pods.slurm.pods import SlurmPods as SlurmPods
    from workbench.rundir.events import log as log


__version__ = VERSION

_HOME = {
    "Benchmark": "workbench.benchmark.benchmark",
    "CMLPods": "workbench.pods.cml.pods",
    "Cluster": "workbench.benchmark.cluster",
    "FineTune": "workbench.finetune.job.finetune",
    "Function": "workbench.jobs.script",
    "KubernetesPods": "workbench.pods.kubernetes.pods",
    "LocalPods": "workbench.pods.local.pods",
    "PodSpec": "workbench.pods.pod_spec",
    "Run": "workbench.client.run",
    "SSHPods": "workbench.pods.hosts.pods",
    "Script": "workbench.jobs.script",
    "SlurmPods": "workbench.pods.slurm.pods",
    "Volume": "workbench.pods.kubernetes.manifests.volumes",
    "compare": "workbench.finetune.notebook.comparison",
    "gpus_for": "workbench.finetune.plan.gpus",
    "history": "workbench.finetune.notebook.history",
    "log": "workbench.rundir.events",
    "plan": "workbench.finetune.plan.plan",
    "preview": "workbench.finetune.plan.reading",
    "tensorboard": "workbench.client.tables.comparison",
}
"""Internal module of every name that stands here."""
__all__ = list(_HOME)

_ELSEWHERE = {
    "data": ("dataset_from", "fill_prompt", "prepare_dataset", "train_tokenizer"),
    "deepspeed": ("load_deepspeed_config", "resolve_deepspeed_config"),
    "errors": (
        "BackendError",
        "ConfigError",
        "PodError",
        "PodTimeout",
        "RemoteError",
        "RunError",
        "RunFailed",
        "WorkbenchError",
    ),
    "forms": ("compose",),
    "places": ("CMLProject", "Pod", "can_limit_memory", "nodes"),
    "results": (
        "FineTuneResult",
        "FineTuneRun",
        "Predictions",
        "RunResult",
        "as_completed",
        "compare_predictions",
        "judge_answers",
    ),
    "wikisql": ("mini_rows", "parse_sql", "read_tables", "run_query"),
}
"""Names of the other public modules, for the error of an import from here."""


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    for public, names in _ELSEWHERE.items():
        if name in names:
            # Python would replace an AttributeError by "cannot import name".
            raise ImportError(f"{name} is in workbench.{public}; import {name} from there")
    if name not in _HOME:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    import importlib

    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except Exception as error:
        from workbench.base.hidden import hiding_file

        if file := hiding_file(error):
            raise ImportError(
                f"{file} hides a module of Python or of a package that has the same name; rename"
                f" the file and restart the kernel ({error})"
            ) from error
        # Python would hide the cause behind "cannot import name".
        if isinstance(error, AttributeError):
            raise ImportError(f"workbench.{name} cannot be imported: {error}") from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# The drawings need matplotlib, Jinja2 and ipywidgets.
draw_with("workbench.display.views")
