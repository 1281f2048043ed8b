"""The batch script of a run for Slurm, without a keeper and a notebook.

The run directory may come from another user, so files named there are not read.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from types import NoneType

from workbench.base import entries
from workbench.base.errors import BackendError, ConfigError, check_type
from workbench.base.files import read_json, user_path, write_bytes, write_text
from workbench.base.json_values import get_object
from workbench.base.redact import is_secret, mask_secrets
from workbench.handover.files import files_of
from workbench.jobs.job import HandoverRequest
from workbench.jobs.registry import job_from_dict
from workbench.jobs.script import references
from workbench.pods.pod_spec import PodSpec
from workbench.pods.slurm.commands import gpu_nodes
from workbench.pods.slurm.gres import cores_to_ask
from workbench.pods.slurm.job import resource_options
from workbench.pods.slurm.pods import SlurmPods
from workbench.rundir.make.prepare import make_root
from workbench.rundir.paths import RunPaths
from workbench.rundir.register.registered import cluster_of
from workbench.rundir.spec import stored

_OWN = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")))
"""Folders that every machine has for itself."""
_UNUSED = ("new_job", "port", "root", "connect_timeout_s", "notice_s")
"""Options of `SlurmPods` for pods with a keeper."""
_FILES = ("spec.json", "workbench.zip", "inputs.zip", "job.sh")
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)=(\S*)")
_SCRIPT = """\
#!/bin/bash -l
# DeepSpeed Workbench: the job of run {run_id} on {nodes} x {slots} ranks, without a notebook.
# Start: sbatch {script}
# Follow, once the job runs: Run.load("{run}")
# End: scancel ID. A second start continues from the last checkpoint.
{needs}{options}
umask 077
cd {folder} || exit 1
{setup}export PYTHONPATH="$PWD/workbench.zip" PYTHONSAFEPATH=1
first=$(scontrol show hostnames | head -n 1)
MASTER_ADDR=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_ADDR
exec srun --export=ALL --cpus-per-task={cpus} --mpi=none --input=none \\
    {python} -m {module} spec.json run
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SbatchScript:
    """Batch script of a run, for `sbatch`. `str()` returns the text."""

    path: Path
    """File of the script, in the folder that the nodes share."""
    run: Path
    """Run directory of the job, for `Run.load` once the job runs."""
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def sbatch_of(
    path: Path,
    place: SlurmPods | None,
    pod: PodSpec | None,
    count: int | None,
    folder: str | Path | None,
) -> SbatchScript:
    """Write the batch script of a run with its files; see `Run.sbatch`."""
    check_type("sbatch(place=…)", place, (SlurmPods, NoneType), "SlurmPods(…)")
    check_type("sbatch(pod=…)", pod, (PodSpec, NoneType), "PodSpec(…)")
    check_type("sbatch(count=…)", count, (Integral, NoneType), "a number of nodes")
    paths = RunPaths(path)
    raw = stored(read_json(paths.spec))
    cluster = get_object(raw, "cluster")
    backend = get_object(cluster, "backend")
    is_slurm = backend.get("kind") == SlurmPods.kind
    job = job_from_dict(get_object(raw, "job"))
    run_pod = PodSpec.from_dict(get_object(cluster, "pods"))
    if place is not None:
        _refuse_unused(place)
    else:
        place = SlurmPods.from_dict(backend if is_slurm else {})
    pod = (pod or run_pod).replace(env=run_pod.env, pip=run_pod.pip)
    if pod.image is not None:
        raise ConfigError(
            f"PodSpec.image is {pod.image!r}, and the script runs in the Python environment of"
            " this notebook. Give a pod without image: run.sbatch(pod=PodSpec(…))"
        )
    _check_texts(place, references([*pod.env.values(), *job.env.values()]))
    home = user_path(folder or path.with_name(f"{path.name}-sbatch")).absolute()
    _check_shared(home, cluster_of(paths) if is_slurm else None)
    # A technique of one rank takes one node and one GPU.
    nodes = job.rules.capped(count or int(str(raw.get("pods") or cluster.get("count") or 1)))
    if job.rules.capped(nodes * pod.slots) == 1:
        pod = pod.replace(gpus=min(pod.gpus, 1), ranks=None)
    files = files_of(job.handed_over(HandoverRequest(root=path, shared=True)), pod, nodes)
    make_root(home)
    if any(each.name not in _FILES for each in home.iterdir()):
        raise ConfigError(
            f"{home} has the run or the log of a job, or other files. Give another folder:"
            " run.sbatch(folder=…)"
        )
    (home / "inputs.zip").unlink(missing_ok=True)
    for name, content in files.items():
        write_bytes(home / name, content)
    script = home / "job.sh"
    text = _text(paths, place, pod, nodes, home)
    write_text(script, text)
    return SbatchScript(path=script, run=home / "run", text=text)


