"""The table of the planner: the walk-through's models on its pods, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.support.sentences import says, sentence
from tests.support.tinyfamilies import FAMILIES
from workbench import FineTune, gpus_for, plan
from workbench.base.errors import ConfigError
from workbench.cli import main
from workbench.finetune.model.shapes import KNOWN, model_config
from workbench.finetune.plan.gpus import KINDS
from workbench.finetune.plan.plan import as_planned, predict
from workbench.finetune.plan.setting import setting_of
from workbench.finetune.plan.table import PlanRow, PlanTable
from workbench.finetune.plan.tracing import Answer, Request, cached_trace, trace_of
from workbench.finetune.techniques.registry import TechniqueName, technique_of

WALK = {
    "per_device_train_batch_size": 32,
    "max_source_length": 96,
    "max_target_length": 96,
    "dataset": "wikisql",
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own: what was traced on this machine before must not answer."""
    before, folder = os.environ.get("XDG_CACHE_HOME"), tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def big(cache: Path) -> PlanTable:
    return plan(FineTune(model="t5-3b", technique="zero1", **WALK), pods=3, gpu_memory_gib=40)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.slow
def test_t5_3b_does_not_fit_one_gpu_of_40_gib_and_does_with_offload(big: PlanTable) -> None:
    assert big.parameters == pytest.approx(
        2.85e9, rel=0.01
    )  # https://arxiv.org/abs/1910.10683: "2.8 billion"
    single = big.row("single")
    assert single.fit == "does not fit" and single.micro_batch == 0
    assert single.gpu is not None
    # Weights and two moments of AdamW in FP32 alone are 12 bytes a parameter.
    assert single.gpu.parameters + single.gpu.optimizer >= 12 * big.parameters
    assert [row.technique for row in big.rows] == [*get_args(TechniqueName)]
    host = big.row("zero3-offload").host
    assert host is not None and host.optimizer > 2**33


@pytest.mark.long
@pytest.mark.slow
def test_more_pods_hold_less_each(big: PlanTable) -> None:
    wide = plan(big.job, pods=12, gpu_memory_gib=40)  # from the cache: nothing is traced again
    for name in ("zero1", "zero3", "fsdp"):
        few, many = big.row(name).gpu_gib, wide.row(name).gpu_gib
        assert few is not None and many is not None and many < few
    assert wide.row("single").gpu_gib == big.row("single").gpu_gib


@pytest.mark.long
@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_one_more_row_does_not(big: PlanTable) -> None:
    row = next(row for row in big.rows if row.micro_batch)
    for rows, fits in ((row.micro_batch, True), ((row.micro_batch or 0) + 1, False)):
        job = FineTune(
            **{
                **WALK,
                "per_device_train_batch_size": rows,
                "model": "t5-3b",
                "technique": row.technique,
            }
        )  # type: ignore[arg-type]
        again = plan(job, pods=3, gpu_memory_gib=40, techniques=[row.technique]).row(row.technique)
        assert (again.fit != "does not fit") == fits


@pytest.mark.long
@pytest.mark.slow
def test_text_and_html_say_the_same(big: PlanTable) -> None:
    text, page = str(big), big._repr_html_()
    best = big.cheapest
    for row in big.rows:
        assert row.technique in text and row.technique in page
        if row.gpu_gib is not None:
            assert f"{row.gpu_gib:.2f}" in text and f"{row.gpu_gib:.2f}" in page
    assert "Predicted" in text and "Predicted" in page
    assert (best is not None) == ("is recommended" in text)


