"""What a composition comes to: global batch, hostfile, DeepSpeed JSON, launch command, and the Python cell. Pure."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.words import count
from workbench.client.compose.composition import FIELDS, Composition, find_problems
from workbench.jobs.choices import Launcher, Technique
from workbench.jobs.data.sources.dataset import Mini, dataset_from
from workbench.jobs.deepspeed.config import resolve
from workbench.keeper.launch.command import LaunchPlan, build_command, place_ranks
from workbench.planner.plan import predict
from workbench.pods.backends import CLASSES
from workbench.pods.guest.addresses import loopback_addresses
from workbench.pods.hostfile import Hostfile
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import pdsh_environment, ssh_argv

__all__ = ["PAGES", "Page", "Preview", "count_memory", "preview_of"]

PAGES = ("Python cell", "Hostfile", "DeepSpeed JSON", "Launch command")
_COMMAND_NOTE = (
    "CLUSTER and RUN stand for what is made at the start, 29500 for a port that is free then; "
    "cluster.command(job) gives the line to the letter."
)


class Page(NamedTuple):
    """A text to look at or to copy, and what to know about it."""

    text: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """All that the form shows beside its fields."""

    problems: Mapping[str, str]
    """Explanations by field, `""` for all together; empty when it can start."""
    pages: Mapping[str, Page]
    """By title, see `PAGES`; while something is refused only the Python cell."""
    batch: str = ""
    memory: str = ""
    """What a pod is predicted to need, or how to learn it; empty while something is refused."""
    is_counted: bool = True
    """Whether `memory` says all that can be known; else `count_memory` finds it in some seconds."""

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Titles and texts of all there is to show; text and HTML are made of these."""
        labels = {field.name: field.label for fields in FIELDS.values() for field in fields}
        refused = "\n".join(f"{labels.get(name, 'All together')}: {why}" for name, why in self.problems.items())
        pages = [(title, f"{page.text.rstrip()}\n{page.note}".strip()) for title, page in self.pages.items()]
        parts = [("Refused", refused), ("Global batch", self.batch), ("Memory", self.memory), *pages]
        return [(title, text.rstrip()) for title, text in parts if text]


def preview_of(composition: Composition) -> Preview:
    """Work out what a composition comes to; one that is refused still has its cell and its problems."""
    problems = find_problems(composition)
    cell = Page(_python_cell(composition))
    if problems:
        return Preview(problems=problems, pages={"Python cell": cell})
    job = composition.make_job()
    config = resolve(job, gpus=composition["gpus"], world_size=composition.ranks)
    without = Page(note=f"Technique {job.technique} runs without DeepSpeed.")
    pods = _pods(composition)
    memory = _memory_text(composition)
    return Preview(
        problems={},
        batch=_batch_text(composition),
        memory=memory or f"Not counted yet: plan(job, pods={composition['count']}) shows what fits.",
        is_counted=bool(memory),
        pages={
            "Python cell": cell,
            "Hostfile": Page(str(Hostfile.from_pods(pods)), _hostfile_note(composition)),
            "DeepSpeed JSON": without if config is None else Page(json.dumps(config, indent=2)),
            "Launch command": Page(_command(composition, pods), _COMMAND_NOTE),
        },
    )


def count_memory(composition: Composition) -> None:
    """Count what a composition needs, which takes some seconds and is then cached; never raises."""
    with contextlib.suppress(WorkbenchError, OSError):
        predict(composition.make_job(), pods=composition["count"], gpus=composition["gpus"])


def _batch_text(composition: Composition) -> str:
    job = composition.make_job()
    rows = job.global_batch(composition.ranks)
    ranks = f"{count(composition.ranks)} rank{'s' if composition.ranks != 1 else ''}"
    micro, accumulated = count(job.per_device_train_batch_size), count(job.gradient_accumulation_steps)
    text = f"{micro} rows a rank × {accumulated} accumulated × {ranks} = {count(rows)} rows per optimizer step"
    dataset = dataset_from(job.dataset)
    train_rows = dataset.train_rows if isinstance(dataset, Mini) else None
    if not job.max_steps:
        if train_rows is None:
            return f"{text}; {job.epochs:g} epochs"
        steps = max(1, round(job.epochs * -(-train_rows // rows)))  # the last step of an epoch takes what is left
        return f"{text}; {job.epochs:g} epochs, about {count(steps)} steps"
    share = "" if train_rows is None else f", {job.max_steps * rows / train_rows:.2g} epochs"
    return f"{text}; {count(job.max_steps)} steps see {count(job.max_steps * rows)} rows{share}"


def _memory_text(composition: Composition) -> str:
    try:
        row = predict(composition.make_job(), pods=composition["count"], gpus=composition["gpus"], trace=False)
    except WorkbenchError as error:
        return f"Not predicted: {error}"
    if row is None:
        return ""
    gpu = f"{row.gpu_gib:.2f} GiB of each GPU and " if row.gpu_gib is not None else ""
    return f"Predicted at the longest rows: {gpu}{row.host_gib:.2f} GiB of each pod's memory."


def _python_cell(composition: Composition) -> str:
    try:
        backend = repr(composition.make_backend())
    except ConfigError:
        backend = f"{CLASSES.get(composition['backend'], LocalPods.__name__)}()"
    names = ", ".join(sorted({"Cluster", "FineTune", "PodSpec", backend.partition("(")[0]}))
    sizes = {"cpus": composition["cpus"], "gpus": composition["gpus"]}
    pods = ", ".join(f"{name}={_literal(value)}" for name, value in sizes.items() if value or name == "cpus")
    options = "".join(f"    {name}={_literal(value)},\n" for name, value in composition.job_options.items())
    return (
        f"from workbench import {names}\n\n"
        f"cluster = Cluster({backend}, PodSpec({pods}), count={composition['count']})\n"
        f"job = FineTune(\n{options})\n"
        f"run = cluster.start().submit(job)\n"
        f"run\n"
    )


def _literal(value: object) -> str:
    match value:
        case str():  # JSON's form of a string is Python's too, with the quotes that this project writes
            return json.dumps(value, ensure_ascii=False)
        case float() if value.is_integer() and abs(value) < 1e6:
            return str(int(value))
    return repr(value)


def _pods(composition: Composition) -> list[Pod]:
    names = [f"pod-{i}" for i in range(composition["count"])]
    local = composition["backend"] == LocalPods.kind
    addresses = loopback_addresses(len(names)) if local else names
    slots = composition.pods.slots
    return [
        Pod(name=name, address=address, slots=slots, root=f"CLUSTER/pods/{name}", python=sys.executable)
        for name, address in zip(names, addresses, strict=True)
    ]


def _hostfile_note(composition: Composition) -> str:
    notes = []
    if composition["backend"] != LocalPods.kind:
        notes.append("Addresses come with the pods; their names stand in.")
    if composition.ranks < composition["count"] * composition.pods.slots:
        notes.append("Technique single takes one rank on the first pod.")
    return " ".join(notes)


def _command(composition: Composition, pods: list[Pod]) -> str:
    single = composition["technique"] == Technique.SINGLE
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
