"""Figures and times of a job's evaluations, and checks of the evaluation options."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.errors import ConfigError, one_of
from workbench.finetune.options.metrics import METRICS, own_metrics
from workbench.finetune.options.model.models import family_by_name
from workbench.finetune.options.options import FineTuneOptions
from workbench.rundir.figures.metrics import less_is_better

LOSS = "eval_loss"
ROUGE = ("rouge1", "rouge2", "rougeL")
_FIGURES = {"rouge": ROUGE}
_OF_ANSWERS = ("exact_match", "execution_match", "rouge")


def evaluates(job: FineTuneOptions) -> bool:
    return job.eval_strategy != "no"


def answered_rows(job: FineTuneOptions) -> int:
    """Return the number of rows answered at every evaluation; 0 if no metric judges answers."""
    if not _judges(job):
        return 0
    return job.predict_rows if job.metric_rows is None else job.metric_rows


def best_metric(job: FineTuneOptions) -> str:
    """Return the name of the metric that compares models, as evaluations name the metric.

    Example:
        >>> how = {"eval_steps": 5, "metrics": ["rouge"], "load_best_model_at_end": True}
        >>> best_metric(FineTuneOptions(**how))
        'eval_loss'
        >>> best_metric(FineTuneOptions(**how, metric_for_best_model="eval_rougeL"))
        'rougeL'
    """
    name = (job.metric_for_best_model or LOSS).removeprefix("eval_")
    return LOSS if name == "loss" else name


def compares_models(job: FineTuneOptions) -> bool:
    """Return whether evaluations choose the saved model or end the training."""
    return job.load_best_model_at_end or job.early_stopping_patience is not None


def greater_is_better(job: FineTuneOptions) -> bool:
    """Return whether a greater value of the best metric is better.

    Default, as in Hugging Face: True unless the metric is a loss or the perplexity.
    """
    if job.greater_is_better is not None:
        return job.greater_is_better
    return not less_is_better(best_metric(job))


def check_times(job: FineTuneOptions) -> None:
    """Raise ConfigError for options that need evaluations at other times."""
    match job.eval_strategy:
        case "steps" if not job.eval_steps:
            raise ConfigError(
                "eval_strategy is 'steps', and eval_steps is not set; set eval_steps, or choose "
                "'epoch'"
            )
        case "epoch" | "no" if job.eval_steps is not None:
            raise ConfigError(
                f"eval_strategy is '{job.eval_strategy}', and eval_steps is {job.eval_steps}; "
                "drop eval_strategy or eval_steps"
            )
    if not evaluates(job) and job.metrics:
        raise ConfigError(
            "metrics is measured at evaluations, and eval_strategy is 'no'; drop metrics or "
            "eval_strategy"
        )
    for name in ("load_best_model_at_end", "early_stopping_patience"):
        if getattr(job, name) and not job.eval_steps and job.eval_strategy != "epoch":
            raise ConfigError(
                f"{name} needs evaluations on the way; set eval_steps, or eval_strategy='epoch'"
            )


def _judges(job: FineTuneOptions) -> bool:
    return any(metric in _OF_ANSWERS or metric not in METRICS for metric in job.metrics)


def check_judged(job: FineTuneOptions) -> None:
    """Raise ConfigError for metrics without answers, and for answers without metrics."""
    judges = _judges(job)
    if judges and not answered_rows(job):
        raise ConfigError(
            "metrics judge answers, and predict_rows is "
            "0; set metric_rows to how many rows to answer"
        )
    if job.metric_rows is not None and not judges:
        raise ConfigError(
            "metric_rows is for metrics of answers; set "
            f"metrics to some of {', '.join(_OF_ANSWERS)}"
        )


def check_best(job: FineTuneOptions) -> None:
    """Raise ConfigError for options of the best model or of checkpoints without effect."""
    compared = compares_models(job)
    for name in ("metric_for_best_model", "greater_is_better"):
        if getattr(job, name) is not None and not compared:
            raise ConfigError(
                f"{name} is for load_best_model_at_end and early_stopping_patience; set either "
                f"option, or drop {name}"
            )
    if job.early_stopping_threshold and job.early_stopping_patience is None:
        raise ConfigError(
            "early_stopping_threshold is for early_stopping_patience; set early_stopping_patience, "
            "or drop the threshold"
        )
    if job.save_total_limit is not None and job.save_steps == 0 and not job.load_best_model_at_end:
        raise ConfigError(
            "save_total_limit limits checkpoints, and save_steps is 0, so no checkpoint is saved; "
            "drop save_steps or save_total_limit"
        )
    if job.async_save and job.save_steps == 0 and not job.load_best_model_at_end:
        raise ConfigError(
            "async_save writes checkpoints in a thread, and save_steps is 0, so no checkpoint is "
            "saved; drop save_steps or async_save"
        )
    if job.method == "sft":  # other methods have figures of their own
        check_best_metric(job)


def check_best_metric(job: FineTuneOptions, also: Sequence[str] = ()) -> None:
    """Raise ConfigError if no evaluation has the figure that compares models.

    `also`: figures of the job's method. The names of own functions' figures are unknown.
    """
    measured = [*measured_names(job), *also]
    if not own_metrics(job.metrics) and best_metric(job) not in measured:
        raise one_of("metric_for_best_model", best_metric(job), measured)


def measured_names(job: FineTuneOptions) -> list[str]:
    """Return the names of the figures of a job's evaluations, without those of own functions."""
    causal = family_by_name(job.model) != "encoder-decoder"
    names = [LOSS]
    if causal and job.method == "sft":
        names.append("perplexity")
    for metric in job.metrics:
        if metric in METRICS:
            names.extend(_FIGURES.get(str(metric), [str(metric)]))
    return list(dict.fromkeys(names))
