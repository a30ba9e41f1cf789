"""Peak FLOP/s of known GPUs: vendors' dense figures, with fp32 accumulation."""

from __future__ import annotations

import re

import torch

_TERA = 1e12
_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    # A regular expression for the device name (the first match counts), and TFLOP/s without sparsity
    (r"GB200", {"bf16": 2500, "fp16": 2500, "tf32": 1250, "fp8": 5000, "fp32": 80}),
    (r"\bB200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp8": 4500, "fp32": 75}),
    (r"\bH[12]00 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp8": 1670.5, "fp32": 60}),
    (r"\bH100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp8": 1513, "fp32": 51}),
    (r"\bG?H[12]00\b", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp8": 1978.9, "fp32": 66.9}),
    (r"\bA100\b", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    (r"\bA10\b", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    (r"\bA40\b", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"\bL4\b", {"bf16": 121, "fp16": 121, "tf32": 60, "fp8": 242.5, "fp32": 30.3}),
    (r"\bL40S\b", {"bf16": 362, "fp16": 362, "tf32": 183, "fp8": 733, "fp32": 91.6}),
    (r"\bL40\b", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp8": 362, "fp32": 90.5}),
    (r"RTX A6000", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    (r"RTX 6000 Ada", {"bf16": 364.2, "fp16": 364.2, "tf32": 182.1, "fp8": 728.5, "fp32": 91.1}),
    (r"RTX 3090$", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    (r"RTX 4090$", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp8": 330.3, "fp32": 82.6}),
    (r"RTX 5090$", {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp8": 419, "fp32": 104.8}),
    (r"V100-SXM", {"fp16": 125, "fp32": 15.7}),
    (r"V100-PCIE", {"fp16": 112, "fp32": 14}),
    (r"Tesla T4\b", {"fp16": 65, "fp32": 8.1}),
    (r"MI210\b", {"bf16": 181, "fp16": 181, "fp32": 45.3}),
    (r"MI250X\b", {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9}),  # one of its two devices
    (r"MI3(00|25)X\b", {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp8": 2614.9, "fp32": 163.4}),
)


def peak_flops_of(name: str, precision: str) -> float | None:
    """Peak FLOP/s of the GPU with this name; None if unknown. `fp32` is without TF32, which has its own key."""
    found = next((peaks for pattern, peaks in _PEAK_TFLOPS if re.search(pattern, name)), {})
    return found[precision] * _TERA if precision in found else None


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of this device in a precision of train.precision; None for a CPU and if unknown.

    For fp8 it is the peak of fp8 products, although attention, head and small matrices are computed in bf16.
    """
    if device.type != "cuda":
        return None
    if precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        precision = "tf32"
    return peak_flops_of(device_name(device), precision)


def device_name(device: torch.device) -> str:
    """The name that the driver reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
