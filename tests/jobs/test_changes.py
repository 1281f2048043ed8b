"""Every option is classified by what the option changes, and benchmarks and `compare` know it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest

from workbench import FineTune
from workbench.base.record import Record
from workbench.finetune.job.views import FineTuneViews
from workbench.finetune.methods.method import Method
from workbench.finetune.methods.registry import METHODS
from workbench.finetune.options.adapters import Fsdp, LocalSgd, Lora
from workbench.finetune.options.changes import marked
from workbench.finetune.options.optimizers import LionOptions, MuonOptions
from workbench.finetune.options.training import ALLOWED

# Options that leave the meaning of the loss, and the rows and tokens of a row, as they are.
NEITHER = {
    "peft",
    "lora",
    "fsdp",
    "local_sgd",
    "device_map",
    "max_memory",
    "precision",
    "communication",
    "launcher",
    "technique",
    "deepspeed",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "warmup_ratio",
    "optimizer",
    "optimizer_options",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "sequence_parallel",
    "tensor_parallel",
    "gradient_checkpointing",
    "checkpoint_layers",
    "checkpoint_policy",
    "attn_implementation",
    "torch_compile",
    "float8",
    "eval_strategy",
    "eval_steps",
    "metrics",
    "metric_rows",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "early_stopping_patience",
    "early_stopping_threshold",
    "logging_steps",
    "per_device_eval_batch_size",
    "save_steps",
    "save_total_limit",
    "async_save",
    "checkpoints",
    "resume",
    "restarts",
    "report_to",
    "profile_step",
    "trace_steps",
    "predict_rows",
    "seed",
    "stall_timeout_s",
    "ddp_timeout",
    "env",
}
# Facts with a column and a check of their own: rows, rows a step, and steps.
OWN_COLUMNS = {
    "dataset",
    "epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
}
# Each TrainingArgument in `training` states what the argument changes.
BY_ARGUMENT = {"training"}
# Fields of the options that are objects. The options of a method change the loss as a whole.
NEITHER_INSIDE: Mapping[type[Record], set[str]] = {
    Lora: {
        "r",
        "alpha",
        "dropout",
        "use_rslora",
        "use_dora",
        "bias",
        "target_modules",
        "target_parameters",
        "modules_to_save",
        "resume_from",
    },
    Fsdp: {
        "shard",
        "layers",
        "layer_parameters",
        "group",
        "prefetch",
        "reduce_in_fp32",
        "reduce",
        "offload",
    },
    LocalSgd: {"sync_steps", "outer_learning_rate", "outer_momentum"},
    LionOptions: {"beta1", "beta2"},
    MuonOptions: {"momentum", "adjust_lr_fn", "adam_learning_rate"},
}


def test_every_option_is_classified_once() -> None:
    fields = FineTune.model_fields
    classes = [
        {*marked(fields, "loss")},
        {*marked(fields, "work")},
        NEITHER,
        OWN_COLUMNS,
        BY_ARGUMENT,
    ]
    for one, other in combinations(classes, 2):
        assert not one & other
    every = set().union(*classes)
    unclassified = fields.keys() - every
    assert not unclassified, "mark a new option with `Changes`, or name it in a list here"
    assert every == fields.keys()


@pytest.mark.parametrize("options", NEITHER_INSIDE)
def test_every_field_of_an_object_is_classified(options: type[Record]) -> None:
    assert options.model_fields.keys() == NEITHER_INSIDE[options]


@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_a_method_changes_the_loss(method: Method) -> None:
    options = {**PLAIN, "method": method.name}
    for name in method.options.model_fields:
        changed = {**options, "method_options": {name: 0.7}}
        assert FineTuneViews.loss_facts(changed) != FineTuneViews.loss_facts(options)


@pytest.mark.parametrize("name", ALLOWED)
def test_a_training_argument_changes_what_it_states(name: str) -> None:
    changed = {**PLAIN, "training": {name: 5}}
    facts = [FineTuneViews.loss_facts(changed), FineTuneViews.work_facts(changed)]
    plain = [FineTuneViews.loss_facts(PLAIN), FineTuneViews.work_facts(PLAIN)]
    differs = [one != other for one, other in zip(facts, plain, strict=True)]
    assert differs == [ALLOWED[name] == "loss", ALLOWED[name] == "work"]
    is_same_group = (
        FineTuneViews.table_columns(changed)["sequence"]
        == (FineTuneViews.table_columns(PLAIN)["sequence"])
    )
    assert is_same_group == (ALLOWED[name] is None)


PLAIN = FineTune(model="tiny-llama", max_source_length=64, max_target_length=64).to_dict()
OTHER = {
    "packing": True,
    "tokens_per_micro_batch": 512,
    "label_smoothing_factor": 0.1,
    "router_aux_loss_coef": 0.5,
    "chat_template": "{{ messages }}",
    "system": "Answer in SQL.",
    "loss_on": "all",
    "prompt": "alpaca",
    "method": "dpo",
    "method_options": {"beta": 0.2},
    "max_source_length": 32,
    "max_target_length": 32,
    "source_language": "eng_Latn",
    "target_language": "deu_Latn",
    "train_sampling_strategy": "random",
    "rewards": ["judge.py:score"],
    "model_revision": "v2",
}


@pytest.mark.parametrize("name", OTHER)
def test_rows_with_another_loss_or_other_work_are_of_different_groups(name: str) -> None:
    # Options of a method belong to a job of that method.
    base = {**PLAIN, "method": "dpo"} if name == "method_options" else PLAIN
    one = FineTuneViews.table_columns(base)["sequence"]
    other = FineTuneViews.table_columns({**base, name: OTHER[name]})["sequence"]
    assert one != other
    facts = [
        (FineTuneViews.loss_facts(options), FineTuneViews.work_facts(options))
        for options in (base, {**base, name: OTHER[name]})
    ]
    assert facts[0] != facts[1]


def test_every_marked_option_is_tried_here() -> None:
    fields = FineTune.model_fields
    # The model has a column of its own.
    assert {*marked(fields, "loss"), *marked(fields, "work")} - {"model"} == OTHER.keys()


def test_long_templates_that_begin_and_end_alike_are_told_apart() -> None:
    words = []
    for middle in "ab":
        template = "{{ x }}" * 50 + middle + "{{ x }}" * 50
        words.append(FineTuneViews.table_columns({**PLAIN, "chat_template": template})["sequence"])
    assert words[0] != words[1]
    assert all(len(str(each)) < 200 for each in words)


def test_other_options_leave_rows_together() -> None:
    for name, value in {"learning_rate": 1.0, "technique": "fsdp", "peft": "lora"}.items():
        changed = {**PLAIN, name: value}
        assert (
            FineTuneViews.table_columns(changed)["sequence"]
            == (FineTuneViews.table_columns(PLAIN)["sequence"])
        )
        assert FineTuneViews.loss_facts(changed) == FineTuneViews.loss_facts(PLAIN)
