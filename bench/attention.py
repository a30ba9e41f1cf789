"""Speed and error of `short` compared with `varlen` on rows of packed documents, by tile; needs a CUDA device.

    python bench/attention.py [--quick] [--window N]     --quick: only the tiles that whet uses
    python bench/attention.py --backends                 all back-ends on rows of equally long documents, no tiles

For each shape (tokens, heads, key heads, head dimension) and mean document length: milliseconds of both back-ends'
forward and backward kernels, their largest errors of output and gradients against fp64, relative to the largest value
(on the first 4096 tokens of the row), and TFLOP/s of useful work (visible pairs; the backward counts 5 / 2 of the
forward). Then milliseconds of each kernel of `short` by tile: rows, keys, warps, stages, s for skip_mask, registers; *
marks the tile in use. Times are the median of 20 runs with a cold L2 cache. Tiles are compiled beforehand by several
processes. The last line is a JSON object with all results.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from whet.compat.flash_attention import why_not_flash_attention_4
from whet.model.attention import (
    AttentionSpec,
    Documents,
    cudnn_attention_forward,
    document_kwargs,
    eager_attention_forward,
    fa4_attention_forward,
    short_attention_forward,
    short_kernels,
    varlen_attention_forward,
)
from whet.model.attention.short_kernels import ATTENTION_TILES, AttentionTile, KernelName

SHAPES = ((32768, 32, 8, 64), (16384, 32, 8, 128), (8192, 32, 8, 128))
LENGTHS = (215, 1000, 4096)
TRUE_TOKENS = 4096  # for which all scores fit in fp64
TIMES = 20

_TRIED: dict[KernelName, dict[int, list[AttentionTile]]] = {
    "forward": {
        64: [
            AttentionTile(128, 64, 8, 3, registers=128), AttentionTile(64, 64, 4, 3),
            AttentionTile(64, 64, 4, 3, registers=128),
            AttentionTile(128, 32, 4, 3), AttentionTile(128, 64, 4, 3), AttentionTile(64, 32, 4, 4),
            AttentionTile(128, 128, 8, 3),
        ],
        128: [
            AttentionTile(128, 32, 8, 3, registers=128), AttentionTile(128, 32, 8, 4, registers=128),
            AttentionTile(128, 64, 8, 2, registers=128),
            AttentionTile(128, 64, 8, 3), AttentionTile(64, 32, 4, 3, registers=168), AttentionTile(64, 64, 4, 3),
            AttentionTile(64, 64, 4, 2),
        ],
    },
    "backward_query": {
        64: [
            AttentionTile(128, 64, 8, 3, registers=128), AttentionTile(64, 64, 4, 3, registers=168),
            AttentionTile(64, 32, 4, 3),
            AttentionTile(64, 64, 4, 2), AttentionTile(128, 32, 8, 3, registers=128),
        ],
        128: [
            AttentionTile(64, 32, 4, 3), AttentionTile(64, 32, 4, 2, registers=168), AttentionTile(64, 64, 4, 2),
            AttentionTile(128, 32, 8, 3),
            AttentionTile(128, 32, 8, 3, registers=128), AttentionTile(128, 64, 8, 2),
        ],
    },
    "backward_key_value": {
        64: [
            AttentionTile(32, 64, 4, 3, registers=168), AttentionTile(64, 64, 4, 3), AttentionTile(64, 64, 4, 2),
            AttentionTile(64, 128, 8, 3),
            AttentionTile(32, 128, 8, 3),
        ],
        128: [
            AttentionTile(32, 64, 4, 3), AttentionTile(32, 64, 4, 2), AttentionTile(64, 64, 8, 3),
            AttentionTile(64, 64, 8, 2), AttentionTile(32, 128, 8, 3),
            AttentionTile(64, 128, 8, 2),
        ],
    },
}  # fmt: skip


def candidates_of(kernel: KernelName, width: int) -> list[AttentionTile]:
    """The tile in use first; each with and without skip_mask."""
    tiles = dict.fromkeys([ATTENTION_TILES[kernel][width], *_TRIED[kernel][width]])
    return list(
        dict.fromkeys(
            tile._replace(skip_mask=skip_mask) for tile in tiles for skip_mask in (tile.skip_mask, not tile.skip_mask)
        )
    )


class Case:
    """States, documents, and what the kernels write, for one shape."""

    def __init__(self, tokens: int, heads: int, key_heads: int, width: int, mean: int, window: int) -> None:
        torch.manual_seed(0)
        drawn = torch.distributions.Gamma(3.0, 3.0 / mean).sample((4 * tokens // mean + 8,)).long().clamp(1, tokens)
        edges = [0, *(edge for edge in drawn.cumsum(0).tolist() if edge < tokens), tokens]
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        self.longest = max(sizes)
        pairs = sum(sum(min(i + 1, window or size) for i in range(size)) for size in sizes)
        self.forward_flops = 4 * pairs * heads * width
        self.documents = self.cut(edges)
        self.tokens, self.window, self.spec = tokens, window, AttentionSpec(width**-0.5, window or None)
        # as a linear layer and the rotation leave them: token by token
        self.states = [
            torch.randn(1, tokens, number, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for number in (heads, key_heads, key_heads)
        ]
        self.slope = torch.randn(1, tokens, heads, width, device="cuda", dtype=torch.bfloat16)

    @staticmethod
    def equal(tokens: int, heads: int, key_heads: int, width: int, length: int) -> Case:
        """A row of documents that are all of this length."""
        case = Case(tokens, heads, key_heads, width, length, 0)
        edges = [*range(0, tokens, length), tokens]
        case.longest, case.documents = length, case.cut(edges)
        case.forward_flops = 4 * heads * width * sum((b - a) * (b - a + 1) // 2 for a, b in itertools.pairwise(edges))
        return case

    def cut(self, edges: list[int]) -> Documents:
        cu_seqlens = torch.tensor(edges, dtype=torch.int32, device="cuda")
        return document_kwargs(cu_seqlens, self.longest, edges, with_spans=True)["documents"]

    def kernels(self) -> dict[KernelName, Callable[[], None]]:
        """The three kernels of `short`, each with its inputs."""
        query, key, value = self.states
        _, heads, tokens, width = query.shape
        new = query.new_empty
        out, dq = new(tokens, heads, width), new(tokens, heads, width)
        dk, dv = (new(tokens, key.shape[1], width) for _ in range(2))
        lse = new(key.shape[1], tokens, heads // key.shape[1], dtype=torch.float32)
        delta, slope = torch.empty_like(lse), self.slope[0]
        asked = (query, key, value, self.documents.spans, self.spec.scale, self.window)
        return {
            "forward": lambda: short_kernels.forward(*asked, out, lse),
            "backward_query": lambda: short_kernels.backward_query(*asked, out, lse, slope, delta, dq),
            "backward_key_value": lambda: short_kernels.backward_key_value(*asked, lse, slope, delta, dk, dv),
        }

    def results(self, backend: Any, dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients on the row's beginning."""
        end = min(self.tokens, TRUE_TOKENS)
        inputs = [state[:, :, :end].detach().to(dtype).requires_grad_() for state in self.states]
        edges = [edge for edge in self.documents.cu_seqlens_host if edge < end]
        out = backend(*inputs, self.spec, self.cut([*edges, end]))
        (out * self.slope[:, :end].to(dtype)).sum().backward()
        return [result.double() for result in (out.detach(), *(state.grad for state in inputs))]


