"""Run a rank of an unattended job: `python -m workbench.handover.unattended SPEC.json OUT`.

Exit code 2: the job was refused.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.agent.machine import free_port, interface_of
from workbench.agent.ranks.request import torchrun_variables
from workbench.base.child import HOME, QUIET
from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.process import marks, write_no_core_dump
from workbench.handover.unattended.coordinator import Coordinator
from workbench.handover.unattended.rank import Task, address_of, run_task
from workbench.handover.unattended.rendezvous import FileRendezvous
from workbench.jobs.job import PodView
from workbench.pods.pod import interface_variables
from workbench.pods.route import own_address_to
from workbench.rundir.spec import RunSpec

# Wait for the records of other ranks, which have passed the last barrier.
_PATIENCE_S = 60.0
# Wait after a failure or stop of rank 0, as other ranks may have been killed.
_HURRY_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    rank: int
    local_rank: int
    world_size: int
    per_node: int
    started_by: str
    """Program that started the rank: torchrun, srun or python."""

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Place:
        if "RANK" not in env and "SLURM_STEP_ID" in env:
            tasks = int(env["SLURM_STEP_NUM_TASKS"])
            return cls(
                rank=int(env["SLURM_PROCID"]),
                local_rank=int(env["SLURM_LOCALID"]),
                world_size=tasks,
                per_node=tasks // int(env["SLURM_STEP_NUM_NODES"]),
                started_by="srun",
            )
        return cls(
            rank=int(env.get("RANK") or 0),
            local_rank=int(env.get("LOCAL_RANK") or 0),
            world_size=int(env.get("WORLD_SIZE") or 1),
            per_node=int(env.get("LOCAL_WORLD_SIZE") or 1),
            started_by="torchrun" if "RANK" in env else "python",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rank until its end. Rank 0 also waits for all other ranks. Blocks."""
    parser = argparse.ArgumentParser(prog="python -m workbench.handover.unattended")
    parser.add_argument("spec", type=Path, metavar="SPEC.json")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="the run directory, in a folder that all ranks see"
    )
    options = parser.parse_args(argv)
    place = Place.read(os.environ)
    write_no_core_dump()
    try:
        return _run(options.spec.absolute(), options.out.absolute(), place)
    except ConfigError as error:
        sys.stderr.write(f"rank {place.rank}: refused: {error}\n")
        return 2
    except WorkbenchError as error:
        sys.stderr.write(f"rank {place.rank}: {error}\n")
        return 1


def _run(spec_file: Path, out: Path, place: Place) -> int:
    scratch = out.with_name(f".{out.name}.ranks")
    rendezvous = FileRendezvous(folder=scratch, rank=place.rank, world_size=place.world_size)
    if place.rank:
        facts = rendezvous.follow()
        return 0 if facts.get("finished") else run_task(_task(facts, out, place))
    coordinator = Coordinator(
        spec_file, out, world_size=place.world_size, started_by=place.started_by
    )
    with rendezvous.leading() as facts:
        facts.update(coordinator.prepare(scratch))
        facts.update(address=address_of(), port=free_port("0.0.0.0"))
    if facts.get("finished"):
        sys.stdout.write(f"{out} holds the result of an earlier attempt that succeeded\n")
        return 0
    coordinator.begin()
    code = run_task(_task(facts, out, place))
    state = coordinator.finish(_PATIENCE_S if code == 0 else _HURRY_S)
    shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.write(f"the run {state}; run directory: {out}\n")
    return code


def _task(facts: Mapping[str, Any], out: Path, place: Place) -> Task:
    spec = RunSpec.load(Path(facts["spec"])).resolved()
    root = out / "work"
    pods = spec.cluster.pods
    view = PodView(package=HOME, folder=None, environment={**pods.env, **spec.job.env})
    program = spec.job.program_on(view)
    # torchrun sets these variables itself. Add the same values for plain Python.
    elastic = torchrun_variables(
        run=out.name,
        rank=place.rank,
        world_size=place.world_size,
        node=place.rank // place.per_node,
        nodes=-(-place.world_size // place.per_node),
    )
    master = os.environ.get("MASTER_ADDR", facts["address"])
    # Nodes of Slurm may not know their own names, by which gloo would look for its interface.
    own = own_address_to(master) if place.started_by == "srun" else ""
    interface = interface_of(own) if own else ""
    network = interface_variables([interface] if interface else [])
    # The user's own variables win over those of the program, and the ranks' numbers over all.
    env = {
        **{name: os.environ.get(name, value) for name, value in elastic.items()},
        "OMP_NUM_THREADS": _pods_threads() or str(max(1, int(pods.cores // pods.slots))),
        "MASTER_ADDR": master,
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(facts["port"])),
        **{name: os.environ.get(name, value) for name, value in network.items()},
        **QUIET,
        **program.env,
        **interface_variables(pods.interfaces),
        **pods.env,
        **spec.job.env,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.per_node),
        **program.forced,
    }
    return Task(
        root=root,
        rank=place.rank,
        address=own or address_of(),
        env=env,
        argv=[sys.executable, "-u", *program.argv],
        success=spec.job.traits.success,
        cwd=program.cwd,
    )


def _pods_threads() -> str:
    """Return `OMP_NUM_THREADS` of the pod; empty if the pod has none."""
    name = "OMP_NUM_THREADS"
    # torchrun sets 1 for its ranks where the pod has no value; its own environment is the pod's.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return marks(os.getppid(), [name]).get(name, "")
    return os.environ.get(name, "")


if __name__ == "__main__":
    sys.exit(main())
