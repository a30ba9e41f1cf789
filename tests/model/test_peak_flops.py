"""Peak FLOP/s by device name."""

from __future__ import annotations

import pytest
import torch

from whet.model.flops import device_peak_flops, peak_flops_of


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H200", "fp32", 66.9e12),
        ("NVIDIA H200", "tf32", 494.7e12),
        ("NVIDIA GH200 480GB", "bf16", 989.4e12),
        ("NVIDIA B200", "fp8", 4500e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L40", "bf16", 181e12),
        ("NVIDIA RTX A6000", "bf16", 154.8e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla T4", "fp16", 65e12),
        ("AMD Instinct MI250X", "bf16", 191.5e12),
        ("AMD Instinct MI300X", "fp8", 2614.9e12),
        ("A card of tomorrow", "bf16", None),
        ("NVIDIA H200", "fp64", None),
    ],
)
def test_peaks(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops_of(name, precision) == (None if peak is None else pytest.approx(peak))


def test_a_cpu_has_no_peak() -> None:
    assert device_peak_flops(torch.device("cpu"), "bf16") is None
