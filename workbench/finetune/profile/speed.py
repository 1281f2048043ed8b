"""Compute the arithmetic of a run per second, and its share of the device's peak.

The count covers the need of training, not the work of the device. The forward pass is counted by
the FLOPS profile of the run, and the backward pass as twice the forward pass (A. Chowdhery et al.,
PaLM, appendix B, https://arxiv.org/abs/2204.02311). Padding counts, recomputed activations do not.
With adapters, the backward pass computes no gradients of the frozen weights and counts as much as
the forward pass.
"""

from __future__ import annotations

import re
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.finetune.profile.parse import read_profile

_WHOLE = 3.0
"""Passes of training in forward passes: one forward, two backward."""
_ADAPTERS = 2.0


def forward_flops(profile: Path) -> float | None:
    """Return the operations of the profiled forward pass, or None without a readable report."""
    try:
        return read_profile(profile).flops
    except (WorkbenchError, ValueError):
        return None


def tflops_per_device(
    *,
    forward_flops: float | None,
    profiled_tokens: int | None,
    padded_tokens_per_s: float | None,
    devices: int,
    adapters: bool,
) -> float | None:
    """Return the 10^12 floating-point operations per second and device that training needed.

    Example:
        >>> tflops_per_device(
        ...     forward_flops=2e12,
        ...     profiled_tokens=1000,
        ...     padded_tokens_per_s=8000.0,
        ...     devices=2,
        ...     adapters=False,
        ... )
        24.0
    """
    if not forward_flops or not profiled_tokens or not padded_tokens_per_s or devices < 1:
        return None
    passes = _ADAPTERS if adapters else _WHOLE
    return passes * forward_flops / profiled_tokens * padded_tokens_per_s / devices / 1e12


def mfu(tflops: float | None, device: str, precision: str) -> float | None:
    """Return the share of the device's peak, 0 to 1, or None if speed or peak is unknown.

    Example:
        >>> mfu(78.0, "NVIDIA A100-SXM4-40GB", "bf16"), mfu(78.0, "AMD EPYC", "bf16")
        (0.25, None)
    """
    peak = peak_tflops(device, precision)
    return None if tflops is None or peak is None else tflops / peak


def peak_tflops(device: str, precision: str) -> float | None:
    """Return the dense peak of a GPU in TFLOPS, without the factor of two for sparse weights.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3", "bf16")
        989.4
        >>> peak_tflops("Tesla V100-SXM2-16GB", "bf16") is None
        True
    """
    for name, peaks in _PEAKS:
        if re.fullmatch(name, device):
            return peaks.get(precision)
    return None


def _peaks(fp32: float, tf32: float | None, half: float, *, bf16: bool = True) -> dict[str, float]:
    peaks = {"fp32": fp32, "fp16": half}
    if tf32:
        peaks["tf32"] = tf32
    if bf16:
        peaks["bf16"] = half
    return peaks


# NVIDIA's own figures, without sparsity and with accumulation in FP32.
# SXM5: https://resources.nvidia.com/en-us-tensor-core (H100 architecture, table 2)
_H100 = _peaks(66.9, 494.7, 989.4)
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf
    (r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", _peaks(19.5, 156.0, 312.0)),
    (r"NVIDIA H100 80GB HBM3", _H100),
    (r"NVIDIA H100 PCIe", _peaks(51.2, 378.0, 756.0)),  # same source, column PCIe
    # https://www.nvidia.com/en-us/data-center/h200/ : the SXM form has the processor of the H100
    (r"NVIDIA H200", _H100),
    (r"NVIDIA L4", _peaks(30.3, 60.0, 121.0)),  # https://www.nvidia.com/en-us/data-center/l4/
    (r"NVIDIA L40S", _peaks(91.6, 183.0, 362.05)),  # https://www.nvidia.com/en-us/data-center/l40s/
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    (r"Tesla V100-SXM[23]-\d+GB(-LS)?", _peaks(15.7, None, 125.0, bf16=False)),
    (r"Tesla V100-PCIE-\d+GB", _peaks(14.0, None, 112.0, bf16=False)),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
    (r"Tesla T4", _peaks(8.1, None, 65.0, bf16=False)),
    # https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
    (r"NVIDIA A10G", _peaks(35.0, 35.0, 70.0)),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf,
    # appendix A
    (r"NVIDIA GeForce RTX 4090", _peaks(82.6, 82.6, 165.2)),
)
