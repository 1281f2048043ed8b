"""A method is a class that is checked when it is made; a job is refused with what to do."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from tests.support.sentences import sentence
from workbench import FineTune, plan
from workbench.base.errors import ConfigError
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.export.recipe import repeats
from workbench.finetune.methods.method import Method
from workbench.finetune.methods.registry import METHODS, MethodName, method_of
from workbench.finetune.options.evaluation import best_metric
from workbench.rundir.figures.metrics import known

REWARDS = {"rewards": ["reward.py:shared"]}


def job(method: str, **options: Any) -> FineTune:
    given = REWARDS if method == "grpo" else {}
    return FineTune(**{"model": "tiny-llama", "method": method, **given, **options})


def test_a_method_without_a_member_fails_when_its_class_is_made() -> None:
    with pytest.raises(TypeError, match="method Half has no metrics, options, rows, tr"):

        class Half(Method):
            name = "half"


def test_every_metric_of_a_method_has_a_row_with_a_title() -> None:
    assert get_args(MethodName) == ("sft", "dpo", "kto", "orpo", "reward", "grpo")
    for method in METHODS:
        assert method.description.endswith(".")
        for name in method.metrics:
            row = known(name)
            assert row is not None and row.title, name
            assert not row.in_panel, "only the jobs that are about it show it"
    assert job("dpo").views.panel_metrics[0] == "rewards/margins"
    assert job("sft").views.panel_metrics == ()
    assert job("sft").views.loss_unit and not job("dpo").views.loss_unit


def test_runs_of_two_methods_are_not_compared_as_equal_work() -> None:
    made = [job("dpo"), job("dpo", method_options={"beta": 0.5}), job("orpo"), job("sft")]
    words = [str(type(each.views).table_columns(each.to_dict())["sequence"]) for each in made]
    assert len(set(words)) == 4 and "method dpo, beta 0.5" in words[1]
    assert "method" not in words[3]


@pytest.mark.parametrize("method", [each.name for each in METHODS if each.uses_trl])
def test_models_are_compared_by_figures_of_the_method(method: str) -> None:
    stops = {"eval_steps": 1, "early_stopping_patience": 2}
    names = [*method_of(method).metrics, "loss"]
    for name in ("rewards/mine/mean", "reward") if method == "grpo" else names:
        made = job(method, **stops, metric_for_best_model=f"eval_{name}")
        assert best_metric(made) == ("eval_loss" if name == "loss" else name)
    if method != "grpo":
        with pytest.raises(ConfigError, match=sentence("is not known")):
            job(method, **stops, metric_for_best_model="perplexity")


@pytest.mark.parametrize("method", get_args(MethodName))
def test_a_job_returns_from_its_json_form(method: str) -> None:
    made = job(method)
    assert FineTune.from_dict(made.to_dict()) == made


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "dpo", "model": "tiny-t5"}, "use a causal model such as 'tiny-llama'"),
    ({"method": "dpo", "method_options": {"betta": 1}}, "did you mean 'beta'?"),
    ({"method": "dpo", "method_options": {"loss_type": "best"}}, "loss_type"),
    ({"method": "dpo", "method_options": {"loss_type": "exo_pair"}}, "label_smoothing above 0"),
    ({"method": "sft", "method_options": {"beta": 1}}, "'beta' is an option of 'dpo'"),
    ({"method": "dpo", "technique": "local-sgd"}, "use 'ddp' or a ZeRO stage"),
    ({"method": "orpo", "packing": True}, "drop packing"),
    (
        {"method": "dpo", "tokens_per_micro_batch": 512, "per_device_train_batch_size": 1},
        "drop tokens_per_micro_batch",
    ),
    ({"method": "kto", "loss_on": "all"}, "drop loss_on"),
    ({"method": "kto", "per_device_train_batch_size": 1}, "use 2 or more"),
    ({"method": "dpo", "metrics": ["perplexity"]}, "drop 'perplexity'"),
    ({"method": "reward", "metrics": ["rouge"]}, "drop metrics"),
    ({"method": "grpo", "metrics": ["rouge"]}, "drop metrics"),
    ({"method": "dpo", "sequence_parallel": 2}, "drop sequence_parallel"),
    ({"method": "dpo", "label_smoothing_factor": 0.1}, "drop label_smoothing_factor"),
    ({"method": "dpo", "torch_compile": True}, "drop torch_compile"),
    ({"method": "dpo", "rewards": ["r.py:f"]}, "drop rewards"),
    ({"method": "grpo", "rewards": []}, r"give rewards=\[function\]"),
    ({"method": "grpo", "rewards": ["r.txt"]}, "job rewards 'r.txt'"),
    ({"method": "grpo", "rewards": [lambda answers: [0]]}, "must take the argument `completions`"),
    ({"method": "dpo", "training": {"use_liger_kernel": True}}, "drop use_liger_kernel"),
    (
        {"method": "dpo", "peft": "lora", "lora": {"target_modules": ["q_proj", "lm_head"]}},
        "leave lm_head out",
    ),
    ({"method": "dpo", "beta": 0.1}, "in method_options"),
    ({"method": "grpo", "reward_funcs": []}, "use rewards"),
    ({"method": "ppo"}, "a Script with TRL can do it"),
    ({"technique": "dpo"}, "use method='dpo'"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_a_job_without_meaning_is_refused_with_a_remedy(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        job(options.pop("method", "sft"), **options)


def test_the_answers_of_a_step_must_be_whole_groups() -> None:
    grpo = method_of("grpo")
    made = job("grpo", per_device_train_batch_size=6, method_options={"num_generations": 4})
    grpo.refuse_ranks(made, 2)
    assert grpo.rows_of_step(made, 2) == 3
    with pytest.raises(ConfigError, match="step has 6 answers on 1 ranks"):
        grpo.refuse_ranks(made, 1)
    with pytest.raises(ConfigError, match="an evaluation"):
        grpo.refuse_ranks(made.replace(per_device_eval_batch_size=3), 2)


def test_a_run_on_fewer_ranks_keeps_whole_groups_and_kto_its_pairs_of_rows() -> None:
    options = {"num_generations": 4}
    made = job("grpo", per_device_train_batch_size=4, method_options=options).on_ranks(3, 2)
    assert made.global_batch(3) % 4 == 0
    assert job("kto", per_device_train_batch_size=2).on_ranks(2, 1).per_device_train_batch_size == 2
    sft = job("sft", per_device_train_batch_size=2).on_ranks(2, 1)
    assert sft.per_device_train_batch_size == 1


def test_a_pod_without_trl_is_told_the_line_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("No module named 'trl'")

    monkeypatch.setattr("workbench.finetune.methods.method.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r'PodSpec\(pip=\["trl>=1.16"\]\)'):
        method_of("dpo").on_pods()


def test_only_sft_is_repeated_without_the_project() -> None:
    assert [name for name in get_args(MethodName) if repeats(name)] == ["sft"]


def test_a_plan_counts_pairs_the_reference_and_the_answers_to_write() -> None:
    def host(method: str, **options: Any) -> dict[str, float]:
        rows = plan(job(method, **options), pods=2, memory_gib=8).rows
        return {row.technique: row.host.parameters for row in rows if row.host}

    def activations(method: str, **options: Any) -> float:
        rows = plan(job(method, **options), pods=1, techniques=["single"], memory_gib=8).rows
        assert rows[0].host is not None
        return rows[0].host.activations

    weights = host("sft")["ddp"]
    assert host("dpo")["ddp"] == pytest.approx(2 * weights)
    # Under ZeRO-3 the reference is sharded as well, and with adapters there is no second model.
    assert host("dpo")["zero3"] < 0.75 * host("dpo")["ddp"]
    lora = {"peft": "lora"}
    assert host("dpo", **lora)["ddp"] == pytest.approx(host("sft", **lora)["ddp"])
    assert "local-sgd" not in host("dpo")
    assert activations("orpo") == pytest.approx(2 * activations("sft"), rel=0.05)
    many = {"gradient_accumulation_steps": 512}
    assert activations("grpo", **many) > 2 * activations("grpo")


OF_TRL = [method for method in METHODS if method.uses_trl]


@pytest.mark.parametrize("method", OF_TRL, ids=lambda method: method.name)
def test_the_rate_of_a_method_is_ten_times_as_high_with_adapters(method: Method) -> None:
    expected = 1e-4 if method.name == "reward" else 1e-6

    def rate(**options: Any) -> float | None:
        return choose(job(method.name, **{"model": "gpt2", **options}), gpus=0).learning_rate

    assert rate() == expected
    assert rate(peft="lora") == rate(peft="qlora") == float(f"{10 * expected:g}")
    assert rate(optimizer="lion") == pytest.approx(expected / 5)
    assert rate(model="tiny-llama") == 1e-3
    assert rate(learning_rate=3e-5) == 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("method", OF_TRL, ids=lambda method: method.name)
def test_the_rate_of_a_method_without_adapters_is_that_of_trl(method: Method) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(method.on_pods().Arguments)}
    assert method.learning_rates is not None
    assert method.learning_rates[0] == fields["learning_rate"]
