"""The list of refusals: who runs the rows of the list, and a job that all callers refuse alike."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.finetune.submit import folders
from workbench.base.errors import ConfigError
from workbench.display.compose.composition import Composition
from workbench.finetune.job import refusals
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import REFUSALS, Facts, Refusal
from workbench.finetune.lm_eval.evaluate import check_trained
from workbench.finetune.plan import plan as planning
from workbench.finetune.plan import reading
from workbench.finetune.plan.plan import plan
from workbench.finetune.plan.reading import preview
from workbench.finetune.submit.prepare import check_early
from workbench.finetune.submit.resume import write_resumption
from workbench.jobs.job import NewRun

MODEL = {"kind", "family", "config", "tokenizer", "has_template", "folder", "outline"}
"""Facts about a model's folder on the user's machine."""
FILES = {"weights", "adapters"}
PODS = {"gpus", "on_pod", "ranks", "deepspeed"}
HYBRID = {"technique": "fsdp", "fsdp": {"shard": "hybrid"}}
QLORA = {"peft": "qlora"}
TIED = {"peft": "lora", "lora": {"target_modules": ["lm_head"]}}
SPREAD = {"technique": "single", "device_map": "auto", "max_memory": {3: 20}}
ANSWERS = {"method_options": {"num_generations": 4}, "per_device_train_batch_size": 6}
LOGGER = {"zero_optimization": {"stage": 1}, "comms_logger": {"enabled": True}}
BATCH = {"zero_optimization": {"stage": 1}, "train_batch_size": 24}


class Accepted(Exception):
    """No refusal was found, and the slow part would begin."""


def accept(*_args: object, **_options: object) -> None:
    raise Accepted


@pytest.fixture(autouse=True)
def nothing_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make outlines in this process, trace no step, and count no tokens."""
    importlib.import_module("transformers")
    monkeypatch.setattr(planning, "traced", accept)
    monkeypatch.setattr(reading, "_ask", accept)


def rows_of(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text('{"source": "w1", "target": "w2"}\n' * 40)
    return str(path)


def submitted(job: FineTune, folder: Path, *, gpus: int, ranks: int) -> None:
    root = folder / "run"
    (root / "inputs").mkdir(parents=True)
    chosen = job.chosen(gpus=gpus, ranks=ranks, apart=False)
    chosen.prepare(NewRun(root=root, asked=job, ranks=ranks, gpus=gpus))


def planned(job: FineTune, *, gpus: int, ranks: int) -> None:
    """Plan a job; raise ConfigError if the row of its technique is refused."""
    pods = ranks // max(1, gpus) or 1
    limits = {"gpu_memory_gib": 80} if gpus else {}
    settings = planning._settings
    refused: dict[str, Any] = {}

    def kept(*args: Any, **options: Any) -> Any:
        there, rows = settings(*args, **options)
        refused.update(rows)
        return there, rows

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Accepted):
        patch.setattr(planning, "_settings", kept)
        plan(job, pods=pods, gpus=max(1, gpus), techniques=[job.technique], **limits)
    if refused:
        raise ConfigError(refused[job.technique].why)


def previewed(job: FineTune) -> None:
    with pytest.raises(Accepted):
        preview(job)