def milliseconds(work: Callable[[], Any]) -> float:
    """The median of several runs, each with an L2 cache full of something else."""
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for _ in range(3):
        work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMES)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def whole(case: Case, backend: Any) -> tuple[float, float]:
    """Forward and backward of a back-end."""
    inputs = [state.detach().requires_grad_() for state in case.states]
    forward = milliseconds(lambda: backend(*inputs, case.spec, case.documents))
    out = backend(*inputs, case.spec, case.documents)
    backward = milliseconds(lambda: torch.autograd.grad(out, inputs, case.slope, retain_graph=True))
    return forward, backward


def errors(case: Case) -> dict[str, list[float]]:
    """Of output, dQ, dK, dV."""
    truth = case.results(eager_attention_forward, torch.float64)
    found = {}
    for name, backend in (("short", short_attention_forward), ("varlen", varlen_attention_forward)):
        ours = case.results(backend, torch.bfloat16)
        found[name] = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, truth, strict=True)]
    return found


def named(tile: AttentionTile) -> str:
    spared, registers = ("s" if tile.skip_mask else ""), (f"r{tile.registers}" if tile.registers else "")
    return f"{tile.rows}x{tile.keys}w{tile.warps}p{tile.stages}{spared}{registers}"


def by_tile(case: Case, kernel: KernelName, tile: AttentionTile, width: int) -> float | None:
    """Milliseconds; None where the tile does not fit the GPU."""
    usual = ATTENTION_TILES[kernel][width]
    ATTENTION_TILES[kernel][width] = tile
    try:
        return milliseconds(case.kernels()[kernel])
    except Exception as error:  # Triton has classes of its own for tiles that do not fit
        print(f"    {kernel} {named(tile)}: {type(error).__name__}: {str(error)[:100]}")  # noqa: T201
        return None
    finally:
        ATTENTION_TILES[kernel][width] = usual


