"""Gather what a launch command is made of from the cluster's identity and links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.jobs.choices import Launcher
from workbench.jobs.finetune import Job
from workbench.keeper.launch.command import LaunchPlan, RankPlace
from workbench.keeper.link.agent import AgentLink
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import pdsh_environment, ssh_argv, ssh_wrapper
from workbench.rundir.paths import RunPaths

__all__ = ["launch_plan"]


def launch_plan(
    run_id: str,
    job: Job,
    links: Sequence[AgentLink],
    places: Sequence[RankPlace],
    identity: Identity,
    paths: RunPaths,
    master_port: int,
) -> LaunchPlan:
    """Make the plan of a run."""
    launcher = Launcher(job.launcher)
    return LaunchPlan(
        run_id=run_id,
        launcher=launcher,
        pods=[link.pod for link in links],
        places=places,
        master_port=master_port,
        interface=links[0].interface,
        package=links[0].package,
        hostfile=paths.hostfile,
        ssh_argv={link.pod.name: ssh_argv(link.pod, identity) for link in links},
        pdsh_env=pdsh_environment(identity) if launcher is Launcher.PDSH else {},
        rsh_wrapper=Path(ssh_wrapper(identity)) if launcher is Launcher.OPENMPI else Path("ssh"),
    )
