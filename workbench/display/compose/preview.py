"""Consequences of a composition: global batch, memory, Python cell, and files. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.words import count
from workbench.display.compose.composition import Composition, find_problems
from workbench.display.kit.code import call_lines, start_code
from workbench.finetune.data.sources.dataset import dataset_from, rows_known
from workbench.finetune.job.deepspeed_config import resolve
from workbench.finetune.plan.plan import fit_of, predict
from workbench.finetune.techniques.registry import runs_alone
from workbench.jobs.launcher import Launcher
from workbench.keeper.launch import LaunchPlan, build_command, place_ranks
from workbench.pods.backends import CLASSES
from workbench.pods.bootstrap.machine import loopback_addresses
from workbench.pods.hostfile import Hostfile
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import pdsh_environment, ssh_argv

_COMMAND_NOTE = (
    "CLUSTER and RUN stand for what is made at the start, 29500 for a port that is free then; "
    "cluster.command(job) gives the line to the letter."
)


class Page(NamedTuple):
    """A text to show, with a note."""

    text: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    problems: Mapping[str, str]
    """Explanations by field, `""` for the whole composition; empty if it can start."""
    cell: str = ""
    """Equivalent Python cell; empty for a refused composition."""
    pages: Mapping[str, Page] = field(default_factory=dict)
    """Files and commands of the start by title; empty for a refused composition."""
    batch: str = ""
    memory: str = ""
    """Predicted memory per pod, or the way to find out; empty for a refused composition."""
    is_short: bool = False
    """Whether the prediction exceeds a pod's memory."""
    is_counted: bool = True
    """Whether `memory` is final; else `count_memory` computes the prediction in some seconds."""


def preview_of(composition: Composition, unknown: str = "") -> Preview:
    """Return the preview of a composition; for a refused composition, only the problems.

    `unknown`: why a count of the memory failed.
    """
    if problems := find_problems(composition):
        return Preview(problems=problems)
    job = composition.make_job()
    config = resolve(job, gpus=composition.pods.gpus, world_size=composition.ranks)
    without = Page(note=f"Technique {job.technique} runs without DeepSpeed.")
    pods = _pods(composition)
    memory, is_short = _memory_text(composition)
    if not memory and unknown:
        memory = f"Memory is not predicted: {unknown}"
    return Preview(
        problems={},
        cell=_python_cell(composition),
        batch=_batch_text(composition),
        memory=memory
        or f"Memory is being counted; plan(job, pods={len(pods)}) shows every technique.",
        is_short=is_short,
        is_counted=bool(memory),
        pages={
            "Hostfile": Page(str(Hostfile.from_pods(pods)), _hostfile_note(composition)),
            "DeepSpeed JSON": without if config is None else Page(json.dumps(config, indent=2)),
            "Launch command": Page(_command(composition, pods), _COMMAND_NOTE),
        },
    )


def count_memory(composition: Composition) -> str:
    """Compute and cache the memory of a composition, which takes some seconds.

    Return why the memory is unknown. Empty: it is known.
    """
    try:
        row = predict(
            composition.make_job(), pods=composition.value("count"), gpus=composition.pods.gpus
        )
    except (WorkbenchError, OSError) as error:
        return str(error)
    return "" if row else "the model cannot be traced on this machine"


def _batch_text(composition: Composition) -> str:
    job = composition.make_job()
    rows = job.global_batch(composition.ranks)
    ranks = f"{count(composition.ranks)} rank{'s' if composition.ranks != 1 else ''}"
    micro = count(job.per_device_train_batch_size)
    accumulated = count(job.gradient_accumulation_steps)
    text = (
        f"Global batch size: {micro} per device × {accumulated} "
        f"accumulated × {ranks} = {count(rows)} rows"
    )
    train_rows = rows_known(dataset_from(job.dataset))
    if not job.max_steps:
        text = f"{text}; {job.epochs:g} epoch{'s' if job.epochs != 1 else ''}"
        if train_rows is None:
            return text
        # The last step of an epoch takes the rest.
        steps = max(1, round(job.epochs * -(-train_rows // rows)))
        return f"{text}, about {count(steps)} steps"
    share = "" if train_rows is None else f", {job.max_steps * rows / train_rows:.2g} epochs"
    return f"{text}; {count(job.max_steps)} steps read {count(job.max_steps * rows)} rows{share}"


def _memory_text(composition: Composition) -> tuple[str, bool]:
    count = composition.value("count")
    pods = composition.pods
    try:
        row = predict(
            composition.make_job(),
            pods=count,
            gpus=pods.gpus,
            trace=False,
        )
    except WorkbenchError as error:
        return f"Memory is not predicted: {error}", False
    if row is None:
        return "", False
    gpu = f"{row.gpu_gib:.2f} GiB of each GPU and " if row.gpu_gib is not None else ""
    text = f"Predicted peak at the longest rows: {gpu}{row.host_gib:.2f} GiB of each pod's memory"
    is_short = fit_of((row.host_gib, pods.memory_gib)) == "does not fit"
    return f"{text}; a pod has {pods.memory_gib:g} GiB." if is_short else f"{text}.", is_short


def _python_cell(composition: Composition) -> str:
    place = CLASSES[composition["backend"]]
    names = sorted({"Cluster", "FineTune", "PodSpec", place})
    start = start_code(
        place,
        composition.place_options,
        composition.options(PodSpec),
        composition.cluster_options,
    )
    return (
        f"from workbench import {', '.join(names)}\n\n"
        f"job = {call_lines('FineTune', composition.job_options)}\n"
        f"{start}"
    )


def _pods(composition: Composition) -> list[Pod]:
    names = [f"pod-{i}" for i in range(composition.value("count"))]
    local = composition["backend"] == LocalPods.kind
    addresses = loopback_addresses(len(names)) if local else names
    slots = composition.pods.slots
    return [
        Pod(
            name=name,
            address=address,
            slots=slots,
            root=f"CLUSTER/pods/{name}",
            python=sys.executable,
        )
        for name, address in zip(names, addresses, strict=True)
    ]


def _hostfile_note(composition: Composition) -> str:
    notes = []
    if composition["backend"] != LocalPods.kind:
        notes.append("Addresses come with the pods; their names stand in.")
    if composition.ranks < composition.value("count") * composition.pods.slots:
        notes.append("Technique single takes one rank on the first pod.")
    return " ".join(notes)


def _command(composition: Composition, pods: list[Pod]) -> str:
    single = runs_alone(composition["technique"])
    used = pods[:1] if single else pods
    launcher = Launcher(composition["launcher"])
    identity = Identity(Path("CLUSTER/identity"))
    plan = LaunchPlan(
        run_id="RUN",
        launcher=launcher,
        pods=used,
        places=place_ranks(used)[: 1 if single else None],
        master_port=29500,
        interface="lo",
        network="",
        package="CLUSTER/workbench.zip",
        hostfile=Path("CLUSTER/runs/RUN/hostfile"),
        ssh_argv={pod.name: ssh_argv(pod, identity) for pod in used},
        pdsh_env=pdsh_environment(identity) if launcher is Launcher.PDSH else {},
        rsh_wrapper=identity.folder / "ssh",
    )
    try:
        return str(build_command(plan))
    except ConfigError as error:
        return f"refused: {error}"