def warm(kernel: KernelName, width: int, tile: AttentionTile, window: int) -> None:
    """Fills Triton's cache. Sizes are as divisible as the measured ones, which is what it compiles for."""
    by_tile(Case(256, 32, 8, width, 100, window), kernel, tile, width)


def compare_backends() -> None:
    """Milliseconds of both passes, by head dimension and length of documents."""
    backends = {
        "varlen": varlen_attention_forward, "cudnn": cudnn_attention_forward, "short": short_attention_forward,
    }  # fmt: skip
    if why_not_flash_attention_4() is None:
        backends["fa4"] = fa4_attention_forward
    for width, length in itertools.product((64, 128), (200, 500, 1000, 2048, 4096, 16384, 32768)):
        case = Case.equal(32768, 32, 8, width, length)
        found = []
        for name, backend in backends.items():
            if name == "cudnn" and length < 4096:
                continue  # a call for each document
            forward, backward = whole(case, backend)
            rate = 3.5 * case.forward_flops / (forward + backward) / 1e9
            found.append(f"{name} {forward:.3f} + {backward:.3f} ms ({rate:.0f} TFLOP/s)")
        print(f"head {width}, documents of {length}: {', '.join(found)}", flush=True)  # noqa: T201


def main(*options: str) -> None:
    if "--backends" in options:
        compare_backends()
        return
    quick = "--quick" in options
    window = int(options[options.index("--window") + 1]) if "--window" in options else 0
    candidates: dict[KernelName, dict[int, list[AttentionTile]]] = {
        kernel: {
            width: [ATTENTION_TILES[kernel][width]] if quick else candidates_of(kernel, width) for width in by_width
        }
        for kernel, by_width in _TRIED.items()
    }
    jobs = [(k, w, tile, window) for k, widths in candidates.items() for w, tiles in widths.items() for tile in tiles]
    workers = min(12, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm, *zip(*jobs, strict=True)))
    lines = []
    for shape, mean in itertools.product(SHAPES, LENGTHS):
        case = Case(*shape, mean, window)
        line: dict[str, Any] = {"shape": shape, "mean": mean, "errors": errors(case)}
        print(f"{shape}, documents of {mean}", flush=True)  # noqa: T201
        for name, backend in (("varlen", varlen_attention_forward), ("short", short_attention_forward)):
            times = whole(case, backend)
            line[name] = times
            rates = [case.forward_flops * share / ms / 1e9 for share, ms in zip((1, 2.5), times, strict=True)]
            wrong = ", ".join(
                f"{part} {error:.1e}"
                for part, error in zip(("out", "dq", "dk", "dv"), line["errors"][name], strict=True)
            )
            print(  # noqa: T201
                f"  {name:7} forward {times[0]:.3f} ms ({rates[0]:.0f} TFLOP/s), backward {times[1]:.3f} ms "
                f"({rates[1]:.0f} TFLOP/s); errors {wrong}",
                flush=True,
            )
        for kernel, by_width in candidates.items():
            found = {tile: by_tile(case, kernel, tile, shape[3]) for tile in by_width[shape[3]]}
            ranked = sorted((ms, named(tile), tile) for tile, ms in found.items() if ms is not None)
            line[kernel] = {name: ms for ms, name, _ in ranked}
            shown = (f"{name}{'*' * (tile == ATTENTION_TILES[kernel][shape[3]])} {ms:.3f}" for ms, name, tile in ranked)
            print(f"    {kernel}: {', '.join(shown)}", flush=True)  # noqa: T201
        lines.append(line)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": lines}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