@pytest.mark.slow
def test_the_command_line_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"kind": "finetune", "model": "tiny-llama", "technique": "zero1", "peft": "qlora"}
    spec = {
        "cluster": {"backend": {"kind": "local"}, "pods": {"cpus": 1, "memory_gib": 4}, "count": 3},
        "job": job,
    }
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    assert main(["plan", str(path)]) == 0
    said = capsys.readouterr().out
    assert "tiny-llama" in said and "is recommended" in said
    assert "zero3 is refused" in said  # it cannot shard 4-bit weights
    spec["cluster"]["pods"]["memory_gib"] = 0.5  # type: ignore[index]
    path.write_text(json.dumps(spec), encoding="utf-8")
    assert main(["plan", str(path)]) == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_loading_and_saving_are_in_the_verdict() -> None:
    job = FineTune(
        model="llama-2-13b",
        technique="zero3",
        precision="bf16",
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        max_source_length=64,
        max_target_length=64,
    )
    large, small = (plan(job, gpus=4, gpu_memory_gib=gib, memory_gib=64) for gib in (80, 32))
    zero3 = large.row("zero3")
    assert zero3.fit == "fits" and zero3.host == zero3.stages["saving"]
    assert zero3.stages["loading"].files == pytest.approx(
        26e9, rel=0.01
    )  # once, and not in the sum
    # ZeRO-1 makes one tensor of all weights: in the pod's
    # memory, with a copy, where the GPU has no room for both.
    assert large.row("zero1").stages["loading"].total < 8 * 2**30
    assert small.row("zero1").stages["loading"].total > 4 * 2 * 2 * 13e9
    assert small.row("zero1").host_gib == pytest.approx(201.5, abs=2)
    assert (
        large.row("zero3-offload").fit == "does not fit"
        and large.row("zero3-offload").stages["training"].total > 2**37
    )


@pytest.mark.parametrize(
    ("fsdp", "shards"),
    [
        ({}, 8),
        ({"shard": "hybrid"}, 4),
        ({"shard": "hybrid", "group": 2}, 2),
        ({"shard": "grads"}, 8),
    ],
)
def test_hybrid_shards_are_spread_over_the_gpus_of_a_pod(
    fsdp: dict[str, object], shards: int
) -> None:
    job = FineTune(model="llama-2-7b", technique="fsdp", fsdp=fsdp)
    assert setting_of(job, pods=2, gpus=4).shards == shards
    assert setting_of(job.replace(technique="zero3", fsdp={}), pods=2, gpus=4).shards == 8


@pytest.mark.long
def test_fsdp_with_offload_and_4_bits_hold_less_on_the_gpu() -> None:
    options = {
        "precision": "bf16",
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
    }
    job = FineTune(
        model="llama-2-70b", technique="fsdp", max_source_length=64, max_target_length=64, **options
    )  # type: ignore[arg-type]

    def row(job: FineTune) -> PlanRow:
        return plan(job, gpus=8, gpu_memory_gib=80, memory_gib=1000, techniques=["fsdp"]).row(
            "fsdp"
        )

    plain, offload, packed = (
        row(job),
        row(job.replace(fsdp={"offload": True})),
        row(job.replace(peft="qlora")),
    )
    assert plain.fit == "does not fit" and packed.fit == "fits"
    assert plain.gpu is not None and offload.gpu is not None and packed.gpu is not None
    # Weights, gradients and two states in FP32 go to
    # the host, and the layers that are gathered stay.
    assert offload.gpu.parameters == offload.gpu.gradients == offload.gpu.optimizer == 0
    assert 0 < offload.gpu.communication < offload.gpu.total < 12 * 2**30
    assert offload.stages["training"].tensors > 16 * 69e9
    assert packed.gpu.parameters == pytest.approx(
        69e9 * (0.5 / 8 + 1 / 64) + 4 * 0.5e9 / 8, rel=0.05
    )
    assert packed.stages["loading"].parameters > 8 * 0.5 * 69e9  # each rank packs the whole model


