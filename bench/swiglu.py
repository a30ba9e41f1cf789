"""How long the middle of a gated MLP takes by shape of tile, beside what reading and writing alone would take.

python bench/swiglu.py [tokens] [width] [rank]     (needs a GPU)
"""

from __future__ import annotations

import sys

import torch
from triton.testing import do_bench

from whet.model import fused_swiglu
from whet.model.swiglu import Middle

TILES = ((64, 64, 4), (64, 128, 8), (64, 128, 4), (64, 256, 8), (128, 64, 4), (128, 64, 8), (32, 64, 4), (32, 128, 4))
"""Rows, columns, warps."""


def main(tokens: int = 16384, width: int = 14336, rank: int = 16) -> None:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    thin = drawn(tokens, 2 * rank)
    middle = Middle(
        drawn(tokens, width),
        drawn(tokens, width),
        thin[:, :rank],
        thin[:, rank:],
        drawn(width, rank),
        drawn(width, rank),
    )
    d_h, d_thin, a_down = drawn(tokens, width), drawn(tokens, rank), drawn(rank, width)
    copying = do_bench(lambda: d_h.copy_(middle.gate0)) / 2  # one wide matrix, read or written
    sys.stdout.write(f"reading and writing alone: {3 * copying:.3f} ms forward, {6 * copying:.3f} ms backward\n")
    for rows, columns, warps in TILES:
        fused_swiglu._ROWS, fused_swiglu._COLUMNS, fused_swiglu._WARPS = rows, columns, warps
        try:
            forward = do_bench(lambda: fused_swiglu.swiglu_triton(middle))
            backward = do_bench(lambda: fused_swiglu.swiglu_triton_backward(d_h, d_thin, a_down, middle))
        except Exception as error:  # a tile that does not fit
            sys.stdout.write(f"{rows:4} × {columns:<4} {warps} warps: {type(error).__name__}\n")
            continue
        sys.stdout.write(
            f"{rows:4} × {columns:<4} {warps} warps: {forward:.3f} ms forward, {backward:.3f} ms backward\n"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
