"""A submission imports neither the planner nor torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SUBMIT = """
import sys

from workbench import Cluster, FineTune, LocalPods
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec

cluster = ClusterSpec(backend={"kind": "local"}, count=2)
job = FineTune(technique="zero1", max_steps=2, precision="fp32")
prepare_run(RunSpec(cluster=cluster, job=job), root=sys.argv[1])
for module in sys.modules:
    assert not module.startswith("workbench.finetune.plan"), module
    assert module != "torch"
"""


def test_a_submission_leaves_the_planner_alone(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _SUBMIT, str(tmp_path / "run")]
    subprocess.run(argv, check=True, timeout=300)
    assert not [path for path in (tmp_path / "run").rglob("*") if "predict" in path.name]