def test_gpus_have_the_memory_that_torch_reports() -> None:
    """Memory as sold: some per cent is not for use; "fits with a tenth to spare" is wrong."""
    sold = {
        "T4": 16,
        "V100 16 GB": 16,
        "V100 32 GB": 32,
        "L4": 24,
        "A10G": 24,
        "RTX 4090": 24,
        "A100 40 GB": 40,
    }
    sold |= {"L40S": 48, "A100 80 GB": 80, "H100": 80, "H200": 141, "B200": 180}
    assert {kind: memory for kind, (memory, _) in KINDS.items() if memory >= sold[kind]} == {}
    assert (KINDS["T4"][0], KINDS["L4"][0], KINDS["A10G"][0], KINDS["L40S"][0]) == (
        14.6,
        22,
        22,
        44.4,
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_the_least_gpus_of_every_kind_are_those_that_the_plan_says_fit() -> None:
    options = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
    job = FineTune(model="llama-2-13b", max_source_length=64, max_target_length=64, **options)  # type: ignore[arg-type]
    table = gpus_for(job, memory_gib=400)
    v100, h100 = table.row("V100 32 GB"), table.row("H100")
    assert (v100.precision, h100.precision) == ("fp32", "bf16")
    for row in (v100, h100):
        assert row.plan is not None and row.gpus is not None
        planned = job.replace(precision=row.precision)
        few = {"gpu_memory_gib": row.memory_gib, "memory_gib": 400.0}
        assert (
            plan(planned, pods=row.pods, gpus=row.gpus, **few).row(row.plan.technique).fit == "fits"
        )  # type: ignore[arg-type]
        # Several pods are full ones, so that the next smaller number is a pod less.
        gpus, pods = (row.gpus, row.pods - 1) if row.pods > 1 else (row.gpus - 1, 1)
        less = plan(planned, pods=pods, gpus=gpus, **few) if gpus else None  # type: ignore[arg-type]
        assert less is None or not {r.technique for r in less.rows if r.fit == "fits"} - {
            "local-sgd"
        }
    text, page = str(table), table._repr_html_()
    assert f"{v100.plan.technique}" in text and "V100 32 GB" in page  # type: ignore[union-attr]
    explicit = gpus_for(
        job.replace(precision="bf16"), memory_gib=400, kinds={"T4": (16, False)}, most_pods=1
    )
    assert "no bf16" in str(explicit) and explicit.rows[0].plan is None
    with pytest.raises(ConfigError, match="most_pods is 0"):
        gpus_for(job, most_pods=0)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("options", "gpus"),
    [({"tensor_parallel": 2}, 2), ({"tensor_parallel": 4}, 4), ({"sequence_parallel": 2}, 2)],
)
def test_ranks_that_share_weights_or_rows_need_as_many_gpus(
    options: dict[str, int], gpus: int
) -> None:
    job = FineTune(model="tiny-llama", technique="zero1", precision="fp32", **options)  # type: ignore[arg-type]
    row = gpus_for(job, kinds={"T4": (16, False)}, most_pods=1).row("T4")
    assert (row.gpus, row.pods) == (gpus, 1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_what_adapters_leave_frozen_is_planned_in_the_format_of_the_arithmetic(
    tmp_path: Path,
) -> None:
    # The shape of Llama-3.1-8B:
    # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
    }
    config |= {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    job = FineTune(
        model=str(tmp_path),
        technique="single",
        peft="lora",
        precision="bf16",
        gradient_checkpointing=True,
        per_device_train_batch_size=2,
        max_source_length=1024,
        max_target_length=1024,
    )
    techniques = ["single", "ddp", "zero1", "fsdp"]
    half, full = (
        plan(job.replace(precision=p), gpu_memory_gib=24, techniques=techniques)
        for p in ("bf16", "fp32")
    )
    assert half.parameters == pytest.approx(8.03e9, rel=0.01)
    frozen = half.parameters - half.trained
    for name in techniques:
        for table, size in ((half, 2), (full, 4)):
            gpu = table.row(name).gpu
            trained = 2 if size == 2 and name == "zero1" else 4
            assert gpu is not None and gpu.parameters == size * frozen + trained * table.trained, (
                name
            )
    single = half.row("single")
    # torchtune's README has 16.2 GiB for it, and makes no scores of all words for all tokens
    # either. CUDA's own gibibyte is counted here, and not there.
    assert single.gpu is not None and single.gpu_gib == pytest.approx(18.6, rel=0.05)
    assert (single.gpu.total - single.gpu.logits) / 2**30 == pytest.approx(17.3, rel=0.05)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("family", "options", "parameters"),
    [
        (
            "mixtral",
            {"num_local_experts": 8, "num_key_value_heads": 8, "intermediate_size": 14336},
            46.7e9,
        ),
        (
            "gpt_oss",
            {
                "num_local_experts": 4,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "intermediate_size": 2880,
            },
            3.84e9,
        ),
    ],
)
def test_mixtures_of_experts_are_planned_from_their_configuration(
    tmp_path: Path, family: str, options: dict[str, int], parameters: float
) -> None:
    size = 4096 if family == "mixtral" else 2880
    config = {
        "vocab_size": 32000,
        "hidden_size": size,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        **options,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": family, "dtype": "bfloat16", **config})
    )
    job = FineTune(
        model=str(tmp_path), technique="fsdp", max_source_length=64, max_target_length=64
    )
    table = plan(job, pods=4, gpus=8, gpu_memory_gib=80, techniques=["fsdp"])
    row = table.row("fsdp")
    assert table.parameters == pytest.approx(parameters, rel=0.02)
    assert row.gpu is not None and row.gpu.parameters == pytest.approx(
        4 * table.parameters / 32, rel=0.01
    )
    assert row.stages["loading"].files == 2 * table.parameters


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("family", "precision", "gpu_gib"),
    [
        ("mixtral", "fp32", None),
        ("mixtral", "bf16", 8.0),
        ("qwen2_moe", "fp16", 8.0),
        ("qwen2_moe", "fp32", None),
    ],
)
def test_mixtures_of_experts_are_planned_under_every_technique_and_precision(
    tmp_path: Path, family: str, precision: str, gpu_gib: float | None
) -> None:
    experts = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 24}
    shape = {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": family, **shape, **heads, **experts})
    )
    job = FineTune(
        model=str(tmp_path), precision=precision, max_source_length=16, max_target_length=16
    )
    table = plan(job, pods=2, gpu_memory_gib=gpu_gib, memory_gib=8)
    assert [row.technique for row in table.rows] == [*get_args(TechniqueName)]
    assert {row.fit for row in table.rows} == {"fits"}, [row.why for row in table.rows]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_composite_model_is_planned_by_its_language_model(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", **FAMILIES["gemma3"].sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = FineTune(model=str(tmp_path), max_source_length=16, max_target_length=16)
    table = plan(job, pods=2, memory_gib=8)
    assert {row.fit for row in table.rows} == {"fits"}, [row.why for row in table.rows]
    text = config["text_config"]
    assert isinstance(text, dict)
    assert table.parameters > text["vocab_size"] * text["hidden_size"]


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_the_methods_of_trl_count_the_words_of_a_composite_model(method: str) -> None:
    shape = FAMILIES["llama"].sizes
    rewards = {"rewards": ["rewards.py:score"]} if method == "grpo" else {}
    job = FineTune(model="tiny-llama", method=method, technique="single", **rewards)
    plain = setting_of(job, pods=1, gpus=0, model=shape)
    assert plain.score_bytes
    assert setting_of(job, pods=1, gpus=0, model={"text_config": shape}) == plain


@pytest.mark.parametrize("nested", [False, True])
def test_a_mixture_in_4_bits_is_refused_before_its_trace(tmp_path: Path, nested: bool) -> None:
    shape = {"vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 2, "num_local_experts": 4}
    config = {"text_config": shape} if nested else shape
    family = "llama4" if nested else "mixtral"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **config}))
    job = FineTune(model=str(tmp_path), peft="qlora")
    refused = sentence(
        "under technique 'fsdp' or 'zero3' for models larger than a GPU", repr(str(tmp_path))
    )
    with pytest.raises(ConfigError, match=refused):
        plan(job, pods=2, gpus=1, gpu_memory_gib=80)


