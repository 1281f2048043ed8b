"""Evaluate a run's model on pods, and keep the figures in the run directory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.base import entries
from workbench.base.child import replies
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import load_json
from workbench.client.cluster import Cluster
from workbench.finetune.answers.server import check_model
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.limits import check_sent
from workbench.finetune.job.refusals import check, known
from workbench.finetune.job.tokenizer_files import check_is_there
from workbench.finetune.job.weights import check_adapters
from workbench.finetune.lm_eval.job import REPORT, Evaluation, checked_folder, trained_job
from workbench.finetune.lm_eval.names import refusal
from workbench.finetune.lm_eval.scores import Scores, as_evaluation, scores_from
from workbench.finetune.methods.registry import method_of
from workbench.rundir.catalog.benchmarks import add_evaluation
from workbench.rundir.checkpoints import model_folder
from workbench.rundir.paths import RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
)

if TYPE_CHECKING:
    from workbench.client.submission import Submission

_NAMES_S = 300.0


def evaluate(
    paths: RunPaths,
    tasks: Sequence[str],
    *,
    cluster: Submission | None,
    pods: int | None,
    progress: bool,
    **options: Any,
) -> Scores:
    """Evaluate the model of a run; see `FineTuneRun.evaluate`."""
    job = _checked(paths, tasks, options)
    chosen = cluster or _own_cluster(paths)
    run = chosen.submit(job, pods=pods)
    run.wait(progress=progress).raise_for_status()
    report = run.paths.root / REPORT
    raw = load_json(report)
    scores = Scores(
        scores=tuple(scores_from(raw, options)),
        run_id=run.id,
        lm_eval=str(raw.get("lm_eval")),
    )
    try:
        add_evaluation(paths, as_evaluation(scores))
    except OSError as error:
        # The evaluation has the figures in a directory of its own.
        warnings.warn(
            f"{paths.benchmarks} cannot be written ({error.strerror}); the figures are in {report}",
            RuntimeWarning,
            stacklevel=3,
        )
    return scores


def _checked(paths: RunPaths, tasks: Sequence[str], options: dict[str, Any]) -> Evaluation:
    """Return the job; refuse what cannot work before pods are asked."""
    if isinstance(tasks, str):
        raise ConfigError(f"tasks is a single name; give a list: [{tasks!r}]")
    check_model(paths)
    trained = trained_job(paths)
    if method_of(trained.method).scores:
        raise ConfigError(
            f"method {trained.method!r} trained a model that scores texts, and lm-eval asks for "
            "answers. The run's own evaluations have the accuracy of the scores"
        )
    check_trained(model_folder(paths), trained, before=bool(options.get("before", True)))
    job = Evaluation(run=str(paths.root), tasks=list(tasks), **options)
    include = None
    if job.include_path is not None:
        include = str(checked_folder(job.include_path))
    # Without lm-eval on this machine the ranks look at the names, before a model is loaded.
    if find_spec("lm_eval") is not None:
        _check_names(job.tasks, include)
    return job


def check_trained(folder: Path, job: FineTune, *, before: bool) -> None:
    """Raise ConfigError if the folder of a trained model, or the base, cannot be loaded.

    `before` also loads the base of a model trained as a whole.
    """
    adapters = job.peft != "none"
    if adapters:
        check_adapters(folder)
        check_is_there(folder)
    else:
        check_sent(job, folder)
    if adapters or before:
        check(job, known(job, sends=True, outlines=True))


def _check_names(tasks: Sequence[str], include: str | None) -> None:
    request = {"tasks": list(tasks), "include": include}
    try:
        [unknown] = replies(entries.TASK_NAMES, request=request, limit_s=_NAMES_S)
    except ValueError as error:
        where = f" in {include}" if include else ""
        raise ConfigError(f"lm-eval cannot read the task files{where}: {error}") from error
    if unknown:
        raise ConfigError(refusal(unknown))


def _own_cluster(paths: RunPaths) -> Cluster:
    """Return the cluster of a run. Raise RunError if the cluster is closed."""
    try:
        return Cluster.attach(cluster_of(paths))
    except RunError as error:
        raise RunError(
            f"{error}. Or evaluate on another cluster: run.evaluate(…, cluster=cluster)"
        ) from error
