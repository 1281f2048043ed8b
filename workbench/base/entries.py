"""Every module that is started by name, by another process or on a pod: one table, so that a move misses none."""

from __future__ import annotations

__all__ = [
    "AGENT",
    "ALLREDUCE",
    "ANSWERS",
    "BOARD",
    "CML_WORKER",
    "EXAMINE",
    "GUARDIAN",
    "INQUIRY",
    "KEEPER",
    "MANIFEST",
    "PREDICTION",
    "RECIPE",
    "TRACE",
    "TRAINER",
    "TRAINER_MODULE",
    "UNATTENDED",
    "WARM_SERVER",
]

AGENT = "workbench.jobs.agent"
WARM_SERVER = "workbench.jobs.warm"
TRAINER_MODULE = "workbench.jobs.train"
TRAINER = f"{TRAINER_MODULE}:main"
UNATTENDED = "workbench.jobs.unattended"
RECIPE = "workbench.jobs.standalone"
ANSWERS = "workbench.jobs.serve"
TRACE = "workbench.jobs.trace"
INQUIRY = "workbench.jobs.foretell:main"
EXAMINE = "workbench.jobs.examine"
ALLREDUCE = "workbench.jobs.allreduce"

KEEPER = "workbench.runs.keeper"
MANIFEST = "workbench.runs.manifest"
PREDICTION = "workbench.planner.foresee"
BOARD = "workbench.runs.boardserver"

GUARDIAN = "workbench.pods.worker"
CML_WORKER = "workbench.pods.cmlworker"
