"""Which options a resumed job may change: every option is compared unless it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.base.errors import ConfigError
from workbench.base.files import read_json
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.submit.resume import CHANGES_NOTHING, COMPARED, COMPARED_APART, LENGTH
from workbench.rundir.checkpoints import write_manifest
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec

# Written out on purpose: a new option fails this test
# until its author has put it into one of the lists.
SAME = """
    router_aux_loss_coef method method_options model_revision
    model technique peft lora fsdp local_sgd precision learning_rate lr_scheduler_type warmup_steps
    warmup_ratio optimizer weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    label_smoothing_factor attn_implementation torch_compile float8 training max_source_length
    max_target_length prompt chat_template system loss_on packing seed train_sampling_strategy
    source_language target_language tensor_parallel optimizer_options
    tokens_per_micro_batch
"""


def test_every_option_is_in_exactly_one_list() -> None:
    lists: list[frozenset[str]] = [CHANGES_NOTHING, LENGTH, COMPARED_APART, frozenset(SAME.split())]
    assert sorted(name for each in lists for name in each) == sorted(FineTune.model_fields)
    assert sorted(COMPARED) == sorted(SAME.split())


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with a checkpoint of step 4."""
    root = tmp_path_factory.mktemp("runs") / "before"
    prepared = prepare_run(RunSpec(cluster=ClusterSpec(count=1), job=job_of()), root=root)
    part = prepared.paths.checkpoints / "step-4" / "pod-0" / "rank-0"
    part.mkdir(parents=True)
    (part / "state.json").write_text("{}")
    write_manifest(part, step=4, rank=0, world_size=1)
    return root


def job_of(**options: Any) -> FineTune:
    rows = {"kind": "wikisql-mini", "train_rows": 24, "eval_rows": 4}
    return FineTune(
        **{"dataset": rows, "technique": "ddp", "max_steps": 40, "save_steps": 4, **options}
    )


def resumed_notes(before: Path, root: Path, **options: Any) -> list[str]:
    job = job_of(**{"resume": str(before), **options})
    prepared = prepare_run(RunSpec(cluster=ClusterSpec(count=1), job=job), root=root)
    notes: list[str] = read_json(prepared.paths.job)["resume"]["notes"]  # type: ignore[index, call-overload, assignment]
    return notes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"communication": "bf16"}, "communication is 'bf16' and was 'fp32'"),
        ({"attn_implementation": "eager"}, "attn_implementation is 'eager' and was None"),
        ({"torch_compile": True}, "torch_compile is True and was False"),
        ({"adam_beta2": 0.95}, "adam_beta2 is 0.95 and was 0.999"),
        (
            {"training": {"neftune_noise_alpha": 5}},
            "training is {'neftune_noise_alpha': 5} and was {}",
        ),
    ],
)
def test_an_option_that_changes_the_steps_is_refused(
    before: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resumed_notes(before, tmp_path / "run", **options)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True, "eval_steps": 2, "logging_steps": 5},
        {"communication": "fp32"},
    ],
)
def test_an_option_that_changes_nothing_is_accepted(
    before: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert resumed_notes(before, tmp_path / "run", **options) == []


def test_another_length_is_accepted_with_a_note(before: Path, tmp_path: Path) -> None:
    (note,) = resumed_notes(before, tmp_path / "longer", max_steps=400)
    assert (
        note
        == "max_steps is 400 and was 40: the learning rate follows the schedule of the new length"
    )
