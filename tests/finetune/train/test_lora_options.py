"""What peft's LoraConfig can do more, under the techniques; and adapters that are trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forkedruns import LENGTH, Plan, Ran
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.answers.serving.serve import Answerer
from workbench.finetune.data.rows import Example
from workbench.finetune.deepspeed.defaults import on_base
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import load as model
from workbench.finetune.model.adapters import attached
from workbench.finetune.plan.plan import plan

STEPS = 3
LORA = {"use_dora": True, "use_rslora": True, "bias": "all", "r": 4}
WHOLE = {"modules_to_save": ["lm_head", "norm"]}
HOW = {
    "model": "tiny-llama",
    "peft": "lora",
    "max_steps": STEPS,
    "learning_rate": 5e-3,
    "profile_step": 0,
    **LENGTH,
}
ONE, TWO = {"per_device_train_batch_size": 8}, {"per_device_train_batch_size": 4}
long = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("lora"))
    plan.add("single", 1, technique="single", lora=LORA, **{**HOW, **ONE})
    for technique in ("zero3", "fsdp"):
        plan.add(technique, 2, technique=technique, lora=LORA, **{**HOW, **TWO})
    plan.add("q", 1, technique="single", lora=LORA, **{**HOW, **ONE, "peft": "qlora"})
    plan.add("whole", 1, technique="single", lora=WHOLE, **{**HOW, **ONE})
    for technique in ("zero2", "zero3", "fsdp"):
        plan.add(f"whole-{technique}", 2, technique=technique, lora=WHOLE, **{**HOW, **TWO})
    plan.add("whole-q", 1, technique="single", lora=WHOLE, **{**HOW, **ONE, "peft": "qlora"})
    whole = {**HOW, "model": str(plan.root / "whole" / "out" / "model")}
    plan.add("whole-more", 1, technique="single", **{**whole, **ONE})
    trained = {**HOW, "model": str(plan.root / "single" / "out" / "model"), "eval_steps": None}
    plan.add("more", 1, technique="single", **{**trained, **ONE})
    for technique in ("zero3", "fsdp"):
        plan.add(f"more-{technique}", 2, technique=technique, **{**trained, **TWO})
    return plan.run(timeout_s=900)


def config_of(run: Ran) -> dict[str, object]:
    return dict(json.loads((run.folder / "out" / "model" / "adapter_config.json").read_text()))


class TestOnRanks:
    pytestmark = long

    @pytest.mark.parametrize("name", ["zero3", "fsdp"])
    def test_dora_rslora_and_biases_train_alike_under_every_technique(
        self, ran: dict[str, Ran], name: str
    ) -> None:
        run, single = ran[name], ran["single"]
        assert set(run.exit_codes.values()) == {0}, run.stderr()
        for metric in ("loss", "grad_norm"):
            assert run.curve(metric) == pytest.approx(single.curve(metric), rel=1e-3), metric
        assert run.data("end")[0]["eval_loss"] == pytest.approx(
            single.data("end")[0]["eval_loss"], rel=1e-3
        )

    def test_the_options_reach_peft(self, ran: dict[str, Ran]) -> None:
        assert set(ran["q"].exit_codes.values()) == {0}, ran["q"].stderr()
        config = config_of(ran["single"])
        assert {name: config[name] for name in LORA} == LORA
        assert config["base_model_name_or_path"] == "tiny-llama" and config["revision"] == "seed-0"
        weights = load_file(ran["single"].folder / "out" / "model" / "adapter_model.safetensors")
        assert any("lora_magnitude_vector" in name for name in weights)

    @pytest.mark.parametrize("name", ["more", "more-zero3", "more-fsdp"])
    def test_adapters_go_on_from_where_they_were(self, ran: dict[str, Ran], name: str) -> None:
        run, before, alone = ran[name], ran["single"].data("end")[0], ran["more"]
        assert set(run.exit_codes.values()) == {0}, run.stderr()
        end = run.data("end")[0]
        assert end["first_eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-4)
        assert float(str(end["eval_loss"])) < float(str(before["eval_loss"]))
        assert run.curve("loss") == pytest.approx(alone.curve("loss"), rel=1e-3)
        assert {
            n: config_of(run)[n] for n in ("use_dora", "r", "base_model_name_or_path", "revision")
        } == {
            "use_dora": True,
            "r": 4,
            "base_model_name_or_path": "tiny-llama",
            "revision": "seed-0",
        }

    @pytest.mark.parametrize("name", ["whole-zero2", "whole-zero3", "whole-fsdp"])
    def test_modules_that_are_trained_whole_learn_alike_under_every_technique(
        self, ran: dict[str, Ran], name: str
    ) -> None:
        run, single = ran[name], ran["whole"]
        assert set(run.exit_codes.values()) == {0}, run.stderr()
        for metric in ("loss", "grad_norm"):
            assert run.curve(metric) == pytest.approx(single.curve(metric), rel=1e-3), metric
        head = "base_model.model.lm_head.weight"
        mine, theirs = saved(run)[head], saved(single)[head]
        assert torch.allclose(mine, theirs, rtol=1e-2, atol=1e-4)

    def test_modules_that_are_trained_whole_are_saved_merged_and_continued(
        self, ran: dict[str, Ran], tmp_path: Path
    ) -> None:
        run, plain = ran["whole"], ran["single"]
        assert set(run.exit_codes.values()) == {0}, run.stderr()
        rows = [Example(source="How many?", target="Three")]
        weights = saved(run)
        start = run.data("start")[0]
        head = weights["base_model.model.lm_head.weight"]
        assert "base_model.model.model.norm.weight" in weights
        assert not any("layernorm" in name for name in weights), "peft matches the ends of names"
        learned = head.numel() + head.shape[1]
        assert int(str(start["trainable_parameters"])) - learned == sum(
            value.numel() for name, value in weights.items() if "lora_" in name
        )
        assert start["parameters"] != plain.data("start")[0]["parameters"]
        # The merged model has the trained weights, and the evaluation loss of the run.
        folder = run.folder / "out" / "model"
        made = json.loads((run.folder / "job.json").read_text())["job"]
        answerer = Answerer(str(folder), FineTune(**{**HOW, "lora": made["lora"]}))
        answerer.export(str(tmp_path / "merged"), dtype=None, merged=True, max_shard_size="1GB")
        whole = model.load(str(tmp_path / "merged"), rows, seed=0).model
        assert torch.equal(whole.lm_head.weight, head)
        more = ran["whole-more"]
        assert set(more.exit_codes.values()) == {0}, more.stderr()
        end = more.data("end")[0]
        assert end["first_eval_loss"] == pytest.approx(run.data("end")[0]["eval_loss"], rel=1e-4)
        assert not torch.equal(saved(more)["base_model.model.lm_head.weight"], head)
        assert config_of(more)["modules_to_save"] == ["lm_head", "model.norm"]

    def test_modules_are_trained_whole_beside_weights_of_4_bits(self, ran: dict[str, Ran]) -> None:
        run = ran["whole-q"]
        assert set(run.exit_codes.values()) == {0}, run.stderr()
        assert "base_model.model.lm_head.weight" in saved(run)


def saved(run: Ran) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "out" / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("base", "names", "message"),
    [
        ("tiny-llama", ["lm_hed"], "the module 'lm_hed' is not known: did you mean 'lm_head'"),
        ("tiny-llama", ["layers.0"], "'model.layers.0', a module of self_attn, mlp"),
        ("tiny-llama", ["act_fn"], r"'model\.layers\.0\.mlp\.act_fn', a module without weights"),
        ("tiny-t5", ["lm_head"], r"'lm_head', and its weight is also .* \(tied embeddings\)"),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_refused(
    base: str, names: list[str], message: str
) -> None:
    job = FineTune(model=base, peft="lora", lora={"modules_to_save": names})
    loaded = model.load(base, [Example(source="How many?", target="Three")], seed=0)
    with pytest.raises(ConfigError, match=f"^lora modules_to_save.*{message}"):
        attached(loaded, job)


def test_a_plan_counts_modules_that_are_trained_whole() -> None:
    rows = []
    for lora in ({}, {"modules_to_save": ["lm_head"]}):
        job = FineTune(model="tiny-llama", peft="lora", lora=lora, technique="single")
        rows.append(plan(job, pods=1))
    assert rows[1].trained - rows[0].trained == 4096 * 128
    assert rows[1].parameters - rows[0].parameters == 4096 * 128


def adapters(folder: Path, base: str, **config: object) -> Path:
    folder.mkdir()
    made = {
        "base_model_name_or_path": base,
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["v", "q"],
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(made))
    return folder


def test_a_folder_of_adapters_stands_for_its_base_with_the_options_they_were_made_with(
    tmp_path: Path,
) -> None:
    folder = adapters(tmp_path / "a", "tiny-llama", use_dora=True, revision="seed-7", bias="none")
    job = on_base(FineTune(model=str(folder), peft="lora"))
    assert (job.model, job.seed, job.lora["resume_from"], job.lora["r"]) == (
        "tiny-llama",
        7,
        str(folder),
        4,
    )
    assert (job.lora["target_modules"], job.lora["use_dora"]) == (["q", "v"], True)
    assert on_base(job) == job
    assert (
        on_base(FineTune(model="gpt2", peft="lora", lora={"resume_from": str(folder)})).model
        == "gpt2"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"peft": "none"},
            sentence("give peft='lora' or 'qlora' to continue to train them"),
        ),
        (
            {"lora": {"r": 8}},
            sentence("lora {} is {}, and the adapters in {} have {}; drop it", "r", 8, 4),
        ),
        (
            {"seed": 3},
            sentence("and the job's seed is", "tiny-llama", 7, 3),
        ),
    ],
)
def test_what_does_not_fit_trained_adapters_is_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    folder = adapters(tmp_path / "a", "tiny-llama", revision="seed-7")
    with pytest.raises(ConfigError, match=message):
        on_base(FineTune(**{"model": str(folder), "peft": "lora", **options}))  # type: ignore[arg-type]


def test_a_damaged_folder_of_adapters_is_named(tmp_path: Path) -> None:
    folder = adapters(tmp_path / "a", "tiny-llama")
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(
        ConfigError,
        match=sentence(
            "the adapters in {} cannot be gone on with: {} is unreadable", "adapter_config.json"
        ),
    ):
        on_base(FineTune(model=str(folder), peft="lora"))


@pytest.mark.slow
def test_merging_keeps_the_number_format_of_the_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = model.load("tiny-llama", [Example(source="How many?", target="Three")], seed=0)
    base.model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    get_peft_model(base.model.float(), config).save_pretrained(str(tmp_path / "adapters"))
    base.tokenizer.save_pretrained(tmp_path / "adapters")
    job = FineTune(model=str(tmp_path / "base"), peft="lora")
    written = {}
    for dtype in (None, "fp32"):
        target = tmp_path / f"merged-{dtype}"
        Answerer(str(tmp_path / "adapters"), job).export(
            str(target), dtype=dtype, merged=True, max_shard_size="5GB"
        )
        written[dtype] = {value.dtype for value in load_file(target / "model.safetensors").values()}
    assert written == {None: {torch.bfloat16}, "fp32": {torch.float32}}
