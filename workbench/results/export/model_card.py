"""The model card that stands beside a pushed model: what the hub reads of it, and what the run card states."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.shown import as_markdown
from workbench.jobs.choices import Peft
from workbench.jobs.data.sources.dataset import dataset_from
from workbench.jobs.data.sources.hub import Hub
from workbench.jobs.finetune import FineTune
from workbench.jobs.model import Family, ModelKind, model_kind
from workbench.results.export.folder import Export, job_of, start_lines
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord

_TASKS = {Family.CAUSAL: "text-generation", Family.ENCODER_DECODER: "text2text-generation"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    repo_id: str
    result: ResultRecord
    job: FineTune
    dtype: str
    base: str
    """The model it was trained from, where others can have it."""
    dataset: str
    """The dataset of the hub that it was trained on; empty where it was another."""
    start_lines: Mapping[str, str]


def write_model_card(result: ResultRecord, repo_id: str, export: Export) -> Path:
    from huggingface_hub import ModelCardData

    job = job_of(RunPaths(result.path))
    base, dataset = _hub_id(job.model), _hub_dataset(job)
    adapters = [] if job.peft == Peft.NONE else [job.peft]
    metadata = ModelCardData(
        base_model=base or None,
        library_name="peft" if export.base else "transformers",
        datasets=[dataset] if dataset else None,
        pipeline_tag=_TASKS[export.family],
        tags=["deepspeed-workbench", job.technique, *adapters],
    )
    card = ModelCard(
        repo_id=repo_id,
        result=result,
        job=job,
        dtype=export.dtype,
        base=base,
        dataset=dataset,
        start_lines=start_lines(repo_id, export.family, export.base),
    )
    path = export.folder / "README.md"
    path.write_text(f"---\n{metadata.to_yaml()}\n---\n\n{as_markdown(card)}", encoding="utf-8")
    return path


def _hub_id(name: str) -> str:
    with suppress(WorkbenchError):
        return name if model_kind(name) is ModelKind.HUB else ""
    return ""


def _hub_dataset(job: FineTune) -> str:
    with suppress(WorkbenchError):
        match dataset_from(job.dataset):
            case Hub(name=name):
                return _hub_id(name)  # it may be a folder
    return ""
