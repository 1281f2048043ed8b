"""The view of a plan: the verdict first, bars against the limit, a fitting unit, details folded."""

from __future__ import annotations

import re
from dataclasses import replace

from workbench.base.table import Bar
from workbench.display.kit.doc import Doc, Fold, Table, to_html, to_text
from workbench.display.records.plan import plan_doc
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.plan.table import Fit, PlanRow, PlanTable
from workbench.finetune.techniques.sizes import Memory

GIB = 2**30


def memory(gib: float, tiny: bool = False) -> Memory:
    half = 0.02 if tiny else gib / 2
    return Memory(
        parameters=half * GIB,
        activations=(0.03 if tiny else gib / 2) * GIB,
        overhead=0.45 * GIB if tiny else 0,
    )


def table(*rows: PlanRow, limit: float | None = 4.0, gpu: float | None = None) -> PlanTable:
    return PlanTable(
        model="tiny-t5",
        parameters=4_673_000,
        trained=4_673_000,
        pods=3,
        gpu_memory_gib=gpu,
        memory_gib=limit,
        job=FineTune(),
        lengths=(96, 64),
        rows=rows,
    )


def row(
    name: str,
    gib: float,
    fit: Fit,
    *,
    tiny: bool = False,
    best: bool = False,
    micro: int | None = 8,
) -> PlanRow:
    return PlanRow(
        technique=name, fit=fit, host=memory(gib, tiny), ranks=3, cheapest=best, micro_batch=micro
    )


def test_a_plan_for_gpus_proposes_options_that_the_job_leaves_out() -> None:
    fits = row("ddp", 3.0, "fits", best=True)
    llama = FineTune(model="tiny-llama")
    assert replace(table(fits), job=llama).proposals == ()  # CPUs
    assert list(table(fits, gpu=80.0).proposals) == []  # Liger has no kernels for a T5
    assert "use_liger_kernel" in to_text(plan_doc(replace(table(fits, gpu=80.0), job=llama)))
    large = table(row("ddp", 90.0, "does not fit"), gpu=80.0)
    (liger, recompute) = replace(large, job=llama).proposals
    assert "use_liger_kernel" in liger and "gradient_checkpointing=True with" in recompute
    job = FineTune(
        model="tiny-llama",
        gradient_checkpointing=True,
        training={"use_liger_kernel": True},
    )
    (policy,) = replace(table(fits, gpu=80.0), job=job).proposals
    assert "checkpoint_policy='matmuls' recomputes no matrix products" in policy
    job = job.replace(checkpoint_policy="matmuls")
    assert list(replace(table(fits, gpu=80.0), job=job).proposals) == []


def test_a_plan_states_whether_the_size_of_a_process_was_measured() -> None:
    assumed = to_text(plan_doc(table(row("ddp", 3.0, "fits"))))
    assert "assumed: 0.57 GiB a process. cluster.plan(job) takes a measured size" in assumed
    measured = to_text(plan_doc(replace(table(row("ddp", 3.0, "fits")), process_gib=0.5)))
    assert "0.50 GiB a process, as these pods measured before any model" in measured
    on_gpu = to_text(plan_doc(table(row("ddp", 3.0, "fits"), gpu=80.0)))
    assert "1 GiB of CUDA context and NCCL a GPU, and 1.9 GiB a process" in on_gpu


LARGE = (
    row("ddp", 3.0, "fits", best=True),
    row("zero1", 3.9, "tight"),
    row("single", 40.0, "does not fit", micro=0),
    row("zero3", 2.0, "fits", micro=16),
)


def first_table(doc: Doc) -> Table:
    return next(block for block in doc.blocks if isinstance(block, Table))


def test_the_verdict_comes_first_and_says_what_cheapest_means() -> None:
    doc = plan_doc(table(*LARGE))
    caption = first_table(doc).grid.caption
    assert caption == (
        "3 of 4 techniques fit into 4 GiB of a pod. ★ ddp is recommended: "
        "of those that fit, it sends the least data per step; zero3 needs least memory"
    )
    assert to_text(doc).startswith(caption[:40])
    assert list(first_table(doc).grid.columns)[:4] == [
        "",
        "technique",
        "fits",
        "memory of a pod (| 4 GiB)",
    ]
    assert [[*row[:3], row[-1]] for row in first_table(doc).grid.rows] == [
        ["★", "ddp", "✓ fits", "8"],
        ["", "zero1", "~ tight", "8"],
        ["", "single", "✗ does not fit", "0"],
        ["", "zero3", "✓ fits", "16"],
    ]


