"""Collect the files of a run for a ConfigMap. No values of environment variables are included."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from workbench.base.child import HOME
from workbench.base.errors import ConfigError
from workbench.base.package import zip_contents, zip_files
from workbench.handover.kubeflow.objects import RESULTS
from workbench.handover.kubeflow.options import HandoverOptions
from workbench.jobs.job import Handover, HandoverRequest, Job
from workbench.jobs.script import references
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.spec import stored

# Limit of Kubernetes for a ConfigMap: 1 MiB, including names.
_MOST_BYTES = (1 << 20) - 4096
_LEFT_OUT = (
    "agent/__main__.py",
    "agent/call.py",
    "agent/folders.py",
    "agent/forkserver.py",
    "agent/listener.py",
    "agent/main.py",
    "agent/packages/environment.py",
    "agent/probe/allreduce.py",
    "agent/warm.py",
    "benchmark",
    "client",
    "display",
    "finetune/advice",
    "finetune/answers",
    "finetune/lm_eval",
    "finetune/export",
    "finetune/model/outline.py",
    "finetune/notebook",
    "finetune/plan",
    "finetune/profile",
    "handover/kubeflow",
    "keeper",
    "lab",
    "pods/cml",
    "pods/doctor",
    "pods/hosts",
    "pods/kubernetes",
    "pods/nodes.py",
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
    "rundir/figures/flight.py",
    "rundir/output/tail.py",
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


def handover_of(job: Job, root: Path, options: HandoverOptions) -> Handover:
    """Ask the run's job for its files, with the input folder on the claim from the options."""
    request = HandoverRequest(
        root=root,
        folder=f"{RESULTS}/{options.inputs}/" if options.inputs else "",
        script=options.script,
        elastic=options.elastic is not None,
    )
    return job.handed_over(request)


def config_files(
    handover: Handover, env: Mapping[str, str], options: HandoverOptions, pod: PodSpec, nodes: int
) -> Mapping[str, bytes]:
    """Return the files of the ConfigMap: specification, zipped package, and zipped inputs."""
    _check_secrets({**pod.env, **env}, options)
    pods = {**pod.to_dict(), "image": None}
    job = {**handover.job, "launcher": "ssh"}
    spec = stored({"cluster": {"pods": pods, "count": nodes}, "job": job})
    files = {"spec.json": json.dumps(spec, indent=1).encode(), "workbench.zip": _package()}
    if handover.archive is not None:
        files["inputs.zip"] = handover.archive
    elif handover.inputs:
        files["inputs.zip"] = zip_contents(handover.inputs)
    size = sum(map(len, files.values()))
    if size > _MOST_BYTES:
        raise ConfigError(
            f"{handover.large} would make a ConfigMap of {size / 2**20:.1f} MiB, and "
            f"Kubernetes takes 1 MiB: put {handover.put} into a folder of the claim "
            "and name claim and folder: run.manifest(…, pvc='claim', inputs='folder')"
        )
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


def _check_secrets(env: Mapping[str, str], options: HandoverOptions) -> None:
    given = {*options.sources, *options.env}
    missing = [variable for variable in references(env.values()) if variable not in given]
    if missing:
        others = ", ".join(
            f'"{variable}": "secret/key"' for variable in missing if variable != "HF_TOKEN"
        )
        hints = ["token_secret='hub'"] * ("HF_TOKEN" in missing) + [f"secrets={{{others}}}"] * bool(
            others
        )
        raise ConfigError(
            f"the run takes {', '.join(missing)} from the environment, and no value "
            "is in a manifest: name the Secrets that hold them, run.manifest(…, "
            f"{', '.join(hints)}), or give what is no secret with env="
        )