@pytest.mark.parametrize(
    ("optimizer", "states"), [("adamw", 8 * 1800), ("lion", 4 * 1800), ("muon", 4 * 1000 + 8 * 800)]
)
def test_lion_has_one_state_and_muon_one_for_a_matrix(optimizer: str, states: int) -> None:
    sizes = {"layers": [[[1000, 1, 0, 1], [200, 1, 0, 0]]], "rest": [[600, 1, 0, 0]]}
    trace = trace_of([{"points": {}, "sizes": sizes}])
    for name, shards, master in (("ddp", 1, 0), ("zero1", 2, 4 * 1800)):
        job = FineTune(optimizer=optimizer, technique=name)
        device, _ = technique_of(name).kept(setting_of(job, pods=2, gpus=1), trace)
        assert device.optimizer == (master + states) / shards


def test_muon_s_plan_refuses_what_shards_matrices() -> None:
    job = FineTune(model="tiny-llama", optimizer="muon")
    for technique in ("zero3", "fsdp"):
        with pytest.raises(ConfigError, match="use 'single', 'ddp', 'zero1' or 'zero2'"):
            as_planned(job, technique)


def test_a_trace_that_fails_refuses_its_own_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 100, "dtype": "bfloat16"})
    )
    asked: list[list[str]] = []

    def ask(request: Request) -> Answer:
        asked.append(request["arithmetic"])
        sizes = {"layers": [[[1000, 1, 0, 0]]], "rest": []}
        return {
            "points": {"bf16": [[0.0, 1.0, 0.0, 0.0, 0.0]]},
            "sizes": sizes,
            "failed": {"autocast-bf16": "RuntimeError: no such kernel"},
        }

    monkeypatch.setattr("workbench.finetune.plan.tracing._ask", ask)
    job = FineTune(model=str(tmp_path), precision="bf16")
    for arithmetic in (
        ["autocast-bf16", "bf16"],
        ["autocast-bf16"],
    ):  # what failed is not remembered
        table = plan(job, pods=2, gpu_memory_gib=8)
        assert asked.pop() == arithmetic
        for row in table.rows:
            fails = technique_of(row.technique).replicates
            assert (row.fit == "refused") == fails, row.technique
            assert (
                says(
                    row.why,
                    "the model cannot be traced in {}, so its memory is not known",
                    "autocast-bf16",
                )
                and "no such kernel" in row.why
            ) == fails


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_layers_over_several_gpus_are_planned_by_the_fullest() -> None:
    job = FineTune(model="tiny-llama", technique="single", device_map="auto", max_source_length=16)
    one, two = (
        plan(job, gpus=gpus, gpu_memory_gib=2, techniques=["single", "ddp"]) for gpus in (1, 2)
    )
    whole, fullest = one.row("single"), two.row("single")
    assert (whole.gpus_on_pod, fullest.gpus_on_pod, fullest.ranks) == (1, 2, 1)
    assert whole.gpu is not None and fullest.gpu is not None and fullest.fit == "fits"
    assert fullest.gpu.parameters + fullest.gpu.optimizer == pytest.approx(
        6 * two.parameters, rel=0.05
    )
    assert two.row("ddp").gpu is not None and two.row("ddp").gpu.parameters == whole.gpu.parameters  # type: ignore[union-attr]
    assert says(two, "single with its layers over {}, the fullest of which is shown", "2 GPUs")
    assert "single with its layers over 1 GPU," not in str(one)
    small = plan(
        job.replace(max_memory={0: 0.002, 1: 0.002}),
        gpus=2,
        gpu_memory_gib=2,
        techniques=["single"],
    )
    assert small.row("single").fit == "refused" and says(
        small.row("single").why, "give more in max_memory or more GPUs to a pod"
    )


def test_what_was_never_traced_is_not_known_without_tracing() -> None:
    assert predict(FineTune(max_source_length=8), pods=1, gpus=0, trace=False) is None
    assert cached_trace({"config": {}, "arithmetic": ["fp32"]}) is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"pods": 0}, "pods is 0"),
        ({"gpus": True}, "gpus is True"),
        ({"gpu_memory_gib": -1}, "gpu_memory_gib is -1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        plan(FineTune(), **options)  # type: ignore[arg-type]


def test_a_shape_that_is_not_known_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=sentence("load its configuration once (AutoConfig.from_pretrained", "me/mine"),
    ):
        model_config("me/mine")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=sentence("names no model_type; give a folder made by save_pretrained")
    ):
        model_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["t5-base"]), encoding="utf-8")
    assert model_config(str(tmp_path)) == KNOWN["t5-base"]


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_decoder_layers", "n_routed_experts"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_number_of_layers_that_no_model_has_is_refused_by_name(
    tmp_path: Path, name: str, is_nested: bool
) -> None:
    many = {name: 10**7}
    config = {**KNOWN["t5-base"], **({"text_config": many} if is_nested else many)}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{name} = 10000000"):
        model_config(str(tmp_path))
