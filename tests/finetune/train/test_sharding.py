"""FSDP on real ranks: every way of sharding trains alike, and tells what lies where."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.forkedruns import Plan, Ran
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.rows import Example
from workbench.finetune.model.layers import recompute
from workbench.finetune.model.load import load
from workbench.finetune.model.sharding import layers_of, parts_of
from workbench.finetune.techniques.on_pods.sharding import ShardScaler

pytestmark = [pytest.mark.slow, pytest.mark.long]

COMMON = {
    "max_steps": 4,
    "optimizer": "sgd",
    "profile_step": 0,
    "max_target_length": 24,
    "learning_rate": 2e-2,
    # Rows of a compiled model are padded, and would be grouped by length.
    "train_sampling_strategy": "random",
}

# Number format of the saved weights of a model with files in bf16, by technique and precision.
SAVED = {
    ("fsdp", "bf16"): torch.bfloat16,
    ("ddp", "bf16"): torch.bfloat16,
    ("zero1", "bf16"): torch.bfloat16,
    ("fsdp", "fp32"): torch.float32,
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("sharding"))

    def add(name: str, ranks: int, **how: object) -> None:
        plan.add(name, ranks, **{"per_device_train_batch_size": 12 // ranks, **COMMON, **how})  # type: ignore[arg-type]

    add("single", 1, technique="single")
    add(
        "grads",
        2,
        technique="fsdp",
        fsdp={"shard": "grads", "prefetch": 0},
        gradient_checkpointing=True,
    )
    add(
        "hybrid",
        4,
        technique="fsdp",
        fsdp={"shard": "hybrid", "offload": True},
        more={"on_pod": 2},
        per_device_train_batch_size=3,
    )
    thrice = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    add("once", 2, technique="fsdp", fsdp={"reduce": "step"}, **thrice)
    # To trace a layer takes each rank seconds, so the model has one.
    thin = load("tiny-llama", [Example(source="How many?", target="Three")], seed=0)
    thin.model.config.num_hidden_layers = 1
    type(thin.model)(thin.model.config).save_pretrained(plan.root / "thin")
    thin.tokenizer.save_pretrained(plan.root / "thin")
    add("thin-single", 1, technique="single", model=str(plan.root / "thin"))
    add(
        "compiled",
        2,
        technique="fsdp",
        model=str(plan.root / "thin"),
        torch_compile=True,
        training={"torch_compile_backend": "eager"},
    )
    add("no-pods", 2, technique="fsdp", fsdp={"shard": "hybrid"})
    # Groups that are no pods, and what has at least so many parameters by itself.
    group = {"shard": "hybrid", "group": 2, "layer_parameters": 40_000}
    chosen = {
        "gradient_checkpointing": True,
        "checkpoint_layers": ["T5LayerFF", "T5LayerSelfAttention"],
    }
    add("group", 4, technique="fsdp", fsdp=group, per_device_train_batch_size=3, **chosen)
    for stage in (1, 2):
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        add(f"offload-{stage}", 2, technique=f"zero{stage}", deepspeed={"zero_optimization": zero})
    add("single-bf16", 1, technique="single", precision="bf16")
    add(
        "bf16",
        2,
        technique="fsdp",
        fsdp={"layers": ["T5LayerFF"], "reduce_in_fp32": False},
        precision="bf16",
    )
    add("llama-single", 1, technique="single", model="tiny-llama")
    llama = {
        "technique": "fsdp",
        "model": "tiny-llama",
        "gradient_checkpointing": True,
        "predict_rows": 2,
    }
    add("llama", 2, fsdp={"prefetch": 2}, **llama)
    made = load("tiny-llama", [Example(source="How many?", target="Three")], seed=0)
    made.model.to(torch.bfloat16).save_pretrained(plan.root / "half")
    made.tokenizer.save_pretrained(plan.root / "half")
    for technique, precision in SAVED:
        base = {"model": str(plan.root / "half"), "technique": technique, "precision": precision}
        name = f"half-{technique}-{precision}"
        add(name, 2, **base)
        again = {"model": str(plan.root / name / "out" / "model"), "precision": precision}
        add(f"again-{technique}-{precision}", 1, technique="single", **again, max_steps=1)
    half = {
        "technique": "fsdp",
        "model": "tiny-llama",
        "precision": "fp16",
        "fsdp": {"offload": True},
    }
    add("fp16", 2, **half, save_steps=2, predict_rows=2)
    add(
        "fp16-on",
        2,
        **half,
        resume="a run",
        more={"checkpoint": str(plan.root / "fp16" / "checkpoints" / "step-2")},
    )
    return plan.run()


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("grads", "single"),
        ("hybrid", "single"),
        ("group", "single"),
        ("once", "single"),
        ("compiled", "thin-single"),
        ("offload-1", "single"),
        ("offload-2", "single"),
        ("llama", "llama-single"),
    ],
)
def test_every_way_of_sharding_follows_one_process(
    ran: dict[str, Ran], name: str, reference: str
) -> None:
    run = ran[name]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    for metric in ("loss", "grad_norm"):
        assert run.curve(metric) == pytest.approx(ran[reference].curve(metric), rel=1e-3), metric
    assert run.data("end")[0]["eval_loss"] == pytest.approx(
        ran[reference].data("end")[0]["eval_loss"], rel=1e-3
    )


def test_bf16_gathers_and_computes_in_it_and_keeps_fp32_shards(ran: dict[str, Ran]) -> None:
    run = ran["bf16"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("loss") == pytest.approx(ran["single-bf16"].curve("loss"), rel=0.01)
    (told,) = run.data("engine")
    assert told["arithmetic"] == "bfloat16"
    assert [told[name]["dtypes"] for name in ("trained", "gradients", "updated")] == [
        ["float32"]
    ] * 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "shards"), [("grads", 2), ("hybrid", 2), ("group", 2), ("llama", 2)]
)
def test_each_rank_tells_the_part_it_holds(ran: dict[str, Ran], name: str, shards: int) -> None:
    run = ran[name]
    told = [run.data("engine", rank)[0] for rank in run.exit_codes]
    assert {str(what["engine"]) for what in told} == {"fsdp"}
    for what in told:
        assert what["trained"]["local"] == pytest.approx(
            what["trained"]["whole"] / shards, rel=0.02
        )  # type: ignore[index]


def test_hybrid_is_refused_where_a_pod_has_one_slot(ran: dict[str, Ran]) -> None:
    run = ran["no-pods"]
    assert set(run.exit_codes.values()) == {1}
    assert says(
        run.record(0, "error.json")["message"],
        "and a pod without several GPUs has one slot",
    )


def test_a_sharded_llama_is_saved_whole_and_has_answered(ran: dict[str, Ran]) -> None:
    from transformers import AutoModelForCausalLM

    folder = ran["llama"].folder / "out"
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert json.loads((folder / "model" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    assert sum(p.numel() for p in model.parameters()) == ran["llama"].data("start")[0]["parameters"]
    assert len((folder / "predictions.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("technique", "precision"), SAVED)
def test_half_files_trained_in_half_are_saved_in_half_with_the_losses_of_the_run(
    ran: dict[str, Ran], technique: str, precision: str
) -> None:
    from transformers import AutoModelForCausalLM

    run = ran[f"half-{technique}-{precision}"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    folder = run.folder / "out" / "model"
    dtype = SAVED[technique, precision]
    saved = load_file(folder / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {dtype}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype)[6:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype is dtype
    # Another run starts from the saved model with the loss with which the first ended.
    again = ran[f"again-{technique}-{precision}"].data("eval")[0]["eval_loss"]
    assert again == pytest.approx(run.data("end")[0]["eval_loss"], rel=2e-3)


def test_layers_that_share_a_weight_are_refused_before_anything_is_sharded() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ModuleDict({"head": nn.Linear(2, 2)}))
    assert len(layers_of(model, ["Linear"])) == 2
    model[1]["head"].weight = model[0][0].weight
    with pytest.raises(
        ConfigError,
        match=sentence("and a shared weight must be gathered as one", "Linear", "weight"),
    ):
        layers_of(model, ["Linear"])


def test_layers_that_a_model_has_not_are_refused_with_those_it_has() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(
        ConfigError,
        match=sentence(
            "and the model consists of {}; name its transformer layers",
            "names Block",
            "Linear, ReLU, Sequential",
        ),
    ):
        layers_of(model, ["Block"])
    with pytest.raises(ConfigError, match="fsdp layers is empty"):
        layers_of(model, [])
    assert [type(layer) for layer in layers_of(model, ["ReLU"])] == [nn.ReLU]


def test_parts_are_the_smallest_that_are_large_enough_and_share_nothing() -> None:
    block = [
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)
    ]  # 40 parameters each
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList(block), "in": nn.Linear(8, 8, bias=False), "out": nn.Linear(8, 8)}
    )
    assert parts_of(model, 40) == [*block, model["in"], model["out"]]
    assert parts_of(model, 41) == [model["in"], model["out"]]
    model["out"].weight = model["in"].weight
    assert parts_of(model, 40) == block


def test_fp16_computes_in_it_with_a_scaled_loss_and_keeps_fp32_shards(ran: dict[str, Ran]) -> None:
    run = ran["fp16"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("loss") == pytest.approx(ran["llama-single"].curve("loss"), rel=0.01)
    assert run.curve("grad_norm") == pytest.approx(
        ran["llama-single"].curve("grad_norm"), rel=0.05
    )  # not scaled
    (told,) = run.data("engine")
    assert told["arithmetic"] == "float16"
    assert [told[name]["dtypes"] for name in ("trained", "gradients", "updated")] == [
        ["float32"]
    ] * 3  # type: ignore[index]
    assert ran["fp16-on"].curve("loss") == run.curve("loss")[2:], ran["fp16-on"].stderr()


def test_a_step_whose_gradients_leave_the_range_of_fp16_is_left_out_and_the_scale_halved() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer, scaler = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            ShardScaler("cpu", init_scale=1024.0),
        )
        weights = [model.weight.full_tensor().clone()]
        for value in (math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 4), value)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            weights.append(model.weight.full_tensor().clone())
    finally:
        dist.destroy_process_group()
    assert torch.equal(weights[0], weights[1]) and scaler.get_scale() == 512.0
    assert torch.allclose(weights[1] - weights[2], torch.full((2, 4), 0.1))


def test_chosen_layers_compute_again_in_the_backward_pass_and_only_while_training() -> None:
    class Layer(nn.Linear):
        calls = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(input).sin()

    model = nn.Sequential(Layer(2, 2), nn.Linear(2, 2))
    recompute(model, ["Layer"])
    model(torch.ones(1, 2)).sum().backward()
    assert model[0].calls == 2 and list(model.state_dict()) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]
    model.eval()
    model(torch.ones(1, 2)).sum().backward()
    assert model[0].calls == 3
    with pytest.raises(
        ConfigError,
        match=sentence(
            "and the model consists of {}; name its transformer layers",
            "checkpoint_layers names Block",
            "Layer, Linear, Sequential",
        ),
    ):
        recompute(model, ["Block"])


def test_what_an_offload_keeps_on_the_host_is_told(ran: dict[str, Ran]) -> None:
    for stage in (1, 2):
        (told,) = ran[f"offload-{stage}"].data("engine")
        assert (told["engine"], told["offload"]) == (f"deepspeed-zero{stage}", ["optimizer"])
