"""Rows of the planner's table for a known trace: limits, micro-batches, other techniques."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.sentences import sentence
from workbench import FineTune, plan
from workbench.base.errors import ConfigError
from workbench.finetune.plan.plan import as_planned, fit_of, most_rows, predict, row_of
from workbench.finetune.plan.setting import setting_of
from workbench.finetune.techniques.sizes import CONTEXT_BYTES, Moment, Parameters, Setting, Trace
from workbench.pods.node_table import Node, NodeTable
from workbench.pods.pod_spec import PodSpec

GIB = 2**30
# A GiB of weights in FP32. The backward pass holds half a GiB a row and no gradients yet.
LAYER = Parameters(
    frozen=0, trained=2**28, packed=0, largest=2**20, largest_packed=0, small={2**20: 256}
)
MOMENT = Moment(base=0.0, row=0.5 * GIB, logits=0.0, logits_row=0.0, gradients=0.0)
TRACE = Trace(
    moments={"fp32": [MOMENT]}, layers=[LAYER], rest=replace(LAYER, trained=0, largest=0, small={})
)
# Weights and two states of AdamW, 3 GiB, and the context of CUDA, 1 GiB.
WITHOUT_ROWS_GIB = 4.0


def setting(technique: str = "single", *, gpus: int = 1, **options: Any) -> Setting:
    job = FineTune(technique=technique, precision="fp32", **options)
    return setting_of(job, pods=2, gpus=gpus)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.finetune.plan.plan.trace_step", lambda _: TRACE)


def test_all_of_the_memory_is_tight_and_nine_tenths_fit() -> None:
    assert fit_of((8.0, 8.0)) == "tight"
    assert fit_of((8.01, 8.0)) == "does not fit"
    assert fit_of((9.0, 10.0)) == "fits"
    assert fit_of((9.1, 10.0)) == "tight"
    # The place with the least room decides, and an unknown place does not.
    assert fit_of((1.0, 10.0), (9.5, 10.0)) == "tight"
    assert fit_of((1.0, 10.0), (9.5, None), (None, 1.0)) == "fits"
    assert fit_of((9.5, None)) == "no limit given"


def test_the_largest_micro_batch_fills_the_memory_to_the_last_row() -> None:
    for rows in (0, 1, 2, 7):
        full = WITHOUT_ROWS_GIB + 0.5 * rows
        # The update without rows needs the gradients, a GiB: as much as two rows.
        assert most_rows(setting(), TRACE, (full, None)) == (rows if rows >= 2 else 0)
        assert most_rows(setting(), TRACE, (full + 0.49, None)) == (rows if rows >= 2 else 0)
    assert most_rows(setting(), TRACE, (1e9, None)) == 2**16


def test_a_row_needs_the_gpu_for_a_step_and_the_pod_for_all_its_ranks() -> None:
    row = row_of(setting("ddp", gpus=2), TRACE, 8, (100.0, 100.0))
    # DDP also has its buckets of gradients, a GiB.
    assert row.gpu_gib == pytest.approx(WITHOUT_ROWS_GIB + 1 + 8 * 0.5)
    assert (row.ranks, row.gpus_on_pod, row.fit) == (4, 2, "fits")
    assert row.pod_gpu_gib == pytest.approx(2 * row.gpu_gib)
    on_cpu = row_of(setting("ddp", gpus=0), TRACE, 8, (None, None))
    assert (on_cpu.gpu, on_cpu.gpus_on_pod, on_cpu.fit) == (None, 0, "no limit given")
    assert on_cpu.micro_batch is None, "without a limit there is no largest micro-batch"


@pytest.mark.usefixtures("traced")
def test_a_pod_without_gpus_holds_all_of_its_ranks() -> None:
    job = FineTune(precision="fp32")
    one, two = (plan(job, pods=2, ranks=ranks, memory_gib=100.0) for ranks in (0, 2))
    for name in ("ddp", "single"):
        alone, both = one.row(name), two.row(name)
        assert alone.host is not None and both.host is not None
        several = 1 if name == "single" else 2
        assert both.ranks == several * alone.ranks
        need = both.stages["training"]
        assert need.total == pytest.approx(several * alone.stages["training"].total)
    # Four ranks share a state under ZeRO-3, two on a pod; the activations are of every rank.
    alone, both = one.row("zero3"), two.row("zero3")
    assert alone.stages["training"].optimizer == both.stages["training"].optimizer
    assert 2 * alone.stages["training"].activations == both.stages["training"].activations
    assert 2 * alone.stages["training"].overhead == both.stages["training"].overhead
    assert predict(job.replace(technique="ddp"), pods=2, gpus=0, ranks=2) == replace(
        plan(job, pods=2, ranks=2).row("ddp"), cheapest=False, transfers=()
    )
    assert plan(job, nodes=NodeTable(nodes=[], pod=PodSpec(ranks=2), count=2)).row("ddp").ranks == 2
    with pytest.raises(ConfigError, match=sentence("plan has ranks=")):
        plan(job, ranks=2, gpu_memory_gib=80)


def test_a_bucket_larger_than_the_model_takes_room_on_a_gpu_only() -> None:
    bucket = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2**29}}
    trace = replace(TRACE, moments={"fp32": [MOMENT._replace(gradients=2.0**28)]})
    on_gpu = row_of(setting("zero1", deepspeed=bucket), trace, 8, (None, None))
    on_cpu = row_of(setting("zero1", deepspeed=bucket, gpus=0), trace, 8, (None, None))
    assert on_gpu.gpu is not None and on_cpu.host is not None
    # A bucket of 2 GiB, of which the gradients write a GiB, beside a GiB of gradients.
    assert on_gpu.gpu.communication == 3 * GIB
    assert on_cpu.host.communication == 2 * GIB


def test_a_gpu_with_little_memory_makes_zero_1_load_through_the_pods_memory() -> None:
    # ZeRO makes one tensor of all weights: a GiB and its copy fit into 8 GiB, and not into 1.5.
    for gpu_gib, through_host in ((8.0, False), (1.5, True)):
        loading = row_of(setting("zero1"), TRACE, 1, (gpu_gib, None)).stages["loading"]
        assert (loading.tensors > GIB) is through_host


def test_layers_over_several_gpus_need_the_memory_of_the_fullest() -> None:
    part = replace(TRACE, layers=[replace(LAYER, trained=2**27)], part=None)
    over_two = replace(TRACE, part=part, gpus=2)
    spread = setting(gpus=2, device_map="auto")
    row = row_of(spread, over_two, 8, (None, None))
    assert row.gpus_on_pod == 2
    assert row.gpu is not None and row.gpu.parameters == 0.5 * GIB
    # A technique with a whole model on each GPU has nothing to do with the part.
    whole = row_of(setting("ddp", gpus=2), over_two, 8, (None, None))
    assert whole.gpu is not None and whole.gpu.parameters == GIB
    assert row.gpu.overhead == CONTEXT_BYTES


@pytest.mark.usefixtures("traced")
def test_only_the_technique_that_spreads_layers_is_refused_where_they_find_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    homeless = replace(TRACE, unplaced="layer 3 is too large")
    monkeypatch.setattr("workbench.finetune.plan.plan.trace_step", lambda _: homeless)
    job = FineTune(technique="single", device_map="auto", precision="fp32")
    table = plan(job, gpus=2, gpu_memory_gib=80, techniques=["single", "ddp"])
    assert (table.row("single").fit, table.row("single").why) == (
        "refused",
        "layer 3 is too large",
    )
    assert table.row("ddp").fit == "fits"


def test_options_of_the_jobs_own_technique_are_for_no_other() -> None:
    job = FineTune(technique="fsdp", fsdp={"shard": "grads"}, launcher="pdsh")
    assert as_planned(job, "fsdp").fsdp == {"shard": "grads"}
    assert as_planned(job, "fsdp").launcher == "pdsh"
    other = as_planned(job, "zero1")
    assert (other.fsdp, other.launcher) == ({}, "pdsh")
    assert as_planned(job, "single").launcher == "ssh", "one rank needs no launcher"


@pytest.mark.usefixtures("traced")
def test_the_memory_of_the_gpus_is_read_from_the_nodes_unless_it_is_given() -> None:
    node = Node(
        name="n",
        product="L4",
        gpus=1,
        taken=0,
        gpu_memory_gib=22.0,
        free_cpus=1.0,
        free_memory_gib=1.0,
        fits=1,
        why="",
    )
    nodes = NodeTable(nodes=[node], pod=PodSpec(gpus=1), count=1)
    job = FineTune(precision="fp32")
    assert plan(job, nodes=nodes).gpu_memory_gib == 22.0
    assert plan(job, nodes=nodes, gpu_memory_gib=80).gpu_memory_gib == 80
    on_cpus = replace(nodes, pod=PodSpec(gpus=0))
    assert plan(job, nodes=on_cpus).gpu_memory_gib is None
    assert plan(job).row("single").gpu is None, "without the memory of a GPU, CPUs are planned"


@pytest.mark.usefixtures("traced")
def test_a_table_names_the_lengths_that_it_was_planned_with() -> None:
    job = FineTune(precision="fp32", max_source_length=96, max_target_length=48)
    assert plan(job).lengths == (96, 48)
    assert plan(job, lengths=(64, 32)).lengths == (64, 32)


def test_the_step_is_traced_in_every_arithmetic_of_the_asked_techniques(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def trace_step(request: dict[str, Any]) -> Trace:
        asked.append(request["arithmetic"])
        return replace(TRACE, moments={name: [MOMENT] for name in request["arithmetic"]})

    monkeypatch.setattr("workbench.finetune.plan.plan.trace_step", trace_step)
    plan(FineTune(precision="bf16"), techniques=["ddp", "zero1"])
    # Local SGD refuses Muon, and the table still names the size of the model.
    muon = FineTune(technique="ddp", optimizer="muon", precision="bf16")
    table = plan(muon, pods=2, techniques=["local-sgd"])
    assert asked == [["autocast-bf16", "bf16"], ["fp32"]]
    assert table.row("local-sgd").fit == "refused" and table.parameters == 2**28


@pytest.mark.usefixtures("traced")
def test_the_technique_with_the_least_traffic_that_fits_is_marked() -> None:
    job = FineTune(precision="fp32", per_device_train_batch_size=2)
    # A GPU with 80 GiB has room for a whole state, one with 6 GiB only for its shards.
    large = plan(job, pods=2, gpu_memory_gib=80)
    assert large.cheapest is not None and large.cheapest.technique == "ddp"
    # DDP needs 6 GiB, all of it: tight. Sharding techniques have room.
    small = plan(job, pods=2, gpu_memory_gib=6)
    assert small.row("ddp").fit == "tight"
    assert small.cheapest is not None and small.cheapest.fit == "fits"
    tight = plan(job, pods=2, gpu_memory_gib=6, techniques=["single", "ddp"])
    assert tight.cheapest is not None and tight.cheapest.technique == "single"
    # With one pod no other pod idles, so a rank alone comes first.
    alone = plan(job, pods=1, gpu_memory_gib=80)
    assert alone.cheapest is not None and alone.cheapest.technique == "single"
    assert plan(job, pods=2, gpu_memory_gib=1).cheapest is None
