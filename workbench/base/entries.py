"""Modules that another process or a pod starts by name: a single table, so a move misses none."""

from __future__ import annotations

AGENT = "workbench.worker.agent"
WARM_SERVER = "workbench.worker.warm"
FORK_SERVER = "workbench.worker.forkserver"
TRAINER_MODULE = "workbench.worker.train.main"
TRAINER = f"{TRAINER_MODULE}:main"
COLD_TRAINER = "workbench.worker.imports:train"
SCRIPT_SITE = "workbench/worker/script_site"
"""A folder, not a module: its `sitecustomize.py` is what Python imports first in a rank of a
script."""
LAUNCHER_SITE = "workbench/worker/launcher_site"
"""Folder, not a module: DeepSpeed's launcher imports its content in place of DeepSpeed itself."""
CALL = "workbench.worker.call"
"""Its text travels: the script of a run that calls a function of the notebook."""
UNATTENDED = "workbench.worker.unattended"
RECIPE = "workbench.worker.standalone"
ROW_LOOK = "workbench.worker.model.look"
TEMPLATE = "workbench.worker.model.template"
ROW_STREAM = "workbench.worker.data.stream"
ANSWERS = "workbench.worker.answer.serve"
TRACE = "workbench.worker.trace.trace"
INQUIRY = "workbench.worker.trace.inquiry:main"
EXAMINE = "workbench.worker.probe.examine"
ALLREDUCE = "workbench.worker.probe.allreduce"

KEEPER = "workbench.keeper.keeper"
MANIFEST = "workbench.rundir.checkpoints"
BOARD = "workbench.results.tensorboard.server"

GUARDIAN = "workbench.pods.guest.guardian"
CML_WORKER = "workbench.pods.cml.worker"

PLACES = {
    "local": "workbench.pods.local.pods:LocalPods",
    "ssh": "workbench.pods.hosts.pods:SSHPods",
    "cml": "workbench.pods.cml.pods:CMLPods",
    "kubernetes": "workbench.pods.kubernetes.pods:KubernetesPods",
}
"""Where pods come from, by the word that says so."""

FINETUNE = "workbench.finetune.verbs"
"""The verbs of a fine-tuning job, which need rooms above that of its options."""
JOBS = {
    "finetune": "workbench.jobs.finetune:FineTune",
    "script": "workbench.jobs.script:Script",
}
"""Classes of the built-in kinds of jobs; `jobs/registry.py` adds those of other packages."""

RUN = "workbench.client.run:Run"
RESULT = "workbench.client.result:RunResult"
"""What a notebook gets for a run and for its result, unless the kind of the job names other classes."""
FINETUNE_RUN = "workbench.finetune.run:FineTuneRun"
FINETUNE_RESULT = "workbench.finetune.result:FineTuneResult"
REPEAT = "workbench.results.recipe:recipe_of"
"""Returns how to repeat a run without this project."""
