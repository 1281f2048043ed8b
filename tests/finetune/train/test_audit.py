from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.sentences import says, sentence
from workbench.base.errors import RunError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.train.checks.sharding import (
    RankState,
    Share,
    engine_of,
    gradients_of,
    state_of,
)
from workbench.finetune.train.checks.technique import TechniqueCheck, differences
from workbench.finetune.train.settings import hold_fp32

WHOLE = 9000
N = 3
ALL = Share(local=WHOLE, whole=WHOLE, dtypes=("float32",), devices=("cpu",))
PART = replace(ALL, local=WHOLE // N + 6)  # with some padding
BF16 = "bfloat16"


def held(
    engine: str, *, trained: Share = ALL, update: Share = ALL, ranks: int = N, **more: object
) -> RankState:
    states = replace(update, local=2 * update.local, whole=2 * update.whole)
    shares = {
        "parameters": trained,
        "trained": trained,
        "gradients": update,
        "updated": update,
        "states": states,
    }
    return RankState(
        **{"engine": engine, "world_size": ranks, "arithmetic": "float32", **shares, **more}
    )  # type: ignore[arg-type]


AS_ASKED = {
    "single": held("none", ranks=1),
    "ddp": held("ddp"),
    "local-sgd": held("local-sgd"),
    "zero1": held("deepspeed-zero1", update=PART),
    "zero2": held("deepspeed-zero2", update=PART),
    "zero3": held("deepspeed-zero3", trained=PART, update=PART),
    "zero3-offload": held(
        "deepspeed-zero3", trained=PART, update=PART, offload=("optimizer", "parameters")
    ),
    "fsdp": held("fsdp", trained=PART, update=PART),
}


def found(technique: str, what: RankState, **job: object) -> list[str]:
    ranks = 1 if technique == "single" else N
    asked = FineTune(technique=technique, **job)  # type: ignore[arg-type]
    return list(differences(asked, what, world_size=ranks, shards=ranks))


@pytest.mark.parametrize("technique", AS_ASKED)
def test_each_technique_is_known_by_what_it_holds_and_none_passes_for_another(
    technique: str,
) -> None:
    for other, what in AS_ASKED.items():
        assert bool(found(technique, what)) == (other != technique), other


def test_a_single_rank_of_ddp_needs_no_wrapper() -> None:
    job = FineTune(technique="ddp")
    assert not list(differences(job, held("none", ranks=1), world_size=1, shards=1))
    assert list(differences(job, held("none", ranks=2), world_size=2, shards=1))
    assert list(
        differences(FineTune(technique="zero1"), held("none", ranks=1), world_size=1, shards=1)
    )


@pytest.mark.parametrize(
    ("technique", "what", "message"),
    [
        (
            "zero1",
            held("deepspeed-zero3", trained=PART, update=PART),
            "but this ran: ZeRO stage 3 on 3 ranks",
        ),
        (
            "zero3",
            held("none", ranks=1),
            "(ZeRO stage 3 on 3 ranks), but this ran: no DeepSpeed on 1 rank",
        ),
        (
            "fsdp",
            held("ddp"),
            "(FSDP on 3 ranks), but this ran: DistributedDataParallel on 3 ranks",
        ),
        (
            "zero1",
            held("deepspeed-zero1", update=ALL),
            "updated was to be spread over 3 ranks, but 9000 of 9000",
        ),
        (
            "zero1",
            held("deepspeed-zero1", trained=PART, update=PART),
            "trained was to be whole on each rank, but 3006",
        ),
        (
            "zero3",
            held("deepspeed-zero3", trained=ALL, update=PART),
            "trained was to be spread over 3 ranks",
        ),
        ("fsdp", held("fsdp", trained=ALL, update=PART), "trained was to be spread over 3 ranks"),
        ("ddp", held("ddp", update=PART), "updated was to be whole on each rank"),
        (
            "zero3-offload",
            AS_ASKED["zero3"],
            "ZeRO stage 3 with offload on 3 ranks), but this ran: ZeRO stage 3 on",
        ),
    ],
)
def test_what_is_not_as_asked_is_said_in_a_sentence(
    technique: str, what: RankState, message: str
) -> None:
    assert message in "; ".join(found(technique, what))


def test_states_that_are_whole_under_zero1_are_found_by_themselves() -> None:
    what = replace(
        AS_ASKED["zero1"], states=Share(local=2 * WHOLE, whole=2 * WHOLE, dtypes=("float32",))
    )
    assert found("zero1", what) == [
        f"states was to be spread over 3 ranks, but {2 * WHOLE} of {2 * WHOLE} elements are here"
    ]


def test_the_precision_is_that_of_the_arithmetic() -> None:
    assert says(
        found("zero1", replace(AS_ASKED["zero1"], arithmetic=BF16)),
        "precision {} was asked for ({}), but linear layers gave",
        "fp32",
        "float32",
        "bfloat16",
    )
    assert not found("zero1", replace(AS_ASKED["zero1"], arithmetic=BF16), precision="bf16")
    assert found("zero1", AS_ASKED["zero1"], precision="bf16")


def test_half_precision_updates_a_full_copy_unless_the_users_own_json_says_no() -> None:
    low = replace(AS_ASKED["zero1"], arithmetic=BF16, updated=replace(PART, dtypes=(BF16,)))
    assert found("zero1", low, precision="bf16") == [
        "the optimizer was to update float32 weights, but they are bfloat16"
    ]
    assert not found("zero1", low, precision="bf16", deepspeed={"zero_optimization": {"stage": 1}})


def test_frozen_weights_that_are_wider_than_the_arithmetic_are_found() -> None:
    def beneath(dtype: str) -> RankState:
        trained = replace(ALL, local=8, whole=8)
        frozen = replace(ALL, dtypes=(dtype,))
        update = {"gradients": trained, "updated": trained, "states": trained}
        return replace(
            AS_ASKED["single"], arithmetic=BF16, trained=trained, frozen=frozen, **update
        )

    job = {"peft": "lora", "precision": "bf16"}
    assert found("single", beneath("float32"), **job) == [
        "frozen weights were to be bfloat16, but they are float32"
    ]
    assert not found("single", beneath(BF16), **job)


def test_an_optimizer_that_should_work_on_the_host_and_does_not_is_found() -> None:
    what = replace(AS_ASKED["zero3-offload"], updated=replace(PART, devices=("cuda",)))
    assert says(
        "; ".join(found("zero3-offload", what)),
        "the optimizer was to work on the host, but its weights are on",
        "cuda",
    )


def test_fsdp_that_should_keep_its_shards_on_the_host_and_does_not_is_found() -> None:
    what = replace(AS_ASKED["fsdp"], updated=replace(PART, devices=("cuda",)))
    assert says(
        "; ".join(found("fsdp", what, fsdp={"offload": True})),
        "the optimizer was to work on the host, but its weights are on",
        "cuda",
    )
    assert not found("fsdp", what)


def test_hybrid_spreads_over_the_ranks_of_a_pod_only() -> None:
    half = replace(ALL, local=WHOLE // 2)
    what = held("fsdp", trained=half, update=half, ranks=4)
    asked = FineTune(technique="fsdp", fsdp={"shard": "hybrid"})
    assert not list(differences(asked, what, world_size=4, shards=2))
    assert list(differences(asked, held("fsdp", ranks=4), world_size=4, shards=2))


class Stepped:
    """A Trainer after one step of plain torch."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], *, frozen: bool = False) -> None:
        self.model = self.model_wrapped = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.model[0].requires_grad_(not frozen)
        self.optimizer = SimpleNamespace(optimizer=optimizer(self.model.parameters(), lr=0.1))

    def step(self, check: TechniqueCheck | None = None) -> None:
        if check:
            check.on_step_begin(None, None, None)
        self.model(torch.ones(3, 4)).sum().backward()
        if check:
            check.on_pre_optimizer_step(None, None, None)
        self.optimizer.optimizer.step()


def test_a_plain_step_is_counted_on_its_tensors() -> None:
    trainer = Stepped(torch.optim.AdamW)
    trainer.step()
    what = state_of(trainer, gradients=gradients_of(trainer), arithmetic="float32")
    elements = 4 * 8 + 8 + 8 * 2 + 2
    assert engine_of(trainer) == what.engine == "none"
    assert (what.parameters.local, what.parameters.whole, what.gradients.local) == (
        elements,
        elements,
        elements,
    )
    assert (what.states.local, what.states.whole) == (2 * elements, 2 * elements)
    assert what.states.dtypes == ("float32",)
    trainer = Stepped(torch.optim.SGD, frozen=True)
    trainer.step()
    what = state_of(trainer, gradients=gradients_of(trainer), arithmetic="float32")
    assert (what.trained.whole, what.gradients.local, what.states.whole) == (18, 18, 0)


def test_every_rank_tells_what_it_saw_after_the_first_step_and_only_then(
    capfd: pytest.CaptureFixture[str],
) -> None:
    trainer = Stepped(torch.optim.AdamW)
    check = TechniqueCheck(FineTune(technique="single"), trainer, world_size=1)
    for _ in range(2):
        trainer.step(check)
        check.on_step_end(None, None, None)
    said = "".join(capfd.readouterr())
    assert said.count('"kind": "engine"') == 1
    assert '"engine": "none"' in said and '"arithmetic": "float32"' in said
    assert not any(module._forward_hooks for module in trainer.model)


@pytest.mark.parametrize(("precision", "other"), [("fp32", "tf32"), ("tf32", "ieee")])
def test_the_products_of_a_run_are_in_the_format_of_its_job(
    precision: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FineTune(technique="single", precision=precision)
    monkeypatch.setattr(torch.backends, "fp32_precision", other)  # as transformers sets it
    trainer = Stepped(torch.optim.AdamW)
    check = TechniqueCheck(job, trainer, world_size=1)
    trainer.step(check)
    with pytest.raises(RunError, match=f"precision {precision} was asked for"):
        check.on_step_end(None, None, None)
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32" if precision == "tf32" else "ieee")
    check = TechniqueCheck(job, trainer, world_size=1)
    trainer.step(check)
    check.on_step_end(None, None, None)


def test_a_compiled_model_in_fp32_multiplies_in_fp32() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"  # as accelerate leaves it
        hold_fp32(FineTune(precision="bf16"))
        assert matmul.fp32_precision == "tf32"
        hold_fp32(FineTune(precision="fp32"))
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before


def test_a_run_that_is_something_else_fails_after_it_has_told_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    trainer = Stepped(torch.optim.AdamW)
    check = TechniqueCheck(FineTune(technique="zero1"), trainer, world_size=3)
    trainer.step(check)
    with pytest.raises(
        RunError,
        match=sentence(
            "technique {} was asked for ({}), but this ran",
            "zero1",
            "ZeRO stage 1 on 3 ranks",
            "no DeepSpeed",
        ),
    ):
        check.on_step_end(None, None, None)
    assert '"engine": "none"' in "".join(capfd.readouterr())


def test_adapters_are_known_by_what_is_trained_and_four_bits_by_how_the_rest_is_held() -> None:
    small = Share(local=90, whole=90, dtypes=("float32",), devices=("cpu",))
    plain = held("ddp", parameters=ALL, trained=small, gradients=small, updated=small, states=small)
    packed = replace(plain, packed=True)
    assert not found("ddp", plain, peft="lora")
    assert not found("ddp", packed, peft="qlora")
    assert found("ddp", plain, peft="qlora") == [
        "peft qlora was asked for, but no weights are in 4 bits: they are float32"
    ]
    assert found("ddp", AS_ASKED["ddp"], peft="lora") == [
        f"peft lora was asked for, but all {WHOLE} weights are trained"
    ]
