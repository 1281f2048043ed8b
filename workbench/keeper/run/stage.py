"""Send the inputs of a run to its pods, and fetch the logs of its ranks."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from workbench.base.child import QUIET
from workbench.base.errors import RemoteError, RunError
from workbench.base.files import read_bytes, read_json, records
from workbench.base.files.gate import pinned_folder
from workbench.base.words import short_list
from workbench.jobs.job import Job, PodView
from workbench.jobs.launcher import Launcher
from workbench.jobs.script_folder import travelling
from workbench.keeper.checkpoints import missing_parts, send_checkpoint
from workbench.keeper.launch import LaunchPlan
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.run.fetch import FETCHED
from workbench.pods.backends import backend_class
from workbench.pods.pod import interface_variables
from workbench.pods.route import common_network, own_address_to
from workbench.pods.ssh.openssh import pdsh_environment, ssh_argv, ssh_wrapper
from workbench.rundir.checkpoints import CHECKPOINT, Checkpoint
from workbench.rundir.output.collect import mask_file
from workbench.rundir.paths import RunPaths

_UNPACKED_S = 600.0


def rank_request(
    context: RunContext, link: AgentLink, master: tuple[str, int]
) -> dict[str, object]:
    pod = link.pod
    job = context.spec.job
    spec = context.spec.cluster.pods
    place = backend_class(context.spec.cluster.backend.get("kind"))
    folder = None
    if job.archive_in(context.paths.root) is not None:
        folder = str(context.folder_on(link))
    program = job.program_on(
        PodView(
            package=link.package,
            folder=folder,
            environment={**spec.env, **job.env},
            restart=context.restart,
        )
    )
    needs = job.packages_in(context.paths.root)
    environment = ""
    python = pod.python
    if needs is not None and needs.installs:
        environment = link.environment_folder(needs, {**spec.env, **job.env})
        python = f"{environment}/bin/python"
    extra = {}
    if spec.pip and not (needs is not None and needs.isolated):
        extra["WORKBENCH_PACKAGES"] = link.packages_folder(spec.pip)
    # Without a name the libraries choose themselves; loopback leads to no other pod.
    interface = link.interface or ("lo" if len(context.links) == 1 else "")
    network = interface_variables([interface] if interface else [])
    return {
        "run": context.run_id,
        "success": job.traits.success,
        "ranks": [asdict(each) for each in context.places],
        "world_size": len(context.places),
        "master_addr": master[0],
        "master_port": master[1],
        "env": {
            **QUIET,
            **program.env,
            **place.rank_variables(spec),
            **job.env,
            **program.forced,
            **extra,
        },
        # An image or a site that names its networks knows more.
        "defaults": network,
        "cwd": program.cwd,
        "environment": environment,
        "argv": [python, "-u", *program.argv],
        "entry": program.entry,
        # Limit the pools of torch and MKL too: 3 pods of one core must not start 3 x all cores.
        "threads": threads_of(context, link),
        "restart": context.restart,
        "attempt": context.attempt,
        "max_restarts": job.restarts,
        "binding": _core_binding(context),
    }


def threads_of(context: RunContext, link: AgentLink) -> int:
    """Return the threads of a rank: its share of the pod's cores.

    Without a number of the user's, a pod with GPUs has the cores that are there. Local pods share
    the cores of the machine.
    """
    cluster = context.spec.cluster
    cores = cluster.pods.cores
    if cluster.pods.gpus and cluster.pods.cpus is None and link.cores:
        cores = link.cores
        if backend_class(cluster.backend.get("kind")).on_this_machine:
            cores /= cluster.count
    return max(1, int(cores // link.pod.slots))


def sent_inputs(job: Job, paths: RunPaths) -> str:
    """Describe the inputs of a run that are sent to the pods."""
    archive = job.archive_in(paths.root)
    if archive is None:
        return "inputs"
    packed = travelling(read_bytes(archive, records.LARGEST_ARCHIVE))
    left_out = read_json(paths.origin).get("left_out")
    if isinstance(left_out, list) and left_out:
        return f"{packed}, without {short_list(left_out)},"
    return packed


def _core_binding(context: RunContext) -> str:
    """Return when agents bind ranks to cores: near their GPUs, or by the place. Empty: never."""
    cluster = context.spec.cluster
    if cluster.pods.gpus:
        return "gpu"
    binding = backend_class(cluster.backend.get("kind")).core_binding
    return "" if binding == "never" else binding


def launch_plan(context: RunContext, master_port: int, *, quiet: bool = False) -> LaunchPlan:
    launcher = Launcher(context.spec.job.launcher)
    identity = context.identity
    links = context.links
    pods = [link.pod for link in links]
    pdsh_env = {}
    if launcher is Launcher.PDSH:
        pdsh_env = pdsh_environment(identity)
    rsh_wrapper = "ssh"
    network = ""
    if launcher is Launcher.OPENMPI:
        rsh_wrapper = ssh_wrapper(identity, pods)
        addresses = [pod.address for pod in pods]
        network = common_network([own_address_to(addresses[0]), *addresses])
    return LaunchPlan(
        run_id=context.run_id,
        launcher=launcher,
        pods=pods,
        places=context.places,
        master_addr=links[0].address,
        master_port=master_port,
        interface=links[0].interface or "lo",
        network=network,
        package=links[0].package,
        hostfile=context.paths.hostfile,
        ssh_argv={link.pod.name: ssh_argv(link.pod, identity) for link in links},
        pdsh_env=pdsh_env,
        rsh_wrapper=Path(rsh_wrapper),
        quiet=quiet,
    )


def send_inputs(context: RunContext, link: AgentLink, fetched: str = "") -> None:
    """Send the inputs of a run to a pod, with the checkpoint parts of its ranks when resuming.

    `fetched` is the folder on the pod with the files of the job's fetch, if any.
    """
    job = context.spec.job
    paths = context.paths
    target = context.on_pod(link)
    packed = job.archive_in(paths.root)
    archive = ""
    if packed is not None:
        archive = link.put(read_bytes(packed, records.LARGEST_ARCHIVE), ".zip")
    files = dict(job.files_for(link, paths.root, context.spec.cluster.pods.gpus))
    if fetched:
        files[FETCHED] = json.dumps({"folder": fetched})
    sent = {"run": context.run_id, "files": files, "archive": archive, "named": job.folder_name}
    link.work("stage", _UNPACKED_S, **sent)
    resume = resumed_from(paths)
    if resume:
        parts: Collection[int] = context.ranks_on(link)
        # With another number of ranks, every rank reads from all parts.
        if resume.world_size != len(context.places):
            parts = resume.parts.keys()
        if context.restart:
            parts = missing_parts(link, resume, parts, target.resume)
        send_checkpoint(link, resume, parts, target.resume)


def resumed_from(paths: RunPaths) -> Checkpoint | None:
    """Return the checkpoint chosen when the run was prepared. None: start from the beginning."""
    chosen = read_json(paths.job).get("resume")
    return CHECKPOINT.validate_python(chosen) if isinstance(chosen, dict) else None


def fetch_logs(context: RunContext, link: AgentLink) -> None:
    """Fetch the logs of a pod's ranks that are longer than the local copies."""
    for rank in context.ranks_on(link):
        for stream in ("stdout", "stderr", "order"):
            there = str(context.on_pod(link).rank_log(context.restart, rank, stream))
            here = context.paths.rank_log(context.restart, rank, stream)
            try:
                longer = link.size(there) > here.stat().st_size
            except RemoteError:
                # A rank that wrote to a single stream leaves no order file.
                if stream == "order":
                    continue
                raise
            if longer:
                with pinned_folder(here.parent, context.paths.root) as folder:
                    link.get(there, folder / here.name)
                mask_file(here, context.redact, context.paths.root)


def check_hostfile(context: RunContext) -> None:
    """Raise RunError if the hostfile changed since submission, as launchers run its content."""
    path = context.paths.hostfile
    try:
        digest = records.sha256_of(path)
    except OSError as error:
        raise RunError(
            f"the hostfile {path} cannot be read: {error.strerror}; submit the job again"
        ) from error
    if digest != context.hostfile_sha256:
        raise RunError(
            f"the hostfile {path} was changed after the run was submitted; submit the job again"
        )
