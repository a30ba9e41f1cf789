"""The GPU of this machine has a known peak, and fp32 counts as TF32 only if torch uses it."""

from __future__ import annotations

import pytest
import torch

from whet.model.flops import device_name, device_peak_flops, peak_flops_of

pytestmark = pytest.mark.gpu


def test_fp32_follows_what_torch_uses() -> None:
    device = torch.device("cuda", 0)
    name = device_name(device)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert device_peak_flops(device, "fp32") == peak_flops_of(name, "fp32")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert device_peak_flops(device, "fp32") == peak_flops_of(name, "tf32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    if "H200" in name:
        assert device_peak_flops(device, "bf16") == pytest.approx(989.4e12)
