"""Techniques as classes: what a new one must have, and what a notebook pays for them."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.deepspeed.files import load
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.techniques.ddp import DDP
from workbench.finetune.techniques.plain import Plain
from workbench.finetune.techniques.registry import (
    TECHNIQUES,
    YARDSTICK,
    TechniqueName,
    by_preference,
    find_technique,
    has_recipe,
    runs_alone,
    technique_of,
)
from workbench.finetune.techniques.technique import Technique


def test_a_class_without_a_member_fails_when_it_is_made() -> None:
    with pytest.raises(
        TypeError,
        match=sentence(
            "technique {} has no",
            "Half",
            "engine, preference, runs, words",
        ),
    ):

        class Half(Plain):
            """A technique that says too little."""

            name = "half"

    with pytest.raises(
        TypeError,
        match=sentence(
            "technique {} has no",
            "Empty",
            "backward, engine, kept",
            "update, words",
        ),
    ):

        class Empty(Technique):
            """A technique that says nothing."""


def test_the_registry_and_the_names_of_options_agree() -> None:
    option = next(option for option in FineTune.options() if option.name == "technique")
    assert (
        [technique.name for technique in TECHNIQUES]
        == [*option.choices]
        == [*get_args(TechniqueName)]
    )
    assert len({technique.preference for technique in TECHNIQUES}) == len(TECHNIQUES)
    assert all(technique.description.endswith(".") for technique in TECHNIQUES)


def test_every_shipped_configuration_is_read_as_its_technique() -> None:
    with_config = [technique for technique in TECHNIQUES if technique.uses_deepspeed]
    for technique in with_config:
        config, _ = load(FineTune(technique=technique.name))
        zero = config["zero_optimization"]
        assert [each.name for each in TECHNIQUES if each.is_of(zero)] == [technique.name]
        technique.refuse_config(config, "shipped")
        assert zero["stage"] == technique.zero_stage
    assert len(with_config) >= 4


def test_an_unknown_name_is_refused_and_a_script_is_none() -> None:
    with pytest.raises(
        ConfigError,
        match=sentence("is not known", "technique", "zero4", "zero3")
        + sentence(": did you mean '{}'?"),
    ):
        technique_of("zero4")
    assert find_technique("script") is None and find_technique(None) is None
    assert runs_alone(YARDSTICK) and not runs_alone("ddp") and not runs_alone(None)
    assert has_recipe("zero3") and has_recipe(None) and not has_recipe("fsdp")


def test_the_order_of_preference_begins_with_what_sends_least_and_ends_with_other_losses() -> None:
    order = [technique.name for technique in by_preference()]
    measured = ["ddp", "zero1", "zero2", "fsdp", "zero3", "zero3-offload", "single", "local-sgd"]
    assert [name for name in order if name in measured] == measured


def test_who_replicates_and_who_is_bound_to_its_ranks() -> None:
    replicates = {technique.name for technique in TECHNIQUES if technique.replicates}
    assert {"single", "ddp", "local-sgd"} <= replicates
    assert not {"zero1", "zero2", "zero3", "zero3-offload", "fsdp"} & replicates
    job = FineTune(technique="zero1", optimizer="adamw-8bit")
    assert technique_of("zero1").bound_to_ranks(job).startswith("the states of adamw-8bit")
    assert DDP().bound_to_ranks(job) == ""
    assert technique_of("local-sgd").bound_to_ranks(job)


def test_a_notebook_reads_techniques_without_a_framework() -> None:
    code = "import sys, workbench.finetune.techniques.registry; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    loaded = set(run.stdout.split())
    assert not loaded & {"torch", "transformers", "deepspeed", "accelerate", "numpy"}
