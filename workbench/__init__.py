"""DeepSpeed Workbench: fine-tune over several pods from a notebook.

Names are imported on first use, so `import workbench` loads no torch, paramiko or ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.shown import draw_with
from workbench.base.versions import VERSION

if TYPE_CHECKING:
    from workbench.base.errors import BackendError as BackendError
    from workbench.base.errors import ConfigError as ConfigError
    from workbench.base.errors import PodError as PodError
    from workbench.base.errors import PodTimeout as PodTimeout
    from workbench.base.errors import RemoteError as RemoteError
    from workbench.base.errors import RunError as RunError
    from workbench.base.errors import RunFailed as RunFailed
    from workbench.base.errors import WorkbenchError as WorkbenchError
    from workbench.benchmark.benchmark import Benchmark as Benchmark
    from workbench.benchmark.cluster import Cluster as Cluster
    from workbench.client.comparison import tensorboard as tensorboard
    from workbench.client.history import history as history
    from workbench.client.result import RunResult as RunResult
    from workbench.client.run import Run as Run
    from workbench.display.compose.form import compose as compose
    from workbench.finetune.answers.ask import compare_predictions as compare_predictions
    from workbench.finetune.answers.predictions import Predictions as Predictions
    from workbench.finetune.answers.predictions import judge_answers as judge_answers
    from workbench.finetune.data.sources.convert import read_tables as read_tables
    from workbench.finetune.data.sources.dataset import dataset_from as dataset_from
    from workbench.finetune.data.sources.dataset import prepare
    from workbench.finetune.data.sql.mini import mini_rows as mini_rows
    from workbench.finetune.data.sql.query import parse
    from workbench.finetune.data.sql.tables import execute
    from workbench.finetune.deepspeed.files import load
    from workbench.finetune.job.deepspeed_config import resolve
    from workbench.finetune.job.finetune import FineTune as FineTune
    from workbench.finetune.model.text.tokenizer import train_tokenizer as train_tokenizer
    from workbench.finetune.notebook.comparison import compare as compare
    from workbench.finetune.notebook.result import FineTuneResult as FineTuneResult
    from workbench.finetune.notebook.run import FineTuneRun as FineTuneRun
    from workbench.finetune.options.text.prompts import fill
    from workbench.finetune.plan.gpus import gpus_for as gpus_for
    from workbench.finetune.plan.plan import plan as plan
    from workbench.finetune.plan.reading import preview as preview
    from workbench.jobs.script import Function as Function
    from workbench.jobs.script import Script as Script
    from workbench.pods.cml.pods import CMLPods as CMLPods
    from workbench.pods.cml.project import CMLProject as CMLProject
    from workbench.pods.guest.machine import can_limit_memory as can_limit_memory
    from workbench.pods.hosts.pods import SSHPods as SSHPods
    from workbench.pods.kubernetes.manifests.volumes import Volume as Volume
    from workbench.pods.kubernetes.pods import KubernetesPods as KubernetesPods
    from workbench.pods.local.pods import LocalPods as LocalPods
    from workbench.pods.nodes import nodes as nodes
    from workbench.pods.pod import Pod as Pod
    from workbench.pods.pod_spec import PodSpec as PodSpec
    from workbench.pods.slurm.pods import SlurmPods as SlurmPods
    from workbench.rundir.events import log as log

    prepare_dataset = prepare
    parse_sql = parse
    run_query = execute
    resolve_deepspeed_config = resolve
    load_deepspeed_config = load
    fill_prompt = fill


__version__ = VERSION

_HOME = {
    "BackendError": "workbench.base.errors",
    "Benchmark": "workbench.benchmark.benchmark",
    "CMLPods": "workbench.pods.cml.pods",
    "CMLProject": "workbench.pods.cml.project",
    "Cluster": "workbench.benchmark.cluster",
    "ConfigError": "workbench.base.errors",
    "FineTune": "workbench.finetune.job.finetune",
    "FineTuneResult": "workbench.finetune.notebook.result",
    "FineTuneRun": "workbench.finetune.notebook.run",
    "Function": "workbench.jobs.script",
    "KubernetesPods": "workbench.pods.kubernetes.pods",
    "LocalPods": "workbench.pods.local.pods",
    "Pod": "workbench.pods.pod",
    "PodError": "workbench.base.errors",
    "PodSpec": "workbench.pods.pod_spec",
    "PodTimeout": "workbench.base.errors",
    "Predictions": "workbench.finetune.answers.predictions",
    "RemoteError": "workbench.base.errors",
    "Run": "workbench.client.run",
    "RunError": "workbench.base.errors",
    "RunFailed": "workbench.base.errors",
    "RunResult": "workbench.client.result",
    "SSHPods": "workbench.pods.hosts.pods",
    "Script": "workbench.jobs.script",
    "SlurmPods": "workbench.pods.slurm.pods",
    "Volume": "workbench.pods.kubernetes.manifests.volumes",
    "WorkbenchError": "workbench.base.errors",
    "can_limit_memory": "workbench.pods.guest.machine",
    "compare": "workbench.finetune.notebook.comparison",
    "compare_predictions": "workbench.finetune.answers.ask",
    "compose": "workbench.display.compose.form",
    "dataset_from": "workbench.finetune.data.sources.dataset",
    "fill_prompt": "workbench.finetune.options.text.prompts:fill",
    "gpus_for": "workbench.finetune.plan.gpus",
    "history": "workbench.client.history",
    "judge_answers": "workbench.finetune.answers.predictions",
    "load_deepspeed_config": "workbench.finetune.deepspeed.files:load",
    "log": "workbench.rundir.events",
    "mini_rows": "workbench.finetune.data.sql.mini",
    "nodes": "workbench.pods.nodes",
    "parse_sql": "workbench.finetune.data.sql.query:parse",
    "plan": "workbench.finetune.plan.plan",
    "prepare_dataset": "workbench.finetune.data.sources.dataset:prepare",
    "preview": "workbench.finetune.plan.reading",
    "read_tables": "workbench.finetune.data.sources.convert",
    "resolve_deepspeed_config": "workbench.finetune.job.deepspeed_config:resolve",
    "run_query": "workbench.finetune.data.sql.tables:execute",
    "tensorboard": "workbench.client.comparison",
    "train_tokenizer": "workbench.finetune.model.text.tokenizer",
}
"""Module of every public name; after a colon the name in the module, if different."""
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    import importlib

    module, _, attribute = _HOME[name].partition(":")
    try:
        value = getattr(importlib.import_module(module), attribute or name)
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


def _load_drawings() -> None:
    """Import the drawings of all records. The drawings need matplotlib, Jinja2 and ipywidgets."""
    import workbench.display.views  # noqa: F401


draw_with(_load_drawings)
