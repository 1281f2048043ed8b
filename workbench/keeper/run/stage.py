"""Send to the pods what a run needs, and bring back what it left."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from workbench.base import entries
from workbench.base.child import QUIET
from workbench.base.errors import RemoteError, RunError
from workbench.base.files import read_json
from workbench.base.package import file_digest
from workbench.base.words import short_list
from workbench.jobs.finetune import FineTune
from workbench.jobs.launcher import Launcher
from workbench.jobs.script import Script
from workbench.keeper.checkpoints import send_checkpoint
from workbench.keeper.launch import LaunchPlan
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.pods.ssh.openssh import pdsh_environment, ssh_argv, ssh_wrapper
from workbench.rundir.checkpoints import CHECKPOINT, Checkpoint
from workbench.rundir.make.script import files_of, travelling
from workbench.rundir.output.collect import mask_file
from workbench.rundir.paths import RunPaths

LOG_STREAMS = ("stdout", "stderr", "order")
_UNPACKED_S = 600.0
_BINDING = {"local": "", "ssh": "always"}
"""By kind of place, when its agents bind ranks on CPUs to cores."""


def rank_request(
    context: RunContext, link: AgentLink, master: tuple[str, int]
) -> dict[str, object]:
    pod, job, spec = link.pod, context.spec.job, context.spec.cluster.pods
    module, _, function = entries.COLD_TRAINER.partition(":")
    entry, cwd = None, None
    package: dict[str, str] = {}
    site: dict[str, str] = {}
    match job:
        case Script():
            program, cwd = job.program({**spec.env, **job.env}), str(context.on_pod(link).script)
            theirs = job.env.get("PYTHONPATH", spec.env.get("PYTHONPATH", ""))
            # The package comes last: `import workbench` finds it, and nothing of the job's is hidden.
            site = {
                "PYTHONPATH": f"{link.package}/{entries.SCRIPT_SITE}:{theirs}{':' * bool(theirs)}{link.package}"
            }
            site |= {"TORCHELASTIC_RESTART_COUNT": str(context.restart)} if job.restarts else {}
        case _:
            program, entry = (
                ["-P", "-c", f"from {module} import {function}; {function}()"],
                entries.TRAINER,
            )
            package = {"PYTHONPATH": link.package}
    extra = {"WORKBENCH_PACKAGES": link.packages_folder(spec.pip)} if spec.pip else {}
    network = {"GLOO_SOCKET_IFNAME": link.interface, "NCCL_SOCKET_IFNAME": link.interface}
    return {
        "run": context.run_id,
        "kind": job.kind,
        "ranks": [asdict(place) for place in context.places],
        "world_size": len(context.places),
        "master_addr": master[0],
        "master_port": master[1],
        "env": {**QUIET, **network, **package, **spec.env, **job.env, **site, **extra},
        "cwd": cwd,
        "argv": [pod.python, "-u", *program],
        "entry": entry,
        # Also of torch's and MKL's own pools: 3 pods of one core each must not start 3 x all cores.
        "threads": max(1, int(spec.cpus // pod.slots)),
        "restart": context.restart,
        "max_restarts": job.restarts,
        # Pods of one machine may have the same cores; a host is one pod's alone.
        "binding": ""
        if spec.gpus
        else _BINDING.get(str(context.spec.cluster.backend.get("kind")), "cpuset"),
    }


def launch_plan(context: RunContext, master_port: int, *, quiet: bool = False) -> LaunchPlan:
    launcher, identity, links = Launcher(context.spec.job.launcher), context.identity, context.links
    pods = [link.pod for link in links]
    return LaunchPlan(
        run_id=context.run_id,
        launcher=launcher,
        pods=pods,
        places=context.places,
        master_port=master_port,
        interface=links[0].interface,
        package=links[0].package,
        hostfile=context.paths.hostfile,
        ssh_argv={link.pod.name: ssh_argv(link.pod, identity) for link in links},
        pdsh_env=pdsh_environment(identity) if launcher is Launcher.PDSH else {},
        rsh_wrapper=Path(ssh_wrapper(identity, pods))
        if launcher is Launcher.OPENMPI
        else Path("ssh"),
        quiet=quiet,
    )


def send_inputs(context: RunContext, link: AgentLink) -> None:
    """Send the inputs of a run to one pod; of a checkpoint to go on from, the parts that its ranks need."""
    job, paths, target = context.spec.job, context.paths, context.on_pod(link)
    files, archive = {}, ""
    match job:
        case Script():
            archive = link.put(paths.script.read_bytes(), ".zip")
        case _:
            files = {
                target.job.name: _send_finetune(link, job, paths, context.spec.cluster.pods.gpus)
            }
    link.work("stage", _UNPACKED_S, run=context.run_id, files=files, archive=archive)
    if link.sees(paths.root):  # results are then written where they belong
        paths.arrivals.mkdir(exist_ok=True)
        link.run(["rm", "-rf", "--", str(target.out)])
        link.run(["ln", "-sfn", "--", str(paths.arrivals), str(target.out)])
    if resume := resumed_from(paths):
        here = context.ranks_on(link)
        as_many = resume.world_size == len(
            context.places
        )  # else each rank takes what it needs of all parts
        send_checkpoint(link, resume, here if as_many else resume.parts.keys(), target.resume)


def travels(paths: RunPaths) -> str:
    """Return what of a run's inputs goes to the pods, in words; of a script's folder also what stays."""
    if not paths.script.exists():
        return "inputs"
    left = read_json(paths.origin).get("left_out")
    stays = f", without {short_list(left)}," if isinstance(left, list) and left else ""
    return travelling(paths.script.read_bytes()) + stays


def resumed_from(paths: RunPaths) -> Checkpoint | None:
    """Return the checkpoint that was chosen for a run when it was prepared; None where it begins from the beginning."""
    chosen = read_json(paths.job).get("resume")
    return CHECKPOINT.validate_python(chosen) if isinstance(chosen, dict) else None


def _send_finetune(link: AgentLink, job: FineTune, paths: RunPaths, gpus: int) -> str:
    """Send data and model to one pod; return its job file."""
    resolved = json.loads(paths.job.read_text(encoding="utf-8"))
    for name in ("train", "eval"):
        local = resolved.get(name)
        if local:
            path = paths.inputs / local
            resolved[name] = str(path) if link.sees(path) else link.put(path.read_bytes(), ".jsonl")
    if (folder := Path(job.model)).is_dir():
        resolved["base"] = job.model
        resolved["job"]["model"] = job.model if link.sees(folder) else _send_model(link, folder)
    if adapters := job.lora.get("resume_from"):
        folder = Path(str(adapters))
        resolved["job"]["lora"]["resume_from"] = (
            adapters if link.sees(folder) else _send_model(link, folder)
        )
    resolved["gpus"] = gpus
    return json.dumps(resolved)


def _send_model(link: AgentLink, folder: Path) -> str:
    digests = {path.relative_to(folder).as_posix(): _digest_of(path) for path in files_of(folder)}
    listing = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    target = link.store / f"model-{listing[:32]}.{link.pod.name}"
    for name, digest in digests.items():
        stored = link.put_once(folder / name, digest)
        link.run(["mkdir", "-p", "-m", "700", "--", str((target / name).parent)])
        # A symbolic one: another pod that shares the store may just be putting the same content in its place.
        link.run(["ln", "-sf", "--", stored, str(target / name)])
    return str(target)


def _digest_of(path: Path) -> str:
    seen = path.stat()
    return _digest(path, seen.st_size, seen.st_mtime_ns)


@lru_cache(maxsize=1024)
def _digest(path: Path, _size: int, _mtime_ns: int) -> str:
    return file_digest(path)  # read once for all pods


def fetch_logs(context: RunContext, link: AgentLink) -> None:
    """Bring back the logs of one pod's ranks that are longer there than here."""
    for rank in context.ranks_on(link):
        for stream in LOG_STREAMS:
            there = str(context.on_pod(link).rank(rank) / f"{stream}.log")
            here = context.paths.rank_log(rank, stream)
            try:
                longer = link.size(there) > here.stat().st_size
            except RemoteError:
                if stream == "order":  # a rank that wrote to one stream alone leaves none
                    continue
                raise
            if longer:
                link.get(there, here)
                mask_file(here, context.redact)


def check_hostfile(context: RunContext) -> None:
    """Refuse a hostfile that is not as it was written at submission: launchers run what it names."""
    path = context.paths.hostfile
    try:
        digest = file_digest(path)
    except OSError as error:
        raise RunError(
            f"the hostfile {path} cannot be read: {error.strerror}; submit the job again"
        ) from error
    if digest != context.hostfile_sha256:
        raise RunError(
            f"the hostfile {path} was changed after the run was submitted; submit the job again"
        )