def adapters(folder: Path) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return str(folder)


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Places in the list of the refusals that ran; none refuses."""
    ran: list[int] = []

    def recorded(place: int, refusal: Refusal) -> Refusal:
        return refusal._replace(check=lambda *_: ran.append(place))

    made = [recorded(place, refusal) for place, refusal in enumerate(REFUSALS)]
    monkeypatch.setattr(refusals, "REFUSALS", made)
    return ran


def needing(known: Collection[str]) -> set[int]:
    return {place for place, row in enumerate(REFUSALS) if {*row.needs} <= {*known}}


@pytest.mark.parametrize("entry", ["submit", "benchmark", "form", "plan", "preview", "evaluate"])
def test_every_refusal_runs_wherever_its_facts_are_known(
    entry: str, tmp_path: Path, rows_run: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folders.model(tmp_path / "model")
    job = FineTune(
        model=str(model),
        dataset=rows_of(tmp_path),
        peft="lora",
        lora={"resume_from": adapters(tmp_path / "adapters")},
    )
    monkeypatch.setattr(Composition, "make_job", lambda _: job)
    entries: Mapping[str, tuple[Callable[[], object], set[str]]] = {
        "submit": (partial(submitted, job, tmp_path, gpus=0, ranks=2), MODEL | FILES | PODS),
        "benchmark": (partial(check_early, job, gpus=0, ranks=2), MODEL | FILES | PODS),
        "form": (Composition().check, MODEL | FILES | PODS),
        "plan": (partial(planned, job, gpus=0, ranks=2), MODEL | PODS),
        "preview": (partial(previewed, job), MODEL),
        "evaluate": (
            partial(check_trained, Path(str(job.lora["resume_from"])), job, before=False),
            MODEL | FILES,
        ),
    }
    call, known = entries[entry]
    for name in ("check_adapters", "check_is_there"):
        monkeypatch.setattr(f"workbench.finetune.lm_eval.evaluate.{name}", lambda _: None)
    rows_run.clear()
    call()
    assert set(rows_run) == needing(known)


def test_a_preview_reads_no_deepspeed_json(tmp_path: Path) -> None:
    model = folders.model(tmp_path / "model")
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    job = FineTune(model=str(model), dataset=rows_of(tmp_path), deepspeed=str(file))
    file.unlink()
    previewed(job)


def test_a_run_on_other_ranks_is_checked_for_the_pods_alone(
    tmp_path: Path, rows_run: list[int]
) -> None:
    (tmp_path / "inputs").mkdir()
    job = FineTune().chosen(gpus=0, ranks=2, apart=False)
    (tmp_path / "inputs" / "job.json").write_text(json.dumps({"job": job.to_dict()}))
    rows_run.clear()
    write_resumption(tmp_path, gpus=0, before=2, ranks=1, last_step=None)
    assert needing(PODS) <= set(rows_run)


def test_the_ranks_know_every_fact_that_no_notebook_knows() -> None:
    named = {need for refusal in REFUSALS for need in refusal.needs}
    assert named == {*Facts.__dataclass_fields__}
    assert named - MODEL - FILES - PODS == {"special"}


def test_a_refusal_names_an_option() -> None:
    assert {refusal.option for refusal in REFUSALS} <= {each.name for each in FineTune.options()}


Case = tuple[Mapping[str, object], Mapping[str, object], tuple[int, int], str]
NO_PODS: Mapping[str, Case] = {
    # Settings of the model's folder, options of the job, GPUs and ranks, and words of the refusal.
    "template": ({}, {"prompt": "chat"}, (0, 1), "no chat template"),
    "shared rows": ({}, {"sequence_parallel": 3}, (0, 3), "the model has .* heads"),
    "shared weights": ({}, {"tensor_parallel": 3}, (3, 3), "the model has .* heads"),
    "tied": ({"tie_word_embeddings": True}, TIED, (0, 1), "names 'lm_head'"),
    "experts": ({"num_local_experts": 4}, QLORA, (1, 1), "stacked experts"),
    "language": ({}, {"source_language": "de"}, (0, 1), "is for encoder-decoder models"),
    "revision": ({}, {"model_revision": "v1"}, (0, 1), "is a folder; only a model of the hub"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, {}, (0, 1), "gptq"),
    "no such type": ({"model_type": "nope"}, {}, (0, 1), "nope"),
}
WITH_PODS: Mapping[str, Case] = {
    "fp16": ({}, {"precision": "fp16"}, (0, 1), "'fp16' needs GPUs"),
    "tf32": ({}, {"precision": "tf32"}, (0, 1), "'tf32' needs NVIDIA GPUs"),
    "8 bits": ({}, {"optimizer": "adamw-8bit"}, (0, 1), "'adamw-8bit' needs GPUs"),
    "flash": ({}, {"attn_implementation": "flash_attention_2"}, (0, 1), "use 'sdpa' on CPUs"),
    "own flash": ({"attn_implementation": "flash_attention_2"}, {}, (0, 1), "needs GPUs. Give"),
    "liger": ({}, {"training": {"use_liger_kernel": True}}, (0, 1), "Triton"),
    "hybrid": ({}, HYBRID, (0, 2), "one slot"),
    "max_memory": ({}, SPREAD, (2, 2), "names GPU 3"),
    "groups": ({}, {"sequence_parallel": 2}, (0, 3), "3 ranks form no groups of 2"),
    "pod": ({}, {"tensor_parallel": 2}, (1, 2), "a pod has one rank"),
    "alone": ({}, {"technique": "local-sgd"}, (0, 1), "there is one"),
    "answers": ({}, {"method": "grpo", **ANSWERS}, (0, 1), "step has 6 answers"),
    "key": ({}, {"deepspeed": LOGGER}, (0, 1), "comms_logger.enabled"),
    "batch": ({}, {"deepspeed": BATCH, "per_device_train_batch_size": 5}, (0, 2), "is 24"),
}


def reward(completions: Sequence[str], **_columns: object) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize("case", [*NO_PODS, *WITH_PODS])
def test_a_job_that_one_caller_refuses_is_refused_by_all_with_the_same_words(
    case: str, tmp_path: Path
) -> None:
    config, options, (gpus, ranks), words = {**NO_PODS, **WITH_PODS}[case]
    model = folders.model(tmp_path / "model", **config)
    if options.get("method") == "grpo":
        options = {**options, "rewards": [reward]}
    job = FineTune(**{"model": str(model), "dataset": rows_of(tmp_path), **options})
    callers = [
        partial(submitted, job, tmp_path, gpus=gpus, ranks=ranks),
        partial(check_early, job, gpus=gpus, ranks=ranks),
        partial(planned, job, gpus=gpus, ranks=ranks),
    ]
    if case in NO_PODS:
        callers.append(partial(previewed, job))
    said = set()
    for call in callers:
        with pytest.raises(ConfigError, match=words) as refused:
            call()
        said.add(str(refused.value))
    assert len(said) == 1
