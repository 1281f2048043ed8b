"""Memory of a rank and of a pod, for a model so small that every number is counted by hand."""

from __future__ import annotations

from dataclasses import replace

from workbench.finetune.plan.memory import CPU_PROCESS_GIB, Need, host_of, need_of
from workbench.finetune.techniques.sizes import (
    CONTEXT_BYTES,
    Memory,
    Moment,
    Parameters,
    Setting,
    Trace,
)

# 30 weights, of which 10 are in the only layer, and all are trained.
LAYER = Parameters(frozen=0, trained=10, packed=0, largest=6, largest_packed=0, small={6: 1, 4: 1})
REST = replace(LAYER, trained=20, largest=20, small={20: 1})
# The forward pass of a row holds 1000 bytes, of which 400 are scores.
FORWARD = Moment(base=0.0, row=1000.0, logits=0.0, logits_row=400.0, gradients=0.0)
TRACE = Trace(moments={"fp32": [FORWARD]}, layers=[LAYER], rest=REST, row_tokens=5)
# The same model with 6 trained weights, and 24 that are not trained.
ADAPTED = replace(
    TRACE,
    layers=[replace(LAYER, frozen=4, trained=6)],
    rest=replace(REST, frozen=20, trained=0),
)
PLAIN = Setting(
    technique="ddp",
    ranks=2,
    shards=1,
    on_pod=2,
    gpu=True,
    arithmetic="fp32",
    packed=False,
    state_bytes=8.0,
    paged=False,
    accumulates=False,
)
SINGLE = replace(PLAIN, technique="single", ranks=1, on_pod=1)
ZERO3 = replace(PLAIN, technique="zero3", shards=2)


def on_gpu(setting: Setting, trace: Trace = TRACE, rows: int = 3) -> Memory:
    gpu = need_of(setting, trace, rows).gpu
    assert gpu is not None
    return gpu


def test_the_forward_pass_of_three_rows_is_the_peak_with_its_scores_apart() -> None:
    assert on_gpu(SINGLE) == Memory(
        parameters=4 * 30,
        optimizer=8 * 30,
        activations=3 * 600,
        logits=3 * 400,
        overhead=CONTEXT_BYTES,
    )


def test_the_end_of_the_backward_pass_holds_all_gradients_and_no_activations() -> None:
    small = replace(TRACE, moments={"fp32": [FORWARD._replace(row=1.0, logits_row=0.0)]})
    # DDP also has its buckets, until the update.
    assert on_gpu(PLAIN, small, rows=1) == Memory(
        parameters=4 * 30,
        gradients=4 * 30,
        optimizer=8 * 30,
        communication=4 * 30,
        overhead=CONTEXT_BYTES,
    )


def test_a_process_on_cpus_has_its_measured_size_or_the_assumed_one() -> None:
    cpu = replace(SINGLE, gpu=False)
    assert need_of(cpu, TRACE, 3).host.overhead == CPU_PROCESS_GIB * 2**30
    measured = need_of(replace(cpu, process_gib=0.25), TRACE, 3)
    assert measured.host.overhead == 2**28
    assert measured.host.tensors == need_of(cpu, TRACE, 3).host.tensors


def test_a_pair_of_answers_is_two_sequences_and_half_a_sequence_more_is_a_whole_one() -> None:
    assert on_gpu(replace(SINGLE, sequences=2.0)).logits == 6 * 400
    assert on_gpu(replace(SINGLE, sequences=1.5)).logits == 5 * 400


def test_a_frozen_reference_has_the_weights_of_the_model_without_its_adapters() -> None:
    for setting, trace, reference in (
        (SINGLE, TRACE, 2 * 30),
        (SINGLE, ADAPTED, 2 * 24),
        (PLAIN, ADAPTED, 2 * 24),
        # ZeRO-3 shards the reference over the two ranks, like the weights in training.
        (ZERO3, ADAPTED, 24),
    ):
        without = on_gpu(setting, trace).parameters
        with_reference = on_gpu(replace(setting, reference_bytes=2), trace).parameters
        assert with_reference - without == reference


def test_a_reference_is_loaded_and_saved_beside_the_model() -> None:
    setting = replace(SINGLE, gpu=False)
    with_reference = replace(setting, reference_bytes=2)
    need = need_of(setting, ADAPTED, 3)
    without = host_of(setting, ADAPTED, need, None)["saving"]
    assert host_of(with_reference, ADAPTED, need, None)["saving"].parameters == (
        without.parameters + 2 * 24
    )


def test_scores_of_a_methods_own_loss_are_counted_by_its_tokens() -> None:
    # Three rows of five tokens, and 100 bytes a token in place of the traced 1200 bytes.
    own = replace(SINGLE, score_bytes=100.0)
    assert (on_gpu(own).logits, on_gpu(own).activations) == (15 * 100, 3 * 600)
    at_once = on_gpu(replace(own, scored_tokens=4))
    assert (at_once.logits, at_once.activations) == (4 * 100, 3 * 600)


def test_a_pass_that_holds_only_scores_has_no_other_activations() -> None:
    only = replace(TRACE, moments={"fp32": [FORWARD._replace(row=400.0)]})
    assert on_gpu(replace(SINGLE, score_bytes=100.0), only).activations == 0


def test_a_loss_of_its_own_has_scores_only_when_the_traced_loss_has_scores() -> None:
    without = replace(TRACE, moments={"fp32": [FORWARD._replace(logits_row=0.0)]})
    assert on_gpu(replace(SINGLE, score_bytes=100.0), without) == on_gpu(SINGLE, without)


def test_weights_in_4_bits_are_unpacked_one_matrix_at_a_time() -> None:
    trace = replace(
        TRACE,
        layers=[replace(LAYER, trained=2, packed=8, largest_packed=8)],
        rest=replace(REST, frozen=20, trained=0),
    )
    whole = on_gpu(SINGLE, trace).activations
    for compute_bytes in (2, 4):
        packed = replace(SINGLE, packed=True, compute_bytes=compute_bytes)
        assert on_gpu(packed, trace).activations == whole + 8 * compute_bytes


def test_the_buffer_of_the_output_layer_is_gone_when_larger_scores_exist() -> None:
    # An output layer of its own, with 20 weights: DeepSpeed copies it out of a buffer of 80 bytes.
    untied = replace(TRACE, rest=replace(REST, trained=40, small={20: 2}))
    zero3 = replace(ZERO3, persist=0, bucket=1)

    def gathered(**changed: float) -> float:
        moments = {"fp32": [FORWARD._replace(**changed)]}
        return on_gpu(zero3, replace(untied, moments=moments)).communication

    assert gathered(logits_row=0.0) - gathered() == 80
    assert gathered(logits_row=20.0) - gathered() == 80 - 3 * 20
    # In the backward pass there is no buffer, with scores or without.
    assert gathered(logits_row=0.0, gradients=1.0) == gathered(gradients=1.0)


def test_a_pod_reads_the_files_once_and_every_rank_holds_its_own_process() -> None:
    need = Need(gpu=Memory(), host=Memory(overhead=1000.0))
    for trace, read in ((TRACE, 30), (ADAPTED, 24)):
        stages = host_of(replace(PLAIN, file_bytes=2), trace, need, None)
        assert stages["loading"].files == 2 * read
        assert stages["training"] == Memory(overhead=2 * 1000.0)
        assert stages["saving"].overhead == 2 * 1000.0