def test_the_lengths_planned_with_stand_beside_those_that_the_job_allows() -> None:
    long = FineTune(max_source_length=256, max_target_length=128)
    text = to_text(plan_doc(replace(table(*LARGE), job=long)))
    assert "96 + 64 tokens (the job allows 256 + 128)" in text
    left_open = replace(table(*LARGE), job=FineTune())
    assert "96 + 64 tokens, " in to_text(plan_doc(left_open))
    assumed = to_text(plan_doc(replace(left_open, lengths=(256, 128))))
    assert "256 + 128 tokens (assumed, because the job cuts no rows" in assumed
    job = FineTune(max_source_length=96, max_target_length=64)
    assert "96 + 64 tokens, " in to_text(plan_doc(replace(table(*LARGE), job=job)))


def test_bars_stand_against_the_limit_and_one_far_off_does_not_make_stubs_of_the_others() -> None:
    bars = [
        cell
        for row in first_table(plan_doc(table(*LARGE))).grid.rows
        for cell in row
        if isinstance(cell, Bar)
    ]
    assert [round(sum(share for _, share in bar.parts), 3) for bar in bars] == [
        0.469,
        0.609,
        6.25,
        0.312,
    ]
    assert {bar.limit for bar in bars} == {0.625}
    assert bars[0].words.startswith("ddp needs 3.00 GiB of 4 GiB: parameters 1.50 GiB")
    page = to_html(plan_doc(table(*LARGE)))
    assert page.count('role="img"') == 4
    lines = [line for line in to_text(plan_doc(table(*LARGE))).splitlines() if "|" in line]
    assert re.search(r"ppppppaaaaa\.*\|", lines[1])
    assert "p parameters" in to_text(plan_doc(table(*LARGE)))


def test_a_tiny_model_is_in_mebibytes_and_columns_of_nothing_are_left_out() -> None:
    doc = plan_doc(table(row("ddp", 0.5, "fits", tiny=True, best=True), limit=2.0))
    text = to_text(doc)
    assert "needed MiB" in text
    assert "512" in text
    assert "0.00" not in text
    (fold,) = [block for block in doc.blocks if isinstance(block, Fold)]
    assert "optimizer" not in [
        title for block in fold.blocks if isinstance(block, Table) for title in block.grid.columns
    ]
    assert "<details><summary>what it is made of" in to_html(doc)


def test_what_does_not_fit_says_what_would() -> None:
    none = plan_doc(
        table(row("ddp", 9.0, "does not fit", micro=0), row("zero3", 5.0, "does not fit", micro=2))
    )
    assert first_table(none).grid.caption == (
        "0 of 2 techniques fit into 4 GiB of a pod; zero3 "
        "needs least, with a micro-batch of 2 it fits"
    )
    unknown = plan_doc(table(row("ddp", 9.0, "no limit given", micro=None), limit=None))
    assert first_table(unknown).grid.caption == "No verdict without a limit; ddp needs least"
    refused = plan_doc(table(PlanRow(technique="fsdp", fit="refused", why="no 4-bit weights")))
    assert "fsdp is refused: no 4-bit weights" in to_text(refused)


def test_the_interval_of_an_offload_stands_beside_its_row_on_a_gpu() -> None:
    ran = [replace(row(name, 3.0, "fits"), gpu=memory(2.0)) for name in ("ddp", "zero3-offload")]
    refused = PlanRow(technique="zero3-offload", fit="refused", why="no")
    for rows, gpu, is_there in ((ran, 40, True), ([ran[0], refused], 40, False), (LARGE, None, 0)):
        shown = " ".join(to_text(plan_doc(table(*rows, gpu=gpu))).split())
        assert ("published runs of zero3-offload, the peak" in shown) == is_there
        assert ("published runs without an offload" in shown) == bool(gpu)
