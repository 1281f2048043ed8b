"""Modules that another process or a pod starts by name, in a single table for renames."""

from __future__ import annotations

AGENT = "workbench.agent"
WARM_SERVER = "workbench.agent.warm"
FORK_SERVER = "workbench.agent.forkserver"
TRAINER_MODULE = "workbench.finetune.train.main"
TRAINER = f"{TRAINER_MODULE}:main"
COLD_TRAINER = "workbench.agent.imports:train"
SCRIPT_SITE = "workbench/agent/script_site"
"""Folder, not a module: Python imports its `sitecustomize.py` first in a rank of a script."""
LAUNCHER_SITE = "workbench/agent/launcher_site"
"""Folder, not a module: DeepSpeed's launcher imports its content in place of DeepSpeed itself."""
CALL = "workbench.agent.call"
"""Sent as text: the script of a run that calls a function of the notebook."""
UNATTENDED = "workbench.handover.unattended"
RECIPE = "workbench.finetune.recipe.standalone"
ROW_LOOK = "workbench.finetune.model.look"
OUTLINE = "workbench.finetune.model.outline"
TEMPLATE = "workbench.finetune.model.text.template"
ROW_STREAM = "workbench.finetune.data.training.stream"
ANSWERS = "workbench.finetune.answers.serving.serve"
GGUF = "workbench.finetune.answers.serving.gguf"
BENCHMARKS = "workbench.finetune.lm_eval.rank"
TASK_NAMES = "workbench.finetune.lm_eval.names"
TRACE = "workbench.finetune.plan.trace.trace"
EXAMINE = "workbench.agent.probe.examine"
ALLREDUCE = "workbench.agent.probe.allreduce"

KEEPER = "workbench.keeper.keeper"
MANIFEST = "workbench.rundir.checkpoints"
STORE = "workbench.rundir.stores.work"
BOARD = "workbench.client.tensorboard.server"

SSH = "workbench.pods.ssh.client"
SSH_SERVER = "workbench.pods.ssh.server"
GUARDIAN = "workbench.pods.bootstrap.guardian"
SEATS = "workbench.pods.local.seats"
CML_WORKER = "workbench.pods.cml.worker"
SLURM_WORKER = "workbench.pods.slurm.worker"

PLACES = {
    "local": "workbench.pods.local.pods:LocalPods",
    "ssh": "workbench.pods.hosts.pods:SSHPods",
    "cml": "workbench.pods.cml.pods:CMLPods",
    "slurm": "workbench.pods.slurm.pods:SlurmPods",
    "kubernetes": "workbench.pods.kubernetes.pods:KubernetesPods",
}
"""Classes of the pods, by the name of the place."""

FINETUNE = "workbench.finetune.submit"
"""Modules with the verbs of a fine-tuning job, in a room above the job's options."""
JOBS = {
    "finetune": "workbench.finetune.job.finetune:FineTune",
    "script": "workbench.jobs.script:Script",
    "evaluation": "workbench.finetune.lm_eval.job:Evaluation",
}
"""Classes of the built-in kinds of jobs; `jobs/registry.py` adds those of other packages."""
REPORTED = ("workbench.finetune.options.reported:REPORTED",)
"""Figures and facts that the built-in kinds report; `rundir/figures/reported.py` adds others."""

RUN = "workbench.client.run:Run"
RESULT = "workbench.client.result:RunResult"
"""Notebook's classes for a run and its result, unless the kind of the job names other classes."""
FINETUNE_RUN = "workbench.finetune.notebook.run:FineTuneRun"
FINETUNE_RESULT = "workbench.finetune.notebook.result:FineTuneResult"
REPEAT = "workbench.finetune.export.recipe:recipe_of"
REPEAT_SCRIPT = "workbench.finetune.export.recipe:script_recipe_of"
"""Functions that return the recipe to repeat a run without this project, by the job's kind."""
