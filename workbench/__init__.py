"""DeepSpeed Workbench: fine-tune over several pods, without leaving the notebook.

Names are imported when first used, so `import workbench` stays light: no torch, paramiko or ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.cluster import Cluster
    from workbench.display.compose import compose
    from workbench.planner.plan import plan
    from workbench.pods.cml import CMLPods
    from workbench.pods.hosts import SSHPods
    from workbench.pods.kubernetes import KubernetesPods
    from workbench.pods.local import LocalPods
    from workbench.pods.pod import Pod, PodSpec
    from workbench.results.answers import compare_predictions
    from workbench.results.benchmark import Benchmark
    from workbench.results.compare import compare
    from workbench.runs.result import RunResult
    from workbench.runs.run import Run
    from workbench.runs.store import history
    from workbench.spec.job import FineTune, Script

__all__ = [
    "Benchmark",
    "CMLPods",
    "Cluster",
    "FineTune",
    "KubernetesPods",
    "LocalPods",
    "Pod",
    "PodSpec",
    "Run",
    "RunResult",
    "SSHPods",
    "Script",
    "compare",
    "compare_predictions",
    "compose",
    "history",
    "plan",
]
__version__ = "0.1.0"

_HOME = {
    "Benchmark": "workbench.results.benchmark",
    "CMLPods": "workbench.pods.cml",
    "Cluster": "workbench.cluster",
    "FineTune": "workbench.spec.job",
    "KubernetesPods": "workbench.pods.kubernetes",
    "LocalPods": "workbench.pods.local",
    "Pod": "workbench.pods.pod",
    "PodSpec": "workbench.pods.pod",
    "Run": "workbench.runs.run",
    "RunResult": "workbench.runs.result",
    "SSHPods": "workbench.pods.hosts",
    "Script": "workbench.spec.job",
    "compare": "workbench.results.compare",
    "compare_predictions": "workbench.results.answers",
    "compose": "workbench.display.compose",
    "history": "workbench.runs.store",
    "plan": "workbench.planner.plan",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
