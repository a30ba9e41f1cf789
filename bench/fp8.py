"""Speed of fp8: compiled layers of an 8B Llama, forward and backward, in bf16 and fp8.

Both are warmed up and then timed in turns; kernel times of one pass are summed by kind. The last line is a JSON object.
Needs a CUDA device of compute capability 8.9 or higher.

    python bench/fp8.py [LAYERS] [TOKENS] [WEIGHTS]      default: 4 8192 bf16
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.flops import count_step_flops
from whet.model.fp8.conversion import convert_to_fp8_, require_fp8
from whet.model.loss.loss_model import LossModel
from whet.parallel.config import ParallelConfig

PRECISIONS = ("bf16", "fp8")
ROUNDS = 10


def main(layers: str = "4", tokens: str = "8192", weights: str = "bf16") -> None:
    require_fp8(torch.device("cuda", 0), "fp8")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[weights]
    passes = {name: make(name, int(layers), int(tokens), dtype) for name in PRECISIONS}
    results: dict[str, Any] = {}
    for name, (run, flops) in passes.items():
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        results[name] = {"flops": flops, "peak_gib": peak, "kernels_ms": kernels(run)}
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(ROUNDS):
        for name, (run, _) in passes.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    for name, result in results.items():
        result["ms"] = sorted(times[name])[ROUNDS // 2]
        result["speedup"] = sorted(times["bf16"])[ROUNDS // 2] / result["ms"]
        result["tflops"] = result.pop("flops") / result["ms"] / 1e9
        print(f"{name:12} {result['ms']:8.2f} ms  × {result['speedup']:.2f}  {result['kernels_ms']}")  # noqa: T201
    print(json.dumps({"layers": int(layers), "tokens": int(tokens), "weights": weights, **results}))  # noqa: T201


def make(precision: str, layers: int, tokens: int, dtype: torch.dtype) -> tuple[Callable[[], None], int]:
    """A forward and backward pass through the layers, as training runs them, and its FLOPs."""
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    attention.install_backend(
        model,
        attention.choose_backend("auto", torch.device("cuda", 0), torch.bfloat16, attention.inspect_attention(model)),
    )
    if precision == "fp8":
        convert_to_fp8_(model)
    transform_layers(model, ParallelConfig(), compile=True)
    root = LossModel(model)
    places = torch.arange(tokens, device="cuda")
    cu_seqlens = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            hidden = root.hidden(places % 1024, places, cu_seqlens, tokens, (0, tokens))
        hidden.float().square().mean().backward()
        root.zero_grad(set_to_none=True)

    return run, count_step_flops(model).for_documents(np.array([tokens]), 0)


def kernels(run: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of a pass by kind of kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    sums: Counter[str] = Counter()
    for event in seen.key_averages():
        sums[kind_of(event.key)] += event.self_device_time_total / 1000
    return {kind: round(time, 2) for kind, time in sums.most_common()}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    if any(part in name for part in ("flash", "fmha", "attention")):
        return "attention"
    if any(part in name for part in ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")):
        return "matmul"
    return "triton" if "triton" in name else "other"


if __name__ == "__main__":
    main(*sys.argv[1:])
