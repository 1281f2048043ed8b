"""The options that transformers' users know: equal numbers under every technique; their places."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from transformers import Seq2SeqTrainingArguments

from tests.support.forkedruns import LENGTH, Plan, Ran
from workbench.finetune.job.deepspeed_config import resolve
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.renamed_options import OTHERWISE
from workbench.finetune.options.training import ALLOWED
from workbench.finetune.recipe import lean_loss
from workbench.finetune.recipe.lean_loss import LeanLoss
from workbench.finetune.recipe.standalone import training_options

OPTIONS = {
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "label_smoothing_factor": 0.1,
}
STEPS = 4
TECHNIQUES = ("ddp", "zero1", "zero3-offload", "fsdp")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("options"))
    # Rows of a compiled model are padded, and would be grouped by length.
    order = {"train_sampling_strategy": "random"}
    how = {"profile_step": 0, "max_steps": STEPS, "model": "tiny-llama", **order, **LENGTH}
    one, two = {**how, "per_device_train_batch_size": 8}, {**how, "per_device_train_batch_size": 4}
    plan.add("single", 1, technique="single", **one, **OPTIONS)
    chosen = {"gradient_checkpointing": True, "checkpoint_layers": ["LlamaMLP", "LlamaAttention"]}
    for technique in TECHNIQUES:
        plan.add(technique, 2, technique=technique, **two, **OPTIONS, **chosen)
    plan.add("default", 1, technique="single", **one)
    spread = {"device_map": "auto", "max_memory": {0: 1, 1: 1}}
    plan.add(
        "pipeline",
        1,
        technique="single",
        **{**one, **OPTIONS, **chosen, **spread, "profile_step": 2},
    )
    # Its own backend compiles nothing: what is looked at is
    # that a wrapped model trains and is saved as it was.
    compiled = {
        "torch_compile": True,
        "profile_step": 2,
        "training": {"torch_compile_backend": "eager"},
        "attn_implementation": "eager",
    }
    plan.add("compiled", 2, technique="ddp", **{**two, **OPTIONS, **compiled})
    unprofiled = {**compiled, "profile_step": 0}  # a profile compiles once more
    plan.add("compiled-zero3", 2, technique="zero3", **{**two, **OPTIONS, **unprofiled})
    return plan.run(timeout_s=900)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [*TECHNIQUES, "pipeline", "compiled", "compiled-zero3"])
def test_every_technique_follows_one_process_with_other_options_than_the_defaults(
    ran: dict[str, Ran], name: str
) -> None:
    run, single = ran[name], ran["single"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    for metric in ("loss", "grad_norm", "learning_rate"):
        assert run.curve(metric) == pytest.approx(single.curve(metric), rel=1e-3), metric
    (end,), (of_single,) = run.data("end"), single.data("end")
    assert end["eval_loss"] == pytest.approx(of_single["eval_loss"], rel=1e-4)
    assert end["eval_loss"] != pytest.approx(ran["default"].data("end")[0]["eval_loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.long
def test_a_compiled_model_is_saved_under_its_own_names(ran: dict[str, Ran]) -> None:
    from safetensors import safe_open

    def names(run: Ran) -> set[str]:
        with safe_open(str(run.folder / "out" / "model" / "model.safetensors"), "pt") as weights:
            return set(weights.keys())

    assert (
        names(ran["compiled"])
        == names(ran["single"])
        == names(ran["compiled-zero3"])
        == names(ran["pipeline"])
    )


@pytest.mark.slow
@pytest.mark.long
def test_layers_on_two_devices_train_as_on_one_and_the_run_says_where_they_are(
    ran: dict[str, Ran],
) -> None:
    run, single = ran["pipeline"], ran["single"]
    # The same sums in the same order.
    assert run.curve("loss") == single.curve("loss") and run.curve("grad_norm") == single.curve(
        "grad_norm"
    )
    parts = (
        "GPU 0 has model.embed_tokens, model.layers.0; GPU 1 has "
        "model.layers.1, model.norm, model.rotary_emb, lm_head"
    )
    assert {"message": f"device_map: {parts}"} in run.data("note")


def options_of(**job: object) -> dict[str, object]:
    asked = FineTune(**job)  # type: ignore[arg-type]
    options: dict[str, object] = training_options(
        asked.to_dict(), resolve(asked, gpus=0), gpus=False
    )
    return options


@pytest.mark.parametrize("technique", ["single", *TECHNIQUES, "zero2", "zero3"])
def test_every_technique_is_given_the_same_arguments(technique: str) -> None:
    own = (
        "bf16",
        "deepspeed",
        "accelerator_config",
        "optim",
    )  # AdamW is fused where it is not sharded by FSDP
    more = {
        "training": {"neftune_noise_alpha": 5},
        "ddp_timeout": 60,
        "torch_compile": technique != "fsdp",
    }
    single = options_of(
        technique="single", **{**OPTIONS, **more, "torch_compile": technique != "fsdp"}
    )
    options = options_of(technique=technique, **OPTIONS, **more)
    assert {n: v for n, v in options.items() if n not in own} == {
        n: v for n, v in single.items() if n not in own
    }
    expected = {**OPTIONS, "neftune_noise_alpha": 5, "ddp_timeout": 60}
    assert {name: options[name] for name in expected} == expected


def test_a_warm_up_is_a_share_of_the_steps_unless_steps_are_given() -> None:
    asked: tuple[dict[str, object], ...] = (
        {},
        {"warmup_ratio": 0.25},
        {"warmup_ratio": 0},
        {"warmup_steps": 0},
        {"warmup_steps": 7},
    )
    assert [options_of(**each)["warmup_steps"] for each in asked] == [0.1, 0.25, 0, 0, 7]


def test_every_training_argument_is_a_job_s_own_or_handed_on_or_explained() -> None:
    names = {field.name for field in fields(Seq2SeqTrainingArguments)}
    assert {*OTHERWISE, *ALLOWED} <= names
    assert not names - {*OTHERWISE, *ALLOWED, *FineTune.model_fields}
    assert not set(OTHERWISE) & ALLOWED.keys()


def test_the_smoothed_loss_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 11)
    hidden, labels = torch.randn(2, 5, 4), torch.randint(0, 11, (2, 5))
    labels[0, 3:] = -100
    theirs = LabelSmoother(epsilon=0.2)({"logits": layer(hidden)}, labels)
    monkeypatch.setattr(lean_loss, "returns_scores", lambda _: True)
    lean = LeanLoss(SimpleNamespace(get_output_embeddings=lambda: layer), causal=False)
    with lean.of(labels, torch.device("cpu"), smoothing=0.2):
        outputs = {"logits": layer(hidden)}
    assert float(lean.total(outputs, labels)) / 8 == pytest.approx(float(theirs), rel=1e-6)


def test_a_rank_gives_its_time_limit_to_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.finetune.recipe import standalone

    given: list[object] = []
    monkeypatch.setattr(
        standalone,
        "PartialState",
        lambda **options: given.append(options["timeout"].total_seconds()),
    )
    for with_deepspeed in (False, True):
        standalone.prepare(single=False, gpus=False, with_deepspeed=with_deepspeed, limit_s=77)
    assert given == [77, 77]
