"""Write the inputs of a fine-tuning run: rows, resolved DeepSpeed JSON, and the ranks' job file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import lru_cache

from workbench.base.files import is_folder, user_path, write_text
from workbench.finetune.data.overlap import overlap_of_files
from workbench.finetune.data.sources.dataset import dataset_from
from workbench.finetune.data.sources.files import RowFiles
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.deepspeed.files import load
from workbench.finetune.deepspeed.unsupported_keys import own_keys
from workbench.finetune.job.deepspeed_config import completed
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.limits import lacking_memory, model_notes, template_of
from workbench.finetune.job.refusals import Facts, check, known
from workbench.finetune.options.metrics import metric_file
from workbench.finetune.options.text.templates import unread
from workbench.finetune.submit import earlier_rows
from workbench.finetune.submit.metric_functions import with_metric_files
from workbench.finetune.submit.metric_inputs import metric_inputs, reward_inputs
from workbench.finetune.submit.origin import origin
from workbench.finetune.submit.resume import before_of, resume_checkpoint
from workbench.finetune.submit.rewards import try_rewards
from workbench.finetune.submit.travels import sent_notes
from workbench.jobs.job import NewRun, Prepared
from workbench.rundir.checkpoints import CHECKPOINT
from workbench.rundir.paths import RunPaths
from workbench.rundir.stores.address import check_address, is_address
from workbench.rundir.stores.rights import check_rights

_LEFT_OPEN = ("learning_rate", "precision", "communication")


def check_early(job: FineTune, *, gpus: int, ranks: int | None = None) -> None:
    """Raise ConfigError for what is quick to find: options, model and dataset. Reads no rows.

    Rows and rights in an object store are checked once for all jobs of this process.
    """
    dataset = dataset_from(job.dataset)
    if isinstance(dataset, RowFiles):
        _look(type(dataset), dataset.model_dump_json())
    job = choose(job, gpus=gpus, world_size=ranks)
    check(job, known(job, gpus=gpus, ranks=ranks, sends=True, outlines=True))
    if job.checkpoint_store:
        _check_rights(job.checkpoint_store)


@lru_cache(maxsize=64)
def _look(kind: type[RowFiles], files: str) -> None:
    kind.model_validate_json(files).look()


@lru_cache(maxsize=64)
def _check_rights(address: str) -> None:
    check_rights(address, "checkpoints")


def prepare(job: FineTune, run: NewRun) -> Prepared:
    """Write the inputs; raise ConfigError if the job does not fit the rows, ranks and GPUs."""
    paths = RunPaths(run.root)
    asked = job
    job = with_metric_files(_absolute(job), paths.inputs)
    if job.checkpoint_store:
        check_rights(job.checkpoint_store, "checkpoints")
    before = before_of(job, paths)
    facts = known(job, gpus=run.gpus, ranks=run.ranks, sends=True)
    check(job, facts)
    # The memory of GPUs is unknown before the pods are asked.
    if not run.gpus and run.memory_gib is not None:
        why = lacking_memory(job, ranks=run.ranks, memory_gib=run.memory_gib)
        if why:
            warnings.warn(why, RuntimeWarning, stacklevel=2)
    deepspeed = completed(job, gpus=run.gpus)
    data = earlier_rows.checked(job, paths.inputs)
    try_rewards(asked.rewards, data.train)
    # Takes seconds, and rows are wrong more often.
    check(job, Facts(outline=facts.folder))
    chosen = []
    for name in _LEFT_OPEN:
        was_open = getattr(run.asked, name, "") is None
        if was_open and getattr(job, name):
            chosen.append(name)
    own_json = {} if job.deepspeed is None else load(job)[0]
    resolved: Mapping[str, object] = {
        "job": {**job.to_dict(), "env": {}},
        "train": data.train.name if data.train else None,
        "eval": data.eval.name if data.eval else None,
        "hub": data.hub,
        "not_read": unread(template_of(job), data.not_read),
        "empty_answers": data.empty_answers,
        "overlap": overlap_of_files(data.train, data.eval) if data.train and data.eval else None,
        "unasked": data.unasked,
        "family": facts.family,
        "chosen": chosen,
        "deepspeed": deepspeed,
        "json_keys": list(own_keys(own_json)),
        "ranks": run.ranks,
        "metric_inputs": metric_inputs(job, data),
        "remarks": data.remarks,
        "notes": [*model_notes(job), *sent_notes(job)],
        "rewards": reward_inputs(job),
    }
    if job.checkpoint_folder:
        resolved = {**resolved, "shared": f"{job.checkpoint_folder}/{run.run_id}"}
    if before is not None:
        checkpoint = resume_checkpoint(
            job,
            paths,
            before,
            world_size=run.ranks,
            resolved=resolved,
            cluster=run.cluster,
        )
        resolved = {**resolved, "resume": CHECKPOINT.dump_python(checkpoint, mode="json")}
    write_text(paths.job, json.dumps(resolved, indent=1))
    if deepspeed is not None:
        write_text(paths.deepspeed, json.dumps(deepspeed, indent=2))
    return Prepared(job=job, origin=origin(paths.root))


def _absolute(job: FineTune) -> FineTune:
    """Return a job with absolute paths of a checkpoint, of metrics and of a model's folder."""
    changes: dict[str, object] = {}
    if is_address(job.resume):
        changes["resume"] = check_address(str(job.resume), "resume")
    elif job.resume is not None:
        changes["resume"] = str(user_path(job.resume).absolute())
    for name in ("metrics", "rewards"):
        given = [*getattr(job, name)]
        files = [metric_file(each) for each in given]
        if any(files):
            changes[name] = [
                f"{user_path(file[0]).absolute()}:{file[1]}" if file else each
                for file, each in zip(files, given, strict=True)
            ]
    folder = user_path(job.model)
    if is_folder(folder):
        changes["model"] = str(folder.absolute())
    return job.replace(**changes) if changes else job
