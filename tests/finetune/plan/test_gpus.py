"""The least number of GPUs of every kind, for a known trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.sentences import sentence
from workbench import FineTune, gpus_for
from workbench.base.errors import ConfigError
from workbench.finetune.plan.gpus import KINDS, GpuTable
from workbench.finetune.techniques.sizes import Moment, Parameters, Trace

# 32 GiB of weights in FP32, in 64 layers of half a GiB.
LAYER = Parameters(
    frozen=0, trained=2**27, packed=0, largest=2**22, largest_packed=0, small={2**22: 32}
)
MOMENT = Moment(base=0.0, row=0.0, logits=0.0, logits_row=0.0, gradients=0.0)
TRACE = Trace(
    moments={name: [MOMENT] for name in ("fp32", "bf16", "autocast-bf16")},
    layers=[LAYER] * 64,
    rest=replace(LAYER, trained=2**12, largest=2**12, small={2**12: 1}),
)
# FSDP shards 20 bytes a weight, 160 GiB, beside the context of CUDA, 1 GiB.
FSDP = ["single", "ddp", "fsdp"]


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.finetune.plan.plan.trace_step", lambda _: TRACE)


def least(
    *gib: float, gpus_on_pod: int = 8, most_pods: int = 3, precision: str | None = "fp32"
) -> list[tuple[int | None, int]]:
    kinds = {f"{size} GiB": (size, True) for size in gib}
    job = FineTune(precision=precision)
    table = gpus_for(
        job, kinds=kinds, gpus_on_pod=gpus_on_pod, most_pods=most_pods, techniques=FSDP
    )
    return [(row.gpus, row.pods) for row in table.rows]


def test_numbers_of_gpus_double_up_to_a_full_pod_and_then_count_full_pods() -> None:
    # Nine tenths of a GPU hold its part of some 140 GiB, and 1 GiB more.
    sizes = (160, 100, 50, 24, 14, 10)
    assert least(*sizes) == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 3)]
    # A pod with six GPUs is full before eight.
    assert least(50, 31, 18, gpus_on_pod=6) == [(4, 1), (6, 1), (6, 2)]
    assert least(24, gpus_on_pod=1, most_pods=16) == [(1, 7)]
    # A pod more than allowed would do.
    assert least(14, most_pods=1) == [(None, 0)]


def test_a_kind_that_is_too_small_has_no_number_and_no_plan() -> None:
    table = gpus_for(FineTune(), kinds={"tiny": (2, True)}, most_pods=1)
    row = table.row("tiny")
    assert (row.gpus, row.pods, row.plan, row.why) == (None, 0, None, "")


def test_a_tenth_of_the_memory_stays_free() -> None:
    for size, gpus in ((143.3, 2), (143.4, 1)):
        # Weights, gradients and states on one GPU: 129 GiB, nine tenths of 143.34.
        assert least(size) == [(gpus, 1)]


def test_an_open_precision_is_bf16_where_the_hardware_has_it() -> None:
    kinds = {"new": (178, True), "old": (178, False)}
    table = gpus_for(FineTune(model="llama-2-7b"), kinds=kinds)
    assert [row.precision for row in table.rows] == ["bf16", "fp32"]
    # A job that asks for bf16 does not train on the old kind.
    asked = gpus_for(FineTune(model="llama-2-7b", precision="bf16"), kinds=kinds)
    assert asked.row("new").plan is not None and asked.row("new").why == ""
    old = asked.row("old")
    assert old.plan is None and "no bf16" in old.why
    # FP32 needs none.
    assert "no bf16" not in gpus_for(FineTune(precision="fp32"), kinds=kinds).row("old").why


def test_one_gpu_is_for_single_and_several_never_are() -> None:
    kinds = {"large": (178, True), "small": (80, True)}
    table = gpus_for(FineTune(precision="fp32"), kinds=kinds)
    one, two = table.row("large").plan, table.row("small").plan
    assert one is not None and one.technique == "single"
    assert two is not None and two.technique != "single"
    only = gpus_for(FineTune(precision="fp32"), kinds=kinds, techniques=["single"])
    assert (only.row("large").gpus, only.row("small").gpus) == (1, None)
    # Local SGD has other losses than one GPU, so it is no answer.
    apart = gpus_for(
        FineTune(precision="fp32"), kinds={"B300": (270, True)}, techniques=["local-sgd"]
    )
    assert apart.row("B300").plan is None


def test_the_memory_of_the_pod_limits_the_choice() -> None:
    kinds = {"large": (178, True)}
    few = gpus_for(FineTune(), kinds=kinds, memory_gib=0.5, most_pods=1)
    assert few.row("large").plan is None
    assert few.memory_gib == 0.5 and few.most_pods == 1


def test_wrong_numbers_and_names_are_refused() -> None:
    for name in ("gpus_on_pod", "most_pods"):
        with pytest.raises(
            ConfigError, match=sentence("is {}; allowed: a whole number from 1", name)
        ):
            gpus_for(FineTune(), **{name: 0})  # type: ignore[arg-type]
        assert isinstance(gpus_for(FineTune(), **{name: 1}), GpuTable)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ddpp"):
        gpus_for(FineTune(), techniques=["ddpp"])
    with pytest.raises(ConfigError, match=sentence("the table has no GPU {}; it has", "Z1", "T4")):
        gpus_for(FineTune()).row("Z1")


def test_the_common_kinds_are_in_the_table_in_their_order() -> None:
    assert [row.kind for row in gpus_for(FineTune()).rows] == [*KINDS]
