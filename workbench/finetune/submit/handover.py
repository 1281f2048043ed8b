"""Hand a fine-tuning job over to a system without a keeper, or raise ConfigError if impossible."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import read_json
from workbench.base.json_values import Json, as_objects, get_object
from workbench.finetune.data.sources.dataset import is_bundled
from workbench.finetune.deepspeed.files import load
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.metrics import carried_metrics, metric_text
from workbench.finetune.submit.resume import bound_to_ranks
from workbench.finetune.techniques.registry import runs_alone
from workbench.jobs.job import Handover, HandoverRequest, carried
from workbench.rundir.paths import RunPaths


def handed_over(job: FineTune, request: HandoverRequest) -> Handover:
    """Return the job with paths of the other system, the rows, and the custom metrics."""
    paths = RunPaths(request.root)
    shipped = read_json(paths.job)
    _check(job, request, get_object(shipped, "deepspeed"))
    asked: dict[str, object] = job.to_dict()
    inputs: dict[str, bytes] = {}
    # A model folder of this machine is the folder `model` on the cluster.
    if Path(job.model).is_absolute() and not request.shared:
        asked["model"] = f"{request.folder}model"
    # Send the prepared rows, unless they are part of the package.
    if shipped.get("train") and not is_bundled(job.dataset):
        names = _row_files(shipped)
        folder = f"{paths.inputs}/" if request.shared else request.folder
        if not folder:
            inputs.update({name: carried(paths.inputs / name, paths.root) for name in names})
        files = {name.partition(".")[0]: f"{folder}{name}" for name in names}
        asked["dataset"] = {"kind": "files", **files}
    # Send custom metrics as files, with their text at the time of submission.
    sent = as_objects(get_object(shipped, "metric_inputs").get("metrics"))
    named = [metric_text(metric) for metric in job.metrics]
    asked["metrics"], metrics = carried_metrics(named, sent, request.folder)
    judging = as_objects(shipped.get("rewards"))
    named = [metric_text(reward) for reward in job.rewards]
    asked["rewards"], rewards = carried_metrics(named, judging, request.folder, "reward")
    if not request.folder:
        inputs.update({**metrics, **rewards})
    if shipped.get("deepspeed") is not None:
        asked["deepspeed"] = shipped["deepspeed"] if job.deepspeed is not None else _shipped(job)
    return Handover(
        job=asked,
        inputs=inputs,
        resumes=job.save_steps != 0,
        large="the rows",
        put=f"train.jsonl and eval.jsonl of {paths.inputs}",
    )


def _check(job: FineTune, request: HandoverRequest, config: Json) -> None:
    if job.resume is not None:
        raise ConfigError(
            f"the run continued from a checkpoint in {job.resume}, a folder of this machine that "
            "no cluster can read; hand over a run without resume (with save_steps, the run "
            "resumes by itself on the cluster)"
        )
    if job.checkpoint_store:
        raise ConfigError(
            f"checkpoints go to {job.checkpoint_store}, and only the keeper of a cluster uploads "
            "checkpoints; hand over a run with checkpoints 'pod', whose checkpoints stay on the "
            "volume of the results"
        )
    if job.checkpoint_folder:
        raise ConfigError(
            f"checkpoints go to {job.checkpoint_folder}, and a run without a keeper keeps its "
            "checkpoints on the volume of the results; hand over a run with checkpoints 'pod'"
        )
    if job.device_map:
        raise ConfigError(
            "device_map spreads a model over the GPUs of a single process, and a manifest gives "
            "every process 1 GPU; hand over a run with technique 'fsdp' instead"
        )
    if request.elastic:
        alone = "it is one process" if runs_alone(job.technique) else ""
        why = alone or bound_to_ranks(job, config)
        if why:
            raise ConfigError(f"technique {job.technique!r} cannot be elastic: {why}")
    if job.lora.get("resume_from"):
        raise ConfigError(
            "a job that continues with adapters cannot be handed over: merge the adapters first "
            "(run.merge)"
        )
    if Path(job.model).is_absolute() and not (request.folder or request.shared):
        raise ConfigError(
            f"the model is {job.model}, a folder of this machine: copy the folder to the claim as "
            "'model', and name claim and folder: run.manifest(…, pvc='claim', inputs='folder')"
        )


def _row_files(shipped: Json) -> list[str]:
    has_tables = get_object(shipped, "metric_inputs").get("tables")
    names = [f"{name}.jsonl" for name in ("train", "eval") if shipped.get(name)]
    return [*names, "tables.jsonl"] if has_tables else names


def _shipped(job: FineTune) -> Mapping[str, object]:
    """Return the technique's configuration, because `dsconfig/` is not part of the package."""
    config, _ = load(job)
    return config
