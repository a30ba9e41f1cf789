"""Would experts be faster in fp8? Grouped products of Qwen3-30B-A3B in bf16, and in fp8 with a scale a row.

A layer with frozen experts multiplies four times: up and down, and their input gradients d_h and d_x. fp8 adds casts of
the rows, and of the weights in both layouts, unless fp8 copies are kept, which are as large as the bf16 weights. Times
are medians in microseconds. The last line is a JSON object. Needs CUDA with compute capability 9.0.

    python bench/fp8_experts.py [TOKENS …]      default: 8192 32768
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

EXPERTS, CHOICES, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
PRODUCTS = {
    "up": (HIDDEN, 2 * INTERMEDIATE), "down": (INTERMEDIATE, HIDDEN), "d_h": (HIDDEN, INTERMEDIATE),
    "d_x": (2 * INTERMEDIATE, HIDDEN),
}  # fmt: skip
FP8_MAX = 448.0


def main(*tokens: str) -> None:
    results = {count: measure(int(count)) for count in tokens or ("8192", "32768")}
    show(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "microseconds": results}))


def measure(tokens: int) -> dict[str, Any]:
    """Microseconds of every product, in both precisions, with the casts."""
    torch.manual_seed(0)
    rows = tokens * CHOICES
    expert = torch.randint(EXPERTS, (rows,), device="cuda").sort().values
    ends = torch.searchsorted(expert, torch.arange(EXPERTS, device="cuda"), right=True, out_int32=True)
    found = {}
    for name, (inputs, outputs) in PRODUCTS.items():
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(EXPERTS, outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
        x8, x_scale = cast_rows(x)
        w8, w_scale = cast_rows(w)
        bf16 = torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
        fp8 = fp8_product(x8, w8, x_scale, w_scale, ends)
        error = ((fp8 - bf16).norm() / bf16.norm()).item()
        assert error < 0.06, f"{name}: fp8 differs from bf16 by {error:.1%}"
        found[name] = times = {
            "bf16": microseconds(lambda x=x, w=w: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)),
            "fp8": microseconds(lambda x8=x8, w8=w8, a=x_scale, b=w_scale: fp8_product(x8, w8, a, b, ends)),
            "cast_rows": microseconds(lambda x=x: cast_rows(x)),
            "cast_weights": microseconds(lambda w=w: cast_rows(w)),
        }
        flops = 2 * rows * inputs * outputs
        rates = {key: flops / times[key] / 1e6 for key in ("bf16", "fp8")}
        show(f"{tokens} tokens, {name}: {times}, TFLOP/s {rates}, error {error:.2%}")
    total = {key: sum(times[key] for times in found.values()) for key in ("bf16", "fp8", "cast_rows", "cast_weights")}
    kept, cast = total["fp8"] + total["cast_rows"], total["fp8"] + total["cast_rows"] + total["cast_weights"]
    show(f"{tokens} tokens, a layer: bf16 {total['bf16']:.0f}, fp8 {cast:.0f}, with fp8 weights kept {kept:.0f}")
    return found | {"layer": {"bf16": total["bf16"], "fp8": cast, "fp8_weights_kept": kept}}


@torch.compile
def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale for each row of the last dimension."""
    scale = FP8_MAX / x.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12)
    return (x * scale).to(torch.float8_e4m3fn), (1 / scale).squeeze(-1)


def fp8_product(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, ends: Tensor) -> Tensor:
    return torch._scaled_grouped_mm(
        x, w.transpose(1, 2), x_scale, w_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def microseconds(run: Callable[[], Any]) -> float:
    return round(do_bench(run, return_mode="median") * 1000, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
