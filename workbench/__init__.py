"""DeepSpeed Workbench: fine-tune over several pods, without leaving the notebook.

Names are imported when first used, so `import workbench` stays light: no torch, paramiko or ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.versions import VERSION

if TYPE_CHECKING:
    from workbench.base.errors import (
        BackendError,
        ConfigError,
        PodError,
        PodTimeout,
        RemoteError,
        RunError,
        RunFailed,
        WorkbenchError,
    )
    from workbench.benchmark.benchmark import Benchmark
    from workbench.client.cluster import Cluster
    from workbench.client.comparison import compare, tensorboard
    from workbench.client.history import history
    from workbench.client.result import RunResult
    from workbench.client.run import Run
    from workbench.display.compose.form import compose
    from workbench.jobs.data.sources.convert import read_tables
    from workbench.jobs.data.sources.dataset import dataset_from
    from workbench.jobs.data.sources.dataset import prepare as prepare_dataset
    from workbench.jobs.data.sources.mini import mini_rows
    from workbench.jobs.data.sql import parse as parse_sql
    from workbench.jobs.data.tables import execute as run_query
    from workbench.jobs.deepspeed.config import resolve as resolve_deepspeed_config
    from workbench.jobs.deepspeed.files import load as load_deepspeed_config
    from workbench.jobs.finetune import FineTune
    from workbench.jobs.function import Function
    from workbench.jobs.prompts import fill as fill_prompt
    from workbench.jobs.script import Script
    from workbench.planner.gpus import gpus_for
    from workbench.planner.plan import plan
    from workbench.planner.reading import preview
    from workbench.pods.cml.pods import CMLPods
    from workbench.pods.cml.project import CMLProject
    from workbench.pods.guest.memory_limit import can_limit_memory
    from workbench.pods.hosts.pods import SSHPods
    from workbench.pods.kubernetes.manifests.volumes import Volume
    from workbench.pods.kubernetes.nodes import nodes
    from workbench.pods.kubernetes.pods import KubernetesPods
    from workbench.pods.local.pods import LocalPods
    from workbench.pods.pod import Pod
    from workbench.pods.pod_spec import PodSpec
    from workbench.results.answers.ask import compare_predictions
    from workbench.results.answers.predictions import Predictions, judge_answers
    from workbench.rundir.catalog.index import RunIndex
    from workbench.rundir.events import log
    from workbench.worker.model.tokenizer import train_tokenizer

__all__ = [
    "BackendError",
    "Benchmark",
    "CMLPods",
    "CMLProject",
    "Cluster",
    "ConfigError",
    "FineTune",
    "Function",
    "KubernetesPods",
    "LocalPods",
    "Pod",
    "PodError",
    "PodSpec",
    "PodTimeout",
    "Predictions",
    "RemoteError",
    "Run",
    "RunError",
    "RunFailed",
    "RunIndex",
    "RunResult",
    "SSHPods",
    "Script",
    "Volume",
    "WorkbenchError",
    "can_limit_memory",
    "compare",
    "compare_predictions",
    "compose",
    "dataset_from",
    "fill_prompt",
    "gpus_for",
    "history",
    "judge_answers",
    "load_deepspeed_config",
    "log",
    "mini_rows",
    "nodes",
    "parse_sql",
    "plan",
    "prepare_dataset",
    "preview",
    "read_tables",
    "resolve_deepspeed_config",
    "run_query",
    "tensorboard",
    "train_tokenizer",
]
__version__ = VERSION

_HOME = {
    "BackendError": "workbench.base.errors",
    "Benchmark": "workbench.benchmark.benchmark",
    "CMLPods": "workbench.pods.cml.pods",
    "CMLProject": "workbench.pods.cml.project",
    "Cluster": "workbench.client.cluster",
    "ConfigError": "workbench.base.errors",
    "FineTune": "workbench.jobs.finetune",
    "Function": "workbench.jobs.function",
    "KubernetesPods": "workbench.pods.kubernetes.pods",
    "LocalPods": "workbench.pods.local.pods",
    "Pod": "workbench.pods.pod",
    "PodError": "workbench.base.errors",
    "PodSpec": "workbench.pods.pod_spec",
    "PodTimeout": "workbench.base.errors",
    "Predictions": "workbench.results.answers.predictions",
    "RemoteError": "workbench.base.errors",
    "Run": "workbench.client.run",
    "RunError": "workbench.base.errors",
    "RunFailed": "workbench.base.errors",
    "RunIndex": "workbench.rundir.catalog.index",
    "RunResult": "workbench.client.result",
    "SSHPods": "workbench.pods.hosts.pods",
    "Script": "workbench.jobs.script",
    "Volume": "workbench.pods.kubernetes.manifests.volumes",
    "WorkbenchError": "workbench.base.errors",
    "can_limit_memory": "workbench.pods.guest.memory_limit",
    "compare": "workbench.client.comparison",
    "compare_predictions": "workbench.results.answers.ask",
    "compose": "workbench.display.compose.form",
    "dataset_from": "workbench.jobs.data.sources.dataset",
    "fill_prompt": "workbench.jobs.prompts:fill",
    "gpus_for": "workbench.planner.gpus",
    "history": "workbench.client.history",
    "judge_answers": "workbench.results.answers.predictions",
    "load_deepspeed_config": "workbench.jobs.deepspeed.files:load",
    "log": "workbench.rundir.events",
    "mini_rows": "workbench.jobs.data.sources.mini",
    "nodes": "workbench.pods.kubernetes.nodes",
    "parse_sql": "workbench.jobs.data.sql:parse",
    "plan": "workbench.planner.plan",
    "prepare_dataset": "workbench.jobs.data.sources.dataset:prepare",
    "preview": "workbench.planner.reading",
    "read_tables": "workbench.jobs.data.sources.convert",
    "resolve_deepspeed_config": "workbench.jobs.deepspeed.config:resolve",
    "run_query": "workbench.jobs.data.tables:execute",
    "tensorboard": "workbench.client.comparison",
    "train_tokenizer": "workbench.worker.model.tokenizer",
}
"""Where each name is defined; behind a colon what it is called there."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    import importlib

    module, _, attribute = _HOME[name].partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