def _text(paths: RunPaths, place: SlurmPods, pod: PodSpec, nodes: int, home: Path) -> str:
    cores = pod.cores
    if pod.gpus and pod.cpus is None:
        with suppress(ConfigError, BackendError):  # another machine than a login node
            cores = cores_to_ask(pod, gpu_nodes(place.partition, place.gpu_type or ""))
    run_id = str(read_json(paths.info).get("id", paths.root.name))
    cpus = max(1, math.floor(cores / pod.slots))
    given = {"partition": place.partition, "time": place.time, "account": place.account}
    options = [
        f"--job-name={run_id}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={pod.slots}",
        f"--cpus-per-task={cpus}",
        *resource_options(pod, place.gpu_type or ""),
        *(f"--{option}={value}" for option, value in given.items() if value is not None),
        *place.arguments,
        "--requeue" if place.requeue else "--no-requeue",
        "--export=NONE",
        f"--output={_in_option(home / 'job-%j.log')}",
    ]
    needs = f"# {sys.executable} needs the packages {', '.join(pod.pip)}.\n" if pod.pip else ""
    return _SCRIPT.format(
        run_id=run_id,
        nodes=nodes,
        slots=pod.slots,
        needs=needs,
        options="\n".join(f"#SBATCH {option}" for option in options),
        setup="".join(f"eval {shlex.quote(line)} || exit 1\n" for line in place.setup),
        cpus=cpus,
        folder=shlex.quote(str(home)),
        python=shlex.quote(sys.executable),
        module=entries.UNATTENDED,
        script=shlex.quote(str(home / "job.sh")),
        run=home / "run",
    )


def _in_option(folder: Path) -> str:
    """Return a path for a line of options, where `sbatch` reads quotes."""
    return json.dumps(str(folder)) if " " in str(folder) else str(folder)


def _refuse_unused(place: SlurmPods) -> None:
    for name in _UNUSED:
        if name in place.model_fields_set:
            raise ConfigError(
                f"SlurmPods.{name} is for pods with a keeper, and a batch script has none. Leave"
                f" {name} out"
            )


def _check_texts(place: SlurmPods, named: list[str]) -> None:
    """Refuse a secret in the text, and a variable of the run that no setup line sets."""
    lines = [*place.setup, *place.arguments]
    assigned = [pair for line in lines for pair in _ASSIGNED.findall(line)]
    for name, value in assigned:
        text = value.strip("\"'")
        if not text.startswith(("$", "`")) and is_secret(name, text):
            raise ConfigError(
                f"setup sets {name} to a secret, and the script is read by others. Read the value"
                f' from a file of yours: setup=["export {name}=$(cat FILE)"]'
            )
    if any(mask_secrets(line) != line for line in lines):
        raise ConfigError(
            "a setup line or an option has a secret, and the script is read by others. Read the"
            " value from a file of yours, as $(cat FILE)"
        )
    missing = sorted(set(named) - {name for name, _ in assigned})
    if missing:
        raise ConfigError(
            f"the run takes {', '.join(missing)} from the environment, and no value is in the"
            f' script. Set each variable by a setup line: setup=["export {missing[0]}=$(cat FILE)"]'
        )


def _check_shared(home: Path, proven: Path | None) -> None:
    """Refuse a folder of this machine alone; pods on Slurm have read below `proven`."""
    if proven is not None and home.is_relative_to(proven):
        return
    own = next((folder for folder in _OWN if home.resolve().is_relative_to(folder)), None)
    if own is not None:
        raise ConfigError(
            f"the folder {home} is below {own}, which each node has for itself. Give a folder that"
            " the nodes share: run.sbatch(folder=…)"
        )
