"""The files of an unattended run. No values of environment variables are included."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from workbench.base.child import HOME
from workbench.base.package import zip_contents, zip_files
from workbench.jobs.job import Handover
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.spec import stored

_LEFT_OUT = (
    "agent/__main__.py",
    "agent/call.py",
    "agent/clients",
    "agent/folders.py",
    "agent/forkserver.py",
    "agent/launcher_site",
    "agent/listener.py",
    "agent/main.py",
    "agent/packages/environment.py",
    "agent/packages/settings.py",
    "agent/probe/allreduce.py",
    "agent/probe/toolkit.py",
    "agent/warm.py",
    "benchmark",
    "client",
    "display",
    "finetune/advice",
    "finetune/answers",
    "finetune/lm_eval",
    "finetune/export",
    "finetune/model/look.py",
    "finetune/model/outline.py",
    "finetune/notebook",
    "finetune/plan",
    "finetune/profile",
    "finetune/submit/forecast.py",
    "finetune/submit/hub_files.py",
    "finetune/submit/handover.py",
    "handover/files.py",
    "handover/kubeflow",
    "handover/slurm.py",
    "keeper",
    "lab",
    "mcp",
    "pods/bootstrap/worker.py",
    "pods/cml",
    "pods/doctor",
    "pods/hosts",
    "pods/kubernetes",
    "pods/node_table.py",
    "pods/nodes.py",
    "pods/notes.py",
    "pods/slurm",
    "pods/ssh/bulk",
    "pods/ssh/channel.py",
    "pods/ssh/child.py",
    "pods/ssh/client.py",
    "pods/ssh/connection.py",
    "pods/ssh/direct.py",
    "pods/ssh/login.py",
    "pods/ssh/master.py",
    "pods/ssh/openssh.py",
    "pods/ssh/transport.py",
    "rundir/catalog",
    "rundir/figures/deadline.py",
    "rundir/figures/flight.py",
    "rundir/figures/glimpse.py",
    "rundir/make/unstarted.py",
    "rundir/output/tail.py",
    "rundir/stores/folder.py",
    "rundir/stores/work",
    "rundir/view.py",
    "verify",
    "cli.py",
    "__main__.py",
)
"""Folders and files of the package not imported by ranks and unattended runs."""
_OF_LEFT_OUT = re.compile(
    r"^from workbench\.("
    + "|".join(name.removesuffix(".py").replace("/", "[.]") for name in _LEFT_OUT)
    + r")\b",
    re.M,
)


def files_of(handover: Handover, pod: PodSpec, nodes: int) -> dict[str, bytes]:
    """Return the files of a run by name: specification, zipped package, and zipped inputs."""
    pods = {**pod.to_dict(), "image": None}
    job = {**handover.job, "launcher": "ssh"}
    spec = stored({"cluster": {"pods": pods, "count": nodes}, "job": job})
    files = {"spec.json": json.dumps(spec, indent=1).encode(), "workbench.zip": _package()}
    if handover.archive is not None:
        files["inputs.zip"] = handover.archive
    elif handover.inputs:
        files["inputs.zip"] = zip_contents(handover.inputs)
    return files


@cache
def _package() -> bytes:
    """Zip only the files of this package needed by ranks, as a ConfigMap is small."""
    root = Path(HOME, "workbench")
    needed = [
        path
        for path in sorted(root.rglob("*.py"))
        if not path.relative_to(root).as_posix().startswith(_LEFT_OUT)
        # On the pods, a file that imports an excluded folder would fail.
        and not _OF_LEFT_OUT.search(path.read_text(encoding="utf-8"))
    ]
    return zip_files(root.parent, needed)
