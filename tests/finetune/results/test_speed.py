from __future__ import annotations

import pytest

from workbench.finetune.profile.speed import mfu, peak_tflops, tflops_per_device


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-SXM2-32GB", "tf32", None),
        ("Tesla T4", "bf16", None),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA L4, NVIDIA H200", "bf16", None),
        ("AMD EPYC", "fp32", None),
        ("", "fp32", None),
    ],
)
def test_a_peak_is_known_for_whole_gpus_of_the_table_alone(
    device: str, precision: str, peak: float | None
) -> None:
    assert peak_tflops(device, precision) == peak
    assert mfu(None, device, precision) is None
    assert mfu(10.0, device, precision) == (None if peak is None else 10.0 / peak)


def test_a_model_of_n_parameters_needs_six_operations_a_parameter_and_token() -> None:
    parameters, tokens, rate = 1e9, 2048, 4000.0
    told = {"profiled_tokens": tokens, "padded_tokens_per_s": rate, "devices": 4}
    forward = 2 * parameters * tokens
    whole = tflops_per_device(forward_flops=forward, adapters=False, **told)  # type: ignore[arg-type]
    assert whole == pytest.approx(6 * parameters * rate / 4 / 1e12)
    adapters = tflops_per_device(forward_flops=forward, adapters=True, **told)  # type: ignore[arg-type]
    assert adapters == pytest.approx(4 * parameters * rate / 4 / 1e12)


@pytest.mark.parametrize("missing", ["forward_flops", "profiled_tokens", "padded_tokens_per_s"])
def test_without_a_profile_or_a_count_of_tokens_nothing_is_said(missing: str) -> None:
    told = {
        "forward_flops": 1e9,
        "profiled_tokens": 10,
        "padded_tokens_per_s": 5.0,
        "devices": 1,
        "adapters": False,
    }
    assert tflops_per_device(**{**told, missing: None}) is None  # type: ignore[arg-type]
