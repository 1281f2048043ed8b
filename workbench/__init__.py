"""DeepSpeed Workbench: fine-tune over several pods, without leaving the notebook.

Names are imported when first used, so `import workbench` stays light: no torch, paramiko or ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.cluster import Cluster
    from workbench.display.compose import compose
    from workbench.errors import (
        BackendError,
        ConfigError,
        PodError,
        PodTimeout,
        RemoteError,
        RunError,
        RunFailed,
        WorkbenchError,
    )
    from workbench.jobs.tokenizer import train_tokenizer
    from workbench.planner.plan import plan
    from workbench.pods.cml import CMLPods
    from workbench.pods.hosts import SSHPods
    from workbench.pods.kubernetes import KubernetesPods
    from workbench.pods.local import LocalPods
    from workbench.pods.memorylimit import can_limit_memory
    from workbench.pods.pod import Pod, PodSpec
    from workbench.results.answers import compare_predictions
    from workbench.results.benchmark import Benchmark
    from workbench.results.compare import compare
    from workbench.results.predict import Predictions
    from workbench.results.predict import judge as judge_answer
    from workbench.runs.index import RunIndex
    from workbench.runs.result import RunResult
    from workbench.runs.run import Run
    from workbench.runs.store import history
    from workbench.spec.convert import read_tables
    from workbench.spec.dataset import dataset_from
    from workbench.spec.dataset import prepare as prepare_dataset
    from workbench.spec.dsconfig import load as load_deepspeed_config
    from workbench.spec.dsconfig import resolve as resolve_deepspeed_config
    from workbench.spec.job import FineTune, Script
    from workbench.spec.mini import mini_rows
    from workbench.spec.prompts import fill as fill_prompt
    from workbench.spec.sql import parse as parse_sql
    from workbench.spec.tables import execute as run_query

__all__ = [
    "BackendError",
    "Benchmark",
    "CMLPods",
    "Cluster",
    "ConfigError",
    "FineTune",
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
    "WorkbenchError",
    "can_limit_memory",
    "compare",
    "compare_predictions",
    "compose",
    "dataset_from",
    "fill_prompt",
    "history",
    "judge_answer",
    "load_deepspeed_config",
    "mini_rows",
    "parse_sql",
    "plan",
    "prepare_dataset",
    "read_tables",
    "resolve_deepspeed_config",
    "run_query",
    "train_tokenizer",
]
__version__ = "0.1.0"

_HOME = {
    "BackendError": "workbench.errors",
    "Benchmark": "workbench.results.benchmark",
    "CMLPods": "workbench.pods.cml",
    "Cluster": "workbench.cluster",
    "ConfigError": "workbench.errors",
    "FineTune": "workbench.spec.job",
    "KubernetesPods": "workbench.pods.kubernetes",
    "LocalPods": "workbench.pods.local",
    "Pod": "workbench.pods.pod",
    "PodError": "workbench.errors",
    "PodSpec": "workbench.pods.pod",
    "PodTimeout": "workbench.errors",
    "Predictions": "workbench.results.predict",
    "RemoteError": "workbench.errors",
    "Run": "workbench.runs.run",
    "RunError": "workbench.errors",
    "RunFailed": "workbench.errors",
    "RunIndex": "workbench.runs.index",
    "RunResult": "workbench.runs.result",
    "SSHPods": "workbench.pods.hosts",
    "Script": "workbench.spec.job",
    "WorkbenchError": "workbench.errors",
    "can_limit_memory": "workbench.pods.memorylimit",
    "compare": "workbench.results.compare",
    "compare_predictions": "workbench.results.answers",
    "compose": "workbench.display.compose",
    "dataset_from": "workbench.spec.dataset",
    "fill_prompt": "workbench.spec.prompts:fill",
    "history": "workbench.runs.store",
    "judge_answer": "workbench.results.predict:judge",
    "load_deepspeed_config": "workbench.spec.dsconfig:load",
    "mini_rows": "workbench.spec.mini",
    "parse_sql": "workbench.spec.sql:parse",
    "plan": "workbench.planner.plan",
    "prepare_dataset": "workbench.spec.dataset:prepare",
    "read_tables": "workbench.spec.convert",
    "resolve_deepspeed_config": "workbench.spec.dsconfig:resolve",
    "run_query": "workbench.spec.tables:execute",
    "train_tokenizer": "workbench.jobs.tokenizer",
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
